"""A chunk id outside the pool: refused before a byte is copied, on CUDA as on the CPU platform.

There is no GPU here. vLLM's own handlers and workers run with stand-ins for what needs one: streams, events, and the
copy itself, which only notes that it was asked.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from facts import COPIES_BY_HANDLERS, POOL_SIZE_IS_GIVEN
from geometry import chunks, emulate_platform, offload_class
from test_worker import BlocksFirst, Rig

from vllm_kvfix import guard

pytestmark = pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)

CHUNKS = 5


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Attention(BlocksFirst):
    """An attention backend that is asked by the names of its parameters, as vLLM's handlers do to 0.18.1."""

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return super().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)


class Stream:
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self, stream: Any) -> None: ...


@pytest.fixture
def start(register: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Rig, Any, list[Any]]]:
    """Makes the transfers of a spec on a platform; also gives its rig, and what was copied (on CUDA)."""
    copies: list[Any] = []

    def begin(platform: str, blocks_per_chunk: int = 1, name: str = "FixedCPUOffloadingSpec") -> Any:
        emulate_platform(platform)
        register()
        one = Rig(Attention, blocks_per_chunk, CHUNKS, name)
        if platform == "cuda":
            from vllm import _custom_ops

            for copy in ("swap_blocks", "swap_blocks_batch"):  # the latter from 0.20.0
                monkeypatch.setattr(_custom_ops, copy, lambda *what, **_: copies.append(what), raising=False)
            monkeypatch.setattr(torch.cuda, "Stream", Stream)
            monkeypatch.setattr(torch.cuda, "current_stream", Stream)
            monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
            monkeypatch.setattr(torch, "Event", Event)
            stock = offload_class("CPUOffloadingSpec")
            monkeypatch.setattr(stock, "_uses_shared_region", lambda self: False, raising=False)
            for module in _modules_that_pin():
                for pin, no in (("PIN_MEMORY", False), ("is_pin_memory_available", lambda: False)):
                    if hasattr(module, pin):
                        monkeypatch.setattr(module, pin, no)
            one.kv = {layer: tensor.as_subclass(OnCuda) for layer, tensor in one.kv.items()}
        return one, one.start(), copies

    return begin


def _modules_that_pin() -> list[Any]:
    found = []
    for name in ("worker.cpu_gpu", "cpu.gpu_worker"):  # to 0.20.2; then
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(f"vllm.v1.kv_offload.{name}"))
    return found


OUTSIDE = [  # ids of a transfer, and which of them are outside
    ([CHUNKS], [CHUNKS]),
    ([-1], [-1]),
    ([0, CHUNKS + 5, CHUNKS - 1], [CHUNKS + 5]),
    ([-(1 << 30), 3, (1 << 31) - 1], [-(1 << 30), (1 << 31) - 1]),
]
DIRECTIONS = {"store": guard.STORE, "load": guard.LOAD}
platforms = pytest.mark.parametrize("platform", ["cpu", "cuda"])


@platforms
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_the_fixed_spec_refuses_chunks_that_its_pool_does_not_have(
    start: Any, log: Any, platform: str, blocks_per_chunk: int
) -> None:
    one, transfer, copies = start(platform, blocks_per_chunk)
    assert chunks(one.spec) == CHUNKS
    kept = one.blocks(range(24))
    for (word, direction), (ids, wrong) in itertools.product(DIRECTIONS.items(), OUTSIDE):
        log.records.clear()
        with pytest.raises(guard.PoolBoundsError) as refusal:
            transfer(word, list(range(len(ids) * blocks_per_chunk)), ids)
        error = refusal.value
        assert (error.direction, error.ids, error.num_chunks) == (direction, wrong, CHUNKS)
        assert f"chunk ids {wrong} are out of bounds for {CHUNKS} chunks; nothing was copied" in str(error)
        assert log.ours(40) == [f"vllm-kvfix: {error}"], "vLLM may hide the error"
        assert copies == [] and one.finished() == []
    for layer, tensor in one.blocks(range(24)).items():
        assert torch.equal(tensor, kept[layer])


def test_stock_hands_them_to_the_copy(start: Any) -> None:
    one, transfer, copies = start("cuda", name="CPUOffloadingSpec")
    assert type(one.spec).__name__ == "CPUOffloadingSpec" and chunks(one.spec) <= CHUNKS
    for word, (ids, _) in itertools.product(DIRECTIONS, OUTSIDE):
        copies.clear()
        assert transfer(word, list(range(len(ids))), ids)
        assert copies


@platforms
def test_what_is_in_the_pool_goes_through_and_so_does_nothing(start: Any, log: Any, platform: str) -> None:
    _, transfer, copies = start(platform)
    for word in DIRECTIONS:
        copies.clear()
        assert transfer(word, [3, 5], [0, CHUNKS - 1])
        assert bool(copies) == (platform == "cuda")
        assert transfer(word, [], [])
    assert log.ours(40) == []


