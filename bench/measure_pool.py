"""What share of ``cpu_bytes_to_use`` a worker's pool takes, over random models, with real specs of vLLM.

The stock number is the installed ``CPUOffloadingSpec``'s own. Both are counted in rows of the bytes
that vLLM's planner really lays out, so a stock pool of too few chunks shows as a small share.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/contract"))
from geometry import Layer, allocated_bytes, chunks, create_spec, group, plan, schedulers_form, vllm_config

from vllm_kvfix import plugin

COUNT = 1000
ALIKE, DIFFERENT, SEVERAL = "layers alike", "layers that differ", "several groups"


def draw(dice: random.Random) -> tuple[str, list[list[Layer]]]:
    """A model: its kind, and the layers of its KV cache groups."""
    kind = dice.choice((ALIKE, DIFFERENT, SEVERAL))
    count = dice.randint(8, 64)
    width = dice.choice((2, 4, 8, 16))
    if kind == ALIKE:
        return kind, [[Layer(dice.choice(("full", "mla", "sliding")), width)] * count]
    if kind == DIFFERENT:
        attention = dice.choice(("full", "mla"))
        return kind, [[Layer(attention, dice.choice((width, width // 2, 3 * width))) for _ in range(count)]]
    return kind, [[Layer(attention, width)] * dice.randint(1, 32) for attention in ("full", "sliding", "sliding")]


def pool(dice: random.Random) -> dict[str, Any]:
    kind, groups = draw(dice)
    world_size, blocks_per_chunk = dice.choice((1, 2, 4, 8)), dice.choice((1, 1, 2, 4, 8))
    budget = int(2 ** dice.uniform(30, 38))  # 1 to 256 GiB
    extra = {"cpu_bytes_to_use": budget, "block_size": 16 * blocks_per_chunk}
    config = vllm_config(extra, world_size=world_size)
    num_blocks = dice.randint(100, 50_000)
    of_worker = plan(config, [group(layers, f"group.{i}") for i, layers in enumerate(groups)], num_blocks)
    of_scheduler = schedulers_form(of_worker)
    row = allocated_bytes(of_worker) // num_blocks * world_size * blocks_per_chunk
    result: dict[str, Any] = {"kind": kind}
    for name, choice in (("stock", {}), ("fixed", {"spec_name": "FixedCPUOffloadingSpec"})):
        config.kv_transfer_config.kv_connector_extra_config = extra | choice
        worker, scheduler = (chunks(create_spec(config, form)) for form in (of_worker, of_scheduler))
        result |= {name: 100 * worker * row / budget, f"{name}_beyond": scheduler > worker}
        if name == "fixed":
            assert worker == scheduler
            assert 0 <= budget - worker * row < row, (budget, worker, row)
    return result


def main() -> None:
    logging.disable()
    plugin.register()
    assert plugin.statuses()["offload-pool-size"].word == "waiting", plugin.statuses()
    dice = random.Random(39617)
    pools = [pool(dice) for _ in range(COUNT)]
    assert plugin.statuses()["offload-pool-size"].word == "applied", plugin.statuses()
    summary = []
    for kind in (ALIKE, SEVERAL, DIFFERENT):
        some = [one for one in pools if one["kind"] == kind]
        line: dict[str, Any] = {"kind": kind, "count": len(some)}
        for name in ("fixed", "stock"):
            line[name] = statistics.median(one[name] for one in some)
            line[f"{name}_beyond"] = sum(one[f"{name}_beyond"] for one in some)
        summary.append(line)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
