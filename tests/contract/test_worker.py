"""The worker's side of ``FixedCPUOffloadingSpec`` on the CPU platform: real tensors, no engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import POOL_SIZE_IS_GIVEN, POOL_SIZE_IS_WRONG
from geometry import (
    BLOCK_SIZE,
    UNIT,
    Layer,
    chunks,
    create_spec,
    emulate_platform,
    group,
    offload_class,
    plan,
    schedulers_form,
    vllm_config,
)

pytestmark = pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
NUM_BLOCKS = 24
PAGES = {"layer.0": 4 * UNIT, "layer.1": UNIT, "layer.2": 2 * UNIT}


class Backend:
    """An attention backend as far as 0.14.0-0.18.1 ask it; ``K`` and ``V`` before the blocks, or not."""

    shape: tuple[str, ...]

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, heads: int, size: int, *_: Any) -> tuple[int, ...]:
        halves_and_blocks = {"kv": 2, "blocks": num_blocks}
        return (*(halves_and_blocks[name] for name in cls.shape), block_size, heads, size)


class HalvesFirst(Backend):
    shape = ("kv", "blocks")


class BlocksFirst(Backend):
    shape = ("blocks", "kv")


class Rig:
    """One worker: its KV cache, and the transfers that vLLM would ask of its spec."""

    def __init__(self, backend: type[Backend], blocks_per_chunk: int, num_chunks: int, spec_name: str) -> None:
        extra: dict[str, Any] = {"spec_name": spec_name}
        if blocks_per_chunk > 1:
            extra["block_size"] = BLOCK_SIZE * blocks_per_chunk
        row = sum(PAGES.values()) * blocks_per_chunk
        extra["cpu_bytes_to_use"] = num_chunks * -(-row // 4096) * 4096 if not POOL_SIZE_IS_WRONG else num_chunks * row
        config = vllm_config(extra)
        layers = [Layer(width=page // UNIT) for page in PAGES.values()]
        self.config = plan(config, [group(layers)], NUM_BLOCKS)
        self.vllm_config = config
        self.spec = create_spec(config, self.config)
        self.blocks_per_chunk = blocks_per_chunk
        halves_first = backend is HalvesFirst
        self.kv = {}
        for name, page in PAGES.items():
            half = torch.randint(-128, 127, (2, NUM_BLOCKS, page // 2), dtype=torch.int8)
            self.kv[name] = half if halves_first else half.transpose(0, 1).contiguous()
        self.backend = backend
        self.job = 0

    def blocks(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """A copy of what these blocks hold in every layer."""
        block_dim = self.backend.shape.index("blocks")
        return {name: tensor.index_select(block_dim, torch.tensor(ids)).clone() for name, tensor in self.kv.items()}

    def wipe(self) -> None:
        for tensor in self.kv.values():
            tensor.zero_()

    def start(self) -> Callable[[str, Sequence[int], Sequence[int], int], bool]:
        """``transfer(direction, block ids, chunk ids, index of the first block)``, by this release's worker API."""
        halves_first = self.backend is HalvesFirst
        if hasattr(offload_class("CPUOffloadingSpec"), "get_worker"):  # from 0.25.0
            worker = self.spec.get_worker(self._canonical(halves_first))
            self._finished = worker.get_finished
            submit = {"store": worker.submit_store, "load": worker.submit_load}

            def transfer(direction: str, blocks: Sequence[int], chunk_ids: Sequence[int], first: int = 0) -> bool:
                sides = [self._gpu(blocks, first), offload_class("CPULoadStoreSpec")(list(chunk_ids))]
                self.job += 1
                return bool(submit[direction](self.job, *(sides if direction == "store" else sides[::-1])))

            return transfer
        if "attn_backends" in inspect.signature(offload_class("CPUOffloadingSpec").get_handlers).parameters:
            attention = {}  # to 0.18.1
            for name, tensor in self.kv.items():
                shape = self.backend.get_kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, 1, 1)
                attention[name] = tensor.view(*shape[:3], 1, -1)
            found = self.spec.get_handlers(attention, dict.fromkeys(attention, self.backend))
        else:
            found = self.spec.get_handlers(self._canonical(halves_first))
        handlers = list(found)
        gpu, cpu = offload_class("GPULoadStoreSpec"), offload_class("CPULoadStoreSpec")
        assert [one[:2] for one in handlers] == [(gpu, cpu), (cpu, gpu)]
        by_direction = {"store": handlers[0][2], "load": handlers[1][2]}
        self._finished = lambda: [done for one in by_direction.values() for done in one.get_finished()]

        def transfer(direction: str, blocks: Sequence[int], chunk_ids: Sequence[int], first: int = 0) -> bool:
            sides = (self._gpu(blocks, first), cpu(list(chunk_ids)))
            self.job += 1
            source_and_destination = sides if direction == "store" else sides[::-1]
            return bool(by_direction[direction].transfer_async(self.job, source_and_destination))

        return transfer

    def finished(self) -> list[tuple[int, bool]]:
        """Jobs that are done, and whether well."""
        return [
            (done[0], done[1]) if isinstance(done, tuple) else (done.job_id, done.success) for done in self._finished()
        ]

    def _gpu(self, blocks: Sequence[int], first: int) -> Any:
        gpu = offload_class("GPULoadStoreSpec")
        more = {"group_sizes": [len(blocks)], "block_indices": [first]}
        takes = inspect.signature(gpu).parameters
        return gpu(list(blocks), **{name: value for name, value in more.items() if name in takes})

    def _canonical(self, halves_first: bool) -> Any:
        """``CanonicalKVCaches``: a tensor for each layer, or two where K and V lie before the blocks."""
        tensor_class, ref_class = offload_class("CanonicalKVCacheTensor"), offload_class("CanonicalKVCacheRef")
        rows = []
        for tensor in self.kv.values():
            rows += list(tensor.unbind(0)) if halves_first else [tensor.view(NUM_BLOCKS, -1)]
        refs = []
        for index, one in enumerate(rows):
            values = {"tensor_idx": index, "page_size_bytes": one.shape[1]}
            names = inspect.signature(ref_class).parameters
            refs.append(ref_class(**{name: value for name, value in values.items() if name in names}))
        return offload_class("CanonicalKVCaches")(
            tensors=[tensor_class(tensor=one, page_size_bytes=one.shape[1]) for one in rows], group_data_refs=[refs]
        )


