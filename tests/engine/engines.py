"""Start engines of a vLLM release in processes of their own. Needs nothing but Python."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVS = HERE.parents[1] / "tools/envs.py"
sys.path.append(str(ENVS.parent))

import envs  # noqa: E402

RELEASES = tuple(release for line in envs.engine_releases().values() for release in line)
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
# One engine in one process and on one thread: fast to start, and several don't fight for the same core.
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@functools.cache
def interpreter(release: str) -> str:
    """A Python that can run an engine of this release with this checkout as its plugin."""
    command = [sys.executable, str(ENVS), "engine", release]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment without what would steer vLLM, our plugin or Python's imports."""
    steering = ("VLLM_", "KVFIX_", "PYTHON", "HF_", "OMP_", "LD_PRELOAD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    # transformers copies a model's own code there: never into the user's cache.
    return inherited | ENVIRON | {"HF_HOME": str(folder / "huggingface"), "PYTHONPATH": str(HERE)} | more


class EngineRunError(Exception):
    """The runner itself failed, or took too long."""


def run(
    release: str, runs: list[dict[str, Any]], folder: Path, timeout: float = 900, **environ: str
) -> dict[str, dict[str, Any]]:
    """Do the runs in one process, as run_engine.py describes them; return its results by name.

    Each result also has "log": what anybody logged during the run. All of it stays in ``folder/results`` and
    ``folder/log``.
    """
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    command = [interpreter(release), str(HERE / "run_engine.py"), str(folder / "runs.json")]
    with (
        (folder / "log").open("w") as log,
        started(command, environment(folder, **IN_PROCESS, **environ), subprocess.PIPE, log) as process,
    ):
        try:
            lines, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise EngineRunError(f"no end after {timeout} s: see {folder / 'log'}") from None
    (folder / "results").write_text(lines)
    results = {result["name"]: result for result in map(json.loads, lines.splitlines())}
    if "process" not in results:
        raise EngineRunError(f"exit status {process.returncode}: see {folder / 'log'}")
    for part in (folder / "log").read_text(errors="replace").split("\n=== ")[1:]:
        name, _, text = part.partition("\n")
        results[name]["log"] = text
    return results


_running: set[subprocess.Popen[str]] = set()


@contextlib.contextmanager
def started(command: list[str], environ: dict[str, str], stdout: Any, stderr: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, of which nothing is left in the end, whatever happens."""
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    _running.add(process)
    try:
        yield process
    finally:
        kill(process)
        _running.discard(process)


def kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_all() -> None:
    """For an early end: whoever waits for these processes wakes up."""
    for process in tuple(_running):
        kill(process)
