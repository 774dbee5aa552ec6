"""Run tests/contract once for each vLLM release, side by side, and count.

    python3 tools/contract.py [RELEASE...]              all that there are if none is named
    python3 tools/contract.py --support [RELEASE...]    only what the support table says
    python3 tools/contract.py --support-of-all-but RELEASE...
    python3 tools/contract.py --write [RELEASE...]      write the support table, of the releases that pass

Prints a line for each release as it ends, the whole output if it failed, and `N passed, N failed` as the
last line. A release in which no test passed has failed; so has, unless the table is written, one of which
vllm_kvfix/support.json says what is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import envs
import support

ROOT = Path(__file__).resolve().parents[1]
MEMORY = 3 << 30  # bytes that the tests of one release may take
LIMIT = 900  # seconds for the tests of one release
# What an operator's shell may hold and would change what the tests see.
STRIPPED = ("PYTEST_", "PYTHON", "VLLM_", "KVFIX_DISABLE", "KVFIX_STOCK_SPEC")

RUNNING: set[int] = set()  # process groups of the tests that run now
STOPPING = threading.Event()


@dataclass
class Result:
    release: str
    output: str = ""
    seconds: float = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    support: support.Rows = field(default_factory=dict)


def at_once() -> int:
    """Releases to test side by side: each takes a core."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY))


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
        if STOPPING.is_set():
            end(process.pid)
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {LIMIT} s\n")
            return 1
        finally:
            end(process.pid)
            process.wait()
            RUNNING.discard(process.pid)


def test(release: str, options: argparse.Namespace) -> Result:
    """Test one release, and write its rows if asked to; whatever goes wrong is its own failure."""
    try:
        result = measure(release, options)
        if options.write and not result.failed and not STOPPING.is_set():
            support.record_measured(release, result.support)
        return result
    except Exception:
        return Result(release, traceback.format_exc(), failed=1)


def measure(release: str, options: argparse.Namespace) -> Result:
    result = Result(release)
    setup = subprocess.run(
        [sys.executable, str(ROOT / "tools/envs.py"), "contract", release], stdout=subprocess.PIPE, text=True
    )
    if setup.returncode or STOPPING.is_set():
        result.failed, result.output = 1, "its environment could not be set up, see above"
        return result
    start = time.monotonic()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(STRIPPED)}
    environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.xml")
        python = setup.stdout.splitlines()[-1]
        tests = "tests/contract" + ("/test_support.py" if options.support else "")
        reporting = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [python, "-m", "pytest", tests, *reporting]
        status = bounded(command, environ, log)
        result.output = log.read_text(errors="replace")
        root: Any = ElementTree.parse(report) if report.exists() else ElementTree.Element("none")
        for suite in root.iter("testsuite"):
            total, errors, failures, skipped = (
                int(suite.get(k, 0)) for k in ("tests", "errors", "failures", "skipped")
            )
            result.passed += total - errors - failures - skipped
            result.failed += errors + failures
            result.skipped += skipped
        for measured in root.iterfind(".//property[@name='support']"):
            result.support = json.loads(measured.get("value"))
    if not result.failed and (status or not result.passed):
        result.failed = 1
        result.output += f"\npytest ended with exit status {status}, {result.passed} tests passed\n"
    if not result.failed and not result.support:
        result.failed, result.output = 1, result.output + "\nno test said what belongs into the support table\n"
    difference = "" if options.write else support.difference(release, result.support)
    if difference and not result.failed:
        result.failed = 1
        result.output += f"\n{difference}\nif that is so, write the table anew: make matrix RELEASE={release}\n"
    result.seconds = time.monotonic() - start
    return result


@contextlib.contextmanager
def ending(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On Ctrl-C, SIGTERM or an error leave no test behind."""
    try:
        yield
    except BaseException:
        STOPPING.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for group in list(RUNNING):
            end(group)
        raise


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()  # a row in the table says that all tests passed
    only.add_argument("--support", action="store_true")
    only.add_argument("--write", action="store_true")
    only.add_argument("--support-of-all-but", action="store_true")
    parser.add_argument("releases", nargs="*")
    options = parser.parse_args(arguments)
    if options.support_of_all_but:
        options.support = True
        options.releases = [release for release in envs.requirements() if release not in options.releases]
    elif not options.releases:
        options.releases = list(envs.requirements())
    results: list[Result] = []
    envs.stop_as_on_ctrl_c()
    with ThreadPoolExecutor(at_once()) as pool, ending(pool):
        for future in as_completed([pool.submit(test, release, options) for release in options.releases]):
            result = future.result()
            results.append(result)
            words = counts(result.passed, result.failed, result.skipped)
            done = f"[{len(results):{len(str(len(options.releases)))}}/{len(options.releases)}]"
            print(f"{done} vLLM {result.release:8}{words} in {result.seconds:.0f} s", flush=True)
            if result.failed:
                print(f"\n===== vLLM {result.release} =====\n{result.output}\n=====\n", flush=True)
    bad = [result.release for result in results if result.failed]
    if bad:
        print("failed on vLLM " + ", ".join(bad))
    passed, failed, skipped = (sum(getattr(r, k) for r in results) for k in ("passed", "failed", "skipped"))
    print(counts(passed, failed, skipped))
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped")
