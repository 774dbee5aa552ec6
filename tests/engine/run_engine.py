"""Run engines of the installed vLLM in this process, one after the other, and print one JSON line for each.

    python run_engine.py RUNS.json

RUNS.json is a list. A run is a dictionary:
    name        to find its result by
    model       folder of the model
    connector   kv_connector_extra_config of the OffloadingConnector, or null for none
    prompts     lists of token ids
    passes      how often to ask all prompts; before each pass the GPU's prefix cache is emptied
    max_tokens  tokens of an answer
    together    ask all prompts at once, not one by one
    beginnings  lengths: after all passes, with the caches as they are then, ask the beginnings of all prompts
    engine      more arguments for vllm.LLM

Its line has the same name and, as far as it came,
    gpu_blocks  blocks of the GPU's KV cache
    scheduler   chunks in the pool, as the scheduler's manager counts them
    ranks       for each rank, chunks in the pool as its spec counts them and the bytes its pool takes
    tokens      for each pass, the token ids of each answer
    cached      for each pass, the tokens of each prompt that were found in a cache
    beginnings  for each length, the token ids of each answer
    stored, loaded   chunks whose transfer the scheduler's manager saw completed
    error       what ended it early, or null
    seconds     from the beginning to the end of the run
A last line, named "process", says what the plugin did.

The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that the numbers are read from the objects
that vLLM works with, not from anybody's log. So does the worker of an engine on one rank.
"""

from __future__ import annotations

import collections
import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# vLLM takes it for one rank anyway, except that on the CPU 0.20.0-0.22.1 replace its short name "uni" by "mp".
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)  # before vLLM is imported: it logs to standard output
    os.dup2(2, 1)
    for run in json.loads(Path(sys.argv[1]).read_text()):
        print(f"\n=== {run['name']}", file=sys.stderr, flush=True)
        result = {"name": run["name"], "error": None}
        begin = time.monotonic()
        try:
            run_engine(result, **run)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        lines.write(json.dumps(result | {"seconds": time.monotonic() - begin}) + "\n")
    print("\n=== process", file=sys.stderr, flush=True)
    lines.write(json.dumps({"name": "process"} | plugin_facts()) + "\n")


def run_engine(
    result: dict[str, Any],
    name: str,
    model: str,
    prompts: list[list[int]],
    connector: dict[str, Any] | None = None,
    passes: int = 1,
    max_tokens: int = 4,
    together: bool = False,
    beginnings: Sequence[int] = (),
    engine: dict[str, Any] | None = None,
) -> None:
    from vllm import LLM, SamplingParams

    transfers: collections.Counter[str] = collections.Counter()
    arguments = dict(
        model=model,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        **{"distributed_executor_backend": ONE_PROCESS} | (engine or {}),
    )
    if connector:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector,
        }
    llm = None
    try:
        llm = LLM(**arguments)
        core = llm.llm_engine.engine_core.engine_core
        result["gpu_blocks"] = core.vllm_config.cache_config.num_gpu_blocks
        if connector:
            manager = core.scheduler.connector.connector_scheduler.manager
            count_transfers(manager, transfers)
            result["scheduler"] = {"chunks": chunks(getattr(manager, "backend", manager))}  # to 0.18.1 it has one
            result["ranks"] = llm.collective_rpc(rank_facts)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        result["tokens"], result["cached"] = [], []
        for _ in range(passes):
            empty_prefix_cache(llm)
            batches = [prompts] if together else [[prompt] for prompt in prompts]
            outputs = [output for batch in batches for output in ask(llm, batch, sampling)]
            result["tokens"].append([list(output.outputs[0].token_ids) for output in outputs])
            result["cached"].append([output.num_cached_tokens for output in outputs])
        result["beginnings"] = [
            [
                list(output.outputs[0].token_ids)
                for output in ask(llm, [prompt[:length] for prompt in prompts], sampling)
            ]
            for length in beginnings
        ]
    finally:
        result["stored"], result["loaded"] = transfers["complete_store"], transfers["complete_load"]
        stop(llm)


def ask(llm: Any, prompts: list[list[int]], sampling: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def empty_prefix_cache(llm: Any) -> None:
    """vLLM refuses while a deferred store holds blocks; a step of the engine submits it (to 0.19.1)."""
    from vllm import SamplingParams

    for attempt in range(10):
        if llm.reset_prefix_cache():
            return
        ask(llm, [[3, 4, 5 + attempt]], SamplingParams(max_tokens=2, temperature=0, detokenize=False))
    raise RuntimeError("the GPU's prefix cache can't be emptied")


def count_transfers(manager: Any, transfers: collections.Counter[str]) -> None:
    """Count the chunks for which the scheduler's manager is told that the workers are done."""
    for name in ("complete_store", "complete_load"):
        setattr(manager, name, counting(name, getattr(manager, name), transfers))


def counting(name: str, method: Any, transfers: collections.Counter[str]) -> Any:
    @functools.wraps(method)
    def counted(keys: Any, *others: Any, **options: Any) -> Any:
        keys = list(keys)
        transfers[name] += len(keys)
        return method(keys, *others, **options)

    return counted


def chunks(owner: Any) -> int:
    """Chunks in the pool as a manager or a spec of any release has it."""
    names = ("_num_blocks", "_num_chunks", "num_blocks", "num_chunks")
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def rank_facts(worker: Any) -> dict[str, int]:
    """Runs in the process of each rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spec = get_kv_transfer_group().connector_worker.spec
    pool_bytes = sum(part.untyped_storage().nbytes() for part in spec._host_pool.pool)
    return {"chunks": chunks(spec), "pool_bytes": pool_bytes}


def stop(llm: Any) -> None:
    """Undo what vLLM keeps in the process, so that another engine can start in it; `llm` is None if it never stood."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    if llm is not None:
        try:
            llm.llm_engine.engine_core.shutdown()
        except RuntimeError as error:
            if "NVIDIA driver" not in str(error):
                raise
            # 0.20.0-0.20.2: a worker waits for its GPU in the end, and a CUDA build of torch finds none.
    ensure_kv_transfer_shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def plugin_facts() -> dict[str, Any]:
    """What a general plugin could have changed in vLLM, and what ours says of itself."""
    import vllm
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    from vllm_kvfix import plugin

    function = kv_cache_utils.get_max_concurrency_for_kv_cache_config
    return {
        "vllm": vllm.__version__,
        "specs": {name: loader().__module__ for name, loader in OffloadingSpecFactory._registry.items()},
        "max_concurrency": function.__code__.co_filename,
        "statuses": {fix: status.word for fix, status in plugin.statuses().items()},
    }


if __name__ == "__main__":
    main()