@pytest.fixture
def rig(register: Any) -> Callable[..., Rig]:
    emulate_platform("cpu")
    torch.manual_seed(0)
    register()

    def make(
        backend: type[Backend] = BlocksFirst,
        blocks_per_chunk: int = 1,
        num_chunks: int = 8,
        spec_name: str = "FixedCPUOffloadingSpec",
    ) -> Rig:
        return Rig(backend, blocks_per_chunk, num_chunks, spec_name)

    return make


backends = pytest.mark.parametrize("backend", [BlocksFirst, HalvesFirst])


@pytest.mark.one_process
@backends
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_blocks_come_back_as_they_were_stored(
    rig: Callable[..., Rig], backend: type[Backend], blocks_per_chunk: int
) -> None:
    """Store six blocks, wipe the KV cache, load them into other blocks; no other block is touched."""
    one = rig(backend, blocks_per_chunk)
    transfer = one.start()
    stored, target = [5, 0, 7, 2, 23, 9], [1, 22, 3, 4, 6, 8]
    chunk_ids = [7, 0, 3, 1, 6, 2][: 6 // blocks_per_chunk]
    before = one.blocks(stored)
    assert transfer("store", stored, chunk_ids)
    one.wipe()
    assert transfer("load", target, chunk_ids)
    assert one.finished() == [(1, True), (2, True)]
    assert one.finished() == []
    untouched = [block for block in range(NUM_BLOCKS) if block not in target]
    for name, tensor in one.blocks(target).items():
        assert torch.equal(tensor, before[name]), name
        assert not one.blocks(untouched)[name].any(), name


@backends
def test_a_load_may_begin_inside_a_chunk(rig: Callable[..., Rig], backend: type[Backend]) -> None:
    """Of two chunks of four blocks, load the last five: a part of a prefix is still in the GPU's cache."""
    one = rig(backend, blocks_per_chunk=4)
    transfer = one.start()
    stored = [0, 1, 2, 3, 4, 5, 6, 7]
    before = one.blocks(stored[3:])
    assert transfer("store", stored, [2, 5])
    one.wipe()
    assert transfer("load", [10, 11, 12, 13, 14], [2, 5], 3)
    for name, tensor in one.blocks([10, 11, 12, 13, 14]).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.one_process
@backends
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_the_pool_has_the_rows_that_the_scheduler_hands_out_and_no_more(
    rig: Callable[..., Rig], log: Any, backend: type[Backend], blocks_per_chunk: int
) -> None:
    """The last chunk of the scheduler exists; the one after it is refused before a byte moves."""
    one = rig(backend, blocks_per_chunk, num_chunks=5)
    number = chunks(create_spec(one.vllm_config, schedulers_form(one.config)))
    assert number == 5
    transfer = one.start()
    blocks = list(range(blocks_per_chunk))
    before = one.blocks(blocks)
    assert transfer("store", blocks, [number - 1])
    one.wipe()
    assert transfer("load", blocks, [number - 1])
    for name, tensor in one.blocks(blocks).items():
        assert torch.equal(tensor, before[name]), name
    everything = one.blocks(range(NUM_BLOCKS))
    for direction, chunk in (("store", number), ("load", number), ("load", -1)):
        with pytest.raises(IndexError, match="out of bounds"):
            transfer(direction, blocks, [chunk])
        assert any(str(chunk) in line and "out of bounds" in line for line in log.ours(40)), "vLLM may hide the error"
    for name, tensor in one.blocks(range(NUM_BLOCKS)).items():
        assert torch.equal(tensor, everything[name])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_stock_refuses_the_cpu_platform_and_on_cuda_the_copies_are_vllms_own(
    register: Any, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    emulate_platform(platform)
    register()
    stock = offload_class("CPUOffloadingSpec")
    called = []
    if platform == "cpu":
        one = Rig(BlocksFirst, 1, 8, "CPUOffloadingSpec")
        with pytest.raises(Exception, match="only supported on CUDA"):
            one.start()
    else:
        name = "get_worker" if hasattr(stock, "get_worker") else "get_handlers"
        copies: Any = iter(()) if name == "get_handlers" else SimpleNamespace(submit_store=None, submit_load=None)
        monkeypatch.setattr(stock, name, lambda self, *args: called.append(args) or copies)
        one = Rig(BlocksFirst, 1, 8, "FixedCPUOffloadingSpec")
        getattr(one.spec, name)("the KV cache", *(["backends"] if name == "get_handlers" else []))
        assert len(called) == 1 and called[0][0] == "the KV cache"


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_a_tensor_with_gaps_is_refused_and_not_copied_from_the_wrong_place() -> None:
    from vllm_kvfix import hostcopy

    dense = torch.arange(5 * 2 * 4, dtype=torch.int32).view(5, 2, 4)
    (rows,) = hostcopy._rows(dense, 0)
    assert rows.view(torch.int32).tolist() == dense.flatten(1).tolist()
    keys, values = hostcopy._rows(dense.view(5, 2, 4).transpose(0, 1).contiguous(), 1)
    assert keys.view(torch.int32).tolist() == dense[:, 0].tolist()
    assert values.view(torch.int32).tolist() == dense[:, 1].tolist()
    with pytest.raises(NotImplementedError, match="gaps"):
        hostcopy._rows(dense[..., :3], 0)
