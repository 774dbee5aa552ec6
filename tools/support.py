"""The support table: what each vLLM release does, and what the fixes make of it.

    python3 tools/support.py        write docs/support.md and the table in README.md from vllm_kvfix/support.json

``vllm_kvfix/support.json`` is written by `make matrix` and `make engines`, from what they measure, and by nobody else:

    {"releases": {RELEASE: {FIX: {
        "stock": "affected" | "right" | "absent",     what vLLM's own code is, by the probe of the fix
        "status": "applied" | "not needed" | ...,     what the fix says of itself
        "fingerprints": {"module:name": "16 digits"}, of the code that it judges, replaces or wraps
        "proof": "contract" | "engine"}}}}            what passed: the contract tests, or engines too
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "vllm_kvfix/support.json"
PAGE = ROOT / "docs/support.md"
README = ROOT / "README.md"
LOCK = ROOT / "locks/releases.lock"
BEGIN, END = "<!-- made by `make matrix`: begin -->\n", "<!-- end -->\n"

CONTRACT, ENGINE = "contract", "engine"
NEEDS_GPU = {"simple-offload-ranks"}  # no engine on a CPU runs what these fixes repair

Rows = dict[str, dict[str, Any]]  # fix id -> its row, for one release


def releases() -> dict[str, Rows]:
    return json.loads(TABLE.read_text())["releases"] if TABLE.exists() else {}


def record_measured(release: str, measured: Rows) -> None:
    """Take over what the contract tests of a release saw; all of them have passed.

    That engines passed stays true of a release that does what it did.
    """
    with changing() as table:
        old = table.get(release, {})
        table[release] = {
            fix: row | {"proof": ENGINE if same(row, old.get(fix)) and old[fix]["proof"] == ENGINE else CONTRACT}
            for fix, row in measured.items()
        }


def record_engine(release: str, passed: bool) -> None:
    """Take over whether the engine tests of a release, which is in the table, have passed."""
    with changing() as table:
        for fix, row in table[release].items():
            row["proof"] = ENGINE if passed and fix not in NEEDS_GPU else CONTRACT


def difference(release: str, measured: Rows) -> str:
    """How a release differs from what the table says of it; empty if it does not."""
    committed = releases().get(release, {})
    return "\n".join(
        f"vLLM {release}, {fix}: support.json says {committed.get(fix)}, measured is {measured.get(fix)}"
        for fix in sorted({*committed, *measured})
        if not same(measured.get(fix), committed.get(fix))
    )


def same(measured: dict[str, Any] | None, committed: dict[str, Any] | None) -> bool:
    """Whether two rows are equal but for the proof, which no single run of the contract tests can tell."""
    one, other = ({k: v for k, v in (row or {}).items() if k != "proof"} for row in (measured, committed))
    return one == other


@contextlib.contextmanager
def changing() -> Iterator[dict[str, Rows]]:
    """The table, to be changed in place and written with the documents in the end, by one process at a time."""
    with (ROOT / "tools/support.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = releases()
        yield table
        supported = re.findall(r"^vllm[^=]*==(\S+)", LOCK.read_text(), re.MULTILINE)
        write({release: table[release] for release in supported if release in table})


def write(table: dict[str, Rows]) -> None:
    """Write the table and the documents, each at once: others may be reading them, and we may be stopped."""
    PAGE.parent.mkdir(exist_ok=True)
    text = json.dumps({"releases": table}, indent=1) + "\n"
    for path, new in (
        (PAGE, page(table)),
        (README, with_short_table(README.read_text(), table)),
        (TABLE, text),
    ):
        part = path.with_name(path.name + ".part")
        part.write_text(new)
        part.replace(path)


def page(table: dict[str, Rows]) -> str:
    """All of docs/support.md."""
    fixes = fix_ids(table)
    return f"""\
# Support

Measured by `make matrix` and `make engines`, not claimed: written from `vllm_kvfix/support.json`, not by hand.
`make test` measures each release again, but for the engines, and fails where this table says otherwise.

- **stock** is what vLLM's own code answers to the probe of the fix: `affected` has the known bug, `right` has not,
  `absent` has nothing that could have it.
