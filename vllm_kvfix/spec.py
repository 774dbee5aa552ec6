"""``FixedCPUOffloadingSpec``: the installed ``CPUOffloadingSpec`` with a pool of the right size.

Operators choose it by name in ``kv_connector_extra_config``. Everything but the size, and the copies
on the CPU platform, is inherited. Scheduler and workers compute the size from the same setting and the
same bytes, those of all ranks, by the same formula; no environment variable changes it.

Source of the formula: https://github.com/vllm-project/vllm/pull/39617; of several ranks' bytes: none
upstream, https://github.com/vllm-project/vllm/issues/50821 is open.
"""

from __future__ import annotations

import collections
import copy
import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm.platforms import current_platform

from vllm_kvfix import (
    _log,
    _pool_command,
    _ranks,
    _releases,
    _stock_name,
    guard,
    hostcopy,
    metrics,
    pool,
    preflight,
    region,
    settings,
)
from vllm_kvfix._fix import AFFECTED, disabled_words
from vllm_kvfix.fixes import offload_pool_size

_Stock = _releases.stock_spec_class()
_ERA = _releases.spec_era(_Stock)
_VERDICT = offload_pool_size.recognise(_Stock)
_AFFECTED = _VERDICT.word == AFFECTED


class FixedCPUOffloadingSpec(_Stock):  # type: ignore[misc,valid-type]  # what is installed
    """vLLM's CPU offloading spec, sized from the bytes that all KV cache tensors really take.

    Args:
        config: ``VllmConfig`` to 0.25.1, ``OffloadingConfig`` from 0.26.0.
        kv_cache_config: ``KVCacheConfig``, of a worker or of the scheduler, 0.14.0-0.25.1.

    Raises:
        ValueError: a setting in ``kv_connector_extra_config`` that cannot be; the message names it,
            its value and what to write. Raised before any memory is taken.
    """

    def __init__(self, config: Any, kv_cache_config: Any = None, *more: Any, **named: Any) -> None:
        if _ERA is None or more or named:
            raise RuntimeError(
                f"{offload_pool_size.SPEC_NAME} does not know this vLLM: {_VERDICT}; take spec_name back"
            )
        if {"all", offload_pool_size.ID} & disabled_words():  # chosen by spec_module_path all the same
            raise ValueError(
                f"KVFIX_DISABLE={os.environ['KVFIX_DISABLE']!r} turns {offload_pool_size.ID} off, but "
                f"spec_name={offload_pool_size.SPEC_NAME!r} in kv_connector_extra_config asks for it: take "
                "back one of them"
            )
        self._host_pool: hostcopy.HostPool | None = None
        self._slot: int | None = None  # byte offset of this rank in a row, where ranks differ
        if _ERA == _releases.TAKES_NUM_CPU_BLOCKS:
            super().__init__(config)
            _log.once(
                logging.INFO,
                f"vllm-kvfix: CPU pool of {self.num_cpu_blocks} chunks a rank, as num_cpu_blocks "
                f"says; vLLM {_releases.vllm_version()} has no pool size to repair",
            )
        elif _ERA == _releases.TAKES_OFFLOADING_CONFIG:
            budget = _checked_budget(config.extra_config)
            for group in config.groups:
                settings.check_block_size(config.extra_config, group.tokens_per_block)
            super().__init__(config)
            copies = 1 if getattr(self, "replicated_layout", False) else config.parallel.world_size
            own_bytes = config.worker_kv_bytes_per_block
            rank_bytes = self._rank_bytes(config, own_bytes, copies, config.parallel.pp_size)
            if self._ranks_differ:
                self._resize(config, budget, rank_bytes, own_bytes)
            self._check_and_say(budget, rank_bytes)
            self._say_mla_copies(config)
        else:
            self._init_from_kv_cache_config(config, kv_cache_config)

    def _init_from_kv_cache_config(self, config: Any, kv_cache_config: Any) -> None:
        extra_config = config.kv_transfer_config.kv_connector_extra_config
        budget = _checked_budget(extra_config)
        for group in kv_cache_config.kv_cache_groups:
            settings.check_block_size(extra_config, group.kv_cache_spec.block_size)
        try:
            super().__init__(config, _as_stock_takes_it(config, kv_cache_config))
        except AssertionError as error:
            # From 0.21.0 a block holds the tokens of all context-parallel ranks, and vLLM asserts without a word.
            if not str(error) and extra_config.get("block_size") is not None:
                settings.check_block_size(extra_config, _tokens_of_all_ranks(config, kv_cache_config))
            raise
        self.kv_cache_config = kv_cache_config
        world_size = config.parallel_config.world_size
        own_bytes = _releases.kv_bytes_per_block(kv_cache_config)
        stages = config.parallel_config.pipeline_parallel_size
        rank_bytes = self._rank_bytes(kv_cache_config, own_bytes, world_size, stages)
        stock = None
        if _AFFECTED:
            factor = _releases.blocks_per_chunk(self)
            stock = offload_pool_size.stock_numbers(budget, kv_cache_config, world_size, factor)
        if _AFFECTED or self._ranks_differ:
            self._resize(kv_cache_config, budget, rank_bytes, own_bytes)
        self._check_and_say(budget, rank_bytes, stock)

    def _rank_bytes(self, config: Any, own: int, copies: int, stages: int) -> tuple[int, ...]:
        """KV bytes of one GPU block on each rank that keeps a copy; ``own`` is what this config says.

        Args:
            config: ``KVCacheConfig`` or ``OffloadingConfig``, which EngineCore may have stamped.
            copies: ranks that keep a copy.
            stages: pipeline stages.

        Raises:
            RuntimeError: this rank keeps something else than EngineCore planned for it.
            ValueError: each stage has a scheduler of its own.
        """
        ranks = _ranks.of(config)
        if ranks is not None and stages > 1 and len(ranks.bytes) == 1:
            message = (
                f"{stages} pipeline stages, each with a scheduler of its own (external_launcher), which cannot "
                "know the KV bytes of the others: their CPU pools would differ where the stages do"
            )
            if not _chosen_by_stock_name(self.extra_config):
                raise ValueError(f"{message}. Write --pipeline-parallel-size 1, or take spec_name back")
            _log.once(logging.WARNING, f"vllm-kvfix: {message}")
        if ranks is None:
            _say_ranks_are_unknown(copies, stages)
            return (own,) * copies
        if not ranks.differ:
            return (own,) * copies
        if len(ranks.bytes) != copies or ranks.bytes[ranks.rank] != own:
            raise RuntimeError(
                f"{offload_pool_size.SPEC_NAME}: rank {ranks.rank} of {copies} keeps {own} KV bytes a block, and "
                f"EngineCore planned {', '.join(map(str, ranks.bytes))} for all: their CPU pools would differ, and "
                "stores would be out of bounds. Run the same vLLM and the same plugins on every node, or take "
                "spec_name back"
            )
        self._slot = pool.slots(ranks.bytes, _releases.blocks_per_chunk(self))[ranks.rank]
        return ranks.bytes

    @property
    def _ranks_differ(self) -> bool:
        return self._slot is not None

    def _resize(self, stamped: Any, budget: int, rank_bytes: tuple[int, ...], own: int) -> None:
        """Size the pool for what all ranks keep, otherwise than stock; bytes are those of one GPU block.

        Raises:
            RuntimeError: we stand behind the stock name here and not in EngineCore.
        """
        if _chosen_by_stock_name(self.extra_config):
            _stock_name.refuse_disagreement(stamped, fixed=True)
        row = self._row(rank_bytes)
        _releases.resize(self, pool.num_chunks(budget, row), row, own * _releases.blocks_per_chunk(self))

    def _check_and_say(self, budget: int, rank_bytes: tuple[int, ...], stock: tuple[int, int] | None = None) -> None:
        """Refuse a pool that is not the budget's (bytes), or under one row; say what it is, once."""
        chunks, factor = _releases.num_chunks(self), _releases.blocks_per_chunk(self)
        row = self._row(rank_bytes)
        made = _releases.row_bytes(self)
        if made not in (None, row) or chunks != pool.num_chunks(budget, row):
            raise RuntimeError(
                f"{offload_pool_size.SPEC_NAME} does not know the {_releases.STOCK_SPEC} of this vLLM "
                f"({_VERDICT}): it makes {chunks} chunks of {made or '?'} bytes, where {row} bytes are needed "
                f"and {budget} are given. Take spec_name back, and see whose code changed it"
            )
        if row and not chunks:
            message = settings.below_one_row(budget, row, len(rank_bytes))
            if not _chosen_by_stock_name(self.extra_config):
                raise ValueError(message)
            _log.once(logging.WARNING, f"vllm-kvfix: nothing will be offloaded: {message}")
        slots = tuple(size * factor for size in rank_bytes)
        self._pool = preflight.Pool(budget, chunks, row, slots, preflight.memory())
        used, tokens_per_block = chunks * row, _releases.tokens_per_block(self)
        tokens = pool.tokens(chunks * factor, tokens_per_block)
        parts = [
            f"{n} rank(s) x {settings.human(size * factor)}" for size, n in collections.Counter(rank_bytes).items()
        ]
        text = (
            f"vllm-kvfix: CPU pool of {chunks:,} chunks, {' + '.join(parts)} each: "
            f"{settings.human(used)}, {100 * used / budget:.1f}% of "
            f"the {settings.human(budget)} in cpu_bytes_to_use, up to {tokens:,} tokens"
        )
        workers = f"worker {stock[1]:,}" if stock else ""
        if self._ranks_differ:
            alone = [pool.num_chunks(budget, self._row((size,) * len(rank_bytes))) for size in rank_bytes]
            if stock is None or (stock[0] == alone[0] and stock[1] in alone):
                stock, workers = (alone[0], min(alone)), f"ranks {min(alone):,} to {max(alone):,}"
        if stock is not None and stock != (chunks, chunks):
            text += (
                f"; stock vLLM {_releases.vllm_version()} would give the scheduler {stock[0]:,} "
                f"chunks and the {workers}"
            )
        again = _pool_command.arguments(rank_bytes, budget, factor, tokens_per_block, _releases.row_alignment(self))
        _log.once(logging.INFO, f"{text}; counted by: {again}")
        metrics.tell(pool={"chunks": chunks, "bytes": used, "budget_bytes": budget, "ranks": len(rank_bytes)})

    def _row(self, rank_bytes: tuple[int, ...]) -> int:
        """Bytes of one chunk on ranks that keep so many bytes of one GPU block."""
        return pool.row_bytes(rank_bytes, _releases.blocks_per_chunk(self), _releases.row_alignment(self))

    def _say_mla_copies(self, config: Any) -> None:
        """On CUDA, vLLM keeps one copy of MLA KV for all ranks (0.27.0); the CPU platform does not."""
        copies = config.parallel.world_size
        if current_platform.is_cpu() and copies > 1 and getattr(config, "replicated_layout", False):
            _log.once(
                logging.INFO,
                f"vllm-kvfix: the CPU platform keeps {copies} copies of this model's KV, one a rank; "
                f"CUDA keeps one, and has about {copies} times as many chunks",
            )

    def get_handlers(self, kv_caches: Any, *attn_backends: Any) -> Iterator[Any]:
        """Worker side, to 0.24.0. Copies are vLLM's own, except on the CPU platform; chunk ids are checked."""
        if _ERA == _releases.TAKES_NUM_CPU_BLOCKS:
            return iter(super().get_handlers(kv_caches, *attn_backends))
        self._preflight()
        if current_platform.is_cpu():
            return hostcopy.handlers(self._host_copies(kv_caches, *attn_backends))
        handlers = super().get_handlers(kv_caches, *attn_backends)
        return guard.guarded_handlers(handlers, _releases.num_chunks(self), _releases.rank(self))

    def get_worker(self, kv_caches: Any) -> Any:
        """Worker side, from 0.25.0. Copies are vLLM's own, except on the CPU platform; chunk ids are checked."""
        self._preflight()
        if current_platform.is_cpu():
            return hostcopy.worker(self._host_copies(kv_caches))
        return guard.guarded_worker(super().get_worker(kv_caches), _releases.num_chunks(self), _releases.rank(self))

    def _preflight(self) -> None:
        preflight.check(self, self._pool, stop=not _chosen_by_stock_name(self.extra_config))

    def create_worker(self, kv_caches: Any) -> Any:
        """Called by vLLM from 0.25.0. In memory that ranks share, each has a slot of its own size."""
        if self._slot is None:  # ranks are alike
            return super().create_worker(kv_caches)
        with region.slots(sys.modules[_Stock.__module__], self._slot, self.cpu_page_size_per_worker):
            return super().create_worker(kv_caches)

    def _host_copies(self, kv_caches: Any, *attn_backends: Any) -> hostcopy.HostPool:
        if self._host_pool is None:
            self._host_pool = hostcopy.HostPool(
                *hostcopy.block_rows(kv_caches, *attn_backends),
                num_chunks=_releases.num_chunks(self),
                blocks_per_chunk=_releases.blocks_per_chunk(self),
                rank=_releases.rank(self),
            )
        return self._host_pool


