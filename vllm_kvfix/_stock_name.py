"""``KVFIX_STOCK_SPEC=1``: the stock spec name gives the fixed class.

For operators who write ``--kv-offloading-size`` only, which leaves no place for a ``spec_name``. The
variable may be set in EngineCore's process and not in a worker's (Ray copies few variables), and a
fixed scheduler over a stock worker would be the out-of-bounds store again. So EngineCore stamps the
KV cache configs that it sends, and a worker whose own variable says otherwise refuses to start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from vllm_kvfix import _log, _stamp

_STAMP = "kvfix_stock_spec"


def asked() -> bool:
    """Whether the operator wants the stock name to give the fixed class."""
    value = os.environ.get("KVFIX_STOCK_SPEC", "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        _log.once(logging.WARNING, f"vllm-kvfix: KVFIX_STOCK_SPEC={value!r} does nothing; write 1")
    return value in ("1", "true", "yes", "on")


def stamp_configs() -> None:
    """In EngineCore: stamp every KV cache config that is planned, if the operator asked."""
    if asked():
        _stamp.on_every_plan("KVFIX_STOCK_SPEC", _stamp_configs)


def _stamp_configs(vllm_config: Any, configs: Sequence[Any]) -> None:
    for config in configs:
        setattr(config, _STAMP, True)


def restore() -> None:
    _stamp.forget("KVFIX_STOCK_SPEC")


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
        "with Ray, from vLLM 0.17.0, also VLLM_RAY_EXTRA_ENV_VARS_TO_COPY=KVFIX_STOCK_SPEC. If it is, "
        f"another plugin has replaced {_stamp.PLANNER}: write spec_name instead"
    )
