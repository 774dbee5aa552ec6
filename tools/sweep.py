"""Run the engine tests on every vLLM release that starts engines on a CPU, two releases at a time.

    python3 tools/sweep.py [RELEASE...]      all that there are if none is named

One torch after the other: each is an environment of several GB. Where the disk is short, what the others left is
removed. Prints a line for each release as it ends, and a summary. The results are in
$KVFIX_CACHE/engine-results/CODE/RELEASE.json, where CODE is a hash of what was tested: what passed is not run again for
the same code, so that a sweep which was stopped goes on where it was. The support table learns of each result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import envs
import support

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2  # engines take a core and 2 GB each, a bit more on two ranks
LIMIT = 1800  # seconds for one release
ROOM = 12 << 30  # bytes that an environment and the wheels of its releases take

RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPING = threading.Event()


@dataclass
class Result:
    release: str
    passed: bool = False
    seconds: int = 0
    summary: str = ""  # what pytest counted, or what went wrong before
    failures: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)  # what tests/engine/run_engine.py saw, in short


def results_of(lock: str) -> Path:
    """The folder for the results of this code in the environment of a lock."""
    code = [*ROOT.glob("vllm_kvfix/**/*.py"), *ROOT.glob("tests/engine/*.py")]
    digest = hashlib.sha256(envs.venv_home(lock).name.encode())  # which has a hash of the pins
    for path in sorted(code):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return envs.CACHE / "engine-results" / digest.hexdigest()[:12]


def passed_before(release: str, results: Path) -> bool:
    path = results / f"{release}.json"
    return path.exists() and json.loads(path.read_text())["passed"]


def test(release: str, lock: str, dev: Path, results: Path) -> Result | None:
    """Run the tests of one release and write their result; None if stopped, or if the code changed meanwhile."""
    result, begin, log = Result(release), time.monotonic(), results / f"{release}.log"
    setup = subprocess.run([sys.executable, str(ROOT / "tools/envs.py"), "engine", release], stdout=subprocess.PIPE)
    if STOPPING.is_set():
        return None
    if setup.returncode:
        result.summary = "its environment could not be set up, see above"
        return result
    folder = results / release
    command = [str(dev), "-m", "pytest", "tests/engine/test_every_release.py", "-k", release, f"--basetemp={folder}"]
    bounded([*command, "-p", "no:cacheprovider"], log)
    if STOPPING.is_set():
        return None
    lines = log.read_text(errors="replace").splitlines() or ["pytest said nothing"]
    result.summary = re.sub(r", \d+ deselected in .*", "", lines[-1].strip("= "))
    result.passed = bool(re.fullmatch(r"\d+ passed", result.summary))
    result.failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    for path in sorted(folder.glob("engines0/*/results")):
        result.runs += map(in_short, map(json.loads, path.read_text().splitlines()))
    result.seconds = round(time.monotonic() - begin)
    if results_of(lock) != results:
        result.passed, result.summary = False, "the code changed while its tests ran: run them again"
        return result
    envs.write(results / f"{release}.json", json.dumps(asdict(result), indent=1) + "\n")
    support.record_engine(release, result.passed)
    if result.passed:
        shutil.rmtree(folder)
    return result


def in_short(run: dict[str, Any]) -> dict[str, Any]:
    """A run without the answers."""
    return {name: value for name, value in run.items() if name not in ("tokens", "cached", "beginnings")}


def bounded(command: list[str], log: Path) -> None:
    """Run a command with its output in a file; after LIMIT end it, and give it the time to end its engines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        RUNNING.add(process)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            end(process)
            file.write(f"\nstopped after {LIMIT} s\n")
        finally:
            RUNNING.discard(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    process.kill()
    process.wait()


@contextlib.contextmanager
def ending(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On Ctrl-C, SIGTERM or an error leave no engine behind."""
    try:
        yield
    except BaseException:
        STOPPING.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):
            end(process)
        raise


def make_room(lock: str) -> None:
    """Where the disk is too full for the environment of a lock, remove those of the others, one at a time."""
    for other, releases in envs.engine_releases().items():
        if envs.is_made(envs.venv_home(lock)) or shutil.disk_usage(envs.CACHE).free >= ROOM:
            return
        left = [envs.CACHE / "full" / release for release in releases]
        if other != envs.CONTRACT:
            left.append(envs.venv_home(other))
        left = [path for path in left if path.exists()]
        if other != lock and left:
            say(f"less than {ROOM >> 30} GiB free: removing the environment and the wheels of {other}")
            for path in left:
                shutil.rmtree(path)


def sweep(releases: list[str]) -> list[str]:
    """Test the releases that have not passed yet; return those that still have not."""
    dev, open_yet = envs.interpreter("dev"), list(releases)
    for lock, line in envs.engine_releases().items():
        results = results_of(lock)
        for release in [release for release in line if release in releases and passed_before(release, results)]:
            open_yet.remove(release)
            support.record_engine(release, True)
            say(f"vLLM {release:8}passed before, {results / release}.json")
        wanted = [release for release in line if release in open_yet]
        if not wanted:
            continue
        make_room(lock)
        envs.venv(lock)
        with ThreadPoolExecutor(AT_ONCE) as pool, ending(pool):
            for future in as_completed([pool.submit(test, release, lock, dev, results) for release in wanted]):
                result = future.result()
                if result is None:
                    continue
                say(f"vLLM {result.release:8}{result.summary} in {result.seconds} s")
                for line_of_pytest in result.failures:
                    say(f"  {line_of_pytest[:200]}")
                if result.passed:
                    open_yet.remove(result.release)
                else:
                    say(f"  see {results / result.release}.log")
    return open_yet


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str]) -> int:
    every = [release for line in envs.engine_releases().values() for release in line]
    releases = arguments or every
    for unknown in [release for release in releases if release not in every]:
        say(f"no engine tests for {unknown!r}: there are {', '.join(every)}")
        return 2
    for unknown in [release for release in releases if release not in support.releases()]:
        say(f"vllm_kvfix/support.json does not have vLLM {unknown}: `make matrix` comes first")
        return 2
    envs.stop_as_on_ctrl_c()
    try:
        failed = sweep(releases)
    except envs.Failure as failure:
        say(f"error: {failure}")
        return 1
    except KeyboardInterrupt:
        say("stopped; the same command goes on with what is left")
        return 130
    say(f"{len(releases) - len(failed)} of {len(releases)} releases passed" + "".join(f", not {r}" for r in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
