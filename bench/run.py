"""Measure what vllm-kvfix adds and what it gives back; print one table.

    make bench

Every figure is of one run, on the Python files of real vLLM releases, without a GPU and without an
engine. Times are CPU time, so that other work on the machine changes them little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300  # seconds for one script; it takes 5 to 20 of a core

HEADER = ("measured", "vLLM", "vllm-kvfix", "stock", "aim")


def interpreter(release: str) -> str:
    command = [sys.executable, str(ROOT / "tools/envs.py"), "contract", release]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def measure(script: str, release: str) -> Any:
    """Run a script of this folder on a release; what its last line says, as JSON."""
    # An installed wheel has bytecode: let Python keep that of this checkout.
    unwanted = ("VLLM_", "KVFIX_DISABLE", "KVFIX_STOCK_SPEC", "PYTHONDONTWRITEBYTECODE")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    python = interpreter(release)
    print(f"bench: {script} on vLLM {release}", file=sys.stderr, flush=True)
    ended = subprocess.run(
        [python, str(ROOT / "bench" / script)],
        env=environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if ended.returncode:
        sys.exit(f"{ended.stdout[-4000:]}{ended.stderr[-4000:]}\nbench: {script} failed on vLLM {release}")
    return json.loads(ended.stdout.splitlines()[-1])


def rows() -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = []
    for release in ("0.19.1", "0.32.0"):
        times = measure("measure_register.py", release)
        for what, aim in (
            ("import vllm_kvfix.plugin", "-"),
            ("register(), vLLM's modules not imported", "< 1 ms"),
            ("register(), vLLM's modules imported", "< 5 ms"),
        ):
            table.append((f"{what}, median", release, f"{times[what]:.2f} ms", "-", aim))
        one = measure("measure_guard.py", release)
        what = f"bounds check of {one['chunks']:,} chunks / copying them ({one['chunk_bytes'] >> 10} KiB each)"
        cost = f"{one['guard_us']:.1f} us ({one['percent']:.3f} %)"
        table.append((what, release, cost, f"{one['copy_us']:,.0f} us", "< 1 %"))
    pools = measure("measure_pool.py", "0.19.1")
    for one in pools:
        what = f"budget used by a worker, median of {one['count']} models, {one['kind']}"
        table.append((what, "0.19.1", f"{one['fixed']:.2f} %", f"{one['stock']:.2f} %", "<= 100 %"))
    beyond = [f"{sum(one[name] for one in pools):,}" for name in ("fixed_beyond", "stock_beyond")]
    models = sum(one["count"] for one in pools)
    table.append((f"models with more chunks in the scheduler than in a worker, of {models:,}", "0.19.1", *beyond, "0"))
    for release in ("0.23.0", "0.26.0"):
        one = measure("measure_capacity.py", release)
        ranges = ["{1:.2f} ({0:.2f}-{2:.2f})".format(*one[name]) for name in ("fixed", "stock")]
        off = [str(one[f"{name}_off"]) for name in ("fixed", "stock")]
        what = f"concurrency reported / requests held, median (range) of {one['count']} models"
        table.append((what, release, *ranges, "1.0x"))
        table.append((f"models reported more than 5 % off, of {one['count']}", release, *off, "0"))
    return table


def main() -> None:
    table = [HEADER, *rows()]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
