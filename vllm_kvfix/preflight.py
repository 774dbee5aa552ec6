"""Whether the host has what the CPU pool is about to take: said before memory is taken, with the cure.

Symptom: the kernel kills the engine minutes after it started (or Kubernetes says OOMKilled), or slows it to a crawl
(memory.high of a cgroup); or, from 0.27.0 on CUDA, ``OSError: [Errno 14] Bad address`` where /dev/shm is too small
(https://github.com/vllm-project/vllm/issues/46949, from 0.28.0 with a clear message of vLLM's own), and ``[Errno 22]
Invalid argument`` on Linux before 5.14 (https://github.com/vllm-project/vllm/issues/44888, from 0.28.0 without it).
Cure: what may go wrong is one WARNING a node, from its first rank; what is certain to fail is an error on every rank.
The free memory is that of the moment when the spec was made, because then no rank has taken its part. A file that
cannot be read says nothing, and neither do we.

RLIMIT_MEMLOCK (``ulimit -l``) is not looked at, on purpose. It limits ``mlock()`` and RDMA registrations. Nothing here
makes either: torch's pinned tensors (to 0.26.0) and ``cudaHostRegister`` (from 0.27.0) pin in NVIDIA's driver, which
takes pages without asking for the limit: ``os_lock_user_pages()`` in
https://github.com/NVIDIA/open-gpu-kernel-modules/blob/main/kernel-open/nvidia/os-mlock.c
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vllm_kvfix import _log, _releases
from vllm_kvfix.settings import human

_SHM = "/dev/shm"
_KILLS = "the kernel may kill the engine"
_LIMIT = (", or raise the limit: docker run --memory, in Kubernetes resources.limits.memory", _KILLS)
_HIGH = (
    ", or raise the limit: MemoryHigh in systemd, resources.limits.memory in Kubernetes (MemoryQoS)",
    "the kernel will slow the engine to a crawl",
)


class Memory(NamedTuple):
    """Bytes that can still be taken, what says so, how to raise them, and what becomes of who takes more."""

    free: int
    why: str
    cure: str = ""
    harm: str = _KILLS


class Pool(NamedTuple):
    """What all ranks of an engine are about to take; all in bytes.

    Args:
        budget: ``cpu_bytes_to_use``.
        row: one chunk on all ranks, with padding.
        slots: one chunk on each rank that keeps a copy of its own.
        memory: what was free when no rank had taken its part yet; None if that is not known.
    """

    budget: int
    chunks: int
    row: int
    slots: tuple[int, ...]
    memory: Memory | None

    def bytes_on(self, ranks: range) -> int:
        """Bytes that these ranks take together, which are all of one node."""
        if len(ranks) >= len(self.slots):  # they are all, or share the one copy
            return self.chunks * self.row
        return self.chunks * sum(self.slots[ranks.start : ranks.stop])

    def budget_for(self, free: int, needed: int) -> int:
        """A budget with which a node that takes ``needed`` bytes now leaves a tenth of ``free``; 0 if none does."""
        return free * 9 // 10 // (needed // self.chunks) * self.row


def check(spec: Any, pool: Pool, stop: bool) -> None:
    """In a worker, before it takes its part of the pool: say what it lacks.

    Args:
        spec: of this worker.
        stop: whether to raise where this release is certain to fail; else that is a WARNING too.

    Raises:
        RuntimeError: /dev/shm is too small, or the kernel too old, and vLLM would fail with less of a message.
    """
    ranks = _releases.ranks_of_node(spec)
    needed = pool.bytes_on(ranks)
    if not needed:
        return
    warnings = [too_little_memory(pool, needed, ranks)]
    region = _releases.shared_region(spec)
    if region is not None:
        fatal = []
        if not _releases.region_runs_on_old_kernels(region):
            fatal.append(too_old_a_kernel())
        if not _releases.region_checks_its_space(region):
            fatal.append(too_little_shm(pool, needed, free_in_shm(_releases.region_file(spec))))
        if stop and any(fatal):
            raise RuntimeError(next(filter(None, fatal)))
        warnings += fatal
    if _releases.rank(spec) == ranks.start:
        for message in filter(None, warnings):
            _log.once(logging.WARNING, f"vllm-kvfix: {message}")


def too_little_memory(pool: Pool, needed: int, ranks: range) -> str | None:
    """Message if the ranks of a node need more bytes than were free, or None."""
    if pool.memory is None or needed <= pool.memory.free:
        return None
    cure = _smaller(pool, pool.memory.free, needed) or "use a machine with more"
    return (
        f"cpu_bytes_to_use={pool.budget} in kv_connector_extra_config: {len(ranks)} rank(s) on this machine take "
        f"{human(needed)} of host memory for it, and {human(pool.memory.free)} are left ({pool.memory.why}): "
        f"{pool.memory.harm}. For this, {cure}{pool.memory.cure}"
    )


def too_little_shm(pool: Pool, needed: int, free: int | None) -> str | None:
    """Message if a node's /dev/shm has less than ``needed`` bytes ``free``, or None."""
    if free is None or needed <= free:
        return None
    smaller = _smaller(pool, free, needed)
    return (
        f"the CPU pool takes {human(needed)} in {_SHM}, which has {human(free)} free: vLLM "
        f"{_releases.vllm_version()} would end with 'OSError: [Errno 14] Bad address'. Write docker run "
        f"--shm-size={-(-needed >> 30) + 1}g (or --ipc=host), in Kubernetes mount at {_SHM} an emptyDir with medium: "
        f"Memory and such a sizeLimit{', or ' + smaller if smaller else ''}"
    )


