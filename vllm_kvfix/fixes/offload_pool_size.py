"""``offload-pool-size``: the number of chunks in the CPU offload pool.

Symptom: a segmentation fault in ``swap_blocks``, ``cuMemcpyBatchAsync failed``, or memory overwritten
at the first store past the worker's pool; or a pool a hundred times too small, without hits.
Cause: ``CPUOffloadingSpec`` multiplies the page size of a KV cache group by the number of KV
tensors. Where layers differ (``UniformTypeKVCacheSpecs``), the page size is already summed over
them in a worker and is one layer's in the scheduler: two numbers, both wrong, and the scheduler
hands out chunk ids that the worker does not have.
Upstream: https://github.com/vllm-project/vllm/pull/39617
Affected: 0.14.0-0.19.1. Before, the operator gives the number; after, it is right for equal ranks.
Recognised: by the stock class's answers for two layers of one page size, and of two.
Change: the name ``FixedCPUOffloadingSpec`` is offered to vLLM's spec factory, on every release, for
operators to choose; EngineCore tells it the bytes of all ranks, which stock never asks for (see
:mod:`vllm_kvfix._ranks`). Where the bug is, a stock spec whose numbers would differ gets a WARNING.
``KVFIX_STOCK_SPEC=1`` makes the stock name give the fixed class, for ``--kv-offloading-size``.
Goes when: nobody runs 0.19.1 or older any more.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm_kvfix import _imports, _log, _ranks, _releases, _stamp, _stock_name, pool
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

ID = "offload-pool-size"
TITLE = "CPU offload pool: one number of chunks for scheduler and workers, within the budget"
UPSTREAM = "https://github.com/vllm-project/vllm/pull/39617"
TARGETS: tuple[str, ...] = (_releases.KV_CACHE_UTILS, _releases.SPEC_FACTORY, *_releases.STOCK_SPEC_MODULES)
CONNECTOR = _releases.CONNECTOR
STOCK_CODE: dict[str, tuple[str, ...]] = {
    f"{_releases.STOCK_SPEC}.__init__": _releases.STOCK_SPEC_MODULES,
    "OffloadingSpecFactory": (_releases.SPEC_FACTORY,),
    _stamp.PLANNER: _releases.PLANNER_MODULES,
    _ranks.BUILDER: (_releases.OFFLOADING_CONFIG,),
}
SPEC_NAME = "FixedCPUOffloadingSpec"

# The answers to the two questions of _answers(), in chunks.
_RIGHT = (150, 100)
_KNOWN_BUG = (150, 50)
_RANKS, _BLOCKS_PER_CHUNK = 2, 2

_UNTIL = "until EngineCore makes an offloading spec"


def settle() -> Status:
    _stock_name.stamp_configs()
    _ranks.tell(ID)
    _stamp.on_every_plan(ID, _warn_if_ranks_differ)
    module, stock_spec = _imports.imported(_releases.SPEC_FACTORY), _releases.imported_stock_spec()
    if module is not None:
        _offer_names(module)  # before anybody can ask for them
        registry = module.OffloadingSpecFactory._registry
        if not is_ours(registry[SPEC_NAME]):
            taker = ".".join(_releases.loads(registry[SPEC_NAME]) or [_releases.name_of(registry[SPEC_NAME])])
            return Status(UNKNOWN, f"the spec name {SPEC_NAME} is taken by {taker}")
        loader = registry[_releases.STOCK_SPEC]
        place = _releases.loads(original_of(loader) or loader)
        if place and (place[0] not in _releases.STOCK_SPEC_MODULES or place[1] != _releases.STOCK_SPEC):
            return Status(UNKNOWN, f"{_releases.STOCK_SPEC} is {'.'.join(place)}, not where it was in any release")
    if module is None or stock_spec is None:
        return Status(WAITING, _UNTIL)
    verdict = recognise(stock_spec)
    if verdict.word == AFFECTED or (verdict.word == RIGHT and _log.in_helper()):
        _watch_stock_spec(stock_spec, verdict.word == AFFECTED)
    if verdict.word != AFFECTED:
        return unrepaired(verdict)
    return Status(APPLIED, f"spec {SPEC_NAME}")


def stock() -> Status:
    stock_spec = _releases.imported_stock_spec()
    return Status(WAITING, _UNTIL) if stock_spec is None else recognise(stock_spec)


def holds() -> bool:
    return is_ours(_registry().get(SPEC_NAME))


def restore() -> None:
    _stock_name.restore()
    _stamp.forget(ID)
    _ranks.forget(ID)
    registry, stock_spec = _registry(), _releases.imported_stock_spec()
    if is_ours(registry.get(SPEC_NAME)):
        del registry[SPEC_NAME]
    stock_loader = original_of(registry.get(_releases.STOCK_SPEC))
    if stock_loader is not None:
        registry[_releases.STOCK_SPEC] = stock_loader
    init = original_of(getattr(stock_spec, "__init__", None))
    if init is not None:
        stock_spec.__init__ = init


def recognise(spec_class: Any) -> Status:
    """Whether the size that ``spec_class`` computes is the known wrong one, right, or neither."""
    if spec_class.__module__ not in _releases.STOCK_SPEC_MODULES:
        return Status(UNKNOWN, f"{_releases.STOCK_SPEC} is {_releases.name_of(spec_class)}, as in no release")
    era = _releases.spec_era(spec_class)
    if era is None:
        return Status(UNKNOWN, f"{_releases.name_of(spec_class)} has another constructor")
    try:
        if era == _releases.TAKES_NUM_CPU_BLOCKS:
            made = _probe(spec_class, {"num_cpu_blocks": 37})(None).num_cpu_blocks
            if made != 37:
                return Status(UNKNOWN, f"{_releases.STOCK_SPEC} makes {made} chunks of num_cpu_blocks 37")
            return Status(ABSENT, f"num_cpu_blocks gives the size; spec {SPEC_NAME} passes on")
        answers = _answers(spec_class, era)
        if answers == _KNOWN_BUG:
            _resize_one(spec_class, era)
    except (Exception, SystemExit) as error:
        return Status(UNKNOWN, one_line(error))
    if answers == _RIGHT:
        return Status(RIGHT, f"right for equal ranks since 0.20.0, vLLM #39617; spec {SPEC_NAME} for unequal ones")
    if answers == _KNOWN_BUG:
        return Status(AFFECTED, "")
    return Status(UNKNOWN, f"{_releases.STOCK_SPEC} answers {answers}, not {_KNOWN_BUG}, {_RIGHT}")


def stock_numbers(budget: int, kv_cache_config: Any, world_size: int, blocks_per_chunk: int) -> tuple[int, int] | None:
    """Chunks that stock 0.14.0-0.19.1 gives the scheduler and a worker; None if it asserts.

    Works from either form of the config. The scheduler's form hides that a group was
    ``UniformTypeKVCacheSpecs``, unless its pages do not add up to the bytes of the tensors.
    """
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    pages = {_releases.first_layer_spec(spec).page_size_bytes for spec in groups}
    sums = {spec.page_size_bytes for spec in groups}
    if len(pages) != 1 or len(sums) != 1:
        return None
    page, page_sum = pages.pop(), sums.pop()
    num_tensors = len(kv_cache_config.kv_cache_tensors)
    actual = _releases.kv_bytes_per_block(kv_cache_config)
    if page == page_sum and actual != page * num_tensors:
        page_sum = actual
    return (
        pool.stock_num_chunks(budget, page, num_tensors, world_size, blocks_per_chunk),
        pool.stock_num_chunks(budget, page_sum, num_tensors, world_size, blocks_per_chunk),
    )


def _registry() -> MutableMapping[str, Any]:
    """vLLM's spec loaders by name; empty where there is no such thing."""
    factory = getattr(sys.modules.get(_releases.SPEC_FACTORY), "OffloadingSpecFactory", None)
    registry = getattr(factory, "_registry", {})
    return registry if isinstance(registry, MutableMapping) else {}


