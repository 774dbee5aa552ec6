"""The built wheel: what is in it, what it asks for, and that it installs and registers where no vLLM is."""

from __future__ import annotations

import ast
import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

import vllm_kvfix

ROOT = Path(__file__).resolve().parents[2]
LITTER = (".git", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info")
DIST_INFO = f"vllm_kvfix-{vllm_kvfix.__version__}.dist-info"

# Run by a fresh venv. `distribution` reads entry points the same way on every Python from 3.9.
REGISTER = """\
import os
import sys
from importlib.metadata import distribution


def refuse(event, arguments):
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event.startswith(("socket.", "subprocess.")) or (event == "open" and arguments[2] & writes):
        os.write(2, f"{event} {arguments}".encode())
        os._exit(3)  # an exception might be caught


sys.addaudithook(refuse)

import vllm_kvfix

heavy = {"vllm", "torch", "numpy"}
assert not heavy & sys.modules.keys(), "import vllm_kvfix imported too much"
(point,) = [p for p in distribution("vllm-kvfix").entry_points if p.group == "vllm.general_plugins"]
register = point.load()
register()
register()
assert not heavy & sys.modules.keys(), "register() imported too much"
print(point.name, point.value, vllm_kvfix.__file__)
"""


def run(*command: str | Path, **options: object) -> str:
    ended = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        **options,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def build(folder: Path, *options: str) -> Path:
    """Build from a copy of the checkout, with the tools of this environment and no network."""
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*LITTER))
    environ = os.environ | {"SOURCE_DATE_EPOCH": "1700000000", "PIP_NO_INDEX": "1"}
    out = folder / "out"
    run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, folder / "checkout", env=environ)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, bytes]:
    return contents(wheel)


@pytest.fixture(scope="module")
def metadata(files: dict[str, bytes]) -> Message:
    return HeaderParser().parsestr(files[f"{DIST_INFO}/METADATA"].decode())


def test_one_small_wheel_for_every_platform(wheel: Path) -> None:
    assert wheel.name == f"vllm_kvfix-{vllm_kvfix.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 100_000


def test_pulls_in_no_other_package(metadata: Message) -> None:
    """A hot-fix must not move a pinned vllm or torch."""
    assert [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r] == []


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "vllm-kvfix"
    assert metadata["Version"] == vllm_kvfix.__version__
    assert metadata["Requires-Python"] == ">=3.9"
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_entry_points_are_those_of_the_one_file_that_declares_them(files: dict[str, bytes]) -> None:
    built, declared = configparser.ConfigParser(), configparser.ConfigParser()
    built.read_string(files[f"{DIST_INFO}/entry_points.txt"].decode())
    declared.read_string((ROOT / "entry_points.txt").read_text())
    assert built == declared
    assert built["vllm.general_plugins"]["kvfix"] == "vllm_kvfix.plugin:register"


def test_holds_the_whole_package_and_nothing_else(files: dict[str, bytes]) -> None:
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm_kvfix").rglob("*.py")} | {
        "vllm_kvfix/py.typed",
        "vllm_kvfix/support.json",
    }
    assert {name for name in files if not name.startswith(f"{DIST_INFO}/")} == package
    assert files[f"{DIST_INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_every_module_is_python_3_9(files: dict[str, bytes]) -> None:
    for name, source in files.items():
        if name.endswith(".py"):
            ast.parse(source, name, feature_version=(3, 9))


def test_building_again_by_way_of_the_sdist_gives_the_same_files(files: dict[str, bytes], tmp_path: Path) -> None:
    assert contents(build(tmp_path)) == files


def pythons() -> list[str]:
    """This Python, and the oldest that vLLM runs on where one is at hand."""
    candidates = [shutil.which("python3.9"), *map(str, Path.home().glob(".pyenv/versions/3.9*/bin/python"))]
    for candidate in filter(None, candidates):
        probe = [candidate, "-c", "import ensurepip, sys; print(sys.version_info[:2] == (3, 9))"]
        if subprocess.run(probe, capture_output=True, text=True).stdout.strip() == "True":
            return [sys.executable, candidate]
    return [sys.executable]


@pytest.mark.parametrize("python", pythons())
def test_installs_offline_and_registers_without_vllm(wheel: Path, python: str, tmp_path: Path) -> None:
    venv, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "KVFIX_"))} | {
        "HOME": str(home)
    }
    run(python, "-m", "venv", venv, env=environ)
    run(venv / "bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, env=environ)
    shutil.rmtree(home)
    home.mkdir()
    output = run(venv / "bin/python", "-B", "-c", REGISTER, env=environ, cwd=home).splitlines()[-1]
    assert output.startswith(f"kvfix vllm_kvfix.plugin:register {venv}/lib/")
    assert list(home.iterdir()) == [], "register() wrote a file"
