"""``simple-offload-ranks``: one CPU pool for ranks that keep different KV bytes, in ``SimpleCPUOffloadConnector``.

Symptom: under pipeline parallelism, with stages of different layers or a draft model on the last one,
``cuMemcpyBatchAsync failed``, a segmentation fault, or host memory overwritten at the first store past
a rank's pool; or loads of what was never stored.
Cause: the scheduler counts the blocks of the pool from rank 0's KV tensors, and each rank from its own.
Upstream: https://github.com/vllm-project/vllm/pull/52921
Affected: 0.19.0-0.32.0. Before, there is no such connector; 0.33.0 takes what the smallest rank has.
Recognised: by what scheduler and worker answer for ranks of one and of three pages, and of three each.
Change: EngineCore stamps the bytes of all ranks on the KV cache configs that it plans. Where ranks
differ, scheduler and workers are given the capacity that makes their own formulas agree: on one node, of
the whole budget; on several, as 0.33.0 does, of what the rank with the most bytes can hold in its share,
so that no node takes more memory than without us. A worker that has fewer blocks all the same does not
start. On every rank, block ids are checked before the step that would copy them.
Goes when: nobody runs 0.32.0 or older any more.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm_kvfix import _imports, _log, _ranks, _releases, _stamp, guard
from vllm_kvfix._fix import (
    ABSENT,
    AFFECTED,
    APPLIED,
    RIGHT,
    UNKNOWN,
    WAITING,
    Status,
    in_place_of,
    is_ours,
    one_line,
    original_of,
    unrepaired,
)

ID = "simple-offload-ranks"
TITLE = "SimpleCPUOffloadConnector: one CPU pool for ranks that keep different KV bytes"
UPSTREAM = "https://github.com/vllm-project/vllm/pull/52921"
CONNECTOR = "SimpleCPUOffloadConnector"
_PACKAGE = "vllm.v1.simple_kv_offload"
_MANAGER, _WORKER = f"{_PACKAGE}.manager", f"{_PACKAGE}.worker"
_SCHEDULER_CLASS, _WORKER_CLASS = "SimpleCPUOffloadScheduler", "SimpleCPUOffloadWorker"
TARGETS: tuple[str, ...] = (_releases.KV_CACHE_UTILS, _MANAGER, _WORKER)
STOCK_CODE: dict[str, tuple[str, ...]] = {
    f"{_SCHEDULER_CLASS}.__init__": (_MANAGER,),
    f"{_SCHEDULER_CLASS}._derive_cpu_config": (_MANAGER,),
    f"{_WORKER_CLASS}.register_kv_caches": (_WORKER,),
    f"{_WORKER_CLASS}.bind_connector_metadata": (_WORKER,),
    _stamp.PLANNER: _releases.PLANNER_MODULES,
}

_UNTIL = f"until vLLM imports {CONNECTOR}"
_STAMP = "kvfix_simple_offload"

# The answers of _answers(), in blocks.
_REPAIRED = (15, 15, 15, 10, 10)
_KNOWN_BUG = (30, 30, 10, 10, 10)


def settle() -> Status:
    _ranks.tell(ID)
    _stamp.on_every_plan(ID, _mark)
    verdict = stock()
    if verdict.word == WAITING:
        return verdict
    if verdict.word != AFFECTED:
        _say_nothing()
        return unrepaired(verdict)
    for cls, name, repaired in _places():
        if not is_ours(getattr(cls, name)):
            setattr(cls, name, repaired(getattr(cls, name)))
    return Status(APPLIED, "")


def stock() -> Status:
    if _imports.imported(_releases.KV_CACHE_UTILS) is None:
        return Status(WAITING, _UNTIL)
    if importlib.util.find_spec(_PACKAGE) is None:  # imports vllm.v1 at the most
        return Status(ABSENT, f"this vLLM has no {CONNECTOR}")
    if _imports.imported(_MANAGER) is None or _imports.imported(_WORKER) is None:
        return Status(WAITING, _UNTIL)
    return recognise(*_classes())


def recognise(scheduler_class: Any, worker_class: Any) -> Status:
    """Whether scheduler and ranks count different pools as known, agree, or neither; ours are looked through."""
    if scheduler_class is None or worker_class is None:
        return Status(UNKNOWN, f"{_PACKAGE} has no {_SCHEDULER_CLASS}, or no {_WORKER_CLASS}")
    for module, cls in ((_MANAGER, scheduler_class), (_WORKER, worker_class)):
        for name in (name for owner, name, _ in _places() if owner is cls):
            function = getattr(cls, name, None)
            function = original_of(function) or function
            if not _releases.is_vllms_own(function, sys.modules[module]):
                return Status(UNKNOWN, f"{name} in {module} is {_releases.name_of(function)}, as in no release")
    try:
        if hasattr(worker_class, "_resolve_num_cpu_blocks"):  # it asks the other ranks: we must not make it
            told = _ask_scheduler(scheduler_class, _stamped(1, 3)[0], 0, aligned_num_cpu_blocks=7)
            if told == 7:
                return Status(RIGHT, "right since 0.33.0: as many blocks as the rank with the fewest")
            return Status(UNKNOWN, f"the ranks agree on 7 blocks, and the scheduler has {told}")
        answers = _answers(scheduler_class, worker_class, of_stock=True)
    except (Exception, SystemExit) as error:
        return Status(UNKNOWN, one_line(error))
    if answers != _KNOWN_BUG:
        return Status(UNKNOWN, f"{CONNECTOR} answers {answers}, not {_KNOWN_BUG}")
    return Status(AFFECTED, "")


def holds() -> bool:
    ours = all(is_ours(getattr(cls, name, None)) for cls, name, _ in _places())
    return ours and _answers(*_classes()) == _REPAIRED


def _say_nothing() -> None:
    _stamp.forget(ID)
    _ranks.forget(ID)


def restore() -> None:
    _say_nothing()
    for cls, name, _ in _places():
        function = original_of(getattr(cls, name, None))
        if function is not None:
            setattr(cls, name, function)


def _classes() -> tuple[Any, Any]:
    """The classes of the scheduler's and the worker's side; None for what is not imported, or not there."""
    return (
        getattr(sys.modules.get(_MANAGER), _SCHEDULER_CLASS, None),
        getattr(sys.modules.get(_WORKER), _WORKER_CLASS, None),
    )


def _places() -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
    """What is repaired: class, method, and what makes ours of vLLM's."""
    scheduler_class, worker_class = _classes()
    return (
        (scheduler_class, "__init__", _sized_scheduler),
        (worker_class, "register_kv_caches", _sized_worker),
        (worker_class, "bind_connector_metadata", _guarded),
    )