def _offer_names(module: ModuleType) -> None:
    """Register our name, and let it stand behind the stock name if the operator asks for that."""
    registry = module.OffloadingSpecFactory._registry
    if not isinstance(registry, MutableMapping):
        raise TypeError(f"OffloadingSpecFactory._registry is a {type(registry).__name__}")
    if SPEC_NAME not in registry:
        module.OffloadingSpecFactory.register_spec(SPEC_NAME, "vllm_kvfix.spec", SPEC_NAME)
        try:
            registry[SPEC_NAME].kvfix = registry[SPEC_NAME]
        except AttributeError:  # no function: not a registry that we know
            del registry[SPEC_NAME]
            raise
    stock = registry[_releases.STOCK_SPEC]
    if not _stock_name.asked() or is_ours(stock) or not is_ours(registry[SPEC_NAME]):
        return
    if _releases.is_vllms_own(stock, module):
        registry[_releases.STOCK_SPEC] = _fixed_loader(stock, registry[SPEC_NAME])
    else:
        name = f"the loader of {_releases.STOCK_SPEC}"
        _say_not_stacked(name, stock, "KVFIX_STOCK_SPEC does nothing")


def _fixed_loader(stock: Any, fixed: Any) -> Any:
    @in_place_of(stock)
    def loader() -> Any:
        spec_class = stock()
        try:
            verdict = recognise(spec_class)
            if verdict.word != UNKNOWN:
                return fixed()
        except Exception as error:
            verdict = Status(UNKNOWN, one_line(error))
        _log.once(logging.WARNING, f"vllm-kvfix: KVFIX_STOCK_SPEC does nothing: {verdict}")
        return spec_class

    return loader


