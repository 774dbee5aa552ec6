"""The OpenAI server with the shipped spec: eight clients at once, twice, on too few GPU blocks for them."""

from __future__ import annotations

import re

import models
import pytest
from scenarios import BUDGET, CROWD, CROWD_BLOCK_SIZE, Results
from server import Visit

import vllm_kvfix

on_0_19_1 = pytest.mark.parametrize("release", ["0.19.1"])
on_both = pytest.mark.parametrize("release", ["0.19.1", "0.32.0"])


@on_0_19_1
def test_answers_are_right_under_load(serving: Visit, disabled: Results) -> None:
    alone = disabled["crowd"]["tokens"][0]
    assert len({tuple(answer) for answer in alone}) == len(CROWD)
    assert serving.answers == [alone, alone]


@on_0_19_1
def test_it_preempted_and_loaded(serving: Visit) -> None:
    assert serving.metric("vllm:num_preemptions_total") > 0
    loaded = serving.metric("vllm:kv_offload_total_bytes_total", 'transfer_type="CPU_to_GPU"')
    assert loaded > 0
    assert loaded % models.bytes_per_block(models.RAGGED_KV_HEADS, CROWD_BLOCK_SIZE) == 0
    assert serving.metric("vllm:external_prefix_cache_hits_total") > 0


@on_0_19_1
def test_it_chats(serving: Visit) -> None:
    assert re.fullmatch(r" ?w\d+( w\d+){2}", serving.chat)


@on_0_19_1
def test_every_process_finds_the_plugin_and_says_so_once(serving: Visit) -> None:
    """By its entry point: the config names no module. One engine on one rank is two processes."""
    said = [line for line in serving.log.splitlines() if "vllm-kvfix 0." in line]
    core = [line for line in said if line.startswith("(EngineCore")]
    front = [line for line in said if not line.startswith("(EngineCore")]
    for lines in (core, front):
        assert len(lines) == 1
        assert " INFO " in lines[0]
        assert "max-concurrency applied" in lines[0]
    assert "offload-pool-size applied (spec FixedCPUOffloadingSpec)" in core[0]


@on_both
def test_metrics_say_what_became_of_the_fixes_and_how_large_the_pool_is(serving: Visit, release: str) -> None:
    """As EngineCore said it: in the API server `offload-pool-size` waits."""
    applied = "applied" if release == "0.19.1" else "not needed"
    words = {"offload-pool-size": applied, "max-concurrency": applied, "simple-offload-ranks": "waiting"}
    budget = 5 * BUDGET
    row = models.bytes_per_block(models.RAGGED_KV_HEADS, CROWD_BLOCK_SIZE)
    row = -(-row // 4096) * 4096 if release == "0.32.0" else row
    pool = {"chunks": budget // row, "bytes": budget // row * row, "budget_bytes": budget, "ranks": 1}
    assert {key: value for key, value in serving.metrics.items() if key.startswith("vllm_kvfix")} == {
        f'vllm_kvfix_info{{fix="{fix}",status="{word}",version="{vllm_kvfix.__version__}",vllm="{release}"}}': 1
        for fix, word in words.items()
    } | {f'vllm_kvfix_pool_{name}{{engine="0"}}': value for name, value in pool.items()}
    assert f"CPU pool of {pool['chunks']:,} chunks, 1 rank(s)" in serving.log
    assert len(serving.files) == 1 and serving.files[0].startswith("vllm-kvfix-")


@on_both
def test_it_stops_and_leaves_nothing(serving: Visit) -> None:
    assert serving.exit_status == 0
    assert serving.processes >= 2
    assert serving.processes_left == []
    assert serving.shared_memory_left == set()
    assert serving.files_left == []
