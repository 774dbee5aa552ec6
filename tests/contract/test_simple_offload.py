"""``SimpleCPUOffloadConnector`` on ranks that keep different KV bytes: one pool for the scheduler and all of them.

Planner, connector, scheduler, block pool and worker are vLLM's own. Stand-ins: CUDA's streams and events, and
the copy backend, which copies in host memory and, other than CUDA, sees an index that is out of bounds.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import (
    SIMPLE_OFFLOAD_HAS_DISK,
    SIMPLE_OFFLOAD_IS_ABSENT,
    SIMPLE_OFFLOAD_ONE_PAGE_SIZE,
    SIMPLE_OFFLOAD_RANKS_DIFFER,
)
from geometry import Layer, allocated_bytes, plan, plan_ranks, schedulers_form, vllm_config
from test_ranks import NARROW, STAGES, WIDE, Stage, ranks_of
from test_register import INFO, SIMPLE_OFFLOAD, WARNING, words

FIX = "simple-offload-ranks"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector"
MANAGER, WORKER = SIMPLE_OFFLOAD
NUM_BLOCKS = 70
ERROR = 40

with_connector = pytest.mark.only_if(not SIMPLE_OFFLOAD_IS_ABSENT)
wrong = pytest.mark.only_if(SIMPLE_OFFLOAD_RANKS_DIFFER)
all_stages = pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)


class Done:
    """A CUDA event, of a copy that is done when it is asked for."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


class HostCopies:
    """The copy backend, in host memory and at once."""

    def init(self, gpu: dict[str, torch.Tensor], cpu: dict[str, torch.Tensor], *_: Any) -> None:
        self.gpu, self.cpu = gpu, cpu

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        sources, destinations = (self.gpu, self.cpu) if is_store else (self.cpu, self.gpu)
        for name, source in sources.items():
            for one, other in zip(src_blocks, dst_blocks, strict=True):
                destinations[name][other] = source[one]
        events_list.append((event_idx, Done()))


class NoDisk:
    """The disk backend: how large a file it would make."""

    def init(self, caches: Any, device: Any, load: Any, store: Any, path: str, slots: int, size: int, *_: Any) -> None:
        self.slots, self.bytes = slots, slots * size


class Stream:
    def __init__(self, **_: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)


def put_backends() -> None:
    """In the place of vLLM's, in the module that is imported by now."""
    module: Any = importlib.import_module(WORKER)
    module.DmaCopyBackend, module.pin_tensor = HostCopies, lambda tensor: None
    if SIMPLE_OFFLOAD_HAS_DISK:
        module.DiskBackend = NoDisk


def config_of_rank(rank: int, ranks: int, stages: int, extra: dict[str, Any], layout: str) -> Any:
    config = vllm_config(extra, world_size=ranks, layout=layout)
    config.parallel_config.rank = rank
    config.parallel_config.tensor_parallel_size = ranks // stages
    config.parallel_config.pipeline_parallel_size = stages
    config.kv_transfer_config.kv_connector = "SimpleCPUOffloadConnector"
    config.cache_config.enable_prefix_caching = True
    config.cache_config.simple_cpu_offload_num_blocks = None  # what the workers say, read from 0.33.0
    return config


def kv_caches(config: Any, halves_first: bool) -> dict[str, Any]:
    """The KV cache tensors of a rank, laid out as model runners do; without a head or a token dimension."""
    caches: dict[str, Any] = {}
    whole: torch.Tensor | None = None
    for tensor in config.kv_cache_tensors:
        if hasattr(tensor, "layers"):  # from 0.29.0 all tensors are places in one allocation
            whole = torch.zeros(tensor.size, dtype=torch.int8) if whole is None else whole
            page = min(tensor.layer_stride, tensor.block_stride)
            for number, name in enumerate(tensor.layers):
                place = tensor.offset + number * tensor.layer_stride
                caches[name] = whole.as_strided((config.num_blocks, page), (tensor.block_stride, 1), place)
            continue
        storage = torch.zeros(tensor.size, dtype=torch.int8)
        shape = (2, config.num_blocks, -1) if halves_first else (config.num_blocks, -1)
        caches.update(dict.fromkeys(tensor.shared_by, storage.view(shape)))
    return caches


