"""What is asked of real engines on the CPU, with every release that starts one."""

from __future__ import annotations

import re
from typing import Any

import models
import pytest
from engines import RELEASES
from expected import CONCURRENCY_IS_WRONG, POOL_SIZE_IS_WRONG, SIMPLE_OFFLOAD_IS_ABSENT, check_it_dies_as_stock_does
from scenarios import BLOCK_SIZE, BLOCKS, BUDGET, MODEL_LENGTH, PROMPTS, Results

TWO_RANK_RELEASES = ("0.19.1", "0.24.0", "0.32.0")  # one for each torch

# Later ones need more than an engine on the CPU has: its second stage has no buffer without torch.compile.
STAGED_RELEASES = ("0.19.1", "0.24.0")

CHUNKS = {
    "ragged": BUDGET // models.bytes_per_block(models.RAGGED_KV_HEADS, BLOCK_SIZE),
    "plain": BUDGET // models.bytes_per_block(models.PLAIN_KV_HEADS, BLOCK_SIZE),
}
STORED = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)

on_every_release = pytest.mark.parametrize("release", RELEASES)


def check_it_lives(run: dict[str, Any], without_connector: dict[str, Any]) -> None:
    assert run["error"] is None
    assert (run["stored"], run["loaded"]) == (STORED, STORED)
    full_blocks = [len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
    assert run["cached"] == [[0] * len(PROMPTS), full_blocks]
    assert run["tokens"] == without_connector["tokens"] * 2
    assert run["beginnings"] == without_connector["beginnings"]


def check_pool(run: dict[str, Any], chunks: int, ranks: int = 1) -> None:
    assert run["scheduler"] == {"chunks": chunks}
    assert [rank["chunks"] for rank in run["ranks"]] == [chunks] * ranks
    pool_bytes = sum(rank["pool_bytes"] for rank in run["ranks"])
    assert pool_bytes <= BUDGET < pool_bytes + pool_bytes / chunks  # less than one row is left over


@on_every_release
@pytest.mark.parametrize("model", ["ragged", "plain"])
def test_fixed_spec_stores_and_loads(in_process: Results, model: str) -> None:
    run = in_process[f"{model}, fixed"]
    check_it_lives(run, in_process[f"{model}, no connector"])
    check_pool(run, CHUNKS[model])


@on_every_release
def test_fixed_spec_with_four_blocks_a_chunk(in_process: Results) -> None:
    run = in_process["four blocks a chunk"]
    check_it_lives(run, in_process["ragged, no connector"])
    check_pool(run, CHUNKS["ragged"])


@on_every_release
@pytest.mark.parametrize("model", ["ragged", "plain"])
def test_answers_show_what_is_loaded(in_process: Results, model: str) -> None:
    zero_loads, without_connector = in_process[f"{model}, zero loads"], in_process[f"{model}, no connector"]
    assert zero_loads["error"] is None
    assert zero_loads["loaded"] == STORED
    right = without_connector["tokens"][0]
    stored_pass, loaded_pass = zero_loads["tokens"]
    assert stored_pass == right
    changed = sum(answer != wanted for answer, wanted in zip(loaded_pass, right, strict=True))
    assert changed > len(PROMPTS) / 2


@pytest.mark.parametrize("release", POOL_SIZE_IS_WRONG)
def test_stock_formula_dies_at_the_first_store_past_the_workers_pool(in_process: Results) -> None:
    check_it_dies_as_stock_does(in_process["stock formula"])


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in POOL_SIZE_IS_WRONG])
def test_stock_formula_lives(in_process: Results) -> None:
    run = in_process["stock formula"]
    check_it_lives(run, in_process["ragged, no connector"])
    check_pool(run, CHUNKS["ragged"])


@on_every_release
def test_plugin_says_what_it_did(in_process: Results, release: str) -> None:
    process = in_process["process"]
    assert process["vllm"].split("+")[0] == release
    words = {
        "offload-pool-size": "applied" if release in POOL_SIZE_IS_WRONG else "not needed",
        "simple-offload-ranks": "not applicable" if release in SIMPLE_OFFLOAD_IS_ABSENT else "waiting",
        "max-concurrency": "applied" if release in CONCURRENCY_IS_WRONG else "not needed",
    }
    assert process["statuses"] == words
    said = [line for run in in_process.values() for line in run["log"].splitlines() if "] vllm-kvfix 0." in line]
    assert all(f"{fix} {word}" in said[-1] for fix, word in words.items())
    assert process["specs"]["FixedCPUOffloadingSpec"] == "vllm_kvfix.spec"
    assert process["specs"]["CPUOffloadingSpec"].startswith("vllm.v1.kv_offload.cpu")


@on_every_release
def test_reported_concurrency_is_right(in_process: Results, release: str) -> None:
    """One KV cache group: no release gets this wrong, and where the function is ours it must not either."""
    file = in_process["process"]["max_concurrency"]
    assert ("/vllm_kvfix/" in file) == (release in CONCURRENCY_IS_WRONG)
    logs = "".join(run["log"] for run in in_process.values())
    fit = BLOCKS / (MODEL_LENGTH / BLOCK_SIZE)  # in every run, and vLLM says the same once
    assert set(re.findall("Maximum concurrency for .*", logs)) == {
        f"Maximum concurrency for {MODEL_LENGTH} tokens per request: {fit:.2f}x"
    }


@pytest.mark.parametrize("release", TWO_RANK_RELEASES)
@pytest.mark.parametrize("name", ["fixed", "stock name"])
def test_fixed_spec_on_two_ranks(two_ranks: Results, in_process: Results, name: str) -> None:
    """4, 2, 1, 2 KV heads are 2, 1, 1, 1 on each of two ranks.

    Under KVFIX_STOCK_SPEC=1 the stock name gives the same: the stamp reaches the workers through the executor.
    """
    run = two_ranks[name]
    check_it_lives(run, in_process["ragged, no connector"])
    check_pool(run, BUDGET // (2 * models.bytes_per_block((2, 1, 1, 1), BLOCK_SIZE)), ranks=2)
    assert not re.findall(r"^\(Worker.*vllm-kvfix[: ].*", run["log"], re.MULTILINE)


@pytest.mark.parametrize("release", STAGED_RELEASES)
def test_fixed_spec_on_stages_of_one_and_three_layers(stages: Results, in_process: Results) -> None:
    run = stages["fixed"]
    check_it_lives(run, in_process["plain, no connector"])
    check_pool(run, CHUNKS["plain"], ranks=2)
    first, second = (rank["pool_bytes"] for rank in run["ranks"])
    assert second == 3 * first


@pytest.mark.parametrize("release", STAGED_RELEASES)
def test_stock_formula_dies_on_stages_of_one_and_three_layers(stages: Results) -> None:
    """Rank 0 keeps a quarter of the bytes, and the scheduler counts by it."""
    run = stages["stock formula"]
    layer = models.bytes_per_block(models.PLAIN_KV_HEADS, BLOCK_SIZE) // 4
    scheduler, fewest = (BUDGET // (2 * layers * layer) for layers in (1, 3))
    assert run["scheduler"] == {"chunks": scheduler}
    assert [rank["chunks"] for rank in run["ranks"]] == [scheduler, fewest]
    assert fewest < STORED
    assert run["error"] is not None
    assert f"are out of bounds for {fewest} chunks" in run["log"]
    assert run["stored"] <= fewest
