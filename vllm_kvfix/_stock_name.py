"""``KVFIX_STOCK_SPEC=1``: the stock spec name gives the fixed class.

For operators who write ``--kv-offloading-size`` only, which leaves no place for a ``spec_name``. The
variable may be set in EngineCore's process and not in a worker's (Ray copies few variables), and a
fixed scheduler over a stock worker would be the out-of-bounds store again. So EngineCore stamps the
KV cache configs that it sends, and a worker whose own variable says otherwise refuses to start.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from vllm_kvfix import _imports, _log, _releases
from vllm_kvfix._fix import in_place_of, original_of

_STAMP = "kvfix_stock_spec"
_PLANNER = "get_kv_cache_configs"


def asked() -> bool:
    """Whether the operator wants the stock name to give the fixed class."""
    value = os.environ.get("KVFIX_STOCK_SPEC", "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def carry() -> None:
    """In EngineCore: stamp every KV cache config that is planned, if the operator asked."""
    if asked():
        _imports.when_imported(_releases.KV_CACHE_UTILS, _stamp_configs)


def restore() -> None:
    for module in _callers():
        planner = original_of(getattr(module, _PLANNER, None))
        if planner is not None:
            setattr(module, _PLANNER, planner)


def refuse_disagreement(kv_cache_config: Any, fixed: bool) -> None:
    """In a worker that was given the stock name: go with EngineCore, or not at all.

    Args:
        kv_cache_config: as EngineCore sent it.
        fixed: whether this worker's spec is the fixed one.

    Raises:
        RuntimeError: EngineCore's scheduler counts another number of chunks than this worker.
    """
    if not _log.in_helper() or hasattr(kv_cache_config, _STAMP) == fixed:
        return
    one, other = ("this worker", "EngineCore") if fixed else ("EngineCore", "this worker")
    raise RuntimeError(
        f"KVFIX_STOCK_SPEC is set in {one} and not in {other}: their CPU pools would differ, and "
        "stores would be out of bounds. Set KVFIX_STOCK_SPEC=1 in the environment of every node; "
        "with Ray, from vLLM 0.17.0, also VLLM_RAY_EXTRA_ENV_VARS_TO_COPY=KVFIX_STOCK_SPEC"
    )


def _callers() -> list[ModuleType]:
    """Modules that call the planner by a name of their own, as far as they are imported."""
    return [sys.modules[name] for name in _releases.PLANNER_CALLERS if name in sys.modules]


def _stamp_configs(module: ModuleType) -> None:
    planner = getattr(module, _PLANNER, None)
    if planner is None or original_of(planner) is not None:
        return

    @in_place_of(planner)
    def plan_and_stamp(*args: Any, **kwargs: Any) -> Any:
        configs = planner(*args, **kwargs)
        for config in configs:
            setattr(config, _STAMP, True)
        return configs

    for caller in _callers():
        if getattr(caller, _PLANNER, None) is planner:
            setattr(caller, _PLANNER, plan_and_stamp)
