"""How many requests of full length the KV cache holds at once. Pure arithmetic: imports nothing.

Source: https://github.com/vllm-project/vllm/pull/48317
"""

from __future__ import annotations


def blocks_per_request(groups: list[tuple[int, int]]) -> int:
    """Blocks that one request takes from the pool, which all KV cache groups share.

    Args:
        groups: for each group, the bytes of one request at ``max_model_len`` and the bytes of one
            page (one block of the group). The ratio is the same whether a group carries the sum
            over its layers (worker) or one layer (scheduler). A group with no page takes nothing.
    """
    return sum(-(-request // page) for request, page in groups if page > 0)


def max_concurrency(num_blocks: int, request_blocks: int) -> float:
    """Requests of full length that ``num_blocks`` hold; 0.0 when a request takes no block.

    0.0 and not infinity: vLLM formats the number and turns it into a whole number of tokens.
    """
    return num_blocks / request_blocks if request_blocks > 0 else 0.0
