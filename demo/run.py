"""`make demo`: the bug and its fix on real engines of vLLM 0.19.1, on this machine's CPU.

Ends with an exit status other than 0 if what it says did not happen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/engine"), str(ROOT / "tools")]

import engines  # noqa: E402
import envs  # noqa: E402
import models  # noqa: E402
import scenarios  # noqa: E402

RELEASE = "0.19.1"
BUDGET, PROMPTS = scenarios.BUDGET, scenarios.PROMPTS


def main() -> int:
    say(
        "vllm-kvfix demo",
        "vLLM can keep KV cache blocks that leave the GPU in a pool of CPU memory (OffloadingConnector). Its scheduler",
        "says where in the pool a block goes, its workers own the pool and copy. Up to 0.19.1 each computes the size",
        "of the pool by itself, and for a model whose layers differ in their KV heads the sizes differ too",
        "(https://github.com/vllm-project/vllm/pull/39617). To show it without a GPU, the GPU's KV cache is in this",
        "machine's memory as well. Engine, scheduler and numbers are those of vLLM; vllm-kvfix is a plugin that gives",
        "both the same, right size.",
    )
    if not set_up():
        return 1
    folder = Path(tempfile.mkdtemp(prefix="vllm-kvfix-demo-"))
    try:
        model = models.make_ragged(folder / "model")
        say(
            f"A tiny model with random weights and {comma(models.RAGGED_KV_HEADS)} KV heads in its layers;"
            f" {len(PROMPTS)} prompts of {len(PROMPTS[0])} tokens;",
            f"cpu_bytes_to_use = {BUDGET:,}. Three engines run now, which takes about a minute.",
            f"What they log: {folder / 'run/log'}",
        )
        results = engines.run(
            RELEASE,
            [
                scenarios.asking(model, "no connector", None),
                scenarios.asking(model, "stock", scenarios.STOCK_FORMULA, passes=2),
                scenarios.asking(model, "fixed", scenarios.FIXED, passes=2),
            ],
            folder / "run",
        )
        shutil.rmtree(model)
    except engines.EngineRunError as error:
        say(f"FAILED: {error}")
        return 1
    for run in results.values():
        if "tokens" not in run and run["name"] != "process":
            say(f"FAILED: an engine did not start: {run['error']}")
            return 1
    checks = [
        *tell_stock(results["stock"]),
        *tell_fixed(results["fixed"], results["no connector"]),
    ]
    missing = [what for what, happened in checks if not happened]
    say(*[f"FAILED, this did not happen: {what}" for what in missing] or ["All as it should be."])
    return 1 if missing else 0


def set_up() -> bool:
    """Download and unpack what is missing; envs.py reports its progress, and why it failed."""
    lock = (envs.LOCKS / f"{envs.engine_lock(RELEASE)}.lock").read_text().splitlines()[0].lstrip("# ")
    wheel = envs.requirements()[RELEASE].partition("#")[2].strip()
    say(
        f"Set-up in {envs.CACHE}, where it stays for the next time. What is missing is downloaded:",
        f"  {lock}",
        f"  vLLM {RELEASE}: {wheel}.",
    )
    try:
        engines.interpreter(RELEASE)
    except subprocess.CalledProcessError:
        return False
    return True


def tell_stock(run: dict[str, Any]) -> list[tuple[str, bool]]:
    scheduler, worker = run["scheduler"]["chunks"], run["ranks"][0]["chunks"]
    say(
        f"Sized as vLLM {RELEASE} does it",
        f"  scheduler: {scheduler} chunks in the pool",
        f"  worker:    {worker} chunks in the pool, {run['ranks'][0]['pool_bytes'] / BUDGET:.1%} of the budget",
        f"  after {run['stored']} chunks: {last_words(run)}",
        f"  the engine {'dies of ' + run['error'].rstrip(': ') if run['error'] else 'lives'}",
    )
    return [
        ("the numbers of stock differ", scheduler > worker),
        ("the stock engine dies at the first store past the worker's pool", bool(run["error"])),
    ]


def last_words(run: dict[str, Any]) -> str:
    """The first complaint of the copy, without the place in the code."""
    said = [line.partition("vllm-kvfix: ")[2] for line in run["log"].splitlines() if "out of bounds" in line]
    return said[0] if said else "no complaint"


def tell_fixed(run: dict[str, Any], without: dict[str, Any]) -> list[tuple[str, bool]]:
    checks = [("the fixed engine lives", run["error"] is None)]
    if run["error"]:
        say(f"Fixed: the engine dies of {run['error']}")
        return checks
    scheduler, rank = run["scheduler"]["chunks"], run["ranks"][0]
    used = rank["pool_bytes"] / BUDGET
    right = without["tokens"][0]
    equal = [answer == wanted for answers in run["tokens"] for answer, wanted in zip(answers, right, strict=True)]
    say(
        'The same engine with "spec_name": "FixedCPUOffloadingSpec"',
        f"  scheduler: {scheduler} chunks in the pool",
        f"  worker:    {rank['chunks']} chunks in the pool, {used:.1%} of the budget",
        f"  {run['stored']} chunks stored; then the GPU's cache is emptied and all prompts are asked again:",
        f"  {run['loaded']} chunks loaded back from the pool",
        f"  {sum(equal)} of {len(equal)} answers equal those of an engine that offloads nothing",
    )
    return [
        *checks,
        ("scheduler and worker have one number", scheduler == rank["chunks"]),
        ("over 95% of the budget is used, and no more than all of it", 0.95 < used <= 1),
        ("chunks are stored and loaded back", run["stored"] > 0 and run["loaded"] > 0),
        ("all answers are equal", all(equal)),
    ]


def comma(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def say(*lines: str) -> None:
    print("", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