def _watch_stock_spec(stock: Any, affected: bool) -> None:
    """Where a stock spec's pool can differ from the scheduler's: warn of it, and refuse it under a fixed scheduler."""
    init = stock.__init__
    if original_of(init) is not None:
        return
    if not _releases.is_vllms_own(init, sys.modules[stock.__module__]):
        name = f"constructor of {_releases.STOCK_SPEC}"
        _say_not_stacked(f"the {name}", init, "a stock spec gets no warning")
        return

    @in_place_of(init)
    def init_and_warn(self: Any, config: Any, *kv_cache_config: Any) -> None:
        init(self, config, *kv_cache_config)
        if type(self) is not stock:
            return
        (stamped,) = kv_cache_config or (config,)
        ranks = _ranks.of(stamped)
        if affected or (ranks and ranks.differ):
            _stock_name.refuse_disagreement(stamped, fixed=False)
        if affected:
            try:
                _warn_if_numbers_differ(self, config, stamped)
            except Exception:
                _log.logger.debug("vllm-kvfix: stock spec not judged", exc_info=True)

    stock.__init__ = init_and_warn


def _say_not_stacked(what: str, taker: Any, effect: str) -> None:
    name = _releases.name_of(taker)
    _log.once(logging.WARNING, f"vllm-kvfix: {what} is {name}, as in no release: {effect}")


def _warn_if_ranks_differ(vllm_config: Any, kv_cache_configs: Sequence[Any]) -> None:
    """In EngineCore, when it has planned: what operators of uneven stages must know."""
    ranks = _ranks.of(kv_cache_configs[0])
    if ranks is None or not ranks.differ or not _releases.is_offloading(vllm_config):
        return
    stock_chosen = _releases.is_stock_spec_chosen(vllm_config) and not _stock_name.asked()
    if stock_chosen:
        _log.once(
            logging.WARNING,
            f"vllm-kvfix: ranks keep {min(ranks.bytes)} to {max(ranks.bytes)} KV bytes a block, and "
            f"{_releases.STOCK_SPEC} takes them to be alike: the scheduler and the ranks count different pools, and "
            "a store may be out of bounds (https://github.com/vllm-project/vllm/issues/50821). Write "
            f'"spec_name": "{SPEC_NAME}" in kv_connector_extra_config, or set KVFIX_STOCK_SPEC=1',
        )
    nodes = _releases.num_nodes(vllm_config)
    if nodes == 1 or stock_chosen:
        return
    own = len(ranks.bytes) // nodes
    shares = [100 * sum(ranks.bytes[own * node :][:own]) / sum(ranks.bytes) for node in range(nodes)]
    _log.once(
        logging.INFO,
        f"vllm-kvfix: ranks keep different KV bytes: the {nodes} nodes take "
        f"{', '.join(f'{share:.0f} %' for share in shares)} of the CPU pool, in their order; where vLLM keeps the pool "
        "in /dev/shm (from 0.27.0, on CUDA), each node needs room for all of it",
    )


