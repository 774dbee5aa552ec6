"""Concurrency that vLLM reports, by its own function and by the fixed one, over the requests it really holds.

The requests are counted by filling vLLM's ``KVCacheManager``, admitted and prefilled as its scheduler does.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/contract"))
from geometry import BLOCK_SIZE, Layer, group, kv_cache_config, schedulers_form, vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from vllm_kvfix import plugin

COUNT = 50


def requests_held(config: Any, max_model_len: int, batch: int) -> int:
    """Requests of ``max_model_len`` tokens that fit, each prefilled ``batch`` tokens a step."""
    known = {"scheduler_block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE, "enable_caching": False}
    known |= {"max_num_batched_tokens": batch, "max_in_flight_tokens": batch}
    takes = inspect.signature(KVCacheManager).parameters
    manager = KVCacheManager(config, max_model_len, **{name: known[name] for name in known if name in takes})
    held = 0
    while True:
        request = Request(str(held), [0] * max_model_len, SamplingParams(max_tokens=1), None)
        while request.num_computed_tokens < max_model_len:
            first = request.num_computed_tokens == 0
            tokens = max_model_len % batch or batch if first else batch
            if manager.allocate_slots(request, tokens, full_sequence_must_fit=first) is None:
                assert first, "admitted, and does not fit"
                return held
            request.num_computed_tokens += tokens
        held += 1


def one_model(dice: random.Random, stock: Any, fixed: Any) -> tuple[float, float]:
    # Lengths for which a sliding window needs all the blocks that vLLM reserves for it.
    batch = BLOCK_SIZE * dice.randint(4, 16)
    max_model_len = BLOCK_SIZE * dice.randint(60, 160) + 1
    groups = []
    for i in range(dice.randint(2, 4)):
        kind = "full" if i == 0 else dice.choice(("full", "sliding"))
        window = BLOCK_SIZE * dice.randint(2, 16) + 3
        layers = [Layer(kind, dice.randint(1, 8), window) for _ in range(dice.randint(1, 12))]
        groups.append(group(layers, f"group.{i}", uniform=True))
    dice.shuffle(groups)
    num_blocks = dice.randint(15_000, 40_000)
    config = vllm_config(max_model_len=max_model_len, max_num_batched_tokens=batch)
    of_worker = kv_cache_config(groups, num_blocks)
    of_scheduler = schedulers_form(of_worker)
    held = requests_held(of_scheduler, max_model_len, batch)
    reported = fixed(config, of_worker)
    assert reported == fixed(config, of_scheduler)
    # vLLM keeps block 0 for itself and reports it as usable.
    assert int(reported * (num_blocks - 1) / num_blocks + 1e-9) == held, (reported, held)
    return reported / held, stock(config, of_worker) / held


def main() -> None:
    logging.disable()
    stock = kv_cache_utils.get_max_concurrency_for_kv_cache_config
    plugin.register()
    assert plugin.statuses()["max-concurrency"].word == "applied", plugin.statuses()
    fixed = kv_cache_utils.get_max_concurrency_for_kv_cache_config
    dice = random.Random(48317)
    ratios = [one_model(dice, stock, fixed) for _ in range(COUNT)]
    summary: dict[str, Any] = {"count": COUNT}
    for name, values in zip(("fixed", "stock"), zip(*ratios)):
        summary[name] = (min(values), statistics.median(values), max(values))
        summary[f"{name}_off"] = sum(abs(value - 1) > 0.05 for value in values)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
