"""CPU time that ``register()`` takes in a process, median over forks, in milliseconds.

Forks are of a process that has imported vLLM. They pay for copying the memory pages they touch, which
a process of its own does not: the figures are upper bounds.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import vllm.config  # noqa: F401  # what every process of vLLM has imported when it loads plugins

ROUNDS, FORKS = 3, 25
MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.kv_offload.factory")
FROM_0_19 = ("vllm.v1.kv_offload.cpu.spec", "vllm.v1.simple_kv_offload.manager", "vllm.v1.simple_kv_offload.worker")


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What ``work()`` returns, through JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(result)


def one_process() -> tuple[float, float, list[str]]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # the log line is made, and not shown
    os.dup2(nowhere, 2)
    start = time.process_time()
    from vllm_kvfix import plugin

    imported = time.process_time()
    plugin.register()
    registered = time.process_time()
    return imported - start, registered - imported, [status.word for status in plugin.statuses().values()]


def processes(words: set[str]) -> list[tuple[float, float]]:
    gc.collect()
    gc.freeze()
    samples = [in_a_fork(one_process) for _ in range(FORKS)]
    assert all(set(seen) <= words for _, _, seen in samples), samples[0]
    return [(imported, registered) for imported, registered, _ in samples]


def not_imported() -> list[tuple[float, float]]:
    assert not [name for name in MODULES if name in sys.modules]
    return processes({"waiting"})


def all_imported() -> list[tuple[float, float]]:
    for name in (*MODULES, *FROM_0_19):
        importlib.import_module(name)
    return processes({"applied", "not needed"})


def main() -> None:
    torch.set_num_threads(1)
    in_a_fork(one_process)  # makes the bytecode
    a, b = [], []
    for _ in range(ROUNDS):
        a += in_a_fork(not_imported)
        b += in_a_fork(all_imported)
    medians = {
        "import vllm_kvfix.plugin": statistics.median(imported for imported, _ in a + b),
        "register(), vLLM's modules not imported": statistics.median(registered for _, registered in a),
        "register(), vLLM's modules imported": statistics.median(registered for _, registered in b),
    }
    print(json.dumps({what: 1000 * seconds for what, seconds in medians.items()}))


if __name__ == "__main__":
    main()
