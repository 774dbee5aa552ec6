"""What EngineCore tells the scheduler and every worker, by the KV cache configs that it sends them.

Each process computes the CPU pool for itself. What only EngineCore knows must travel, and attributes
on ``KVCacheConfig`` do: through pickle, cloudpickle and ``deepcopy``, to wherever the config goes. They
are plain values, so that a process without this plugin can unpickle them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vllm_kvfix import _bound, _log, _releases
from vllm_kvfix._fix import in_place_of, one_line

PLANNER = "get_kv_cache_configs"
PREFIX = "kvfix_"  # of every attribute that is stamped

Stamp = Callable[[Any, Sequence[Any]], None]
"""Given the ``VllmConfig``, sets attributes on the ``KVCacheConfig`` of each rank, in their order."""

_stamps: dict[str, Stamp] = {}


def on_every_plan(name: str, stamp: Stamp) -> None:
    """Have the planner stamp what it plans, wherever it is called from now on."""
    _stamps[name] = stamp
    _bound.replace_in_all(_releases.PLANNER_CALLERS, _releases.PLANNER_MODULES, _replace_in)


def forget(name: str) -> None:
    """Stop stamping; vLLM's own planner is put back when nothing else is stamped."""
    _stamps.pop(name, None)
    if not _stamps:
        _bound.put_back(_releases.PLANNER_CALLERS, PLANNER, _replace_in)


def _replace_in(module: ModuleType) -> None:
    _bound.replace(module, PLANNER, _stamping)


def _stamping(planner: Any) -> Any:
    @in_place_of(planner)
    def plan_and_stamp(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        configs = planner(vllm_config, *args, **kwargs)
        for name, stamp in _stamps.items():
            try:
                stamp(vllm_config, configs)
            except Exception as error:
                _log.once(logging.WARNING, f"vllm-kvfix: workers cannot be told of {name} ({one_line(error)})")
        return configs

    return plan_and_stamp
