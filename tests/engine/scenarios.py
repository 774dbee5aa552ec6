"""The engine runs that the tests look at: each takes a release, a folder of its own and two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import models
import server

Results = dict[str, dict[str, Any]]

BUDGET = 8_000_000
FIXED = {"spec_name": "FixedCPUOffloadingSpec", "cpu_bytes_to_use": BUDGET}
ZERO_LOADS = FIXED | {"spec_name": "ZeroLoadsSpec", "spec_module_path": "hostspecs"}
STOCK_FORMULA = FIXED | {"spec_name": "StockFormulaSpec", "spec_module_path": "hostspecs"}
STOCK_NAME = FIXED | {"spec_name": "CPUOffloadingSpec"}

# 300 tokens are two full blocks of 128, vLLM's block size on CPU: 24 chunks in all, which a pool of BUDGET holds.
PROMPTS = models.make_prompts(12, 300)
BLOCK_SIZE, BLOCKS = 128, 64
MODEL_LENGTH = 512

# An answer does not depend on the order of the blocks before it: the keys carry their positions. A beginning that has
# only the first of the blocks that were loaded together, or of those in one chunk, does not forgive a mix-up.
BEGINNINGS = (BLOCK_SIZE + 12, BLOCK_SIZE - 28)

# 8 requests of 13 blocks each want more than the 60 that there are: some are preempted.
CROWD = models.make_prompts(8, 300)
CROWD_BLOCK_SIZE, CROWD_BLOCKS, CROWD_TOKENS = 32, 60, 100


def asking(model: Path, name: str, connector: dict[str, Any] | None, passes: int = 1, **engine: Any) -> dict[str, Any]:
    """A run of run_engine.py with PROMPTS."""
    return {
        "name": name,
        "model": str(model),
        "connector": connector,
        "prompts": PROMPTS,
        "passes": passes,
        "beginnings": BEGINNINGS,
        "engine": {"max_model_len": MODEL_LENGTH, "num_gpu_blocks_override": BLOCKS} | engine,
    }


def three_runs(name: str, model: Path) -> list[dict[str, Any]]:
    """What the answers are, whether the spec keeps them, and whether they would change if it did not."""
    return [
        asking(model, f"{name}, no connector", None),
        asking(model, f"{name}, fixed", FIXED, passes=2),
        asking(model, f"{name}, zero loads", ZERO_LOADS, passes=2),
    ]


def four_blocks_a_chunk(model: Path) -> dict[str, Any]:
    engine = {"block_size": BLOCK_SIZE // 4, "num_gpu_blocks_override": 4 * BLOCKS}
    return asking(model, "four blocks a chunk", FIXED | {"block_size": BLOCK_SIZE}, passes=2, **engine)


def in_process(release: str, folder: Path, plain: Path, ragged: Path) -> Results:
    runs = [
        *three_runs("ragged", ragged),
        *three_runs("plain", plain),
        four_blocks_a_chunk(ragged),
        # Last: an engine that died may leave something behind.
        asking(ragged, "stock formula", STOCK_FORMULA, passes=2),
    ]
    return engines.run(release, runs, folder)


def two_ranks(release: str, folder: Path, plain: Path, ragged: Path) -> Results:
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    runs = [
        asking(ragged, "fixed", FIXED, passes=2, **parallel),
        asking(ragged, "stock name", STOCK_NAME, passes=2, **parallel),
    ]
    return engines.run(release, runs, folder, KVFIX_STOCK_SPEC="1")


def stages(release: str, folder: Path, plain: Path, ragged: Path) -> Results:
    """One layer on the first rank and three on the second."""
    parallel = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    runs = [
        asking(plain, "fixed", FIXED, passes=2, **parallel),
        # Last: an engine that died may leave something behind.
        asking(plain, "stock formula", STOCK_FORMULA, passes=2, **parallel),
    ]
    return engines.run(release, runs, folder, VLLM_PP_LAYER_PARTITION="1,3")


def disabled(release: str, folder: Path, plain: Path, ragged: Path) -> Results:
    """vLLM as it is: also what the server's answers are compared with."""
    crowd = {
        "name": "crowd",
        "model": str(ragged),
        "prompts": CROWD,
        "max_tokens": CROWD_TOKENS,
        "together": True,
        "engine": {"max_model_len": MODEL_LENGTH, "block_size": CROWD_BLOCK_SIZE},
    }
    runs = [
        crowd,
        asking(ragged, "stock name", STOCK_NAME),
        asking(ragged, "stock formula", STOCK_FORMULA),
    ]
    return engines.run(release, runs, folder, KVFIX_DISABLE="all")


def serving(release: str, folder: Path, plain: Path, ragged: Path) -> server.Visit:
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    arguments = (
        f"--dtype float32 --enforce-eager --max-model-len {MODEL_LENGTH} --seed 0 --trust-remote-code "
        f"--block-size {CROWD_BLOCK_SIZE} --num-gpu-blocks-override {CROWD_BLOCKS} --kv-transfer-config"
    ).split()
    arguments.append(json.dumps(transfer | {"kv_connector_extra_config": FIXED | {"cpu_bytes_to_use": 5 * BUDGET}}))
    return server.visit(release, ragged, arguments, folder, CROWD, CROWD_TOKENS, rounds=2)


LONGEST_FIRST = {run.__name__: run for run in (serving, two_ranks, stages, in_process, disabled)}
