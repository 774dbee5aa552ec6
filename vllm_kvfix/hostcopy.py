"""Block copies in host memory, for the CPU platform only, where stock vLLM refuses to offload.

With them a configuration can be rehearsed on a machine without a GPU: the scheduler, the pool's
size and the block ids are the real ones, only the copy is a plain one. On CUDA, ROCm and XPU
nothing here runs. Copies are done when submitted: the CPU platform has no streams to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvfix import _releases, guard
from vllm_kvfix.guard import LOAD, STORE


class HostPool:
    """One rank's CPU pool, and the copies between it and the KV cache.

    Args:
        rows: KV cache tensors as int8, each of shape ``(num_blocks, page_bytes)``.
        groups: for each KV cache group the indices of its tensors in ``rows``.
        num_chunks: chunks in the pool; chunk ids are ``0 .. num_chunks - 1``.
        blocks_per_chunk: blocks in one chunk.
        rank: of the worker, to be named in an error.
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        groups: Sequence[Sequence[int]],
        num_chunks: int,
        blocks_per_chunk: int,
        rank: int | None = None,
    ) -> None:
        self.rows, self.groups, self.rank = rows, groups, rank
        self.num_chunks, self.blocks_per_chunk = num_chunks, blocks_per_chunk
        self.pool = [torch.zeros((num_chunks * blocks_per_chunk, page.shape[1]), dtype=torch.int8) for page in rows]

    def copy(self, direction: tuple[str, str], kv_side: Any, pool_side: Any) -> int:
        """Store or load the blocks of one transfer; returns the bytes copied.

        Args:
            direction: ``STORE`` or ``LOAD``.
            kv_side: names blocks, per group where the release has ``group_sizes``.
            pool_side: names chunks, of which each group's first and last may be used in part.

        Raises:
            PoolBoundsError: a chunk outside the pool; nothing is copied.
            IndexError: a block outside the KV cache, or sides that do not match; nothing is copied.
        """
        guard.check(direction, pool_side.block_ids, self.num_chunks, self.rank)
        self._check_blocks(direction, kv_side.block_ids)
        transfers = list(self._transfers(direction, kv_side, pool_side))
        copied = 0
        for tensors, blocks, slots in transfers:
            for i in tensors:
                if direction == STORE:
                    self.pool[i][slots] = self.rows[i][blocks]
                else:
                    self.rows[i][blocks] = self.pool[i][slots]
                copied += len(blocks) * self.rows[i].shape[1]
        return copied

    def _transfers(
        self, direction: tuple[str, str], kv_side: Any, pool_side: Any
    ) -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
        """For each group: its tensors, its blocks, and the pool slots (block-sized) of those."""
        blocks, chunks, factor = kv_side.block_ids, pool_side.block_ids, self.blocks_per_chunk
        sizes = getattr(kv_side, "group_sizes", None)  # from 0.19.0
        sizes = [len(blocks)] if sizes is None else sizes
        first = getattr(kv_side, "block_indices", None)  # 0.19.0-0.20.2: for loads only
        if first is None:  # stores begin at a chunk; loads end at one, and may begin inside
            first = [-len(blocks) % factor if direction == LOAD else 0] * len(sizes)
        block_offset = chunk_offset = 0
        for tensors, size, index in zip(self.groups, sizes, first):
            if size == 0:
                continue
            skip = index % factor
            num_chunks = -(-(size + skip) // factor)
            group_chunks = chunks[chunk_offset : chunk_offset + num_chunks]
            slots = (group_chunks[:, None] * factor + np.arange(factor)).reshape(-1)
            yield (
                tensors,
                torch.from_numpy(blocks[block_offset : block_offset + size]),
                torch.from_numpy(slots[skip : skip + size].copy()),
            )
            block_offset, chunk_offset = block_offset + size, chunk_offset + num_chunks
        if (block_offset, chunk_offset) != (len(blocks), len(chunks)):
            guard.refuse(
                IndexError(
                    f"a transfer of {len(blocks)} blocks and {len(chunks)} chunks does not match "
                    f"groups of {list(sizes)} blocks, {factor} a chunk"
                )
            )

    def _check_blocks(self, direction: tuple[str, str], blocks: Any) -> None:
        """A negative index would wrap around silently."""
        count = min((len(page) for page in self.rows), default=0)
        outside = blocks[(blocks < 0) | (blocks >= count)]
        if outside.size:
            guard.refuse(
                IndexError(
                    f"{direction[0]} to {direction[1]}: block ids {outside[:8].tolist()} are out "
                    f"of bounds for {count} blocks; nothing was copied"
                )
            )


def block_rows(kv_caches: Any, attn_backends: Any = None) -> tuple[list[torch.Tensor], list[list[int]]]:
    """The KV cache as :class:`HostPool` takes it: int8 rows of blocks, and tensor indices by group.

    Args:
        kv_caches: ``CanonicalKVCaches`` (from 0.19.0), or tensors by layer name (to 0.18.1).
        attn_backends: by layer name, to 0.18.1.
    """
    if not isinstance(kv_caches, dict):
        rows = [
            t.tensor
            if t.tensor.ndim == 2 and t.tensor.dtype == torch.int8
            else t.tensor.view(torch.int8).view(-1, t.page_size_bytes)
            for t in kv_caches.tensors
        ]
        groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        return rows, groups
    rows, seen = [], set()
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise NotImplementedError(f"{name}: this vLLM offloads attention layers only, not {type(tensor).__name__}")
        if tensor.data_ptr() in seen:  # layers that share their KV
            continue
        seen.add(tensor.data_ptr())
        shape = attn_backends[name].get_kv_cache_shape(1234, 16, 8, 256)
        cross_layers = tensor.ndim != len(shape)
        rows += _rows(tensor, 0 if cross_layers else shape.index(1234))
    return rows, [list(range(len(rows)))]


def _rows(tensor: torch.Tensor, block_dim: int) -> list[torch.Tensor]:
    """int8 views ``(num_blocks, bytes)`` of a tensor; two when K and V lie before the blocks."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    if last + 1 != tensor.numel():
        raise NotImplementedError(f"blocks with gaps: {tuple(tensor.shape)}, strides {tensor.stride()}")
    outermost = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    memory = torch.empty(0, dtype=torch.int8).set_(tensor.untyped_storage())
    begin = tensor.storage_offset() * tensor.element_size()
    memory = memory[begin : begin + tensor.numel() * tensor.element_size()]
    num_blocks = tensor.shape[block_dim]
    if outermost[0] == block_dim:
        return [memory.view(num_blocks, -1)]
    if outermost[1] == block_dim:
        return list(memory.view(tensor.shape[outermost[0]], num_blocks, -1).unbind(0))
    raise NotImplementedError(f"blocks are inside of {tuple(tensor.shape)} {tensor.stride()}")


class _Transfers:
    """Does transfers when they are submitted, and keeps their results until asked."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._finished: list[Any] = []

    def submit(self, job_id: int, direction: tuple[str, str], src: Any, dst: Any) -> bool:
        start = time.perf_counter()
        sides = (src, dst) if direction == STORE else (dst, src)
        copied = self._pool.copy(direction, *sides)
        seconds = time.perf_counter() - start
        self._finished.append(_result(job_id, direction, copied, seconds))
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


def _result(job_id: int, direction: tuple[str, str], copied: int, seconds: float) -> Any:
    transfer_result: Any = _releases.offload_class("TransferResult")
    names = set(getattr(transfer_result, "__dataclass_fields__", ()))
    if not names:  # to 0.15.1 a tuple
        return job_id, True
    values = {
        "job_id": job_id,
        "success": True,
        "transfer_size": copied,
        "transfer_time": seconds,
        "transfer_type": direction,  # to 0.24.0
    }
    return transfer_result(**{name: value for name, value in values.items() if name in names})


def handlers(pool: HostPool) -> Iterator[tuple[Any, Any, Any]]:
    """``(source, destination, handler)`` for both directions, as the worker wants to 0.24.0."""
    kv_side = _releases.offload_class("GPULoadStoreSpec")
    pool_side = _releases.offload_class("CPULoadStoreSpec")

    class Handler(_Transfers, _releases.offload_class("OffloadingHandler")):  # type: ignore[misc]
        def __init__(self, direction: tuple[str, str]) -> None:
            super().__init__(pool)
            self._direction = direction

        def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
            return self.submit(job_id, self._direction, *spec)

    yield kv_side, pool_side, Handler(STORE)
    yield pool_side, kv_side, Handler(LOAD)


def worker(pool: HostPool) -> Any:
    """An ``OffloadingWorker``, as it is from 0.25.0."""

    class Worker(_Transfers, _releases.offload_class("OffloadingWorker")):  # type: ignore[misc]
        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self.submit(job_id, STORE, src_spec, dst_spec)

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
            # expedited (0.33.0) changes nothing: no load waits behind another
            return self.submit(job_id, LOAD, src_spec, dst_spec)

    return Worker(pool)
