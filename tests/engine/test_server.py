"""The OpenAI server of 0.19.1 with the shipped spec: eight clients at once, twice, on too few GPU blocks for them."""

from __future__ import annotations

import re

import models
from scenarios import CROWD, CROWD_BLOCK_SIZE, Results
from server import Visit


def test_answers_are_right_under_load(server_0_19_1: Visit, in_process_0_19_1: Results) -> None:
    alone = in_process_0_19_1["crowd"]["tokens"][0]
    assert len({tuple(answer) for answer in alone}) == len(CROWD)
    assert server_0_19_1.answers == [alone, alone]


def test_it_preempted_and_loaded(server_0_19_1: Visit) -> None:
    assert server_0_19_1.metric("vllm:num_preemptions_total") > 0
    loaded = server_0_19_1.metric("vllm:kv_offload_total_bytes_total", 'transfer_type="CPU_to_GPU"')
    assert loaded > 0
    assert loaded % models.bytes_per_block(models.RAGGED_KV_HEADS, CROWD_BLOCK_SIZE) == 0
    assert server_0_19_1.metric("vllm:external_prefix_cache_hits_total") > 0


def test_it_chats(server_0_19_1: Visit) -> None:
    assert re.fullmatch(r" ?w\d+( w\d+){2}", server_0_19_1.chat)


def test_every_process_finds_the_plugin_and_says_so_once(server_0_19_1: Visit) -> None:
    """By its entry point: the config names no module. One engine on one rank is two processes."""
    said = [line for line in server_0_19_1.log.splitlines() if "vllm-kvfix 0." in line]
    core = [line for line in said if line.startswith("(EngineCore")]
    front = [line for line in said if not line.startswith("(EngineCore")]
    for lines in (core, front):
        assert len(lines) == 1
        assert " INFO " in lines[0]
        assert "max-concurrency applied" in lines[0]
    assert "offload-pool-size applied (spec FixedCPUOffloadingSpec)" in core[0]


def test_it_stops_and_leaves_nothing(server_0_19_1: Visit) -> None:
    assert server_0_19_1.exit_status == 0
    assert server_0_19_1.processes >= 2
    assert server_0_19_1.processes_left == []
    assert server_0_19_1.shared_memory_left == set()