class Engine:
    """A scheduler and its ranks, each with the connector that vLLM makes there of what travels to it."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tensor_parallel_size: int = 1,
        *,
        num_blocks: int = NUM_BLOCKS,
        travel: Callable[[Any], Any] = lambda configs: pickle.loads(pickle.dumps(configs)),
        nodes: Any = 1,
        **extra: Any,
    ) -> None:
        connector: Any = importlib.import_module(CONNECTOR)
        self._make = connector.SimpleCPUOffloadConnector
        self._role = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole
        put_backends()
        layers = ranks_of(list(stages), tensor_parallel_size)
        several = len({layer for stage in stages for layer in stage}) > 1
        layout = "BLHNC" if several and SIMPLE_OFFLOAD_ONE_PAGE_SIZE else "LBNHC"
        self.configs = [config_of_rank(rank, len(layers), len(stages), extra, layout) for rank in range(len(layers))]
        for config in self.configs:
            if nodes == "ray":
                config.parallel_config.distributed_executor_backend = "ray"
            else:
                config.parallel_config.nnodes_within_dp = nodes
        self.plans = plan_ranks(self.configs[0], layers, num_blocks)
        self.bytes = [allocated_bytes(one) // one.num_blocks for one in self.plans]
        self._travel = travel

    def start(self, halves_first: bool = False) -> Engine:
        """As EngineCore does it: the workers first, then the scheduler."""
        arrived = self._travel(self.plans)
        self.workers = []
        for config, one in zip(self.configs, arrived, strict=True):
            worker = self._make(config, self._role.WORKER, one)
            worker.register_kv_caches(kv_caches(one, halves_first))
            worker.worker_handler._store_compute_done = Done()  # made on CUDA by the first store, from 0.24.0
            self.workers.append(worker)
        self.scheduler = self._make(self.configs[0], self._role.SCHEDULER, schedulers_form(self.plans[0]))
        return self

    @property
    def scheduled(self) -> int:
        return int(self.scheduler.scheduler_manager.num_cpu_blocks)

    @property
    def counted(self) -> list[int]:
        return [int(worker.worker_handler.num_cpu_blocks) for worker in self.workers]

    def taken(self) -> list[int]:
        """Bytes of host memory that each rank has taken for its pool."""
        return [
            sum(tensor.nbytes for tensor in worker.worker_handler.cpu_kv_caches.values()) for worker in self.workers
        ]

    def all_ids(self) -> list[int]:
        """Every block id that the scheduler's own block pool gives out."""
        block_pool = self.scheduler.scheduler_manager.cpu_block_pool
        blocks = block_pool.get_new_blocks(block_pool.get_num_free_blocks())
        return [block.block_id for block in blocks]


def step(worker: Any, **blocks: list[int]) -> None:
    """One step of a worker, with what the scheduler says of transfers, in the order of a model runner."""
    metadata = importlib.import_module("vllm.v1.simple_kv_offload.metadata").SimpleCPUOffloadMetadata
    events = {f"{direction}_event": 0 for direction in ("store", "load") if f"{direction}_cpu_blocks" in blocks}
    worker.bind_connector_metadata(metadata(**events, **blocks))
    worker.start_load_kv(None)
    worker.wait_for_save()
    worker.get_finished(set())
    worker.clear_connector_metadata()


