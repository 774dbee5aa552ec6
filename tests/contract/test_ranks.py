"""Ranks that keep different KV bytes: pipeline stages of different layers, a draft model on the last one.

Stock sizes the scheduler's pool from rank 0's bytes and each rank's from its own. All must count one pool.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from facts import POOL_SIZE_IS_GIVEN, POOL_SIZE_IS_WRONG
from geometry import (
    Layer,
    allocated_bytes,
    chunks,
    chunks_managed,
    create_spec,
    has_field,
    kv,
    plan_ranks,
    schedulers_form,
    vllm_config,
)
from test_pool_size import FIXED

pytestmark = pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
WARNING = 30

Stage = list[Layer]
WIDE, NARROW = Layer(width=4), Layer(width=1)
STAGES: dict[str, list[Stage]] = {
    "1 + 3 layers": [[WIDE], [WIDE] * 3],
    "3 + 1 layers": [[WIDE] * 3, [WIDE]],
    "19/20/20/19 layers, a second kind on some": [
        [WIDE] * 19,
        [WIDE] * 16 + [NARROW] * 4,
        [WIDE] * 20,
        [WIDE] * 10 + [NARROW] * 9,
    ],
    "a draft model on the last of four": [[WIDE] * 2] * 3 + [[WIDE] * 2 + [NARROW]],
    "eight": [[WIDE] * count for count in (1, 1, 2, 3, 5, 8, 13, 21)],
}


def ranks_of(stages: list[Stage], tensor_parallel_size: int = 1) -> list[dict[str, Layer]]:
    """The layers of each rank, in the order of ranks: those of a stage are side by side."""
    numbers = iter(range(1000))
    layers = [{f"layer.{next(numbers)}": layer for layer in stage} for stage in stages]
    return list(chain.from_iterable([stage] * tensor_parallel_size for stage in layers))


class Engine:
    """The specs of a scheduler and of every rank, each made in a process's place from what travels to it."""

    def __init__(
        self, stages: list[Stage], budget: int, tensor_parallel_size: int = 1, blocks_per_chunk: int = 1, **extra: Any
    ) -> None:
        ranks = ranks_of(stages, tensor_parallel_size)
        extra |= {"cpu_bytes_to_use": budget, "block_size": 16 * blocks_per_chunk}
        self.config = vllm_config(extra, world_size=len(ranks))
        self.config.parallel_config.tensor_parallel_size = tensor_parallel_size
        self.config.parallel_config.pipeline_parallel_size = len(stages)
        self.plans = plan_ranks(self.config, ranks, num_blocks=100)
        self.factor = blocks_per_chunk

    @property
    def rank_bytes(self) -> list[int]:
        """What each rank allocates on its GPU for one block."""
        return [allocated_bytes(plan) // plan.num_blocks for plan in self.plans]

    def spec(self, plan: Any, rank: int) -> Any:
        config = copy.deepcopy(self.config)
        config.parallel_config.rank = rank
        return create_spec(config, pickle.loads(pickle.dumps(plan)))

    def scheduler(self) -> Any:
        return self.spec(schedulers_form(self.plans[0]), 0)

    def workers(self) -> list[Any]:
        return [self.spec(plan, rank) for rank, plan in enumerate(self.plans)]


def check_one_pool(engine: Engine, budget: int) -> None:
    """The invariants of the pool."""
    scheduler, workers = engine.scheduler(), engine.workers()
    slots = [size * engine.factor for size in engine.rank_bytes]
    alignment = getattr(scheduler, "BLOCK_SIZE_ALIGNMENT", 1)
    row = -(-sum(slots) // alignment) * alignment
    count = chunks(scheduler)
    assert [chunks(worker) for worker in workers] == [count] * len(workers)
    assert count * row <= budget < (count + 1) * row
    for spec, slot in zip([scheduler, *workers], [slots[0], *slots], strict=True):
        for name in ("kv_bytes_per_chunk", "kv_bytes_per_offloaded_block"):
            assert getattr(spec, name, row) == row, "one row stride on all ranks"
        assert getattr(spec, "cpu_page_size_per_worker", slot) == slot
        if hasattr(spec, "cpu_info"):
            assert spec.cpu_info.cpu_num_chunks == count
            assert spec.cpu_info.cpu_kv_cache_size_bytes == count * row


@pytest.mark.one_process
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_stock_counts_another_pool_on_each_stage(stages: list[Stage]) -> None:
    engine = Engine(stages, budget=50_000_000)
    counted = {chunks(spec) for spec in [engine.scheduler(), *engine.workers()]}
    assert len(counted) > 1


@pytest.mark.one_process
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_every_rank_and_the_scheduler_count_one_pool(
    register: Any, log: Any, stages: list[Stage], tensor_parallel_size: int
) -> None:
    register()
    budget = 50_000_000
    check_one_pool(Engine(stages, budget, tensor_parallel_size, spec_name=FIXED), budget)
    assert log.ours(WARNING) == []


def test_enginecore_says_what_all_ranks_keep_and_what_stock_would_do(register: Any, log: Any) -> None:
    register()
    Engine(STAGES["1 + 3 layers"], 50_000_000, spec_name=FIXED).scheduler()
    (line,) = [line for line in log.ours(20) if "CPU pool of" in line]
    assert "1 rank(s) x 2.00 KiB + 1 rank(s) x 6.00 KiB each" in line
    assert " chunks and the ranks " in line


def test_any_stages_and_budgets(register: Any) -> None:
    register()
    draw = random.Random(50821)
    for _ in range(60):
        stages = [
            [draw.choice((WIDE, NARROW)) for _ in range(draw.randint(1, 6))] for _ in range(draw.choice((2, 3, 4, 8)))
        ]
        budget, ranks, factor = draw.randint(3_000_000, 90_000_000), draw.choice((1, 1, 2)), draw.choice((1, 1, 2, 5))
        try:
            check_one_pool(Engine(stages, budget, ranks, factor, spec_name=FIXED), budget)
        except BaseException as failure:
            failure.add_note(f"replay: Engine({stages}, {budget}, {ranks}, {factor}, spec_name=FIXED)")
            raise


def test_the_manager_hands_out_what_every_rank_has(register: Any) -> None:
    register()
    engine = Engine(STAGES["1 + 3 layers"], 2_000_000, spec_name=FIXED)
    assert {chunks_managed(engine.scheduler())} == {chunks(worker) for worker in engine.workers()}


def test_ranks_that_are_alike_have_the_numbers_of_one_that_is_alone_with_its_copy(register: Any) -> None:
    """Nothing is repaired where stock is right: from 0.20.0 these are stock's own numbers."""
    register()
    stages = [[WIDE, WIDE], [WIDE, WIDE]]
    fixed, stock = (Engine(stages, 9_000_000, spec_name=name) for name in (FIXED, "CPUOffloadingSpec"))
    counted = [chunks(spec) for spec in [fixed.scheduler(), *fixed.workers()]]
    assert counted == [chunks(spec) for spec in [stock.scheduler(), *stock.workers()]]


@pytest.mark.only_if(POOL_SIZE_IS_WRONG)
def test_by_the_stock_name_too(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    register()
    check_one_pool(Engine(STAGES["1 + 3 layers"], 50_000_000), 50_000_000)


@pytest.mark.parametrize("alike", [True, False])
def test_stock_whose_ranks_differ_gets_one_warning_with_the_remedy(register: Any, log: Any, alike: bool) -> None:
    register()
    engine = Engine([[WIDE], [WIDE]] if alike else STAGES["1 + 3 layers"], 50_000_000)
    assert {type(spec).__name__ for spec in engine.workers()} == {"CPUOffloadingSpec"}
    warnings = [line for line in log.ours(WARNING) if "50821" in line]
    assert len(warnings) == (0 if alike else 1)
    for words in () if alike else ("2048 to 6144 KV bytes", '"spec_name": "FixedCPUOffloadingSpec"'):
        assert words in warnings[0]


def test_enginecore_says_what_each_node_takes_where_they_differ(register: Any, log: Any) -> None:
    register()
    engine = Engine(STAGES["1 + 3 layers"], 50_000_000, spec_name=FIXED)
    assert not [line for line in log.ours(20) if "nodes" in line]
    engine.config.parallel_config.nnodes_within_dp = 2
    plan_ranks(engine.config, ranks_of(STAGES["1 + 3 layers"], tensor_parallel_size=2), num_blocks=100)
    (line,) = [line for line in log.ours(20) if "nodes" in line]
    assert "the 2 nodes take 25 %, 75 % of the CPU pool, in their order" in line


# ---- what EngineCore says, and who does not hear it ----


def test_what_is_said_survives_the_ways_to_the_workers(register: Any) -> None:
    cloudpickle = importlib.import_module("cloudpickle")  # Ray's way
    register()
    _ranks = importlib.import_module("vllm_kvfix._ranks")
    engine = Engine(STAGES["1 + 3 layers"], 50_000_000)
    said = [_ranks.of(plan) for plan in engine.plans]
    assert [(one.bytes, one.rank) for one in said] == [(tuple(engine.rank_bytes), 0), (tuple(engine.rank_bytes), 1)]
    for way in (
        copy.deepcopy,
        lambda plan: pickle.loads(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)),
        lambda plan: cloudpickle.loads(cloudpickle.dumps(plan)),
    ):
        assert [_ranks.of(way(plan)) for plan in engine.plans] == said
    assert _ranks.of(schedulers_form(engine.plans[0])) == said[0]


def test_a_process_without_the_plugin_can_read_what_it_is_sent(register: Any) -> None:
    register()
    sent = pickle.dumps(Engine(STAGES["1 + 3 layers"], 50_000_000).plans)
    assert b"kvfix_rank_bytes" in sent and b"vllm_kvfix" not in sent


@pytest.mark.parametrize("wrong", ["rank", "count"])
def test_a_rank_that_keeps_something_else_refuses(register: Any, wrong: str) -> None:
    register()
    engine = Engine(STAGES["1 + 3 layers"], 50_000_000, spec_name=FIXED)
    if wrong == "rank":
        engine.plans[1].kvfix_rank = 0
    else:
        engine.plans[1].kvfix_rank_bytes += (512,)
    with pytest.raises(RuntimeError, match=r"rank [01] of 2 keeps .* EngineCore planned 2048, 6144"):
        engine.workers()


# ---- EngineCore and its workers are processes of their own, with environments of their own ----


@pytest.mark.parametrize("stages", [[[WIDE], [WIDE]], STAGES["1 + 3 layers"]], ids=["alike", "1 + 3 layers"])
@pytest.mark.parametrize("in_engine_core", [True, False])
@pytest.mark.parametrize("in_worker", [True, False])
def test_a_worker_goes_with_enginecore_or_does_not_start(
    enter: Any, stages: list[Stage], in_engine_core: bool, in_worker: bool
) -> None:
    """Ranks that differ: a fixed scheduler over a stock worker would hand out chunks that the worker does not have."""
    enter("vllm.v1.engine.core", in_engine_core)
    engine = Engine(stages, 50_000_000)
    scheduler = chunks(engine.scheduler())
    enter("vllm.v1.worker.worker_base", in_worker)
    agree = in_engine_core == in_worker
    if agree or (len(set(engine.rank_bytes)) == 1 and not POOL_SIZE_IS_WRONG):
        counted = [chunks(worker) for worker in engine.workers()]
        assert counted == [scheduler] * 2 or not in_worker
    else:
        with pytest.raises(RuntimeError, match="KVFIX_STOCK_SPEC=1"):
            engine.workers()


def forget(engine: Engine) -> Engine:
    for plan in engine.plans:
        del plan.kvfix_rank_bytes, plan.kvfix_rank
    return engine


def test_stages_of_which_nothing_is_known_get_a_warning(register: Any, log: Any) -> None:
    register()
    forget(Engine(STAGES["1 + 3 layers"], 50_000_000, spec_name=FIXED)).scheduler()
    (warning,) = log.ours(WARNING)
    assert "2 pipeline stages" in warning and "50821" in warning


def test_ranks_of_one_stage_of_which_nothing_is_known_are_taken_to_be_alike(register: Any, log: Any) -> None:
    register()
    engine = forget(Engine([[WIDE] * 3], 50_000_000, tensor_parallel_size=2, spec_name=FIXED))
    assert len({chunks(spec) for spec in [engine.scheduler(), *engine.workers()]}) == 1
    assert log.ours(WARNING) == []
    assert [line for line in log.ours() if "taking all 2 ranks" in line]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_scheduler_on_each_stage_is_refused(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    """As under distributed_executor_backend="external_launcher": each EngineCore plans for its own rank only."""
    if not by_name:
        monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    register()
    engine = Engine(STAGES["1 + 3 layers"], 50_000_000, **({"spec_name": FIXED} if by_name else {}))
    for plan in engine.plans:
        plan.kvfix_rank_bytes, plan.kvfix_rank = (plan.kvfix_rank_bytes[plan.kvfix_rank],), 0
    if by_name:
        with pytest.raises(ValueError, match=r"external_launcher.*--pipeline-parallel-size 1"):
            engine.scheduler()
    else:
        engine.scheduler()
        assert "external_launcher" in log.ours(WARNING)[0]


@pytest.mark.only_if(has_field(kv.KVCacheConfig, "hisparse_host_num_blocks"))
def test_nothing_is_said_where_vllm_counts_otherwise() -> None:
    _ranks = importlib.import_module("vllm_kvfix._ranks")
    plan = Engine(STAGES["1 + 3 layers"], 50_000_000).plans[0]
    plan.hisparse_host_num_blocks = 10
    _ranks._tell_each(None, [plan])
    assert _ranks.of(plan) is None


def test_switched_off_it_says_nothing(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_DISABLE", "all")
    register()
    engine = Engine(STAGES["1 + 3 layers"], 50_000_000)
    assert not any(hasattr(plan, "kvfix_rank_bytes") for plan in engine.plans)


def test_the_fix_that_is_switched_off_is_not_advised(register: Any, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_DISABLE", "offload-pool-size")
    register()
    Engine(STAGES["1 + 3 layers"], 50_000_000).workers()
    assert log.ours(WARNING) == []


def test_an_offloading_config_that_takes_no_attribute_is_said_and_used_all_the_same(register: Any, log: Any) -> None:
    register()
    _ranks = importlib.import_module("vllm_kvfix._ranks")
    plan = Engine(STAGES["1 + 3 layers"], 50_000_000, spec_name=FIXED).plans[0]
    assert _ranks._carrying(lambda *_: 7)(None, plan) == 7
    (warning,) = log.ours(WARNING)
    assert "the spec cannot be told" in warning and "AttributeError" in warning


def test_what_cannot_be_stamped_is_said_and_planned_all_the_same(register: Any, log: Any) -> None:
    register()
    stamp = importlib.import_module("vllm_kvfix._stamp")
    plan = stamp._stamping(lambda config: [SimpleNamespace()])
    assert len(plan(vllm_config())) == 1
    (warning,) = log.ours(WARNING)
    assert "the KV bytes of all ranks" in warning and "AttributeError" in warning
