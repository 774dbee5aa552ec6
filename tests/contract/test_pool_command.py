"""``vllm-kvfix pool --release`` says what the stock spec of that release really counts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import vllm
from facts import POOL_SIZE_IS_GIVEN, ROW_ALIGNMENT, SHARED_REGION
from geometry import UNIT, chunks
from test_pool_size import FIXED
from test_ranks import NARROW, STAGES, WIDE, Engine, Stage

BUDGET = 50_000_000
MODELS: dict[str, list[Stage]] = STAGES | {
    "layers alike, one stage": [[WIDE] * 3],
    "layers that differ, one stage": [[WIDE] * 5 + [NARROW] * 2],
    "layers that differ, a narrow one first": [[NARROW] + [WIDE] * 3, [WIDE] * 2],
    "layers that differ, on the last stage only": [[WIDE] * 2, [WIDE, NARROW]],
}


def count(*arguments: str) -> dict[str, Any]:
    from vllm_kvfix import _pool_command

    parser = argparse.ArgumentParser()
    _pool_command.add_arguments(parser)
    given = ["--release", vllm.__version__, *arguments]
    return _pool_command.answer(_pool_command._question(parser.parse_args(given)))


def layers(stages: list[Stage]) -> str:
    return "/".join(",".join(str(layer.width * UNIT) for layer in stage) for stage in stages)


@pytest.mark.only_if(POOL_SIZE_IS_GIVEN)
def test_there_is_nothing_to_count() -> None:
    assert count("--layers", layers([[WIDE]]), "--budget", str(BUDGET))["stock"] is None


@pytest.mark.one_process
@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
@pytest.mark.parametrize(("tensor_parallel_size", "blocks_per_chunk"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("stages", MODELS.values(), ids=MODELS)
def test_what_stock_counts(stages: list[Stage], tensor_parallel_size: int, blocks_per_chunk: int) -> None:
    engine = Engine(stages, BUDGET, tensor_parallel_size, blocks_per_chunk)
    scheduler, workers = engine.scheduler(), engine.workers()
    more = ["--ranks", str(tensor_parallel_size), "--blocks-per-chunk", str(blocks_per_chunk)]
    result = count("--layers", layers(stages), "--budget", str(BUDGET), *more)
    assert [rank["bytes_per_block"] for rank in result["ranks"]] == engine.rank_bytes
    assert result["row_alignment"] == ROW_ALIGNMENT
    stock = result["stock"]
    assert (stock["scheduler"], stock["ranks"]) == (chunks(scheduler), [chunks(worker) for worker in workers])
    assert stock["out_of_bounds"] == any(chunks(worker) < chunks(scheduler) for worker in workers)
    assert stock["shared_region"] == SHARED_REGION == hasattr(scheduler, "_uses_shared_region")
    if len({layer for stage in stages for layer in stage}) == 1:  # then the sums say as much
        sizes = ",".join(map(str, engine.rank_bytes))
        sums = count("--bytes-per-block", sizes, "--budget", str(BUDGET), *more[2:])["stock"]
        assert (sums["scheduler"], sums["ranks"]) == (stock["scheduler"], stock["ranks"])


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
@pytest.mark.parametrize("model", ["1 + 3 layers", "layers that differ, one stage"])
def test_the_log_of_a_server_is_counted_as_the_server_counted(
    register: Any, log: Any, tmp_path: Path, model: str
) -> None:
    register()
    engine = Engine(MODELS[model], BUDGET, 2, 3, spec_name=FIXED)
    scheduler = engine.scheduler()
    path = tmp_path / "log"
    path.write_text("\n".join(log.ours()))
    result = count("--from-log", str(path))
    assert [rank["bytes_per_block"] for rank in result["ranks"]] == engine.rank_bytes
    assert result["chunks"] == result["logged_chunks"] == chunks(scheduler)
    assert f"up to {result['tokens']:,} tokens" in path.read_text()
