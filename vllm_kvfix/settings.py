"""The operator's settings for the offload pool: accepted as vLLM accepts them, or refused clearly.

Every refusal is a ``ValueError`` that names the setting, its value, and what to write instead.
Imports nothing of vLLM.
"""

from __future__ import annotations

import math
from typing import Any

_WHERE = "in kv_connector_extra_config"
_EXAMPLE = 'write for example "cpu_bytes_to_use": 34359738368 (32 GiB for the whole engine)'


def cpu_bytes_to_use(extra_config: Any) -> int:
    """The budget in bytes, for all ranks of the engine together.

    Accepts what ``int()`` accepts, as vLLM does (34359738368, 34359738368.0, "34359738368").

    Raises:
        ValueError: missing, not a number, NaN, infinite, zero or negative, or beyond any address.
    """
    value = extra_config.get("cpu_bytes_to_use")
    if value is None:
        raise ValueError(f"cpu_bytes_to_use is missing {_WHERE}: {_EXAMPLE}")
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError
        budget = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"cpu_bytes_to_use={value!r} {_WHERE} is not a number of bytes: {_EXAMPLE}") from None
    if not 0 < budget < 1 << 63:
        raise ValueError(f"cpu_bytes_to_use={value!r} {_WHERE} must be above zero and below 2**63: {_EXAMPLE}")
    return budget


def check_block_size(extra_config: Any, gpu_block_size: int) -> None:
    """Refuse a ``block_size`` (tokens of one chunk) that is no multiple of the GPU block size.

    Raises:
        ValueError: not a whole number of GPU blocks of ``gpu_block_size`` tokens, at least one.
    """
    value = extra_config.get("block_size")
    if value is None:
        return
    try:
        tokens = int(value)
    except (TypeError, ValueError, OverflowError):
        tokens = 0
    if tokens <= 0 or tokens % gpu_block_size:
        right = max(1, round(tokens / gpu_block_size)) * gpu_block_size
        raise ValueError(
            f"block_size={value!r} {_WHERE} is no multiple of the GPU block size "
            f'({gpu_block_size} tokens): write for example "block_size": {right}, or leave it out'
        )


def below_one_row(budget: int, row: int, ranks: int) -> str:
    """Message for a budget (bytes) that does not hold one chunk on all ranks."""
    return (
        f"cpu_bytes_to_use={budget} {_WHERE} holds no chunk: one chunk on {ranks} rank(s) takes "
        f'{row} bytes; write "cpu_bytes_to_use": {row} at the least'
    )


def human(size: int) -> str:
    """``size`` bytes in the largest unit that leaves at least one."""
    for unit, exponent in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << exponent:
            return f"{size / (1 << exponent):.2f} {unit}"
    return f"{size} byte{'' if size == 1 else 's'}"
