"""Refuses a transfer that names a chunk which the CPU pool does not have, before a byte is copied.

vLLM's copies take ids as they come: one outside the pool is an address outside the pool. The size that this
package computes removes the known cause; the guard is for the next one, whoever hands out the id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import vllm_kvfix
from vllm_kvfix import _log, _releases
from vllm_kvfix._fix import in_place_of, is_ours

STORE, LOAD = ("GPU", "CPU"), ("CPU", "GPU")

_SHOWN = 8  # ids that the message lists


class PoolBoundsError(IndexError):
    """Chunk ids outside a rank's CPU pool; nothing was copied.

    Args:
        direction: ``STORE`` or ``LOAD``.
        ids: those outside of ``0 .. num_chunks - 1``.
        num_chunks: chunks in the pool of this rank.
        rank: of the worker, if it is known.
    """

    def __init__(self, direction: tuple[str, str], ids: list[int], num_chunks: int, rank: int | None) -> None:
        super().__init__(direction, ids, num_chunks, rank)  # all of them, to be pickled with
        self.direction, self.ids, self.num_chunks, self.rank = direction, ids, num_chunks, rank

    def __str__(self) -> str:
        more = len(self.ids) - _SHOWN
        return (
            f"{self.direction[0]} to {self.direction[1]}{'' if self.rank is None else f', rank {self.rank}'}: "
            f"chunk ids {self.ids[:_SHOWN]}{f' and {more} more' if more > 0 else ''} are out of bounds for "
            f"{self.num_chunks} chunks; nothing was copied. The scheduler gave out what this worker's CPU pool "
            "does not have. Report this line, all lines of the log with 'CPU pool of' and the server's arguments; "
            f"vllm-kvfix {vllm_kvfix.__version__}, vLLM {_releases.vllm_version()}"
        )


def check(direction: tuple[str, str], chunk_ids: Any, num_chunks: int, rank: int | None = None) -> None:
    """Refuse chunk ids (a numpy array of integers) outside of ``0 .. num_chunks - 1``.

    Raises:
        PoolBoundsError: at least one is outside.
    """
    if not chunk_ids.size or (chunk_ids.min() >= 0 and chunk_ids.max() < num_chunks):
        return
    outside = chunk_ids[(chunk_ids < 0) | (chunk_ids >= num_chunks)].tolist()
    refuse(PoolBoundsError(direction, outside, num_chunks, rank))


def refuse(error: IndexError) -> NoReturn:
    """Say it before raising: to 0.24.0 vLLM hides the error and dies of a bare assertion later."""
    _log.logger.error("vllm-kvfix: %s", error)
    raise error


def guarded_handlers(
    handlers: Iterable[tuple[Any, Any, Any]], num_chunks: int, rank: int | None = None
) -> Iterator[tuple[Any, Any, Any]]:
    """``(source, destination, handler)`` as a spec gives them to 0.24.0; each handler checks first."""
    chunks = _releases.offload_class("CPULoadStoreSpec")
    for source, destination, handler in handlers:
        side, direction = (1, STORE) if issubclass(destination, chunks) else (0, LOAD)
        _guard(handler, "transfer_async", lambda spec, side=side: spec[side], direction, num_chunks, rank)
        yield source, destination, handler


def guarded_worker(worker: Any, num_chunks: int, rank: int | None = None) -> Any:
    """The worker of a spec from 0.25.0, itself; it checks first."""
    _guard(worker, "submit_store", lambda src_spec, dst_spec, *_, **__: dst_spec, STORE, num_chunks, rank)
    _guard(worker, "submit_load", lambda src_spec, dst_spec, *_, **__: src_spec, LOAD, num_chunks, rank)
    return worker


def _guard(
    instance: Any,
    method: str,
    chunk_side: Callable[..., Any],
    direction: tuple[str, str],
    num_chunks: int,
    rank: int | None,
) -> None:
    submit = getattr(instance, method)
    if is_ours(submit):  # vLLM's spec keeps what it made, and gives it again
        return

    @in_place_of(submit)
    def check_and_submit(job_id: int, *args: Any, **named: Any) -> Any:
        check(direction, chunk_side(*args, **named).block_ids, num_chunks, rank)
        return submit(job_id, *args, **named)

    setattr(instance, method, check_and_submit)
