"""The reported concurrency against vLLM's own KV cache manager, filled with real requests until it refuses.

No formula: what a request takes is what the release's ``KVCacheManager`` gives it, prefix caching off.

Relation. Let ``n`` be the requests of ``max_model_len`` that the manager holds, ``c`` the reported
concurrency and ``N`` the blocks of the pool, so that ``N / c`` is the reported number of blocks a request.
The manager keeps one block of the pool for itself (block 0, the null block), hence ``N - 1`` can be given
away. A sliding window may begin inside a block, so vLLM's ``SlidingWindowSpec`` counts one block more than
its tokens fill; a request that is given all its tokens at once, from a block's first token on, does not
take that one. So a request really takes ``N / c - s`` blocks, ``s`` the number of sliding groups, and

    n == floor((N - 1) / (N / c - s))

exactly. Requests are given all their tokens at once: ``max_num_batched_tokens >= max_model_len`` makes that
what the scheduler does, and what the estimate is for.
"""

from __future__ import annotations

import inspect
import math
from fractions import Fraction
from typing import Any

import pytest
from facts import CONCURRENCY_IS_WRONG
from geometry import Layer, group, kv_cache_config, schedulers_form, vllm_config
from hypothesis import given, note, settings
from hypothesis import strategies as st
from test_concurrency import reported

MAX_MODEL_LEN = 256
KINDS = ("full", "sliding", "chunked", "mamba", "mla")


def requests_held(cache_config: Any) -> int:
    """Requests of ``MAX_MODEL_LEN`` tokens, all of them different, that a real manager allocates in full."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    block_sizes = {group.kv_cache_spec.block_size for group in cache_config.kv_cache_groups}
    manager = KVCacheManager(
        **given_what_it_takes(
            KVCacheManager,
            kv_cache_config=cache_config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=math.lcm(*block_sizes),
            hash_block_size=min(block_sizes),
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_in_flight_tokens=MAX_MODEL_LEN,
            enable_caching=False,
        )
    )
    held = 0
    while True:
        first_token = held * MAX_MODEL_LEN
        request = Request(
            **given_what_it_takes(
                Request,
                request_id=str(held),
                prompt_token_ids=list(range(first_token, first_token + MAX_MODEL_LEN)),
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                eos_token_id=None,
            )
        )
        if manager.allocate_slots(request, MAX_MODEL_LEN) is None:
            return held
        held += 1
        assert held <= cache_config.num_blocks, "the manager gives away more than it has"


def given_what_it_takes(cls: Any, **values: Any) -> dict[str, Any]:
    """``values`` without those that this release's constructor does not have."""
    return {name: value for name, value in values.items() if name in inspect.signature(cls).parameters}


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Any], int, int]:
    """Groups as a worker has them, how many of them slide, and the blocks of the pool."""
    block_size = draw(st.sampled_from([16, 32]))
    uniform = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    window = draw(st.sampled_from([8, 64, MAX_MODEL_LEN, 4 * MAX_MODEL_LEN]))
    groups = []
    for number, kind in enumerate(kinds):
        layers = [Layer(kind, 2, window)] * draw(st.integers(1, 8))
        one_state_a_request = MAX_MODEL_LEN if kind == "mamba" else block_size  # as vLLM sets it without caching
        groups.append(group(layers, f"group.{number}", one_state_a_request, uniform=uniform and kind != "mamba"))
    return groups, kinds.count("sliding"), draw(st.integers(1, 400))


@pytest.mark.parametrize("form", ["worker", "scheduler"])
def test_reported_concurrency_is_what_the_manager_holds(register: Any, form: str) -> None:
    register()

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(pools())
    def check(pool: tuple[list[Any], int, int]) -> None:
        groups, sliding, num_blocks = pool
        worker = kv_cache_config(groups, num_blocks)
        note(f"{worker}")
        config = vllm_config(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=MAX_MODEL_LEN)
        concurrency = reported(config, worker if form == "worker" else schedulers_form(worker))
        estimate = Fraction(num_blocks) / Fraction(concurrency).limit_denominator(10**6)
        held = requests_held(schedulers_form(worker))
        assert held == (num_blocks - 1) // (estimate - sliding)
        assert abs(held - concurrency) <= 1 + sliding * concurrency / (estimate - sliding)

    check()


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
@pytest.mark.parametrize(("layers", "stock"), [((8, 2), 8.0), ((2, 8), 2.0)])
def test_stock_contradicts_the_manager(layers: tuple[int, int], stock: float) -> None:
    """Two ``UniformTypeKVCacheSpecs`` groups of 8 and 2 layers: 5 requests fit, whatever stock says."""
    groups = [group([Layer()] * count, f"group.{count}", uniform=True) for count in layers]
    per_request = 2 * MAX_MODEL_LEN // 16
    worker = kv_cache_config(groups, 5 * per_request + 1)
    config = vllm_config(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=MAX_MODEL_LEN)
    assert requests_held(schedulers_form(worker)) == 5
    assert int(reported(config, worker)) == int(stock)


def test_repaired_agrees_with_the_manager_where_stock_does_not(register: Any) -> None:
    register()
    for layers in ((8, 2), (2, 8)):
        groups = [group([Layer()] * count, f"group.{count}", uniform=True) for count in layers]
        worker = kv_cache_config(groups, 5 * 2 * MAX_MODEL_LEN // 16 + 1)
        config = vllm_config(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=MAX_MODEL_LEN)
        assert int(reported(config, worker)) == requests_held(schedulers_form(worker)) == 5
