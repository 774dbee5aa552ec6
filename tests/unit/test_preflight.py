"""What the host has, read from faked trees of /proc and /sys; and what is said of it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_kvfix import preflight
from vllm_kvfix.preflight import Memory, Pool

GIB = 1 << 30
NO_LIMIT_IN_V1 = "9223372036854771712"


class Host:
    """A faked root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def meminfo(self, available: int, total: int = 256 * GIB) -> None:
        self.write(
            "proc/meminfo",
            f"MemTotal:       {total >> 10} kB\nMemFree:        1 kB\nMemAvailable:   {available >> 10} kB\n",
        )

    def inside(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def v2(
        self,
        path: str,
        limit: Any,
        used: int,
        *,
        inactive: int = 0,
        active: int = 0,
        mount: str = "",
        high: Any = "max",
    ) -> None:
        folder = f"sys/fs/cgroup{mount}{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        stat = f"anon {used}\nfile 0\nactive_anon 7\ninactive_file {inactive}\nactive_file {active}\nunevictable 0\n"
        self.write(f"{folder}/memory.stat", stat)

    def v1(self, path: str, limit: Any, used: int, *, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"cache 1\ninactive_file 3\ntotal_inactive_file {inactive}\n")

    def free(self) -> int | None:
        found = preflight.memory(self.root)
        return None if found is None else found.free


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# ---- What is free ----


def test_without_cgroups_it_is_what_the_machine_has_available(host: Host) -> None:
    host.meminfo(available=20 * GIB)
    assert preflight.memory(host.root) == Memory(20 * GIB, "MemAvailable in /proc/meminfo")


def test_without_proc_nothing_is_known(host: Host) -> None:
    assert preflight.memory(host.root) is None


@pytest.mark.parametrize("mount", ["", "/unified"])
def test_a_limit_of_cgroup_v2_binds(host: Host, mount: str) -> None:
    host.meminfo(available=200 * GIB)
    host.inside("0::/kubepods/pod1/container")
    host.v2("/kubepods/pod1/container", 64 * GIB, 10 * GIB, mount=mount)
    found = preflight.memory(host.root)
    assert found is not None and found.free == 54 * GIB
    assert f"of 64.00 GiB, says /sys/fs/cgroup{mount}/kubepods/pod1/container/memory.max" in found.why
    assert "10.00 GiB are in use" in found.why
    assert "--memory" in found.cure and "resources.limits.memory" in found.cure


@pytest.mark.parametrize("level", ["/kubepods/pod1", "/kubepods", ""])
def test_a_limit_of_an_ancestor_binds_too(host: Host, level: str) -> None:
    host.meminfo(available=200 * GIB)
    host.inside("0::/kubepods/pod1/container")
    host.v2("/kubepods/pod1/container", "max", 10 * GIB)
    host.v2(level, 32 * GIB, 12 * GIB)
    assert host.free() == 20 * GIB


@pytest.mark.parametrize("mount", ["", "/unified"])
@pytest.mark.parametrize("level", ["/pod/container", "/pod", ""])
def test_what_slows_an_engine_down_binds_too(host: Host, level: str, mount: str) -> None:
    """systemd's MemoryHigh, and Kubernetes with MemoryQoS."""
    host.meminfo(available=200 * GIB)
    host.inside("0::/pod/container")
    host.v2("/pod/container", 64 * GIB, 10 * GIB, mount=mount)
    host.v2(level, 64 * GIB, 10 * GIB, high=16 * GIB, mount=mount)
    found = preflight.memory(host.root)
    assert found is not None and found.free == 6 * GIB
    assert f"of 16.00 GiB, says /sys/fs/cgroup{mount}{level}/memory.high" in found.why


@pytest.mark.parametrize(
    ("limit", "high", "harm", "cure"),
    [
        (
            64 * GIB,
            16 * GIB,
            "memory.high, 0 bytes are in use): the kernel will slow the engine to a crawl",
            "MemoryHigh",
        ),
        (16 * GIB, 64 * GIB, "memory.max, 0 bytes are in use): the kernel may kill the engine", "docker run --memory"),
        ("max", "max", "MemAvailable in /proc/meminfo): the kernel may kill the engine", ""),
    ],
)
def test_the_file_that_binds_and_what_comes_of_it_are_said(
    host: Host, limit: Any, high: Any, harm: str, cure: str
) -> None:
    host.meminfo(available=31 * GIB)
    host.inside("0::/")
    host.v2("", limit, 0, high=high)
    message = preflight.too_little_memory(pool()._replace(memory=preflight.memory(host.root)), 32 * GIB, range(2))
    assert message is not None and harm in message and cure in message
    assert ("crawl" in message) != ("kill" in message)


def test_the_tightest_of_all_limits_binds(host: Host) -> None:
    host.meminfo(available=200 * GIB)
    host.inside("0::/a/b")
    host.v2("/a/b", 64 * GIB, 10 * GIB)
    host.v2("/a", 60 * GIB, 40 * GIB)
    assert host.free() == 20 * GIB
    host.meminfo(available=5 * GIB)
    assert host.free() == 5 * GIB


def test_files_that_the_kernel_would_drop_are_not_in_use(host: Host) -> None:
    """Weights that were just read from disk fill the cgroup of every server that starts."""
    host.meminfo(available=200 * GIB)
    host.inside("0::/")
    host.v2("", 64 * GIB, 60 * GIB, inactive=30 * GIB, active=20 * GIB)
    assert host.free() == 54 * GIB


@pytest.mark.parametrize("inactive", [0, 4 * GIB])
def test_a_limit_of_cgroup_v1_binds_and_its_children_s_files_are_counted(host: Host, inactive: int) -> None:
    host.meminfo(available=200 * GIB)
    host.inside("9:name=systemd:/", "4:cpu,memory:/docker/abc", "0::/")
    host.v1("/docker/abc", 16 * GIB, 6 * GIB, inactive=inactive)
    host.v1("", NO_LIMIT_IN_V1, 90 * GIB)
    assert host.free() == 10 * GIB + inactive


def test_in_a_container_that_sees_its_own_cgroup_as_the_root(host: Host) -> None:
    """The path is the host's, and there is no such folder in the container."""
    host.meminfo(available=200 * GIB)
    host.inside("4:memory:/docker/abc")
    host.v1("", 16 * GIB, 6 * GIB)
    assert host.free() == 10 * GIB


def test_a_path_outside_of_the_container_s_namespace_is_not_followed(host: Host) -> None:
    host.meminfo(available=200 * GIB)
    host.inside("0::/../../other")
    for name in ("max", "current"):
        host.write(f"sys/other/memory.{name}", "1")  # where the dots lead to from sys/fs/cgroup
    host.v2("", 16 * GIB, 6 * GIB)
    assert host.free() == 10 * GIB


def test_without_a_limit_the_machine_s_memory_binds(host: Host) -> None:
    host.meminfo(available=20 * GIB)
    host.inside("4:memory:/", "0::/a")
    host.v1("", NO_LIMIT_IN_V1, 6 * GIB)
    host.v2("/a", "max", 6 * GIB)
    assert host.free() == 20 * GIB


def test_use_above_the_limit_leaves_nothing_and_more_files_than_use_leave_the_limit(host: Host) -> None:
    host.meminfo(available=200 * GIB)
    host.inside("0::/")
    host.v2("", 2 * GIB, 3 * GIB)
    assert host.free() == 0
    host.v2("", 2 * GIB, 1 * GIB, inactive=5 * GIB)
    assert host.free() == 2 * GIB


def test_a_path_that_no_file_can_have_says_nothing(host: Host) -> None:
    host.meminfo(available=20 * GIB)
    host.inside("0::/a\x00b", "1:memory:/a\x00b", f"2:memory:/{'c' * 5000}")
    assert host.free() == 20 * GIB


def test_a_limit_without_a_use_and_a_folder_in_place_of_a_file_say_nothing(host: Host) -> None:
    host.meminfo(available=20 * GIB)
    host.inside("0::/a")
    host.write("sys/fs/cgroup/a/memory.max", "1024")
    (host.root / "sys/fs/cgroup/memory.max").mkdir(parents=True)
    assert host.free() == 20 * GIB


def test_the_real_machine_has_some() -> None:
    found = preflight.memory()
    assert found is not None and 0 < found.free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


garbage = st.one_of(
    st.text(max_size=80),
    st.sampled_from(["max", "-1", "", "0", "1e9", "9" * 5000, "0x10", "\x00", "²", "1 2", "12 kB", "0\x1f"]),
)


@given(meminfo=garbage, lines=st.lists(garbage, max_size=4), values=st.lists(garbage, min_size=7, max_size=7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_whatever_is_in_the_files_is_never_an_error(
    host: Host, meminfo: str, lines: list[str], values: list[str]
) -> None:
    def write(path: str, text: str) -> None:
        host.write(path, text.encode("utf-8", "replace").decode())

    write("proc/meminfo", f"MemAvailable: {meminfo}\n{meminfo}")
    write("proc/self/cgroup", "\n".join([*lines, "0::/", f"1:memory:{lines[0] if lines else ''}", *lines]))
    for name, value in zip(("max", "current", "stat", "high"), values):
        write(f"sys/fs/cgroup/memory.{name}", value)
    for name, value in zip(("limit_in_bytes", "usage_in_bytes", "stat"), values[4:]):
        write(f"sys/fs/cgroup/memory/memory.{name}", value)
    free = host.free()
    assert free is None or free >= 0


@given(st.integers(0, 10**18), st.integers(0, 10**18), st.integers(0, 10**18))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_what_a_cgroup_leaves_is_never_more_than_its_limit(host: Host, limit: int, used: int, dropped: int) -> None:
    host.inside("0::/x")
    host.v2("/x", limit, used, active=dropped)
    free = host.free()
    assert free is not None and 0 <= free <= limit
    assert free == min(limit, max(0, limit - used + dropped))


# ---- Is it enough ----


def pool(budget: int = 32 * GIB, chunks: int = 32, slots: tuple[int, ...] = (GIB // 2,) * 2, free: Any = None) -> Pool:
    return Pool(budget, chunks, GIB, slots, None if free is None else Memory(free, "as told", ", or more"))


@pytest.mark.parametrize("free", [None, 32 * GIB, 33 * GIB])
def test_enough_memory_or_an_unknown_amount_is_no_message(free: int | None) -> None:
    assert preflight.too_little_memory(pool(free=free), 32 * GIB, range(2)) is None


def test_too_little_memory_is_named_with_both_numbers_and_a_budget_that_fits() -> None:
    message = preflight.too_little_memory(pool(free=32 * GIB - 1), 32 * GIB, range(2))
    assert message is not None and "cpu_bytes_to_use=34359738368 in kv_connector_extra_config" in message
    assert "2 rank(s) on this machine take 32.00 GiB" in message and "(as told)" in message
    budget = int(message.split('"cpu_bytes_to_use": ')[1].split()[0])
    assert budget == 28 * GIB and message.endswith("or less, or more")


def test_a_node_that_cannot_hold_a_single_chunk_is_not_given_a_number() -> None:
    message = preflight.too_little_memory(pool(free=GIB), 32 * GIB, range(2))
    assert message is not None and "use a machine with more, or more" in message
    assert '"cpu_bytes_to_use"' not in message


@given(
    chunks=st.integers(1, 1000),
    slots=st.lists(st.integers(1, 10**9), min_size=1, max_size=8),
    padding=st.integers(0, 4095),
    free=st.integers(0, 10**12),
    nodes=st.integers(1, 8),
    rest=st.integers(0, 10**9),
)
def test_the_budget_that_is_advised_fits(
    chunks: int, slots: list[int], padding: int, free: int, nodes: int, rest: int
) -> None:
    row = sum(slots) + padding
    one = Pool(chunks * row + rest % row, chunks, row, tuple(slots), None)
    ranks = range(0, max(1, len(slots) // nodes))
    needed = one.bytes_on(ranks)
    advised = one.budget_for(free, needed)
    fewer = one._replace(chunks=advised // row)
    assert fewer.bytes_on(ranks) <= free * 9 // 10 < fewer._replace(chunks=fewer.chunks + 1).bytes_on(ranks)
    if needed > free:
        assert advised < one.budget


def test_the_bytes_of_a_node_are_those_of_its_ranks() -> None:
    one = Pool(1000, 3, 64, (10, 20, 30, 1), None)
    assert one.bytes_on(range(4)) == 3 * 64
    assert one.bytes_on(range(2)) + one.bytes_on(range(2, 4)) == 3 * 61
    assert Pool(1000, 3, 64, (60,), None).bytes_on(range(4)) == 3 * 64, "one copy for all ranks"


# ---- /dev/shm ----


def shm(monkeypatch: pytest.MonkeyPatch, free: int, blocks: int = 100, block: int = 4096) -> None:
    space = SimpleNamespace(f_blocks=blocks, f_bavail=free // block, f_frsize=block)
    monkeypatch.setattr(os, "statvfs", lambda path: space)


def test_free_bytes_of_shm_are_those_that_a_user_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    shm(monkeypatch, free=64 << 20)
    assert preflight.free_in_shm() == 64 << 20


def test_what_another_rank_has_already_put_there_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "region"
    file.write_bytes(b"x" * (1 << 20))
    taken = file.stat().st_blocks * 512
    assert taken >= 1 << 20
    shm(monkeypatch, free=64 << 20)
    assert preflight.free_in_shm(str(file)) == (64 << 20) + taken
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    assert preflight.free_in_shm(str(file)) == 64 << 20, "a file that is only long has taken nothing"


def test_no_shm_and_one_without_a_limit_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.free_in_shm(folder="/no/such/folder") is None
    shm(monkeypatch, free=0, blocks=0)  # mount -t tmpfs -o size=0
    assert preflight.free_in_shm() is None
    monkeypatch.delattr(os, "statvfs")
    assert preflight.free_in_shm() is None


@pytest.mark.parametrize("free", [None, 32 * GIB, 33 * GIB])
def test_enough_shm_or_an_unknown_amount_is_no_message(free: int | None) -> None:
    assert preflight.too_little_shm(pool(), 32 * GIB, free) is None


def test_too_little_shm_names_the_flags_that_cure_it() -> None:
    message = preflight.too_little_shm(pool(), 32 * GIB, 64 << 20)
    assert message is not None and "takes 32.00 GiB in /dev/shm, which has 64.00 MiB free" in message
    assert "--shm-size=33g" in message and "--ipc=host" in message
    assert "medium: Memory" in message and "sizeLimit" in message
    assert "cpu_bytes_to_use" not in message, "64 MiB hold no chunk"
    message = preflight.too_little_shm(pool(), 32 * GIB, 20 * GIB)
    assert message is not None and '"cpu_bytes_to_use": 19327352832 or less' in message


# ---- The kernel ----


class Page:
    """What ``mmap.mmap`` gives, on a kernel that answers as told."""

    error: OSError | None = None

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def madvise(self, advice: int, start: int, length: int) -> None:
        assert (advice, start, length) == (23, 0, mmap.PAGESIZE)
        if self.error is not None:
            raise self.error


def test_a_kernel_that_says_einval_has_no_populate_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Page)
    assert preflight.knows_populate_write() and preflight.too_old_a_kernel() is None
    monkeypatch.setattr(Page, "error", OSError(errno.EINVAL, "Invalid argument"))
    assert not preflight.knows_populate_write()
    message = preflight.too_old_a_kernel()
    assert message is not None and f"Linux {os.uname().release} has no MADV_POPULATE_WRITE" in message
    assert "Linux 5.14" in message and "0.28.0" in message


@pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOMEM, errno.EPERM])
def test_any_other_error_says_nothing_about_the_kernel(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(mmap, "mmap", Page)
    monkeypatch.setattr(Page, "error", OSError(code, "other"))
    assert preflight.knows_populate_write()


def test_a_python_without_madvise_says_nothing_about_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Page)
    monkeypatch.delattr(Page, "madvise")
    assert preflight.knows_populate_write()
