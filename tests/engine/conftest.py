"""Engine runs are slow to start, so each is done once a session, two at a time, and asked by many tests.

Every test says by its parameter `release` on which vLLM it looks. `-k "0.19.1 or 0.32.0"` chooses some.
"""

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

Runs = dict[tuple[str, str], Future[Any]]  # by scenario and release


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """All runs that the tests of this session ask for."""
    wanted = {(name, item.callspec.params["release"]) for item in request.session.items for name in item.fixturenames}
    folder = tmp_path_factory.mktemp("engines")
    plain, ragged = models.make_plain(folder / "plain"), models.make_ragged(folder / "ragged")
    # Engines run in sessions of their own: without this they would outlive a `kill` of pytest.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))
    with ThreadPoolExecutor(2) as pool:
        begun = {
            (name, release): pool.submit(scenario, release, folder / f"{release}-{name}", plain, ragged)
            for name, scenario in scenarios.LONGEST_FIRST.items()
            for release in engines.RELEASES
            if (name, release) in wanted
        }
        yield begun
        for future in begun.values():
            future.cancel()
        engines.kill_all()


@pytest.fixture
def in_process(runs: Runs, release: str) -> scenarios.Results:
    return runs["in_process", release].result()


@pytest.fixture
def two_ranks(runs: Runs, release: str) -> scenarios.Results:
    return runs["two_ranks", release].result()


@pytest.fixture
def stages(runs: Runs, release: str) -> scenarios.Results:
    return runs["stages", release].result()


@pytest.fixture
def disabled(runs: Runs, release: str) -> scenarios.Results:
    return runs["disabled", release].result()


@pytest.fixture
def serving(runs: Runs, release: str) -> server.Visit:
    return runs["serving", release].result()
