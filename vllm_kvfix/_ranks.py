"""The KV bytes of all ranks, known to the scheduler and to every rank.

Symptom: under pipeline parallelism, with stages of different layers or a draft model on the last one,
an out-of-bounds copy or a crash at the first store past a rank's pool; or more host memory taken than
``cpu_bytes_to_use``. From 0.27.0, on CUDA, ranks write into each other's part of the shared memory.
Cause: stock sizes the scheduler's pool from rank 0's KV tensors, and each rank's from its own.
Upstream: https://github.com/vllm-project/vllm/issues/50821, open; 0.14.0-0.33.0.
Cure: only EngineCore sees the KV cache configs of all workers. It stamps on each of them what all ranks
keep for one GPU block; ``FixedCPUOffloadingSpec`` reads it, in whatever form its config arrives. Where
ranks are alike, stock's numbers are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from vllm_kvfix import _bound, _log, _releases, _stamp
from vllm_kvfix._fix import in_place_of, one_line

_NAME = "the KV bytes of all ranks"
_BYTES, _RANK = "kvfix_rank_bytes", "kvfix_rank"
BUILDER = "build_offloading_config"

_users: set[str] = set()


class Ranks(NamedTuple):
    """KV bytes of one GPU block on each rank of the engine, and which of them a config is for.

    The scheduler's config is a copy of rank 0's.
    """

    bytes: tuple[int, ...]
    rank: int

    @property
    def differ(self) -> bool:
        return len(set(self.bytes)) > 1


def tell(user: str) -> None:
    """In EngineCore: tell each rank of all; and everywhere: let its spec hear it. ``user`` is a fix id."""
    _users.add(user)
    _stamp.on_every_plan(_NAME, _tell_each)
    _bound.replace_in_all(_releases.BUILDER_CALLERS, (_releases.OFFLOADING_CONFIG,), _carry_in)


def forget(user: str) -> None:
    """When no fix needs them any more, put vLLM's own planner and builder back."""
    _users.discard(user)
    if _users:
        return
    _stamp.forget(_NAME)
    _bound.put_back(_releases.BUILDER_CALLERS, BUILDER, _carry_in)


def _tell_each(vllm_config: Any, kv_cache_configs: Sequence[Any]) -> None:
    if any(getattr(config, "hisparse_host_num_blocks", None) is not None for config in kv_cache_configs):
        return  # what is offloaded then is not all KV, and vLLM counts it otherwise (0.30.0)
    rank_bytes = tuple(_releases.kv_bytes_per_block(config) for config in kv_cache_configs)
    for rank, config in enumerate(kv_cache_configs):
        setattr(config, _BYTES, rank_bytes)
        setattr(config, _RANK, rank)


def of(config: Any) -> Ranks | None:
    """What EngineCore said, on a ``KVCacheConfig`` or an ``OffloadingConfig``; None if nothing."""
    if not hasattr(config, _BYTES):
        return None
    return Ranks(tuple(getattr(config, _BYTES)), int(getattr(config, _RANK)))


def _carry_in(module: ModuleType) -> None:
    _bound.replace(module, BUILDER, _carrying)


def _carrying(builder: Any) -> Any:
    """From 0.26.0 the spec sees an ``OffloadingConfig`` only: put on it what is stamped on the ``KVCacheConfig``."""

    @in_place_of(builder)
    def build_and_carry(vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        config = builder(vllm_config, kv_cache_config, *args, **kwargs)
        try:
            for name, value in vars(kv_cache_config).items():
                if name.startswith(_stamp.PREFIX):
                    object.__setattr__(config, name, value)  # it is frozen
        except Exception as error:
            _log.once(logging.WARNING, f"vllm-kvfix: the spec cannot be told of {_NAME} ({one_line(error)})")
        return config

    return build_and_carry