# ---- The wrappers themselves ----


@pytest.fixture
def recorder(register: Any) -> Any:
    """What a spec gives to vLLM, of this release's own abstract class: it notes what reaches it."""
    emulate_platform("cuda")

    def note(self: Any, *args: Any, **named: Any) -> bool:
        self.seen.append((args, named))
        return True

    base = offload_class("OffloadingHandler" if COPIES_BY_HANDLERS else "OffloadingWorker")
    return type("Recorder", (base,), dict.fromkeys(base.__abstractmethods__, note) | {"seen": []})()


def pool_side(ids: list[int]) -> Any:
    return offload_class("CPULoadStoreSpec")(ids)


@pytest.mark.only_if(not COPIES_BY_HANDLERS)
def test_a_guarded_worker_is_itself_and_passes_everything_on(recorder: Any) -> None:
    worker = guard.guarded_worker(recorder, CHUNKS, rank=2)
    assert guard.guarded_worker(worker, CHUNKS, rank=2) is worker is recorder
    gpu, inside, beyond = "GPU side", pool_side([0, CHUNKS - 1]), pool_side([CHUNKS])
    assert worker.submit_store(1, gpu, inside)
    assert worker.submit_load(2, inside, gpu, expedited=True)  # 0.33.0
    assert worker.submit_load(3, inside, gpu, True)
    assert worker.submit_store(job_id=4, src_spec=gpu, dst_spec=inside)
    assert worker.wait({1})
    expected = [
        ((1, gpu, inside), {}),
        ((2, inside, gpu), {"expedited": True}),
        ((3, inside, gpu, True), {}),
        ((4,), {"src_spec": gpu, "dst_spec": inside}),
        (({1},), {}),
    ]
    assert recorder.seen == expected
    for submit, named in (
        (worker.submit_store, {"src_spec": gpu, "dst_spec": beyond}),
        (worker.submit_load, {"src_spec": beyond, "dst_spec": gpu}),
        (worker.submit_load, {"src_spec": beyond, "dst_spec": gpu, "expedited": True}),
    ):
        with pytest.raises(guard.PoolBoundsError, match=r"rank 2: chunk ids \[5\] are out"):
            submit(5, **named)
    assert recorder.seen == expected


@pytest.mark.only_if(COPIES_BY_HANDLERS)
def test_a_guarded_handler_is_itself_and_vllm_cannot_hide_the_error(recorder: Any, log: Any) -> None:
    """vLLM's worker makes a warning of it, and the engine dies of ``assert success`` without a word."""
    gpu_class, cpu_class = offload_class("GPULoadStoreSpec"), offload_class("CPULoadStoreSpec")
    worker = offload_class("OffloadingWorker")()
    second = type(recorder)()
    found = [(gpu_class, cpu_class, recorder), (cpu_class, gpu_class, second)]
    for _ in range(2):
        handlers = list(guard.guarded_handlers(found, CHUNKS, rank=2))
        assert handlers == found
    for one in handlers:
        worker.register_handler(*one)
    takes = inspect.signature(gpu_class).parameters
    more = {name: value for name, value in {"group_sizes": [2], "block_indices": [0]}.items() if name in takes}
    gpu, inside, beyond = gpu_class([4, 5], **more), pool_side([0, CHUNKS - 1]), pool_side([-2, CHUNKS])
    for direction in ((gpu, inside), (inside, gpu)):
        assert worker.transfer_async(1, direction)
    assert recorder.seen == [((1, (gpu, inside)), {}), ((1, (inside, gpu)), {})]
    for direction in ((gpu, beyond), (beyond, gpu)):
        assert not worker.transfer_async(2, direction)
    loud = [record for record in log.records if record.levelname in ("ERROR", "WARNING")]
    assert [record.levelname for record in loud] == ["ERROR", "WARNING"] * 2, "ours, then vLLM's"
    assert "PoolBoundsError" in loud[1].getMessage()
    assert len(recorder.seen) == 2
    assert all("rank 2: chunk ids [-2, 5] are out of bounds for 5 chunks" in line for line in log.ours(40))


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64])  # int32 from 0.33.0
def test_ids_of_any_integer_type_are_held_against_the_pool(kind: Any) -> None:
    guard.check(guard.STORE, np.array([], dtype=kind), 0)
    guard.check(guard.STORE, np.arange(CHUNKS, dtype=kind), CHUNKS)
    with pytest.raises(guard.PoolBoundsError, match=r"chunk ids \[5\] are out of bounds for 5 chunks"):
        guard.check(guard.STORE, np.arange(CHUNKS + 1, dtype=kind), CHUNKS)
