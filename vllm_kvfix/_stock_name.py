"""``KVFIX_STOCK_SPEC=1``: the stock spec name gives the fixed class.

For operators who write ``--kv-offloading-size`` only, which leaves no place for a ``spec_name``. The
variable may be set in EngineCore's process and not in a worker's (Ray copies few variables), and a
fixed scheduler over a stock worker would be the out-of-bounds store again. So EngineCore decides:
it stamps the KV cache configs that it sends, and a worker goes by the stamp, not by its variables.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from vllm_kvfix import _imports, _log, _releases
from vllm_kvfix._fix import in_place_of, original_of

_STAMP = "kvfix_stock_spec"
_FUNCTION = "get_kv_cache_configs"

_engine_core_asked: ContextVar[bool | None] = ContextVar("_engine_core_asked", default=None)


def asked() -> bool:
    """Whether the stock name shall give the fixed class, for the spec that is being made."""
    decided = _engine_core_asked.get()
    return os.environ.get("KVFIX_STOCK_SPEC", "0") == "1" if decided is None else decided


def carry() -> None:
    """In EngineCore: let every KV cache config that is planned carry the operator's wish."""
    if asked():
        if _releases.KV_CACHE_UTILS in sys.modules:
            _stamp_configs(sys.modules[_releases.KV_CACHE_UTILS])
        else:
            _imports.when_imported(_releases.KV_CACHE_UTILS, _stamp_configs)


@contextlib.contextmanager
def as_engine_core_decided(kv_cache_config: Any) -> Iterator[None]:
    """While a worker makes its spec of a config it was sent, go by the config's stamp."""
    decided = hasattr(kv_cache_config, _STAMP) if _log.in_helper() else None
    token = _engine_core_asked.set(decided)
    try:
        yield
    finally:
        _engine_core_asked.reset(token)


def restore() -> None:
    for module in _planners():
        planner = original_of(getattr(module, _FUNCTION, None))
        if planner is not None:
            setattr(module, _FUNCTION, planner)


def _planners() -> list[ModuleType]:
    """Modules that call the planner by a name of their own, as far as they are imported."""
    return [sys.modules[name] for name in _releases.PLANNER_CALLERS if name in sys.modules]


def _stamp_configs(module: ModuleType) -> None:
    planner = getattr(module, _FUNCTION, None)
    if planner is None or original_of(planner) is not None:
        return

    @in_place_of(planner)
    def plan_and_stamp(*args: Any, **kwargs: Any) -> Any:
        configs = planner(*args, **kwargs)
        for config in configs:
            setattr(config, _STAMP, True)
        return configs

    for caller in _planners():
        if getattr(caller, _FUNCTION, None) is planner:
            setattr(caller, _FUNCTION, plan_and_stamp)