def too_old_a_kernel() -> str | None:
    """Message if this kernel cannot pre-fault memory as vLLM 0.27 asks it to, or None."""
    if knows_populate_write():
        return None
    return (
        f"Linux {os.uname().release} has no MADV_POPULATE_WRITE, with which vLLM {_releases.vllm_version()} takes the "
        "CPU pool: it would end with 'OSError: [Errno 22] Invalid argument'. Use Linux 5.14 or newer, or vLLM 0.28.0 "
        "or newer"
    )


def _smaller(pool: Pool, free: int, needed: int) -> str:
    budget = pool.budget_for(free, needed)
    return f'write "cpu_bytes_to_use": {budget} or less' if budget else ""


def memory(root: Path = Path("/")) -> Memory | None:
    """What this process may still take: of the machine's memory, and of each cgroup that it is in.

    Args:
        root: the folder that has proc and sys.
    """
    bounds = list(_cgroups(root))
    found = re.search(r"^MemAvailable:\s*([0-9]{1,18}) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if found is not None:
        bounds.append(Memory(int(found[1]) << 10, "MemAvailable in /proc/meminfo"))
    return min(bounds, default=None)


def _cgroups(root: Path) -> Iterator[Memory]:
    """Of the cgroup of this process and all that it is in: a limit binds in each of them, of v1 and of v2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = PurePosixPath(path).parts[1:]
        if ".." in parts:  # outside of what this container sees
            parts = ()
        for depth in range(len(parts), -1, -1):
            inside = PurePosixPath(*parts[:depth])
            if not controllers and rest:
                for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                    yield from _cgroup(root, root / mount / inside, "memory.max", "memory.current", "")
                    yield from _cgroup(root, root / mount / inside, "memory.high", "memory.current", "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                yield from _cgroup(root, root / "sys/fs/cgroup/memory" / inside, *names)


def _cgroup(root: Path, folder: Path, limit_file: str, usage_file: str, prefix: str) -> Iterator[Memory]:
    """What a cgroup leaves. Its use counts files that the kernel drops before it kills: weights that were just read."""
    limit, used = _number(_text(folder / limit_file)), _number(_text(folder / usage_file))
    if limit is None or used is None:
        return
    numbers = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    dropped = sum(_number(numbers.get(f"{prefix}{name}_file", "")) or 0 for name in ("inactive", "active"))
    used = max(0, used - dropped)
    yield Memory(
        max(0, limit - used),
        f"of {human(limit)}, says /{(folder / limit_file).relative_to(root)}, {human(used)} are in use",
        *(_HIGH if limit_file == "memory.high" else _LIMIT),
    )


def free_in_shm(region_file: str = "", folder: str = _SHM) -> int | None:
    """Bytes free in /dev/shm, with those that another rank has already put into ``region_file``.

    None if there is no such folder, or no limit on it.
    """
    try:
        space = os.statvfs(folder)  # before the file: else what a rank takes in between would be counted as missing
    except (OSError, AttributeError):
        return None
    if not space.f_blocks:
        return None
    free = space.f_bavail * space.f_frsize
    with contextlib.suppress(OSError):
        free += os.stat(region_file).st_blocks * 512
    return free


def knows_populate_write() -> bool:
    """Whether the kernel has MADV_POPULATE_WRITE, tried on a page of ours: kernels have it by backport, too."""
    advice = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Python has no name for it
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            page.madvise(advice, 0, mmap.PAGESIZE)
    except (OSError, AttributeError) as error:
        return getattr(error, "errno", None) != errno.EINVAL
    return True


def _text(path: Path) -> str:
    """What is in a file; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """A count of bytes; None for ``max`` and whatever else is no number."""
    found = re.fullmatch(r"\s*([0-9]{1,20})\s*", text)
    return int(found[1]) if found is not None else None
