"""Ranks that keep different bytes in vLLM's shared region: real regions in separate processes, one a rank."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from facts import (
    SHARED_REGION,
    SHARED_REGION_IS_SEVERAL_FILES,
    SHARED_REGION_KEEPS_ITS_NAME,
    SHARED_REGION_TRIES_ITS_FIRST_PAGE,
)
from geometry import UNIT, Layer, create_spec, emulate_platform, group, plan, vllm_config

from vllm_kvfix import pool, region

pytestmark = pytest.mark.only_if(SHARED_REGION)

REGION_MODULE = "vllm.v1.kv_offload.cpu.shared_offload_region"
PAGE = mmap.PAGESIZE
LIMIT = 30  # seconds for any wait; a test that needs them all has failed
FOUR = (78_336, 196_608, 66_048, 40_960)
_draw = random.Random(4)
DRAWN = [tuple(_draw.randint(1, 200_000) for _ in range(ranks)) for ranks in (2, 3, 8)]
CHUNKS = 21


@pytest.fixture
def engine_id() -> Iterator[str]:
    name = f"kvfix-test-{os.getpid()}"
    yield name
    for path in names(name):
        os.unlink(path)


@pytest.fixture
def module() -> ModuleType:
    """The module in which vLLM's spec finds the name of the region's class."""
    emulate_platform("cuda")
    return importlib.import_module("vllm.v1.kv_offload.cpu.spec")


def names(engine_id: str) -> list[str]:
    """What there is of this engine in /dev/shm."""
    return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if engine_id in name]


def row(sizes: Sequence[int]) -> int:
    return -(-sum(sizes) // PAGE) * PAGE


def offset(sizes: Sequence[int], rank: int) -> int:
    return pool.slots(tuple(sizes), blocks_per_chunk=1)[rank]


def make(module: ModuleType, engine_id: str, rank: int, barrier: Callable[[], Any], chunks: int, **sizes: int) -> Any:
    """The region of a rank, as this release's spec makes it; ``sizes`` are its row and its slot."""
    values = {"num_blocks": chunks, "num_chunks": chunks, "barrier": barrier, "num_segments": 32}
    values |= {"kv_bytes_per_block": sizes["row"], "kv_bytes_per_chunk": sizes["row"]}
    takes = inspect.signature(importlib.import_module(REGION_MODULE).SharedOffloadRegion).parameters
    more = {name: value for name, value in values.items() if name in takes}
    return module.SharedOffloadRegion(engine_id=engine_id, rank=rank, cpu_page_size=sizes["slot"], **more)


class Rank:
    """One rank in a process of its own: makes its region, then does what it is told."""

    def __init__(self, make_region: Callable[[], Any], size: int, seed: int) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._pipe.close()
            self._serve(there, make_region, size, seed)
        there.close()

    def _serve(self, pipe: Connection, make_region: Callable[[], Any], size: int, seed: int) -> None:
        try:
            shared = make_region()
            next_view = getattr(shared, "create_next_worker_view", None) or shared.create_next_view  # from 0.28.0
            views = [next_view(page) for page in pages_of(size)]
            generator = torch.Generator().manual_seed(seed)
            written = [torch.randint(-128, 127, view.shape, dtype=torch.int8, generator=generator) for view in views]

            def write() -> None:
                for view, values in zip(views, written):
                    view.copy_(values)

            def wrong() -> int:
                """Bytes that are not what this rank wrote."""
                return sum(int((view != values).sum()) for view, values in zip(views, written))

            def leave() -> None:
                views.clear()
                shared.cleanup()

            tasks = {"write": write, "wrong": wrong, "leave": leave}
            pipe.send(("made", None))
            while True:
                pipe.send(("done", tasks[pipe.recv()]()))
        except EOFError:
            os._exit(0)
        except BaseException as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(1)

    def answer(self) -> Any:
        assert self._pipe.poll(LIMIT), "a rank does not answer"
        word, value = self._pipe.recv()
        assert word != "failed", value
        return value

    def tell(self, task: str) -> None:
        self._pipe.send(task)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pipe.close()


