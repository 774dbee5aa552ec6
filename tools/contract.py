"""Run tests/contract once for each vLLM release, two at a time, and count.

    python3 tools/contract.py RELEASE...

Prints a line for each release as it ends, the whole output of those that failed, and `N passed, N failed` as the
last line. A release in which no test passed has failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2  # a process with torch and vLLM takes a core and about 1 GB
LIMIT = 900  # seconds for the tests of one release
# What an operator's shell may hold and would change what the tests see.
STRIPPED = ("PYTHONPATH", "VLLM_", "KVFIX_DISABLE", "KVFIX_STOCK_SPEC")

RUNNING: set[int] = set()  # process groups of the tests that run now


@dataclass
class Result:
    release: str
    output: str = ""
    seconds: float = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def counts(passed: int, failed: int, skipped: int) -> str:
    return f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")


def end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def bounded(command: list[str], environ: dict[str, str], log: Path) -> int:
    """Run a command with its output in a file; after LIMIT end it and all that it started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {LIMIT} s\n")
            return 1
        finally:
            end(process.pid)
            process.wait()
            RUNNING.discard(process.pid)


def test(release: str) -> Result:
    result = Result(release)
    setup = subprocess.run(
        [sys.executable, str(ROOT / "tools/envs.py"), "contract", release], stdout=subprocess.PIPE, text=True
    )
    if setup.returncode:
        result.failed, result.output = 1, "its environment could not be set up, see above"
        return result
    start = time.monotonic()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(STRIPPED)}
    environ |= {"KVFIX_RELEASE": release, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.xml")
        python = setup.stdout.splitlines()[-1]
        options = ["-p", "no:cacheprovider", f"--junitxml={report}"]
        status = bounded([python, "-m", "pytest", "tests/contract", *options], environ, log)
        result.output = log.read_text(errors="replace")
        for suite in ElementTree.parse(report).iter("testsuite") if report.exists() else ():
            total, errors, failures, skipped = (
                int(suite.get(k, 0)) for k in ("tests", "errors", "failures", "skipped")
            )
            result.passed += total - errors - failures - skipped
            result.failed += errors + failures
            result.skipped += skipped
    if not result.failed and (status or not result.passed):
        result.failed = 1
        result.output += f"\npytest ended with exit status {status}, {result.passed} tests passed\n"
    result.seconds = time.monotonic() - start
    return result


@contextlib.contextmanager
def ending(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On Ctrl-C or SIGTERM leave no test behind."""
    try:
        yield
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for group in list(RUNNING):
            end(group)
        raise


def main(releases: list[str]) -> int:
    if not releases:
        print(__doc__, file=sys.stderr)
        return 2
    results = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(AT_ONCE) as pool, ending(pool):
        for future in as_completed([pool.submit(test, release) for release in releases]):
            result = future.result()
            results.append(result)
            words = counts(result.passed, result.failed, result.skipped)
            print(f"vLLM {result.release:8}{words} in {result.seconds:.0f} s", flush=True)
    bad = [result for result in results if result.failed]
    for result in bad:
        print(f"\n===== vLLM {result.release} =====\n{result.output}")
    if bad:
        print("failed on vLLM " + ", ".join(result.release for result in bad))
    passed, failed, skipped = (sum(getattr(r, k) for r in results) for k in ("passed", "failed", "skipped"))
    print(counts(passed, failed, skipped))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
