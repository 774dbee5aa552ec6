"""The OpenAI server of 0.19.1 with the shipped spec: eight clients at once, twice, on too few GPU blocks for them."""

from __future__ import annotations

import re

import models
import pytest
from scenarios import CROWD, CROWD_BLOCK_SIZE, Results
from server import Visit

pytestmark = pytest.mark.parametrize("release", ["0.19.1"])


def test_answers_are_right_under_load(serving: Visit, disabled: Results) -> None:
    alone = disabled["crowd"]["tokens"][0]
    assert len({tuple(answer) for answer in alone}) == len(CROWD)
    assert serving.answers == [alone, alone]


def test_it_preempted_and_loaded(serving: Visit) -> None:
    assert serving.metric("vllm:num_preemptions_total") > 0
    loaded = serving.metric("vllm:kv_offload_total_bytes_total", 'transfer_type="CPU_to_GPU"')
    assert loaded > 0
    assert loaded % models.bytes_per_block(models.RAGGED_KV_HEADS, CROWD_BLOCK_SIZE) == 0
    assert serving.metric("vllm:external_prefix_cache_hits_total") > 0


def test_it_chats(serving: Visit) -> None:
    assert re.fullmatch(r" ?w\d+( w\d+){2}", serving.chat)


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


def test_it_stops_and_leaves_nothing(serving: Visit) -> None:
    assert serving.exit_status == 0
    assert serving.processes >= 2
    assert serving.processes_left == []
    assert serving.shared_memory_left == set()
