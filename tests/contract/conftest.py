"""Runs the tests of this folder against the one vLLM release that this Python imports.

What ``register()`` does depends on what is imported already, and vLLM cannot be un-imported, so every
test runs in a process of its own: a fork of this one, in which torch and the slow parts of vLLM are
imported (about 10 s, once a release) but neither of the modules that the fixes are for. All parameters
of a test that is marked ``one_process`` share one: that is for numbers, and not for what is said or
patched. A test whose process dies or hangs has failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

# vLLM 0.17.x looks for this at import; torch has it under another name since 2.11.
if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False

LIMIT = 60  # seconds for one test
SLOW_PARTS_OF_VLLM = ("vllm.config", "vllm.v1.kv_cache_interface", "vllm.v1.request", "vllm._custom_ops")
MUST_NOT_BE_IMPORTED = ("vllm.v1.core.kv_cache_utils", "vllm.v1.kv_offload.factory", "vllm_kvfix.plugin")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_if(condition): the test is about other releases if the condition is false")
    config.addinivalue_line("markers", "one_process: its parameters need no vLLM that is as it was imported")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, instead of skipping, what is not about this release: then every skip is a mistake."""
    about_others = [item for item in items if not all(mark.args[0] for mark in item.iter_markers("only_if"))]
    items[:] = [item for item in items if item not in about_others]
    config.hook.pytest_deselected(items=about_others)


def pytest_sessionstart(session: pytest.Session) -> None:
    for name in [name for name in os.environ if name.startswith("KVFIX_")]:
        del os.environ[name]
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    with warnings.catch_warnings(action="ignore"):
        for name in SLOW_PARTS_OF_VLLM:
            importlib.import_module(name)
    early = [name for name in MUST_NOT_BE_IMPORTED if name in sys.modules]
    assert not early, f"imported before any test: {early}"
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    import vllm

    return f"vLLM {vllm.__version__} from {os.path.dirname(vllm.__file__)}, torch {torch.__version__}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if item.nodeid not in _ended:
        _ended.update(_reports_of_a_fork(_with_the_same_process(item)))
    for report in _ended.pop(item.nodeid):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


_ended: dict[str, list[pytest.TestReport]] = {}


def _with_the_same_process(item: pytest.Item) -> list[pytest.Item]:
    if item.get_closest_marker("one_process") is None:
        return [item]
    return [other for other in item.session.items if other.nodeid.split("[")[0] == item.nodeid.split("[")[0]]


def _reports_of_a_fork(items: list[pytest.Item]) -> dict[str, list[pytest.TestReport]]:
    """Set up, call and tear down ``items`` in a fork; the reports of each, or one of how the fork ended."""
    here, there = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        here.close()
        _run_and_exit(items, there)
    there.close()
    reports = {}
    how = "died"
    try:
        for item in items:
            if not here.poll(LIMIT):
                how = f"gave no result within {LIMIT} s"
                break
            from_serializable = item.config.hook.pytest_report_from_serializable
            reports[item.nodeid] = [from_serializable(config=item.config, data=one) for one in here.recv()]
    except EOFError:
        pass
    finally:
        here.close()
        if len(reports) < len(items):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    why = f"the process of this test {how} (wait status {status})"
    return {
        item.nodeid: reports.get(item.nodeid)
        or [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")]
        for item in items
    }


def _run_and_exit(items: list[pytest.Item], to_parent: Connection) -> None:
    code = 1
    try:
        for item in items:
            reports = runtestprotocol(item, log=False, nextitem=None)
            to_serializable = item.config.hook.pytest_report_to_serializable
            to_parent.send([to_serializable(config=item.config, report=report) for report in reports])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Log(logging.Handler):
    """What was logged to the logger ``vllm`` and its children."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def ours(self, level: int = logging.DEBUG) -> list[str]:
        """Messages of vllm-kvfix of ``level``, or of all levels."""
        return [
            record.getMessage()
            for record in self.records
            if record.name.startswith("vllm.kvfix") and level in (logging.DEBUG, record.levelno)
        ]

    def vllms(self, text: str) -> list[str]:
        """Messages of vLLM's own that contain ``text``."""
        return [
            record.getMessage()
            for record in self.records
            if not record.name.startswith("vllm.kvfix") and text in record.getMessage()
        ]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """pytest's own would look through all earlier ones, in every fork anew."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logging.getLogger("vllm.kvfix").setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def register(log: Log) -> Any:
    """``register()`` as vLLM calls it, in a process in which it was not called before."""
    from vllm_kvfix import plugin

    return plugin.register


@pytest.fixture
def enter(register: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Goes on as another process, by its module, in which KVFIX_STOCK_SPEC is set or is not."""
    from vllm_kvfix import plugin

    def register_there(process: str, switched_on: bool) -> None:
        plugin.restore()
        monkeypatch.setenv("KVFIX_STOCK_SPEC", "1" if switched_on else "0")
        exec("register()", {"__name__": process, "register": register})

    return register_there
