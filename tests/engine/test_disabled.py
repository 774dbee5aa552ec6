"""KVFIX_DISABLE=all on a release that both fixes change: vLLM as if the plugin were not there."""

from __future__ import annotations

import pytest
from expected import check_it_dies_as_stock_does
from scenarios import Results


@pytest.mark.parametrize("release", ["0.19.1"])
def test_disabled_is_stock(disabled: Results) -> None:
    process = disabled["process"]
    assert process["specs"] == {"CPUOffloadingSpec": "vllm.v1.kv_offload.cpu.spec"}
    assert process["max_concurrency"].endswith("/vllm/v1/core/kv_cache_utils.py")
    assert set(process["statuses"].values()) == {"disabled"}
    refused = disabled["stock name"]
    assert refused["error"] == "Exception: CPU Offloading is currently only supported on CUDA-alike GPUs"
    check_it_dies_as_stock_does(disabled["stock formula"])
    said = [line for run in disabled.values() for line in run["log"].splitlines() if "vllm-kvfix 0." in line]
    assert said and not [line for line in said if "applied" in line]