def stored_and_read_back(worker: Any, ids: list[int]) -> bool:
    """Store other bytes into each block, then load all of them again; whether they are what was stored."""
    gpu = worker.worker_handler.gpu_kv_caches
    for first in range(0, len(ids), NUM_BLOCKS):
        some = ids[first : first + NUM_BLOCKS]
        for cache in gpu.values():
            cache.random_(-128, 127, generator=torch.Generator().manual_seed(first))
        step(worker, store_gpu_blocks=list(range(len(some))), store_cpu_blocks=some)
    for first in range(0, len(ids), NUM_BLOCKS):
        some = ids[first : first + NUM_BLOCKS]
        for cache in gpu.values():
            cache.zero_()
        step(worker, load_cpu_blocks=some, load_gpu_blocks=list(range(len(some))))
        for cache in gpu.values():
            stored = torch.empty_like(cache).random_(-128, 127, generator=torch.Generator().manual_seed(first))
            if not torch.equal(cache[: len(some)], stored[: len(some)]):
                return False
    return True


def word() -> str:
    return words()[FIX]


def check_one_pool(engine: Engine, budget: int) -> None:
    """The invariants of the pool: one number, within the budget, less than one row left."""
    count, row = engine.scheduled, sum(engine.bytes)
    assert engine.counted == [count] * len(engine.bytes)
    assert engine.taken() == [count * size for size in engine.bytes]
    assert count * row <= budget < (count + 1) * row
    assert engine.all_ids() == list(range(1, count)), "block 0 is vLLM's null block"


# ---- what each release does ----