- **status** is what the fix says of itself on that release, read back.
- **proof** is what passed with the plugin: `contract`, the tests on the release's Python files; `engine`, real engines
  on the CPU too, storing and loading, with equal tokens. {needs_gpu(fixes)}

{rendered(["vLLM", *(f"`{fix}`: {word}" for fix in fixes for word in ("stock", "status")), "proof"], every(table))}
## Code

The same fingerprint is the same code, comments, docstrings and layout aside.

{rendered(["fix", "code", "fingerprint", "vLLM"], code(table))}"""


def every(table: dict[str, Rows]) -> Iterator[list[str]]:
    for release, rows in table.items():
        words = [said(rows, fix, word) for fix in fix_ids(table) for word in ("stock", "status")]
        yield [release, *words, proof(rows)]


def code(table: dict[str, Rows]) -> Iterator[list[str]]:
    """A row for each piece of code as it is in some releases, in the order of its first release."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for release, rows in table.items():
        for fix, row in rows.items():
            for name, mark in row["fingerprints"].items():
                where.setdefault((fix, name, mark), []).append(release)
    order = list(where)
    for key in sorted(where, key=lambda key: (key[0], key[1].partition(":")[2], order.index(key))):
        fix, name, mark = key
        yield [f"`{fix}`", f"`{name}`", f"`{mark}`", ", ".join(spans(where[key], list(table)))]


def with_short_table(readme: str, table: dict[str, Rows]) -> str:
    """README.md with a row for each span of releases that are alike."""
    fixes = fix_ids(table)

    def cells(release: str) -> tuple[str, ...]:
        return (*(said(table[release], fix, "status") for fix in fixes), proof(table[release]))

    rows = []
    for words, group in itertools.groupby(table, cells):
        rows.append([*spans(list(group), list(table)), *words])
    text = rendered(["vLLM", *(f"`{fix}`" for fix in fixes), "proof"], rows)
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no place for the table: {BEGIN!r}, {END!r}")
    return before + BEGIN + text + END + after


def fix_ids(table: dict[str, Rows]) -> list[str]:
    return list(dict.fromkeys(fix for rows in table.values() for fix in rows))


def said(rows: Rows, fix: str, word: str) -> str:
    """A word of a row; a fix that is new is not measured on every release yet."""
    text = rows[fix][word] if fix in rows else "not measured"
    return f"**{text}**" if text == "applied" else text


def proof(rows: Rows) -> str:
    """What is proven of all fixes of a release that engines on a CPU can prove."""
    return ENGINE if {row["proof"] for fix, row in rows.items() if fix not in NEEDS_GPU} == {ENGINE} else CONTRACT


def needs_gpu(fixes: list[str]) -> str:
    names = ", ".join(f"`{fix}`" for fix in fixes if fix in NEEDS_GPU)
    return f"For {names}, which engines on the CPU cannot run, it is `contract` on every release." if names else ""


def spans(some: list[str], every: list[str]) -> list[str]:
    """Releases as spans of neighbours: ["0.11.0-0.13.0", "0.19.1"]."""
    positions = [every.index(release) for release in some]
    result = []
    for _, group in itertools.groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):
        span = [every[position] for _, position in group]
        result.append(span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}")
    return result


def rendered(header: list[str], rows: Any) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def affected(table: dict[str, Rows], fix: str) -> list[str]:
    """The releases of the table that have the bug of a fix."""
    return [release for release, rows in table.items() if rows.get(fix, {}).get("stock") == "affected"]


def stale(table: dict[str, Rows], fix: str, docstring: str) -> str:
    """What is no longer true of a fix, given the releases that are supported; empty if all is."""
    with_bug = affected(table, fix)
    if not with_bug:
        return f"no supported release has the bug of {fix} any more: remove the fix"
    (claim,) = re.findall(r"^Affected: ([\d.]+(?:-[\d.]+)?)(?=[. ])", docstring, re.MULTILINE) or [""]
    (span, *others) = spans(with_bug, list(table))
    if claim.rstrip(".") != span or others:
        return (
            f'{fix} says "Affected: {claim}", of the supported releases {", ".join([span, *others])} are: '
            "correct the docstring, and remove what only the others needed"
        )
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    write(releases())