class Engine:
    """All ranks of an engine on one node.

    Args:
        fixed: one row for all, and slots as ``vllm_kvfix.region`` places them; else each rank makes of its own
            bytes what stock makes of them.
        stale: there is a file of this engine already.
    """

    def __init__(
        self, module: ModuleType, engine_id: str, sizes: Sequence[int], fixed: bool = True, stale: bool = False
    ) -> None:
        world, path = len(sizes), f"/dev/shm/vllm_offload_{engine_id}.mmap"
        budget = CHUNKS * row(sizes)
        rows = [row(sizes) if fixed else row([size] * world) for size in sizes]
        chunks = [budget // one for one in rows]
        barrier = multiprocessing.get_context("fork").Barrier(world, timeout=LIMIT)
        lend_world_group(barrier.wait)
        # The rank with the largest file makes it: another order is a time-out of 30 s on stock.
        first = max(range(world), key=lambda rank: rows[rank] * chunks[rank])

        def maker(rank: int) -> Callable[[], Any]:
            def make_region() -> Any:
                if rank != first and not stale:
                    wait_until(lambda: os.path.exists(path) and os.stat(path).st_size > 0)
                slots = region.slots(module, offset(sizes, rank), sizes[rank]) if fixed else contextlib.nullcontext()
                with slots:
                    return make(module, engine_id, rank, barrier.wait, chunks[rank], row=rows[rank], slot=sizes[rank])

            return make_region

        self.ranks = [Rank(maker(rank), size, seed=rank) for rank, size in enumerate(sizes)]
        self.first = first
        for one in self.ranks:
            one.answer()

    def all(self, task: str) -> list[Any]:
        """All ranks do it, none goes on before all have."""
        for one in self.ranks:
            one.tell(task)
        return [one.answer() for one in self.ranks]

    def kill(self, rank: int) -> None:
        self.ranks.pop(rank).kill()

    def end(self) -> None:
        while self.ranks:
            self.kill(0)


@pytest.fixture
def engine(module: ModuleType, engine_id: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines, and ends what is left of them."""
    with contextlib.ExitStack() as ends:

        def start(sizes: Sequence[int] = FOUR, **how: bool) -> Engine:
            one = Engine(module, engine_id, sizes, **how)
            ends.callback(one.end)
            return one

        yield start


def pages_of(size: int) -> list[int]:
    """A rank's bytes as several tensors of different bytes."""
    parts = [size // 2, size // 3]
    return [part for part in (*parts, size - sum(parts)) if part]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def lend_world_group(barrier: Callable[[], Any]) -> None:
    """What ``torch.distributed`` gives a worker: to 0.28.0 nobody else hands the region a barrier."""
    from vllm.distributed import parallel_state

    parallel_state._INNER_DP_WORLD = None
    parallel_state._WORLD = SimpleNamespace(barrier=barrier)


# ---- No rank writes into another's slot ----


@pytest.mark.parametrize("sizes", [FOUR, FOUR[::-1], *DRAWN], ids=str)
def test_every_rank_reads_back_all_that_it_wrote(engine: Callable[..., Engine], engine_id: str, sizes: Any) -> None:
    one = engine(sizes)
    assert names(engine_id) == [], "its name is gone when all have mapped it"
    one.all("write")
    assert one.all("wrong") == [0] * len(sizes)
    one.all("leave")
    assert names(engine_id) == []


def test_stock_ranks_of_the_same_bytes_overwrite_each_other(engine: Callable[..., Engine]) -> None:
    one = engine(FOUR, fixed=False)
    one.all("write")
    assert sum(one.all("wrong")) > 100_000


@pytest.mark.only_if(SHARED_REGION_IS_SEVERAL_FILES)
def test_slots_go_on_from_one_file_of_the_region_to_the_next(
    engine: Callable[..., Engine], engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = importlib.import_module(REGION_MODULE)
    monkeypatch.setattr(stock, "_MIN_SEGMENT_BYTES", 1 << 20)
    files = []
    segments = stock.SharedOffloadRegion._map_segments
    monkeypatch.setattr(
        stock.SharedOffloadRegion, "_map_segments", lambda self: (files.extend(names(engine_id)), segments(self))
    )
    with region.slots(holder := SimpleNamespace(SharedOffloadRegion=stock.SharedOffloadRegion), 0, PAGE):
        alone = make(holder, engine_id, 0, lambda: None, 512, row=PAGE, slot=PAGE)
    assert len(files) == 2 and names(engine_id) == []
    alone.cleanup()
    one = engine(FOUR)
    one.all("write")
    assert one.all("wrong") == [0] * len(FOUR)
    assert names(engine_id) == []


def test_the_release_s_own_create_worker_makes_a_region_with_our_slot(
    module: ModuleType, engine_id: str, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By keyword, through the name in its module; vLLM's class is back afterwards, also after an error."""
    register()
    lend_world_group(lambda: None)
    config = vllm_config({"cpu_bytes_to_use": 1 << 20, "spec_name": "CPUOffloadingSpec"}, world_size=4)
    config.kv_transfer_config.engine_id = engine_id
    spec = create_spec(config, plan(config, [group([Layer(width=2), Layer()])], num_blocks=24))
    assert type(spec) is module.CPUOffloadingSpec and spec._uses_shared_region()
    made: list[Any] = []
    monkeypatch.setattr(module, "CPUOffloadingWorker", lambda **arguments: made.append(arguments["mmap_region"]))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3, raising=False)
    stock = module.SharedOffloadRegion
    with region.slots(module, 4 * UNIT, 5 * UNIT):
        spec.create_worker(None)
    (ours,) = made
    assert isinstance(ours, stock) and type(ours) is not stock and module.SharedOffloadRegion is stock
    view = (getattr(ours, "create_next_worker_view", None) or ours.create_next_view)(5 * UNIT)
    assert view.storage_offset() == 4 * UNIT and view.stride() == (spec.kv_bytes_per_chunk, 1)
    assert view.shape == (ours.total_size_bytes // spec.kv_bytes_per_chunk, 5 * UNIT)
    with pytest.raises(AssertionError, match="exceeds worker area end"):
        (getattr(ours, "create_next_worker_view", None) or ours.create_next_view)(1)
    with pytest.raises(ZeroDivisionError), region.slots(module, 0, 1):
        _ = 1 // 0
    assert module.SharedOffloadRegion is stock
    del view
    ours.cleanup()


def test_a_spec_without_shared_region_is_left_alone() -> None:
    module = SimpleNamespace(CPUOffloadingSpec=object)
    with region.slots(module, 0, 1):
        assert vars(module) == {"CPUOffloadingSpec": object}


def alone(module: ModuleType, engine_id: str, sizes: Sequence[int], rank: int, chunks: int = CHUNKS) -> Any:
    """The region of one rank whose neighbours never come."""
    lend_world_group(lambda: None)
    with region.slots(module, offset(sizes, rank), sizes[rank]):
        return make(module, engine_id, rank, lambda: None, chunks, row=row(sizes), slot=sizes[rank])


def own_pages(sizes: Sequence[int], rank: int) -> set[int]:
    """Numbers of the pages in which a rank's slots lie."""
    begins = [chunk * row(sizes) + offset(sizes, rank) for chunk in range(CHUNKS)]
    return {page for begin in begins for page in range(begin // PAGE, -(-(begin + sizes[rank]) // PAGE))}


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_takes_its_own_memory_at_once_and_no_other(module: ModuleType, engine_id: str, rank: int) -> None:
    one = alone(module, engine_id, FOUR, rank)
    taken = os.fstat(one.fd).st_blocks * 512 // PAGE
    assert taken == len(own_pages(FOUR, rank) | ({0} if SHARED_REGION_TRIES_ITS_FIRST_PAGE else set()))
    one.cleanup()


@pytest.mark.only_if(SHARED_REGION_IS_SEVERAL_FILES)
def test_a_rank_pins_its_own_slots(module: ModuleType, engine_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own pinning, without the driver: the ranges are its slots' pages, each once."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    sizes = (4 << 20, 66_048, 40_960)
    one = alone(module, engine_id, sizes, rank=1)
    pinned: list[int] = []
    base = one._base.data_ptr()

    def host_register(address: int, size: int) -> bool:
        assert (address - base) % PAGE == size % PAGE == 0
        pinned.extend(range((address - base) // PAGE, (address - base + size) // PAGE))
        return True

    monkeypatch.setattr(gpu_worker, "host_register", host_register)
    gpu_worker.pin_mmap_region(one, worker_slot_only=True)
    assert sorted(pinned) == sorted(own_pages(sizes, 1)) and one.is_pinned
    one.is_pinned = False
    one.cleanup()


# ---- Nothing stays in /dev/shm ----


def test_a_killed_rank_leaves_no_file_and_the_same_engine_starts_again(
    engine: Callable[..., Engine], engine_id: str
) -> None:
    one = engine(FOUR)
    one.all("write")
    one.kill(one.first)
    assert one.all("wrong") == [0] * 3
    again = engine(FOUR)  # the others still live
    again.all("write")
    assert again.all("wrong") == [0] * 4 and one.all("wrong") == [0] * 3
    one.end()
    again.end()
    assert names(engine_id) == []


@pytest.mark.only_if(SHARED_REGION_KEEPS_ITS_NAME)
def test_a_killed_stock_rank_leaves_its_file(engine: Callable[..., Engine], engine_id: str) -> None:
    one = engine(FOUR, fixed=False)
    one.end()
    assert len(names(engine_id)) == 1


def test_an_engine_killed_while_it_starts_leaves_an_empty_file_that_the_next_start_uses_up(
    module: ModuleType, engine: Callable[..., Engine], engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one moment that nobody can cover. All ranks find a file then: none is its creator, and vLLM would keep it."""
    stock = importlib.import_module(REGION_MODULE)
    monkeypatch.setattr(stock, "_MIN_SEGMENT_BYTES", 1 << 20, raising=False)  # several files where there can be
    never = multiprocessing.get_context("fork").Event()
    lend_world_group(never.wait)

    def make_region() -> Any:
        with region.slots(module, 0, FOUR[0]):
            return make(module, engine_id, 0, never.wait, CHUNKS, row=row(FOUR), slot=FOUR[0])

    rank = Rank(make_region, FOUR[0], seed=0)
    path = f"/dev/shm/vllm_offload_{engine_id}.mmap"  # made first, sized last
    wait_until(lambda: os.path.exists(path) and os.stat(path).st_size > 0)
    rank.kill()
    left = names(engine_id)
    assert len(left) == (7 if SHARED_REGION_IS_SEVERAL_FILES else 1)
    taken = sum(os.stat(one).st_blocks for one in left) * 512
    assert taken <= PAGE, "but for the page that vLLM tries, no memory is taken before all have mapped it"
    one = engine(FOUR, stale=True)
    assert names(engine_id) == []
    one.all("write")
    assert one.all("wrong") == [0] * 4


def test_a_larger_file_is_used_up(engine: Callable[..., Engine], engine_id: str) -> None:
    leave_file(engine_id, 2 * CHUNKS * row(FOUR))
    one = engine(FOUR, stale=True)
    assert names(engine_id) == []
    one.all("write")
    assert one.all("wrong") == [0] * 4


def test_a_smaller_file_is_named(module: ModuleType, engine_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_file(engine_id, PAGE)
    wait = importlib.import_module(REGION_MODULE)._wait_for_file_size
    monkeypatch.setattr(wait, "__defaults__", (0.1,))
    (path,) = names(engine_id)
    with pytest.raises(TimeoutError, match=rf"Timed out.*{path} is smaller.*remove it"):
        alone(module, engine_id, FOUR, rank=1)
    assert names(engine_id) == [path], "it may be another engine's"


def test_a_file_of_the_same_name_that_another_engine_made_since_is_left_alone(
    module: ModuleType, engine_id: str
) -> None:
    def another_engine_comes() -> None:
        for path in names(engine_id):
            os.unlink(path)
        leave_file(engine_id, PAGE)

    lend_world_group(another_engine_comes)
    with region.slots(module, 0, FOUR[0]):
        one = make(module, engine_id, 0, another_engine_comes, CHUNKS, row=row(FOUR), slot=FOUR[0])
    one.cleanup()
    assert [os.stat(path).st_size for path in names(engine_id)] == [PAGE]


def leave_file(engine_id: str, size: int) -> None:
    with open(f"/dev/shm/vllm_offload_{engine_id}.mmap", "wb") as file:
        file.truncate(size)


def no_memory(*args: Any, **named: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("moment", ["in vLLM's constructor", "in ours"])
def test_a_constructor_that_fails_leaves_no_file_and_lets_the_other_ranks_go(
    module: ModuleType, engine_id: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    arrivals = itertools.count()

    def try_once() -> int:
        before = next(arrivals)
        lend_world_group(lambda: next(arrivals))
        with region.slots(module, offset(FOUR, 2), FOUR[2]):
            one = make(module, engine_id, 2, lambda: next(arrivals), CHUNKS, row=row(FOUR), slot=FOUR[2])
        one.cleanup()
        return next(arrivals) - before

    waits = try_once()
    files = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken, pytest.raises(OSError, match="Cannot allocate memory"):
        if moment == "in ours":
            broken.setattr(region, "_populate", no_memory)
        else:
            stock = importlib.import_module(REGION_MODULE)
            broken.setattr(stock, "mmap", SimpleNamespace(**vars(mmap) | {"mmap": no_memory}))
        before = next(arrivals)
        try_once()
    assert next(arrivals) - before - 1 == waits, "the others wait as often as ever"
    assert names(engine_id) == []
    if moment == "in ours":
        assert set(os.listdir("/proc/self/fd")) == files
    assert try_once() == waits, "the same engine starts again"


def test_a_slot_outside_the_row_is_refused(module: ModuleType, engine_id: str) -> None:
    lend_world_group(lambda: None)
    refused = pytest.raises(ValueError, match="a slot of 4097 bytes at 4096 is not in a row of 8192")
    with refused, region.slots(module, PAGE, PAGE + 1):
        make(module, engine_id, 1, lambda: None, 3, row=2 * PAGE, slot=PAGE)
    assert names(engine_id) == []
