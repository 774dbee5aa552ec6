"""Real engines on the CPU: what the stock formula does, and what the shipped spec does."""

from __future__ import annotations

from typing import Any

import models
import pytest
from scenarios import BLOCK_SIZE, BLOCKS, BUDGET, PROMPTS, Results

CHUNKS = {
    "ragged": BUDGET // models.bytes_per_block(models.RAGGED_KV_HEADS, BLOCK_SIZE),
    "plain": BUDGET // models.bytes_per_block(models.PLAIN_KV_HEADS, BLOCK_SIZE),
}
STORED = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)


def check_it_lives(run: dict[str, Any], without_connector: dict[str, Any], chunks: int, ranks: int = 1) -> None:
    assert run["error"] is None
    assert run["scheduler"] == {"chunks": chunks}
    assert [rank["chunks"] for rank in run["ranks"]] == [chunks] * ranks
    pool_bytes = sum(rank["pool_bytes"] for rank in run["ranks"])
    assert pool_bytes <= BUDGET < pool_bytes + pool_bytes / chunks  # less than one row is left over
    assert (run["stored"], run["loaded"]) == (STORED, STORED)
    full_blocks = [len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
    assert run["cached"] == [[0] * len(PROMPTS), full_blocks]
    assert run["tokens"] == without_connector["tokens"] * 2
    assert run["beginnings"] == without_connector["beginnings"]


def check_answers_show_what_is_loaded(zero_loads: dict[str, Any], without_connector: dict[str, Any]) -> None:
    assert zero_loads["error"] is None
    assert zero_loads["loaded"] == STORED
    right = without_connector["tokens"][0]
    stored_pass, loaded_pass = zero_loads["tokens"]
    assert stored_pass == right
    changed = sum(answer != wanted for answer, wanted in zip(loaded_pass, right, strict=True))
    assert changed > len(PROMPTS) / 2


def check_it_dies_as_stock_does(run: dict[str, Any]) -> None:
    """The scheduler hands out chunk ids up to 14, the worker has 0 to 5; the fourth prompt's store names 6 and 7."""
    assert run["gpu_blocks"] == BLOCKS
    assert run["scheduler"] == {"chunks": 15}
    assert run["ranks"][0]["chunks"] == 6
    assert run["error"] is not None and run["error"].startswith("AssertionError")
    assert "Exception in ('GPU', 'CPU') transfer 3: IndexError" in run["log"]
    assert "chunk ids [6, 7] are out of bounds for 6 chunks" in run["log"]
    assert "assert success" in run["log"]
    assert (run["stored"], run["loaded"]) == (6, 0)


def test_stock_0_19_1_dies_at_the_first_store_past_the_workers_pool(in_process_0_19_1: Results) -> None:
    check_it_dies_as_stock_does(in_process_0_19_1["stock formula"])


@pytest.mark.parametrize("model", ["ragged", "plain"])
def test_fixed_0_19_1_stores_and_loads(in_process_0_19_1: Results, model: str) -> None:
    runs = in_process_0_19_1
    check_it_lives(runs[f"{model}, fixed"], runs[f"{model}, no connector"], CHUNKS[model])


def test_fixed_0_19_1_with_four_blocks_a_chunk(in_process_0_19_1: Results) -> None:
    runs = in_process_0_19_1
    check_it_lives(runs["four blocks a chunk"], runs["ragged, no connector"], CHUNKS["ragged"])


@pytest.mark.parametrize("model", ["ragged", "plain"])
def test_answers_on_0_19_1_show_what_is_loaded(in_process_0_19_1: Results, model: str) -> None:
    runs = in_process_0_19_1
    check_answers_show_what_is_loaded(runs[f"{model}, zero loads"], runs[f"{model}, no connector"])


def test_both_fixes_are_applied_on_0_19_1(in_process_0_19_1: Results) -> None:
    process = in_process_0_19_1["process"]
    assert process["statuses"] == {"offload-pool-size": "applied", "max-concurrency": "applied"}
    assert "/vllm_kvfix/" in process["max_concurrency"]


@pytest.mark.parametrize("name", ["fixed", "stock name"])
def test_fixed_0_19_1_on_two_ranks(two_ranks_0_19_1: Results, in_process_0_19_1: Results, name: str) -> None:
    """4, 2, 1, 2 KV heads are 2, 1, 1, 1 on each of two ranks.

    Under KVFIX_STOCK_SPEC=1 the stock name gives the same: the stamp reaches the workers through the executor.
    """
    row = 2 * models.bytes_per_block((2, 1, 1, 1), BLOCK_SIZE)
    run = two_ranks_0_19_1[name]
    check_it_lives(run, in_process_0_19_1["ragged, no connector"], BUDGET // row, ranks=2)
    assert not [line for line in run["log"].splitlines() if line.startswith("(Worker") and "vllm-kvfix" in line]


def test_disabled_0_19_1_is_stock(disabled_0_19_1: Results) -> None:
    process = disabled_0_19_1["process"]
    assert process["specs"] == {"CPUOffloadingSpec": "vllm.v1.kv_offload.cpu.spec"}
    assert process["max_concurrency"].endswith("/vllm/v1/core/kv_cache_utils.py")
    assert set(process["statuses"].values()) == {"disabled"}
    refused = disabled_0_19_1["stock name"]
    assert refused["error"] == "Exception: CPU Offloading is currently only supported on CUDA-alike GPUs"
    check_it_dies_as_stock_does(disabled_0_19_1["stock formula"])
    said = [line for run in disabled_0_19_1.values() for line in run["log"].splitlines() if "vllm-kvfix 0." in line]
    assert said and not [line for line in said if "applied" in line]


@pytest.mark.parametrize("model", ["ragged", "plain"])
def test_fixed_0_32_0_stores_and_loads(in_process_0_32_0: Results, model: str) -> None:
    runs = in_process_0_32_0
    check_it_lives(runs[f"{model}, fixed"], runs[f"{model}, no connector"], CHUNKS[model])


def test_fixed_0_32_0_with_four_blocks_a_chunk(in_process_0_32_0: Results) -> None:
    runs = in_process_0_32_0
    check_it_lives(runs["four blocks a chunk"], runs["ragged, no connector"], CHUNKS["ragged"])


@pytest.mark.parametrize("model", ["ragged", "plain"])
def test_answers_on_0_32_0_show_what_is_loaded(in_process_0_32_0: Results, model: str) -> None:
    runs = in_process_0_32_0
    check_answers_show_what_is_loaded(runs[f"{model}, zero loads"], runs[f"{model}, no connector"])


def test_0_32_0_needs_no_fix(in_process_0_32_0: Results) -> None:
    process = in_process_0_32_0["process"]
    assert process["statuses"] == {"offload-pool-size": "not needed", "max-concurrency": "not needed"}
    assert process["max_concurrency"].endswith("/vllm/v1/core/kv_cache_utils.py")
    assert process["specs"]["CPUOffloadingSpec"] == "vllm.v1.kv_offload.cpu.spec"
    said = [line for run in in_process_0_32_0.values() for line in run["log"].splitlines() if "vllm-kvfix 0." in line]
    assert "offload-pool-size not needed" in said[-1] and "max-concurrency not needed" in said[-1]
