"""Size of the CPU offload pool. Pure arithmetic: imports nothing.

Words: a *block* is what vLLM's GPU block ids name; a *chunk* is what the CPU pool's ids name, one
or more blocks; a *row* is one chunk on all ranks. ``N`` chunks must mean the same in the scheduler
and on every rank, so everything here starts from the bytes of **all** ranks.
"""

from __future__ import annotations


def bytes_per_block(kv_bytes: int, num_blocks: int) -> int:
    """KV bytes that one rank keeps for one GPU block, over all its layers.

    Args:
        kv_bytes: bytes of all KV cache tensors of the rank.
        num_blocks: GPU blocks they hold; 0 (no KV cache) gives 0.

    Source: https://github.com/vllm-project/vllm/pull/39617
    """
    return kv_bytes // num_blocks if num_blocks > 0 else 0


def row_bytes(rank_bytes: tuple[int, ...], blocks_per_chunk: int, alignment: int = 1) -> int:
    """Bytes of one chunk on all ranks, rounded up to ``alignment`` bytes.

    Args:
        rank_bytes: bytes of one GPU block on each rank that keeps a copy of its own.
        blocks_per_chunk: GPU blocks in one chunk.
        alignment: bytes; 1 up to vLLM 0.26.0, 4096 from 0.27.0.
    """
    unaligned = sum(rank_bytes) * blocks_per_chunk
    return -(-unaligned // alignment) * alignment


def slots(rank_bytes: tuple[int, ...], blocks_per_chunk: int) -> tuple[int, ...]:
    """Byte offset of each rank's slot in a row that holds one slot a rank, each of its own size.

    Slots of whole 8-byte words come first and begin at one: vLLM's kernel for small loads (0.27.0) reads
    words on such a rank, whatever the bytes of the others.

    Args:
        rank_bytes: bytes of one GPU block on each rank.
        blocks_per_chunk: GPU blocks in one chunk.
    """
    sizes = [size * blocks_per_chunk for size in rank_bytes]
    offsets, end = [0] * len(sizes), 0
    for rank in sorted(range(len(sizes)), key=lambda rank: sizes[rank] % 8 != 0):
        offsets[rank] = end
        end += sizes[rank]
    return tuple(offsets)


def num_chunks(budget: int, row: int) -> int:
    """Chunks of ``row`` bytes in ``budget`` bytes: never above it, less than one row left over."""
    return budget // row if row > 0 else 0


def tokens(blocks: int, tokens_per_block: tuple[int, ...]) -> int:
    """Tokens in ``blocks`` blocks at the most; each KV cache group of a hybrid model takes blocks of its own.

    Args:
        tokens_per_block: of each KV cache group; none without KV.
    """
    return blocks // len(tokens_per_block) * min(tokens_per_block) if tokens_per_block else 0


def stock_num_chunks(budget: int, page_bytes: int, num_tensors: int, world_size: int, blocks_per_chunk: int) -> int:
    """What vLLM 0.14.0-0.19.1 computes, for comparison only.

    Args:
        page_bytes: ``page_size_bytes`` of the KV cache group. A worker sees the sum over the
            group's layers when they differ, the scheduler sees the first layer's.
        num_tensors: KV cache tensors of one rank.
    """
    return num_chunks(budget, page_bytes * num_tensors * world_size * blocks_per_chunk)
