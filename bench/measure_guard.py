"""Time that the guard adds to a transfer of 1,000 chunks, beside a copy of as many in host memory.

A chunk here is one block of 16 tokens of a model with 32 layers and 8 KV heads of 128 float16 numbers, on one of 8
ranks: 256 KiB. On fewer ranks it is larger, and the guard's share smaller.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_kvfix import _releases, guard

CHUNKS, CHUNK_BYTES = 1000, 256 << 10
POOL = 4 * CHUNKS  # chunks that the ids are drawn from
ROUNDS, CALLS = 15, 100


class Worker:
    """Takes a transfer and does nothing, so that what is measured is the guard."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return True

    submit_load = submit_store


def seconds(work: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def main() -> None:
    torch.set_num_threads(1)
    generator = np.random.default_rng(4)
    transfer = _releases.offload_class("CPULoadStoreSpec")(generator.permutation(POOL)[:CHUNKS].tolist())
    bare, guarded = Worker(), guard.guarded_worker(Worker(), POOL, rank=0)
    kv = torch.ones(CHUNKS * CHUNK_BYTES, dtype=torch.int8)
    pool = torch.ones_like(kv)
    samples: dict[str, list[float]] = {"guard": [], "copy": []}
    for _ in range(ROUNDS):  # in turn: what disturbs one disturbs the other
        with_guard = seconds(lambda: guarded.submit_store(1, None, transfer), CALLS)
        samples["guard"].append(with_guard - seconds(lambda: bare.submit_store(1, None, transfer), CALLS))
        samples["copy"].append(seconds(lambda: pool.copy_(kv), 1))
    guard_us, copy_us = (1e6 * statistics.median(samples[what]) for what in ("guard", "copy"))
    print(
        json.dumps(
            {
                "chunks": CHUNKS,
                "chunk_bytes": CHUNK_BYTES,
                "guard_us": guard_us,
                "copy_us": copy_us,
                "percent": 100 * guard_us / copy_us,
            }
        )
    )


if __name__ == "__main__":
    main()
