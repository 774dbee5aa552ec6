"""What is expected of each release, and of stock where it is wrong."""

from __future__ import annotations

from typing import Any

from engines import RELEASES
from scenarios import BLOCKS

# https://github.com/vllm-project/vllm/pull/39617
POOL_SIZE_IS_WRONG = RELEASES[: RELEASES.index("0.19.1") + 1]
# https://github.com/vllm-project/vllm/pull/52921
SIMPLE_OFFLOAD_IS_ABSENT = RELEASES[: RELEASES.index("0.19.0")]
# https://github.com/vllm-project/vllm/pull/48317
CONCURRENCY_IS_WRONG = RELEASES[: RELEASES.index("0.26.0") + 1]


def check_it_dies_as_stock_does(run: dict[str, Any]) -> None:
    """The scheduler hands out chunk ids up to 14, the worker has 0 to 5; the fourth prompt's store names 6 and 7."""
    assert run["gpu_blocks"] == BLOCKS
    assert run["scheduler"] == {"chunks": 15}
    assert run["ranks"][0]["chunks"] == 6
    assert run["error"] is not None and run["error"].startswith("AssertionError")
    assert "Exception in ('GPU', 'CPU') transfer 3: PoolBoundsError(" in run["log"]
    assert "chunk ids [6, 7] are out of bounds for 6 chunks" in run["log"]
    assert "assert success" in run["log"]
    assert (run["stored"], run["loaded"]) == (6, 0)
