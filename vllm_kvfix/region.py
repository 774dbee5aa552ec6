"""The memory that all ranks of a node share (0.27.0), with a slot of its own size for each rank.

``SharedOffloadRegion`` keeps one row a chunk, and in each row one slot a rank, at ``rank * own bytes``. Ranks that
keep different bytes write into each other's slots. Here the caller says where the slot begins.

The file's name in /dev/shm goes as soon as every rank has mapped it, so that the kernel frees the memory whatever
ends the engine. vLLM does so from 0.29.0: https://github.com/vllm-project/vllm/pull/52596
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

from vllm_kvfix import _releases

_NAME = "SharedOffloadRegion"


@contextlib.contextmanager
def slots(module: Any, offset: int, size: int) -> Iterator[None]:
    """While this is open, the region that ``module`` makes has this rank's slot where we say.

    Args:
        module: of the installed ``CPUOffloadingSpec``. Without a shared region (to 0.26.0) nothing happens.
        offset: bytes before this rank's slot in a row, as ``pool.slots`` places it.
        size: bytes of one chunk on this rank.
    """
    stock = getattr(module, _NAME, None)
    if stock is None:
        yield
        return
    setattr(module, _NAME, _with_slot(stock, offset, size))
    try:
        yield
    finally:
        setattr(module, _NAME, stock)


def _with_slot(stock: Any, offset: int, size: int) -> Any:
    class UnevenOffloadRegion(stock):
        def __init__(self, *, rank: int, cpu_page_size: int, **arguments: Any) -> None:
            wait_for_all_ranks = arguments.get("barrier") or _wait_for_all_ranks  # given from 0.29.0
            try:
                # An empty slot: vLLM's constructor pre-faults nothing, above all not another rank's memory.
                super().__init__(rank=0, cpu_page_size=0, **arguments)
            except Exception as error:
                if getattr(self, "_creator", False):  # to 0.29.0 vLLM leaves the file after some errors
                    _unlink(self)
                with contextlib.suppress(Exception):
                    wait_for_all_ranks()  # the others are waiting, or will
                if isinstance(error, TimeoutError):
                    raise TimeoutError(_left_behind(self.mmap_path, error)) from error
                raise
            try:
                wait_for_all_ranks()
                _unlink_if_mapped(self)
                if not 0 <= offset <= offset + size <= self._row_stride:
                    raise ValueError(f"a slot of {size} bytes at {offset} is not in a row of {self._row_stride}")
                self.rank, self.cpu_page_size = rank, size
                self._worker_offset, self._worker_area_end = offset, offset + size
                _populate(self, sys.modules[stock.__module__])
            except Exception:
                self.cleanup()
                raise

        def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
            """This rank's slots as ``(offset, length)`` in whole pages; 0.33.0 pins them one by one."""
            if not self.cpu_page_size:
                return
            rows, page, row_bytes = _releases.num_chunks(self), self.page_size, self._row_stride
            first = rows * offset // row_bytes  # ranks begin in different files, of which 0.33.0 has several
            for row in (*range(first, rows), *range(first)):
                begin = row * row_bytes + offset
                end = -(-(begin + size) // page) * page
                yield begin - begin % page, end - (begin - begin % page)

    return UnevenOffloadRegion


def _populate(region: Any, module: Any) -> None:
    """Take this rank's memory now, as vLLM does: at a first touch it would cost the transfer time."""
    choose = getattr(module, "_get_populate_write_fn", None)  # from 0.28.0: also for Linux before 5.14
    if choose is None:
        advice = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Python has no name for it
        for start, length in region.iter_worker_slot_ranges():
            region.mmap_obj.madvise(advice, start, length)
        return
    populate = choose(region.mmap_obj)
    for start, length in region.iter_worker_slot_ranges():
        populate(region.mmap_obj, start, length)


def _wait_for_all_ranks() -> None:
    """What vLLM's spec gives as ``barrier`` from 0.29.0."""
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_inner_dp_world_group()
    except AssertionError:  # there is none
        group = parallel_state.get_world_group()
    group.barrier()


def _unlink_if_mapped(region: Any) -> None:
    """Take the name from the file that all ranks have mapped now, whoever created it.

    It may be one that an engine with the same id left, killed while it started: no rank of ours is its
    creator then, and vLLM would keep it.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(region.mmap_path), os.fstat(region.fd)):
            _unlink(region)
    region._creator = False


def _unlink(region: Any) -> None:
    segments = getattr(region, "_segments", None) or [(region.mmap_path,)]  # 0.33.0
    for path, *_ in segments:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _left_behind(path: str, error: TimeoutError) -> str:
    return (
        f"{error}: {path} is smaller. It was left by an engine with the same engine_id that was killed while it "
        "started: remove it, unless such an engine runs on this machine"
    )
