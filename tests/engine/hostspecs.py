"""Offloading specs that only the tests use: what the shipped one must not be.

vLLM finds them by ``spec_module_path``. Both copy in host memory by the shipped code, so that each differs from
``FixedCPUOffloadingSpec`` in one thing only.
"""

from __future__ import annotations

from typing import Any

from vllm_kvfix import hostcopy
from vllm_kvfix.spec import FixedCPUOffloadingSpec


class StockFormulaSpec(FixedCPUOffloadingSpec.__base__):
    """The numbers are vLLM's own. Stock itself refuses to copy on the CPU platform."""

    _host_pool: hostcopy.HostPool | None = None
    _host_copies = FixedCPUOffloadingSpec._host_copies
    get_handlers = FixedCPUOffloadingSpec.get_handlers  # to 0.24.0
    get_worker = FixedCPUOffloadingSpec.get_worker  # from 0.25.0

    def _preflight(self) -> None:
        """Stock looks at nothing."""


class ZeroLoadsSpec(FixedCPUOffloadingSpec):
    """What is loaded is zeros: answers must change, or comparing them shows nothing."""

    def _host_copies(self, *kv_caches: Any) -> hostcopy.HostPool:
        pool = super()._host_copies(*kv_caches)
        pool.__class__ = _ZeroLoads
        return pool


class _ZeroLoads(hostcopy.HostPool):
    def copy(self, direction: tuple[str, str], kv_side: Any, pool_side: Any) -> int:
        copied = super().copy(direction, kv_side, pool_side)
        if direction == ("CPU", "GPU"):
            for rows in self.rows:
                rows[kv_side.block_ids] = 0
        return copied
