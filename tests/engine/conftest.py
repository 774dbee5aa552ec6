"""Engine runs are slow to start, so each is done once a session, two at a time, and asked by many tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import engines
import models
import pytest
import scenarios
import server


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """All runs that the tests of this session ask for, by name."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    folder = tmp_path_factory.mktemp("engines")
    plain, ragged = models.make_plain(folder / "plain"), models.make_ragged(folder / "ragged")
    # Engines run in sessions of their own: without this they would outlive a `kill` of pytest.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))
    with ThreadPoolExecutor(2) as pool:
        begun = {
            run.__name__: pool.submit(run, folder / run.__name__, plain, ragged)
            for run in scenarios.LONGEST_FIRST
            if run.__name__ in wanted
        }
        yield begun
        for future in begun.values():
            future.cancel()
        engines.kill_all()


@pytest.fixture(scope="session")
def in_process_0_19_1(runs: dict[str, Future[Any]]) -> scenarios.Results:
    return runs["in_process_0_19_1"].result()


@pytest.fixture(scope="session")
def two_ranks_0_19_1(runs: dict[str, Future[Any]]) -> scenarios.Results:
    return runs["two_ranks_0_19_1"].result()


@pytest.fixture(scope="session")
def disabled_0_19_1(runs: dict[str, Future[Any]]) -> scenarios.Results:
    return runs["disabled_0_19_1"].result()


@pytest.fixture(scope="session")
def in_process_0_32_0(runs: dict[str, Future[Any]]) -> scenarios.Results:
    return runs["in_process_0_32_0"].result()


@pytest.fixture(scope="session")
def server_0_19_1(runs: dict[str, Future[Any]]) -> server.Visit:
    return runs["server_0_19_1"].result()
