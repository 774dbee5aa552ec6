"""What the host lacks for the CPU pool is said once a node, before memory is taken; what must fail is an error."""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from facts import POOL_SIZE_IS_GIVEN, SHARED_REGION, SHARED_REGION_TRIES_ITS_FIRST_PAGE
from geometry import BLOCK_SIZE, Layer, create_spec, emulate_platform, group, offload_class, plan, vllm_config
from test_worker import NUM_BLOCKS, PAGES, BlocksFirst, Rig

from vllm_kvfix import _log, preflight

pytestmark = pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)

CHUNKS, BLOCKS_PER_CHUNK = 5, 8
ROW = sum(PAGES.values()) * BLOCKS_PER_CHUNK  # on one rank
assert ROW % 4096 == 0, "so that no release pads it"
MIB = 1 << 20
FIXED = {"spec_name": "FixedCPUOffloadingSpec"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with so many bytes available, in a cgroup with such a limit."""

    def has(available: int, limit: int | str = "max", used: int = 0) -> None:
        for name, text in {
            "proc/meminfo": f"MemAvailable: {available >> 10} kB\n",
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{limit}\n",
            "sys/fs/cgroup/pod/memory.current": f"{used}\n",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    read = preflight.memory
    monkeypatch.setattr(preflight, "memory", lambda: read(tmp_path))
    return has


@pytest.fixture
def start(register: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Starts an engine on the CPU platform as vLLM does, workers before the scheduler.

    Each process says what it has to say, whatever another one said.
    """

    def begin(ranks: int = 1, nodes: int = 1, **extra: Any) -> None:
        emulate_platform("cpu")
        register()
        extra = FIXED | {"block_size": BLOCK_SIZE * BLOCKS_PER_CHUNK, "cpu_bytes_to_use": CHUNKS * ROW * ranks} | extra
        rig = Rig(BlocksFirst, BLOCKS_PER_CHUNK, CHUNKS, "FixedCPUOffloadingSpec")
        configs = [vllm_config(extra, world_size=ranks) for _ in range(ranks)]
        specs = []
        for rank, config in enumerate(configs):
            config.parallel_config.rank = rank
            config.parallel_config.nnodes_within_dp = nodes
            specs.append(create_spec(config, rig.config))
        for config, spec in zip(configs, specs):
            forget_what_was_said()
            # As WorkerWrapperBase.initialize_from_config() has it: from 0.26.0 the spec is not told.
            monkeypatch.setattr(vllm.config.vllm, "_current_vllm_config", config)
            rig.spec = spec
            rig.start()
        forget_what_was_said()
        monkeypatch.setattr(vllm.config.vllm, "_current_vllm_config", None)
        create_spec(configs[0], rig.config).get_manager()

    return begin


def forget_what_was_said() -> None:
    """As in another process."""
    _log._said.clear()


def budget_in(message: str) -> int:
    found = re.search(r'"cpu_bytes_to_use": (\d+) or less', message)
    assert found is not None, message
    return int(found[1])


# ---- Memory ----


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_engine_that_fits_says_nothing(start: Any, host: Any, log: Any, ranks: int) -> None:
    host(available=CHUNKS * ROW * ranks)
    start(ranks)
    assert log.ours(30) == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_pool_above_the_available_memory_is_one_warning_of_the_whole_engine(
    start: Any, host: Any, log: Any, ranks: int
) -> None:
    needed = CHUNKS * ROW * ranks
    host(available=needed - 1024)
    start(ranks)
    (warning,) = log.ours(30)
    assert f"cpu_bytes_to_use={needed} " in warning and f"{ranks} rank(s) on this machine" in warning
    assert "MemAvailable" in warning
    log.records.clear()
    start(ranks, cpu_bytes_to_use=budget_in(warning))
    assert log.ours(30) == [], "what it advises is a cure"


def test_a_pool_above_what_the_cgroup_leaves_is_one_warning_with_the_flag(start: Any, host: Any, log: Any) -> None:
    host(available=1 << 40, limit=2 * CHUNKS * ROW, used=CHUNKS * ROW + 1)
    start(1)
    (warning,) = log.ours(30)
    assert "/sys/fs/cgroup/pod/memory.max" in warning and "docker run --memory" in warning
    assert "resources.limits.memory" in warning
    log.records.clear()
    host(available=1 << 40, limit=2 * CHUNKS * ROW, used=CHUNKS * ROW)
    start(1)
    assert log.ours(30) == []


def test_each_of_two_nodes_is_asked_for_its_own_ranks_and_says_one_line(start: Any, host: Any, log: Any) -> None:
    half = 2 * CHUNKS * ROW
    host(available=half)
    start(4, nodes=2)
    assert log.ours(30) == []
    host(available=half - 1024)
    start(4, nodes=2)
    warnings = log.ours(30)
    assert len(warnings) == 2 and warnings[0] == warnings[1]
    assert "2 rank(s) on this machine" in warnings[0]


def test_with_ray_the_nodes_are_those_that_torch_distributed_counted(
    start: Any, host: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import parallel_state

    from vllm_kvfix import _releases

    spec = SimpleNamespace(vllm_config=vllm_config({}, world_size=4))
    parallel = spec.vllm_config.parallel_config
    parallel.rank = 2
    assert _releases.ranks_of_node(spec) == range(4)
    parallel.distributed_executor_backend = "ray"
    assert _releases.ranks_of_node(spec) == range(4), "torch.distributed is not set up"
    monkeypatch.setattr(parallel_state, "_NODE_COUNT", 2)
    assert _releases.ranks_of_node(spec) == range(2, 4)
    parallel.data_parallel_size = 2
    assert _releases.ranks_of_node(spec) == range(4), "the nodes of all engines"


def test_a_host_that_tells_nothing_is_left_in_peace(
    start: Any, log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = preflight.memory
    monkeypatch.setattr(preflight, "memory", lambda: read(tmp_path / "nothing"))
    start(2)
    assert log.ours(30) == []


def test_the_scheduler_is_silent_though_the_ranks_have_taken_all(register: Any, host: Any, log: Any) -> None:
    register()
    host(available=0)
    config = vllm_config(FIXED | {"cpu_bytes_to_use": 1 << 40})
    create_spec(config, plan(config, [group([Layer(width=8)] * 4)], num_blocks=10)).get_manager()
    assert log.ours(30) == []


def test_a_budget_above_any_machine_is_one_warning_and_a_pool_of_that_size(register: Any, log: Any) -> None:
    """Without a faked host. vLLM's own worker, which would take it, is not called."""
    register()
    config = vllm_config(FIXED | {"cpu_bytes_to_use": 1 << 60})
    spec = create_spec(config, plan(config, [group([Layer(width=8)] * 4)], num_blocks=10))
    spec._preflight()
    spec._preflight()
    (warning,) = log.ours(30)
    assert f"cpu_bytes_to_use={1 << 60}" in warning
    assert 0 < budget_in(warning) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- The shared region, on CUDA ----

regions = pytest.mark.only_if(SHARED_REGION)
# https://github.com/vllm-project/vllm/pull/50358
fails_without_a_word = pytest.mark.only_if(SHARED_REGION and not SHARED_REGION_TRIES_ITS_FIRST_PAGE)


class OldKernel(mmap.mmap):
    """A mapping on Linux before 5.14."""

    def madvise(self, advice: int, *what: int) -> None:
        if advice == 23:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().madvise(advice, *what)


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A /dev/shm with so many bytes free."""

    def has(free: int) -> None:
        space = SimpleNamespace(f_blocks=1 << 30, f_bavail=free // 4096, f_frsize=4096, f_bfree=0)
        monkeypatch.setattr(os, "statvfs", lambda path: space)

    return has


@pytest.fixture
def on_cuda(register: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts one worker of two: the region is vLLM's own, what copies on a GPU is not."""
    names: list[str] = []
    made: list[Any] = []

    def begin(rank: int = 0, **extra: Any) -> Any:
        emulate_platform("cuda")
        register()
        stock = importlib.import_module(offload_class("CPUOffloadingSpec").__module__)

        def worker(**arguments: Any) -> Any:
            made.append(arguments["mmap_region"])
            return SimpleNamespace(submit_store=None, submit_load=None)

        from vllm.distributed import parallel_state

        monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(barrier=lambda: None))
        monkeypatch.setattr(parallel_state, "_INNER_DP_WORLD", None)
        monkeypatch.setattr(stock, "CPUOffloadingWorker", worker)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: rank, raising=False)
        config = vllm_config({"cpu_bytes_to_use": MIB} | extra, world_size=2)
        config.parallel_config.rank = rank
        config.kv_transfer_config.engine_id = f"kvfix-preflight-{os.getpid()}-{len(names)}"
        names.append(config.kv_transfer_config.engine_id)
        forget_what_was_said()
        spec = create_spec(config, plan(config, [group([Layer(width=8)] * 4)], NUM_BLOCKS))
        spec.get_worker(None)
        return made[-1]

    yield begin
    for region in made:
        region.cleanup()
    for name in os.listdir("/dev/shm"):
        if any(engine_id in name for engine_id in names):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{name}")


@regions
def test_enough_of_everything_is_a_region_and_no_word(on_cuda: Any, shm: Any, log: Any) -> None:
    shm(MIB)
    assert on_cuda(**FIXED).total_size_bytes == MIB
    assert log.ours(30) == []


@fails_without_a_word
@pytest.mark.parametrize("rank", [0, 1])
def test_a_small_shm_is_an_error_on_every_rank_before_there_is_a_file(on_cuda: Any, shm: Any, rank: int) -> None:
    shm(MIB - 4096)
    with pytest.raises(RuntimeError, match=r"takes 1.00 MiB in /dev/shm, which has 1020.00 KiB free.*--shm-size=2g"):
        on_cuda(rank, **FIXED)
    assert not [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]


@fails_without_a_word
def test_what_another_rank_has_taken_of_a_small_shm_is_not_missing(on_cuda: Any, shm: Any, log: Any) -> None:
    """The two ranks of a node do not start at the same moment."""
    shm(MIB)
    first = on_cuda(**FIXED)
    assert os.stat(first.mmap_path).st_blocks * 512 == MIB // 2, "its own part"
    shm(MIB // 2)
    assert preflight.free_in_shm(first.mmap_path) == MIB
    assert log.ours(30) == []


@fails_without_a_word
def test_a_kernel_without_populate_write_is_an_error_that_names_it(
    on_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    with pytest.raises(RuntimeError, match=rf"Linux {os.uname().release} has no MADV_POPULATE_WRITE.*Linux 5.14"):
        on_cuda(**FIXED)


@fails_without_a_word
def test_under_kvfix_stock_spec_they_are_one_warning_each_a_node_and_vllm_goes_on(
    on_cuda: Any, shm: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    shm(4096)
    for rank in (0, 1):
        assert on_cuda(rank).total_size_bytes == MIB, "here /dev/shm only says that it is small"
    (warning,) = log.ours(30)
    assert "--shm-size" in warning
    log.records.clear()
    shm(MIB)
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    for rank in (0, 1):
        with pytest.raises(OSError, match="Invalid argument"):  # as we said it would
            on_cuda(rank)
    (warning,) = log.ours(30)
    assert "MADV_POPULATE_WRITE" in warning


@pytest.mark.only_if(SHARED_REGION_TRIES_ITS_FIRST_PAGE)
def test_where_vllm_says_it_clearly_we_say_nothing(
    on_cuda: Any, shm: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm(MIB - 4096)
    with pytest.raises(RuntimeError, match="Insufficient space in /dev/shm"):
        on_cuda(**FIXED)
    shm(MIB)
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    assert on_cuda(**FIXED).total_size_bytes == MIB
    assert log.vllms("MADV_POPULATE_WRITE is not supported")
    assert log.ours(30) == []


@pytest.mark.only_if(not SHARED_REGION)
def test_where_each_rank_has_memory_of_its_own_neither_is_looked_at(
    register: Any, shm: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_platform("cuda")
    register()
    shm(4096)
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    config = vllm_config(FIXED | {"cpu_bytes_to_use": MIB}, world_size=2)
    create_spec(config, plan(config, [group([Layer(width=8)] * 4)], NUM_BLOCKS))._preflight()
    assert log.ours(30) == []