def _mark(vllm_config: Any, kv_cache_configs: Sequence[Any]) -> None:
    """In EngineCore: say that its scheduler goes by the bytes of all ranks, and whether they share one memory.

    Where it does not, no worker must.
    """
    on_one_node = _releases.is_on_one_node(vllm_config)
    for config in kv_cache_configs:
        setattr(config, _STAMP, on_one_node)


class _Pool(NamedTuple):
    """The pool of an engine whose ranks differ."""

    blocks: int
    ranks: _ranks.Ranks
    setting: str  # what the operator gave
    given: int  # bytes of it: for all ranks together, or for each
    least: int  # bytes of it that a block takes

    @property
    def own_bytes(self) -> int:
        """Bytes of one block on the rank of this process; on rank 0 for the scheduler, as vLLM counts."""
        return self.ranks.bytes[self.ranks.rank]

    @property
    def own_capacity(self) -> int:
        """Bytes of which vLLM's own formula makes ``blocks``."""
        return self.blocks * self.own_bytes


def _pool(vllm_config: Any, kv_cache_config: Any, capacity: int, on_disk: bool) -> _Pool | None:
    """The pool that all ranks have room for; None where vLLM's own number is to stand.

    Args:
        capacity: bytes that vLLM gives this rank.
        on_disk: it is space on disk, of which the operator gives each rank the same (from 0.28.0).
    """
    ranks = _ranks.of(kv_cache_config)
    world_size = vllm_config.parallel_config.world_size
    if ranks is None or len(ranks.bytes) != world_size or not hasattr(kv_cache_config, _STAMP):
        _say_ranks_are_unknown(vllm_config.parallel_config.pipeline_parallel_size)
        return None
    if len(set(ranks.bytes)) == 1:
        return None
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    setting = "cpu_bytes_to_use"
    if on_disk or "cpu_bytes_to_use_per_rank" in extra_config:
        setting = "disk_capacity_bytes" if on_disk else "cpu_bytes_to_use_per_rank"
        given, least = capacity, max(ranks.bytes)
    else:
        # capacity is this by the number of ranks, rounded down.
        given = int(extra_config.get(setting, capacity * world_size))
        least = sum(ranks.bytes) if getattr(kv_cache_config, _STAMP) else max(ranks.bytes) * world_size
    # One at the least, as vLLM does: its block pool cannot be empty.
    return _Pool(max(1, given // least), ranks, setting, given, least)


def _say_ranks_are_unknown(stages: int) -> None:
    if stages > 1:
        _log.once(
            logging.WARNING,
            f"vllm-kvfix: {CONNECTOR}: {stages} pipeline stages, and EngineCore did not say what KV bytes all ranks "
            "keep, as with external_launcher: where they differ, the scheduler and the ranks count different pools "
            "(https://github.com/vllm-project/vllm/pull/52921); keep stages equal",
        )
    else:
        _log.once(logging.DEBUG, f"vllm-kvfix: {CONNECTOR}: the KV bytes of all ranks are not known; left alone")


def _say(pool: _Pool, capacity: int) -> None:
    """In EngineCore: what the pool is, and what vLLM would have made of ``capacity`` bytes a rank."""
    sizes = pool.ranks.bytes
    stock = [max(1, capacity // size) if size else 0 for size in sizes]
    _log.once(
        logging.INFO,
        f"vllm-kvfix: {CONNECTOR}: CPU pool of {pool.blocks:,} blocks on {len(sizes)} ranks, {_list(sizes)} bytes a "
        f"block: {_list(size * pool.blocks for size in sizes)} bytes, {sum(sizes) * pool.blocks:,} in all, "
        f"{pool.setting} is {pool.given:,}; stock vLLM {_releases.vllm_version()} would give the scheduler "
        f"{stock[pool.ranks.rank]:,} blocks and the ranks {_list(stock)}",
    )
    if pool.given < 2 * pool.least:
        _log.once(
            logging.WARNING,
            f"vllm-kvfix: {CONNECTOR}: nothing will be offloaded: a block takes {pool.least} bytes of {pool.setting}="
            f"{pool.given}, and vLLM keeps one block for itself; write {2 * pool.least} at the least",
        )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _sized_scheduler(init: Any) -> Any:
    signature = inspect.signature(init)

    @in_place_of(init)
    def init_with_room_on_all_ranks(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments
        on_disk = given.get("disk_capacity_bytes", 0) > 0
        name = "disk_capacity_bytes" if on_disk else "cpu_capacity_bytes"
        capacity = given[name]
        pool = _pool(given["vllm_config"], given["kv_cache_config"], capacity, on_disk)
        if pool is not None:
            given[name] = pool.own_capacity
        init(*call.args, **call.kwargs)
        if pool is None:
            return
        if self.num_cpu_blocks > pool.blocks:  # a class derived from vLLM's may count for itself
            raise _disagreement(f"the scheduler has {self.num_cpu_blocks} blocks", pool)
        _say(pool, capacity)

    return init_with_room_on_all_ranks


def _sized_worker(register_kv_caches: Any) -> Any:
    @in_place_of(register_kv_caches)
    def register_with_room_on_all_ranks(self: Any, *args: Any, **kwargs: Any) -> None:
        on_disk = getattr(self, "disk_mode", False)
        name = "disk_capacity_bytes" if on_disk else "cpu_capacity_bytes"
        capacity = getattr(self, name)
        pool = _pool(self.vllm_config, self.kv_cache_config, capacity, on_disk)
        if pool is None:
            register_kv_caches(self, *args, **kwargs)
            return
        setattr(self, name, pool.own_capacity)
        register_kv_caches(self, *args, **kwargs)
        setattr(self, name, capacity)
        if self.gpu_kv_caches and self.num_cpu_blocks < pool.blocks:
            raise _disagreement(f"rank {pool.ranks.rank} has {self.num_cpu_blocks} blocks", pool)

    return register_with_room_on_all_ranks


def _guarded(bind_connector_metadata: Any) -> Any:
    import numpy

    @in_place_of(bind_connector_metadata)
    def check_and_bind(self: Any, metadata: Any) -> None:
        for direction, ids in ((guard.STORE, metadata.store_cpu_blocks), (guard.LOAD, metadata.load_cpu_blocks)):
            guard.check(direction, numpy.array(ids), self.num_cpu_blocks, self.vllm_config.parallel_config.rank)
        bind_connector_metadata(self, metadata)

    return check_and_bind


def _disagreement(found: str, pool: _Pool) -> RuntimeError:
    return RuntimeError(
        f"{CONNECTOR}: {found}, where EngineCore counted {pool.blocks} for all ranks, of {pool.own_bytes} bytes "
        "here: block ids would be out of bounds. Report this line, the model and the server's arguments. "
        f"KVFIX_DISABLE={ID} on every node gives vLLM's own numbers, which do not agree either"
    )


# ---- the questions ----


class _Answer(Exception):
    """Ends a method of vLLM's at the point where it has counted the blocks: what follows takes memory."""


@dataclass
class _Config:
    """A ``KVCacheConfig`` as far as a pool is counted from it, stamped; from 0.29.0 vLLM asks for a dataclass."""

    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[Any]
    kvfix_rank_bytes: tuple[int, ...]
    kvfix_rank: int
    kvfix_simple_offload: bool = True  # on one node


_NUM_BLOCKS, _PAGE = 2, 16
_BUDGET = 60 * _PAGE


def _answers(scheduler_class: Any, worker_class: Any, of_stock: bool = False) -> tuple[int, ...]:
    """Blocks that the scheduler and two ranks count: one of one page and one of three; then both of three."""
    uneven, even = _stamped(1, 3), _stamped(3, 3)
    capacity = _BUDGET // 2
    return (
        _ask_scheduler(scheduler_class, uneven[0], capacity, of_stock),
        _ask_worker(worker_class, uneven[0], capacity, of_stock),
        _ask_worker(worker_class, uneven[1], capacity, of_stock),
        _ask_scheduler(scheduler_class, even[0], capacity, of_stock),
        _ask_worker(worker_class, even[1], capacity, of_stock),
    )


def _stamped(*pages: int) -> list[_Config]:
    """The configs of ranks that keep so many pages a block, as EngineCore sends them."""
    sizes = tuple(count * _PAGE for count in pages)
    return [_Config(_NUM_BLOCKS, [_tensor(size)], [], sizes, rank) for rank, size in enumerate(sizes)]


def _tensor(block: int) -> SimpleNamespace:
    """A ``KVCacheTensor`` of so many bytes a block, with what any release calls its parts."""
    size = block * _NUM_BLOCKS
    return SimpleNamespace(
        size=size, shared_by=["layer"], layers=["layer"], layer_stride=size, block_stride=block, offset=0
    )


def _vllm_config() -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16),
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": _BUDGET}),
        parallel_config=SimpleNamespace(
            world_size=2, rank=0, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )


def _ask_scheduler(cls: Any, config: _Config, capacity: int, of_stock: bool = False, **more: Any) -> int:
    def derive(*args: Any, **kwargs: Any) -> None:
        raise _Answer(cls._derive_cpu_config(*args, **kwargs).num_blocks)

    init = original_of(cls.__init__) if of_stock else None
    asked: Any = type(_SCHEDULER_CLASS, (cls,), {"_derive_cpu_config": staticmethod(derive)})
    sizes = dict.fromkeys(("scheduler_block_size", "hash_block_size"), 16)  # from 0.22.0
    taken = inspect.signature(cls.__init__).parameters
    more.update((name, size) for name, size in sizes.items() if name in taken)
    return _answer(init or asked.__init__, asked.__new__(asked), _vllm_config(), config, capacity, **more)


def _ask_worker(cls: Any, config: _Config, capacity: int, of_stock: bool = False) -> int:
    import torch

    def count(self: Any, blocks: int) -> None:
        raise _Answer(blocks)

    register = original_of(cls.register_kv_caches) if of_stock else None
    asked: Any = type(_WORKER_CLASS, (cls,), {"num_cpu_blocks": property(fset=count)})
    worker = asked.__new__(asked)
    worker.vllm_config, worker.kv_cache_config = _vllm_config(), config
    worker.cpu_capacity_bytes, worker.disk_mode = capacity, False
    (tensor,) = config.kv_cache_tensors
    cache = torch.zeros(config.num_blocks, tensor.block_stride, dtype=torch.int8, device="cpu")
    return _answer(register or asked.register_kv_caches, worker, {"layer": cache})


def _answer(function: Any, *args: Any, **kwargs: Any) -> int:
    try:
        function(*args, **kwargs)
    except _Answer as answer:
        return int(answer.args[0])
    raise LookupError(f"{_releases.name_of(function)} counts no blocks")