def _warn_if_numbers_differ(spec: Any, config: Any, kv_cache_config: Any) -> None:
    budget = int(spec.extra_config["cpu_bytes_to_use"])
    ranks, factor = config.parallel_config.world_size, _releases.blocks_per_chunk(spec)
    numbers = stock_numbers(budget, kv_cache_config, ranks, factor)
    if numbers is None or numbers[0] == numbers[1] or _releases.num_chunks(spec) not in numbers:
        return
    scheduler, worker = numbers
    own = _releases.kv_bytes_per_block(kv_cache_config)
    right = pool.num_chunks(budget, pool.row_bytes((own,) * ranks, factor))
    if _log.in_helper() and (scheduler != right or config.parallel_config.rank > 0):
        return  # the scheduler's number shows the difference too: EngineCore says it, once
    harm = (
        "the scheduler will hand out chunks that the worker does not have, and a store will write out of bounds"
        if scheduler > worker
        else "most of the pool is never used"
    )
    _log.once(
        logging.WARNING,
        f"vllm-kvfix: {_releases.STOCK_SPEC} gives the scheduler {scheduler:,} chunks and the "
        f"worker {worker:,}, where {right:,} fit: {harm} (vLLM #39617). Write "
        f'"spec_name": "{SPEC_NAME}" in kv_connector_extra_config, or set KVFIX_STOCK_SPEC=1',
    )


def _answers(spec_class: Any, era: str) -> tuple[int, int]:
    """Chunks that ``spec_class`` makes of two small configs.

    Asked: two layers of one page in 300 rows' bytes, whose sum over layers the known bug counts
    right; and a group whose page is the sum of two layers' pages, which it counts twice.
    """
    one, two = 4096, 8192  # multiples of every row alignment
    equal = _small_spec(spec_class, era, page=one, layers=(one, one), budget=150 * 2 * one)
    ragged = _small_spec(spec_class, era, page=one + two, layers=(one, two), budget=100 * (one + two))
    return _releases.num_chunks(equal), _releases.num_chunks(ragged)


def _resize_one(spec_class: Any, era: str) -> None:
    """See that a spec takes another size: what is found out later would stop the engine."""
    spec = _small_spec(spec_class, era, page=4096, layers=(4096,), budget=4096)
    _releases.resize(spec, 7, 7 * 4096, 4096)
    if _releases.num_chunks(spec) != 7:
        raise TypeError(f"{_releases.STOCK_SPEC} keeps its number of chunks")


def _probe(spec_class: Any, extra_config: dict[str, int]) -> Any:
    """A subclass of ``spec_class`` of which only the constructor with the formula runs.

    The base's would log, and reads much more of vLLM's configuration: a stand-in comes before it.
    """

    def stand_in_init(self: Any, *args: Any) -> None:
        self.extra_config = extra_config
        self.gpu_block_size, self.offloaded_block_size = 16, 16 * _BLOCKS_PER_CHUNK
        self.block_size_factor = self.blocks_per_chunk = _BLOCKS_PER_CHUNK

    stand_in = type("_StandIn", (spec_class.__mro__[1],), {"__init__": stand_in_init})
    return type(spec_class.__name__, (spec_class, stand_in), {})


def _small_spec(spec_class: Any, era: str, page: int, layers: tuple[int, ...], budget: int) -> Any:
    """A spec with two blocks a chunk, on two ranks; ``budget`` (bytes) is for one block on one of them."""
    probe = _probe(spec_class, {"cpu_bytes_to_use": budget * _RANKS * _BLOCKS_PER_CHUNK})
    if era == _releases.TAKES_OFFLOADING_CONFIG:
        return probe(
            SimpleNamespace(
                worker_kv_bytes_per_block=sum(layers),
                groups=(),
                cache=SimpleNamespace(blocks_per_chunk=_BLOCKS_PER_CHUNK),
                parallel=SimpleNamespace(world_size=_RANKS, rank=0),
                model=SimpleNamespace(max_model_len=0),
                replicated_layout=False,
            )
        )
    num_blocks = 7
    return probe(
        SimpleNamespace(parallel_config=SimpleNamespace(world_size=_RANKS)),
        SimpleNamespace(
            num_blocks=num_blocks,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=page))],
            kv_cache_tensors=[SimpleNamespace(size=layer * num_blocks, block_stride=0) for layer in layers],
        ),
    )