def _chosen_by_stock_name(extra_config: Any) -> bool:
    """Whether KVFIX_STOCK_SPEC chose us: then a pool of no chunks is a WARNING, as stock starts with it."""
    return bool(extra_config.get("spec_name", _releases.STOCK_SPEC) == _releases.STOCK_SPEC)


def _checked_budget(extra_config: Any) -> int:
    if extra_config.get("secondary_tiers") and not _chosen_by_stock_name(extra_config):
        raise ValueError(
            f"secondary_tiers={extra_config['secondary_tiers']!r} in kv_connector_extra_config "
            f"would be ignored by {offload_pool_size.SPEC_NAME}: leave it out, or write "
            '"spec_name": "TieringOffloadingSpec", which vLLM has from 0.22.0'
        )
    return settings.cpu_bytes_to_use(extra_config)


def _say_ranks_are_unknown(copies: int, stages: int) -> None:
    if stages > 1:
        _log.once(
            logging.WARNING,
            f"vllm-kvfix: {stages} pipeline stages, and EngineCore did not say what KV bytes each keeps: where "
            "they differ, the scheduler and the ranks count different pools "
            "(https://github.com/vllm-project/vllm/issues/50821); keep stages equal",
        )
    elif copies > 1:
        _log.once(logging.DEBUG, f"vllm-kvfix: taking all {copies} ranks to keep the same KV bytes")


def _as_stock_takes_it(config: Any, kv_cache_config: Any) -> Any:
    """The config in a form that the stock constructor accepts; its size is not used where wrong.

    0.14.0-0.19.1 assert one page size over all groups, which several groups and attention-free
    models do not have; 0.23.0-0.25.1 divide by zero when there are blocks but no bytes.
    """
    seen = copy.copy(kv_cache_config)
    if _AFFECTED:
        block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        seen.kv_cache_groups = [
            SimpleNamespace(layer_names=[], kv_cache_spec=SimpleNamespace(block_size=size, page_size_bytes=1))
            for size in block_sizes or [config.cache_config.block_size]
        ]
    if not _releases.kv_bytes(kv_cache_config):
        seen.num_blocks = 0
    return seen


def _tokens_of_all_ranks(config: Any, kv_cache_config: Any) -> int:
    """Tokens of one GPU block of the first KV cache group, on all context-parallel ranks together."""
    parallel = config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size * ranks)