@pytest.mark.one_process
@with_connector
@all_stages
def test_stock_counts_another_pool_on_each_stage_and_0_33_0_counts_one_if_the_ranks_can_talk(
    stages: list[Stage],
) -> None:
    """Without a process group, as here, 0.33.0's ranks count each its own; what it does with one is below."""
    row = sum(Engine(stages).bytes)
    engine = Engine(stages, cpu_bytes_to_use=40 * row).start()
    share = 40 * row // len(stages)
    assert engine.counted == [share // size for size in engine.bytes]
    assert engine.scheduled == engine.counted[0]
    assert len(set(engine.counted)) > 1


@pytest.mark.one_process
@wrong
@pytest.mark.parametrize("stages", [[[WIDE], [WIDE] * 3], [[WIDE] * 2, [WIDE] * 2 + [NARROW]]], ids=["1 + 3", "draft"])
def test_stock_is_out_of_bounds_on_the_rank_that_keeps_more(stages: list[Stage]) -> None:
    engine = Engine(stages, cpu_bytes_to_use=40 * sum(Engine(stages).bytes)).start()
    ids = engine.all_ids()
    assert stored_and_read_back(engine.workers[0], ids)
    with pytest.raises(IndexError, match="out of bounds"):
        stored_and_read_back(engine.workers[1], ids)


@with_connector
def test_the_fix_is_applied_where_the_bug_is_and_nowhere_else(register: Any, log: Any) -> None:
    register()
    assert word() == "waiting"
    importlib.import_module(CONNECTOR)
    assert word() == ("applied" if SIMPLE_OFFLOAD_RANKS_DIFFER else "not needed")
    assert log.ours(WARNING) == []


@pytest.mark.only_if(SIMPLE_OFFLOAD_IS_ABSENT)
def test_the_fix_is_not_applicable_where_there_is_no_such_connector(register: Any, log: Any) -> None:
    register()
    assert word() == "waiting"
    planner = importlib.import_module("vllm.v1.core.kv_cache_utils").get_kv_cache_configs
    assert word() == "not applicable"
    assert log.ours(WARNING) == []
    assert planner is sys.modules["vllm.v1.core.kv_cache_utils"].get_kv_cache_configs


# ---- what the fix does ----


@pytest.mark.one_process
@wrong
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@all_stages
def test_all_count_one_pool_of_the_whole_budget(
    register: Any, log: Any, stages: list[Stage], tensor_parallel_size: int
) -> None:
    register()
    row = sum(Engine(stages, tensor_parallel_size).bytes)
    budget = 41 * row - 1
    check_one_pool(Engine(stages, tensor_parallel_size, cpu_bytes_to_use=budget).start(), budget)
    assert log.ours(WARNING) == []


@pytest.mark.one_process
@wrong
@pytest.mark.parametrize("halves_first", [False, True])
@pytest.mark.parametrize("name", ["1 + 3 layers", "3 + 1 layers", "a draft model on the last of four"])
def test_every_block_that_is_given_out_is_stored_and_read_back_on_every_rank(
    register: Any, name: str, halves_first: bool
) -> None:
    register()
    engine = Engine(STAGES[name], cpu_bytes_to_use=150 * sum(Engine(STAGES[name]).bytes)).start(halves_first)
    ids = engine.all_ids()
    assert len(ids) == 149
    assert [stored_and_read_back(worker, ids) for worker in engine.workers] == [True] * len(engine.workers)


@wrong
def test_any_stages_and_budgets(register: Any) -> None:
    register()
    draw = random.Random(52921)
    for _ in range(60):
        kinds = (WIDE, WIDE) if SIMPLE_OFFLOAD_ONE_PAGE_SIZE else (WIDE, NARROW)
        stages = [[draw.choice(kinds) for _ in range(draw.randint(1, 5))] for _ in range(draw.choice((2, 3, 4, 6, 8)))]
        ranks = draw.choice((1, 1, 2, 3))
        row = sum(Engine(stages, ranks).bytes)
        budget = draw.randint(1, 40) * row + draw.choice((0, draw.randint(0, row - 1)))
        try:
            check_one_pool(Engine(stages, ranks, cpu_bytes_to_use=budget).start(), budget)
        except BaseException as failure:
            failure.add_note(f"replay: Engine({stages}, {ranks}, cpu_bytes_to_use={budget})")
            raise


@wrong
def test_a_cap_a_rank_gives_what_the_rank_with_the_most_bytes_holds(register: Any) -> None:
    register()
    stages = [[WIDE], [WIDE] * 3]
    cap = 10 * max(Engine(stages).bytes) + 17
    engine = Engine(stages, cpu_bytes_to_use=1 << 40, cpu_bytes_to_use_per_rank=cap).start()
    assert [engine.scheduled, *engine.counted] == [10, 10, 10]
    assert max(engine.taken()) <= cap
    engine.workers[0].register_kv_caches(kv_caches(engine.plans[0], False))
    assert engine.counted == [10, 10], "also when the KV cache is made anew"


@pytest.mark.only_if(SIMPLE_OFFLOAD_RANKS_DIFFER and SIMPLE_OFFLOAD_HAS_DISK)
def test_space_on_disk_is_a_cap_a_rank(register: Any) -> None:
    stages = [[WIDE], [WIDE] * 3]
    disk: dict[str, Any] = {
        "kv_offload_backend": "disk",
        "disk_path": "/nowhere",
        "disk_capacity_bytes": 10 * 3 * 4 * 512 + 17,
    }
    stock = Engine(stages, **disk).start()
    assert [stock.scheduled, *stock.counted] == [30, 30, 10]
    register()
    engine = Engine(stages, **disk).start()
    assert [engine.scheduled, *engine.counted] == [10, 10, 10]
    assert [worker.worker_handler._backend.slots for worker in engine.workers] == [10, 10]


@wrong
@pytest.mark.parametrize("budget", ["none given", "a part of a row", "three rows"])
@pytest.mark.parametrize("fixed", [False, True])
def test_where_ranks_are_alike_vllms_numbers_stand(register: Any, log: Any, budget: str, fixed: bool) -> None:
    if fixed:
        register()
    layer = Layer(width=4096) if budget == "none given" else WIDE  # a block pool of few blocks
    stages = [[layer], [layer]]
    size = Engine(stages).bytes[0]
    extra: dict[str, Any] = {"cpu_bytes_to_use": {"a part of a row": size, "three rows": 6 * size + 5}.get(budget)}
    capacity = 4 << 30 if budget == "none given" else extra["cpu_bytes_to_use"] // 2
    connector = importlib.import_module(CONNECTOR).SimpleCPUOffloadConnector
    engine = Engine(stages, **({} if budget == "none given" else extra))
    if budget == "none given":  # 4 GiB a rank, which nobody takes here
        scheduler = connector(engine.configs[0], engine._role.SCHEDULER, schedulers_form(engine.plans[0]))
        assert scheduler.scheduler_manager.num_cpu_blocks == capacity // size
        return
    engine.start()
    assert {engine.scheduled, *engine.counted} == {max(1, capacity // size)}
    assert not [line for line in log.ours() if "SimpleCPUOffloadConnector:" in line], "nothing to say"


@wrong
def test_without_a_budget_the_ranks_share_vllms_default(register: Any) -> None:
    register()
    layer = Layer(width=4096)
    engine = Engine([[layer], [layer] * 3])
    connector = importlib.import_module(CONNECTOR).SimpleCPUOffloadConnector
    scheduler = connector(engine.configs[0], engine._role.SCHEDULER, schedulers_form(engine.plans[0]))
    assert scheduler.scheduler_manager.num_cpu_blocks == (8 << 30) // sum(engine.bytes)


@wrong
@pytest.mark.parametrize("share_of_a_row", [0.5, 1.5])
def test_a_budget_that_holds_no_block_starts_and_offloads_nothing_with_one_warning(
    register: Any, log: Any, share_of_a_row: float
) -> None:
    """As stock starts; and of one block vLLM's block pool has none to give out."""
    register()
    stages = [[WIDE], [WIDE] * 3]
    row = sum(Engine(stages).bytes)
    engine = Engine(stages, cpu_bytes_to_use=int(share_of_a_row * row)).start()
    assert [engine.scheduled, *engine.counted] == [1, 1, 1]
    assert engine.all_ids() == []
    (warning,) = log.ours(WARNING)
    assert "nothing will be offloaded" in warning and str(2 * row) in warning


@wrong
@pytest.mark.parametrize("fixed", [False, True])
def test_no_gpu_blocks_are_vllms_own_error(register: Any, fixed: bool) -> None:
    if fixed:
        register()
    engine = Engine([[WIDE], [WIDE] * 3])
    for one in engine.plans:
        one.num_blocks = 0
        for tensor in one.kv_cache_tensors:
            tensor.size = 0
    with pytest.raises((ZeroDivisionError, RuntimeError)) as error:
        engine._make(engine.configs[0], engine._role.SCHEDULER, schedulers_form(engine.plans[0]))
    assert "vllm_kvfix" not in str(error.traceback[-1].path)


@wrong
def test_enginecore_says_what_the_pool_is_and_what_stock_would_make_of_it(register: Any, log: Any) -> None:
    register()
    stages = [[WIDE], [WIDE] * 3]
    engine = Engine(stages, cpu_bytes_to_use=40 * sum(Engine(stages).bytes)).start()
    own, other = engine.bytes
    (line,) = [line for line in log.ours(INFO) if "CPU pool of" in line]
    for text in ("40 blocks", f"{own:,}, {other:,} bytes a block", f"{40 * own:,}, {40 * other:,} bytes"):
        assert text in line
    assert "the scheduler 80 blocks and the ranks 80, 26" in line


# ---- the configs travel ----


def through_a_queue(obj: Any) -> Any:
    """As the multiprocess executor sends to its workers: its ``MessageQueue``, read in a process of its own."""
    queue_class = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").MessageQueue
    queue = queue_class(1, 1)
    here, there = multiprocessing.Pipe(duplex=False)
    handle = queue.export_handle()

    def read() -> None:
        queue_there = queue_class.create_from_handle(handle, 0)
        queue_there.wait_until_ready()
        there.send(queue_there.dequeue())

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    try:
        queue.wait_until_ready()
        queue.enqueue(obj)
        assert here.poll(30)
        return here.recv()
    finally:
        process.join(10)
        process.kill()


def through_cloudpickle(obj: Any) -> Any:
    """As Ray sends, which is not installed here: its serializer is made of this."""
    return pickle.loads(importlib.import_module("cloudpickle").dumps(obj))


@wrong
@pytest.mark.parametrize("travel", [through_a_queue, through_cloudpickle])
def test_the_configs_of_ranks_travel_as_executors_send_them(register: Any, travel: Callable[[Any], Any]) -> None:
    register()
    stages = STAGES["a draft model on the last of four"]
    budget = 40 * sum(Engine(stages).bytes)
    check_one_pool(Engine(stages, cpu_bytes_to_use=budget, travel=travel).start(), budget)


@wrong
@pytest.mark.parametrize("lost", ["all", "the decision", "a rank"])
def test_where_the_ranks_bytes_are_not_known_vllms_numbers_stand(register: Any, log: Any, lost: str) -> None:
    """EngineCore without this package, or with the fix off; an external launcher, that sees one rank only."""
    register()
    stages = [[WIDE], [WIDE] * 3]
    engine = Engine(stages, cpu_bytes_to_use=40 * sum(Engine(stages).bytes))
    for one in engine.plans:
        for name in [name for name in vars(one) if name.startswith("kvfix_")]:
            if lost == "all" or name == {"the decision": "kvfix_simple_offload"}.get(lost):
                delattr(one, name)
            elif lost == "a rank" and name == "kvfix_rank_bytes":
                one.kvfix_rank_bytes = one.kvfix_rank_bytes[:1]
    engine.start()
    assert [engine.scheduled, *engine.counted] == [80, 80, 26]
    (warning,) = log.ours(WARNING)
    assert "2 pipeline stages" in warning and "52921" in warning


@wrong
@pytest.mark.parametrize("more", [512, -512])
def test_a_worker_that_has_fewer_blocks_than_the_scheduler_refuses_to_start(register: Any, more: int) -> None:
    register()
    engine = Engine([[WIDE], [WIDE] * 3], cpu_bytes_to_use=1 << 20)
    worker = engine._make(engine.configs[1], engine._role.WORKER, engine.plans[1])
    other = plan(engine.configs[1], engine.plans[1].kv_cache_groups, NUM_BLOCKS)
    assert worker.worker_handler.kv_cache_config.kvfix_rank_bytes == tuple(engine.bytes)
    for one in engine.plans:
        one.kvfix_rank_bytes = (engine.bytes[0], engine.bytes[1] + more)
    if more > 0:  # its blocks are smaller, so it has more of them
        worker.register_kv_caches(kv_caches(other, False))
        return
    with pytest.raises(RuntimeError, match=f"rank 1 has .* of {engine.bytes[1] + more} bytes.*{FIX}"):
        worker.register_kv_caches(kv_caches(other, False))


@wrong
@pytest.mark.parametrize("blocks", [5, 5000])
def test_a_scheduler_derived_from_vllms_may_count_fewer_blocks_and_no_more(register: Any, blocks: int) -> None:
    register()
    engine = Engine([[WIDE], [WIDE] * 3], cpu_bytes_to_use=1 << 20).start()
    scheduler = engine.scheduler.scheduler_manager

    class Derived(type(scheduler)):  # type: ignore[misc]
        @staticmethod
        def _derive_cpu_config(*args: Any, **kwargs: Any) -> Any:
            config = type(scheduler)._derive_cpu_config(*args, **kwargs)
            config.num_blocks = blocks
            return config

    importlib.import_module(CONNECTOR).SimpleCPUOffloadScheduler = Derived
    args = (engine.configs[0], engine._role.SCHEDULER, schedulers_form(engine.plans[0]))
    if blocks < engine.scheduled:
        assert engine._make(*args).scheduler_manager.num_cpu_blocks == blocks
    else:
        with pytest.raises(RuntimeError, match=f"the scheduler has {blocks} blocks"):
            engine._make(*args)


@wrong
@pytest.mark.parametrize("nodes", [2, "ray"])
def test_on_several_nodes_no_rank_takes_more_than_in_stock(register: Any, log: Any, nodes: Any) -> None:
    """Nor has a rank on a node without this package fewer blocks than the scheduler."""
    stages = [[WIDE], [WIDE] * 3]
    budget = 40 * sum(Engine(stages).bytes)
    stock = Engine(stages, cpu_bytes_to_use=budget).start()
    register()
    engine = Engine(stages, cpu_bytes_to_use=budget, nodes=nodes).start()
    assert [engine.scheduled, *engine.counted] == [min(stock.counted)] * 3
    assert all(ours <= theirs for ours, theirs in zip(engine.taken(), stock.taken(), strict=True))


# ---- the guard ----


@wrong
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_block_outside_the_pool_is_refused_before_a_byte_is_copied(
    register: Any, log: Any, direction: str, alike: bool
) -> None:
    """Also where vLLM's number stands, and whoever hands out the id."""
    from vllm_kvfix.guard import PoolBoundsError

    register()
    stages = [[WIDE], [WIDE] * (1 if alike else 3)]
    engine = Engine(stages, cpu_bytes_to_use=10 * sum(Engine(stages).bytes)).start()
    worker = engine.workers[1]
    handler = worker.worker_handler
    for cache in (*handler.gpu_kv_caches.values(), *handler.cpu_kv_caches.values()):
        cache.random_(-128, 127)
    before = {name: cache.clone() for name, cache in (handler.gpu_kv_caches | handler.cpu_kv_caches).items()}
    gpu = {name: cache.clone() for name, cache in handler.gpu_kv_caches.items()}
    for ids in ([3, 10], [-1, 4], [1 << 40, 2]):
        with pytest.raises(PoolBoundsError, match="out of bounds for 10") as error:
            step(worker, **{f"{direction}_cpu_blocks": ids, f"{direction}_gpu_blocks": [1, 2]})
        assert error.value.rank == 1
    for name, cache in gpu.items():
        assert torch.equal(handler.gpu_kv_caches[name], cache)
        assert torch.equal(handler.cpu_kv_caches[name], before[name])
    assert len(log.ours(ERROR)) == 3
    step(worker, **{f"{direction}_cpu_blocks": [9, 0], f"{direction}_gpu_blocks": [1, 2]})


# ---- a vLLM that others changed, and undoing ----


def parts() -> dict[str, Any]:
    """Everything of vLLM that the fix may touch."""
    scheduler = importlib.import_module(MANAGER).SimpleCPUOffloadScheduler
    worker = importlib.import_module(WORKER).SimpleCPUOffloadWorker
    planners = [getattr(module, "get_kv_cache_configs", None) for name, module in planner_modules()]
    return {"scheduler": dict(vars(scheduler)), "worker": dict(vars(worker)), "planners": planners}


def planner_modules() -> Iterator[tuple[str, Any]]:
    for name in ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"):
        if importlib.util.find_spec(name):
            yield name, importlib.import_module(name)


@with_connector
def test_apply_restore_apply(register: Any) -> None:
    from vllm_kvfix import plugin

    stock = parts()
    register()
    if SIMPLE_OFFLOAD_RANKS_DIFFER:
        assert parts()["scheduler"] != stock["scheduler"]
    else:
        assert {**parts(), "planners": 0} == {**stock, "planners": 0}
    register()
    plugin.restore()
    assert parts() == stock
    register()
    assert word() == ("applied" if SIMPLE_OFFLOAD_RANKS_DIFFER else "not needed")


@wrong
@pytest.mark.parametrize(
    ("module", "method"),
    [
        (MANAGER, "SimpleCPUOffloadScheduler.__init__"),
        (WORKER, "SimpleCPUOffloadWorker.register_kv_caches"),
        (WORKER, "SimpleCPUOffloadWorker.bind_connector_metadata"),
    ],
)
def test_who_has_replaced_a_part_is_left_alone_and_named(register: Any, log: Any, module: str, method: str) -> None:
    class_name, name = method.split(".")
    cls = getattr(importlib.import_module(module), class_name)

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    setattr(cls, name, theirs)
    before = parts()
    register()
    assert word() == "unknown"
    assert {**parts(), "planners": 0} == {**before, "planners": 0}
    (warning,) = log.ours(WARNING)
    assert FIX in warning and "test_simple_offload" in warning and name in warning


@wrong
@pytest.mark.parametrize("part", ["scheduler", "worker"])
def test_who_counts_otherwise_is_left_alone(register: Any, log: Any, part: str) -> None:
    """A fork whose answers are neither right nor the known bug's."""
    module: Any = importlib.import_module(MANAGER if part == "scheduler" else WORKER)
    source = importlib.util.find_spec(module.__name__).loader.get_source(module.__name__)  # type: ignore[union-attr]
    counted = {"scheduler": "max(1, num_gpu_blocks * cpu", "worker": "max(1, self.cpu"}[part]
    assert source.count(counted) == 1
    changed = source.replace(counted, counted.replace("max(1, ", "max(1, 9 * "))
    exec(compile(changed, module.__file__, "exec"), vars(module))
    before = parts()
    register()
    assert word() == "unknown"
    assert {**parts(), "planners": 0} == {**before, "planners": 0}
    (warning,) = log.ours(WARNING)
    assert FIX in warning and "answers" in warning


@wrong
@pytest.mark.parametrize("gone", ["SimpleCPUOffloadScheduler", "SimpleCPUOffloadWorker"])
def test_a_module_without_its_class_is_one_warning(register: Any, log: Any, gone: str) -> None:
    importlib.import_module(WORKER)
    importlib.import_module(MANAGER)
    delattr(sys.modules[MANAGER if gone.endswith("Scheduler") else WORKER], gone)
    register()
    assert word() == "unknown"
    (warning,) = log.ours(WARNING)
    assert FIX in warning and gone in warning


@wrong
def test_who_replaces_a_part_after_us_is_seen(register: Any) -> None:
    importlib.import_module(CONNECTOR)
    register()
    assert word() == "applied"
    importlib.import_module(WORKER).SimpleCPUOffloadWorker.register_kv_caches = lambda self, kv_caches: None
    assert word() == "failed"


@wrong
@pytest.mark.parametrize("value", [FIX, "all"])
def test_kvfix_disable_leaves_the_connector_alone(register: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    stock = parts()
    monkeypatch.setenv("KVFIX_DISABLE", value)
    register()
    assert word() == "disabled"
    assert {**parts(), "planners": 0} == {**stock, "planners": 0}
    engine = Engine([[WIDE], [WIDE] * 3])
    assert not any(hasattr(one, "kvfix_simple_offload") for one in engine.plans)


# ---- 0.33.0 ----


@pytest.mark.only_if(not (SIMPLE_OFFLOAD_IS_ABSENT or SIMPLE_OFFLOAD_RANKS_DIFFER))
def test_upstreams_number_is_one_and_leaves_memory_of_the_lighter_rank_unused(register: Any, tmp_path: Any) -> None:
    """Two processes with a real process group, as 0.33.0's workers have it."""
    register()
    stages = [[WIDE], [WIDE] * 3]
    row = sum(Engine(stages).bytes)
    engine = Engine(stages, cpu_bytes_to_use=40 * row)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in stages]

    def work(rank: int) -> None:
        try:
            import torch.distributed as dist

            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
            state: Any = importlib.import_module("vllm.distributed.parallel_state")
            state.get_world_group = lambda: SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
            worker = engine._make(engine.configs[rank], engine._role.WORKER, engine.plans[rank])
            worker.register_kv_caches(kv_caches(engine.plans[rank], False))
            pipes[rank][1].send(worker.get_aligned_num_cpu_blocks())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    processes = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        counted = [here.recv() if here.poll(40) else None for here, _ in pipes]
    finally:
        for process in processes:
            process.kill()
    assert counted == [26, 26], "40 would fit"
    engine.configs[0].cache_config.simple_cpu_offload_num_blocks = min(counted)
    scheduler = engine._make(engine.configs[0], engine._role.SCHEDULER, schedulers_form(engine.plans[0]))
    assert scheduler.scheduler_manager.num_cpu_blocks == 26
