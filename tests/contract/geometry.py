"""Real vLLM objects of whatever release is installed: specs, groups, KV cache configs, offloading specs.

Releases are told apart by what they have. Tensors are planned by the release's own planner.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as kv

BLOCK_SIZE = 16
UNIT = 32 * BLOCK_SIZE  # bytes of a page of width 1, of every kind of layer
WINDOW = 64  # tokens, of sliding windows and attention chunks that are not told otherwise


_PLANNING = "vllm.v1.core.kv_cache_planning"  # from 0.33.0
PLANNER_MODULE = _PLANNING if importlib.util.find_spec(_PLANNING) else "vllm.v1.core.kv_cache_utils"


@dataclass(frozen=True)
class Layer:
    """One layer: ``kind`` is full, sliding, chunked, mla or mamba; its page takes ``width * UNIT`` bytes."""

    kind: str = "full"
    width: int = 1
    window: int = WINDOW


def layer_spec(layer: Layer, block_size: int = BLOCK_SIZE) -> Any:
    """The vLLM spec of one layer."""
    attention = {
        "block_size": block_size,
        "num_kv_heads": layer.width,
        "head_size": 8,
        "dtype": torch.float16,
    }
    if layer.kind == "full":
        return kv.FullAttentionSpec(**attention)
    if layer.kind == "sliding":
        return kv.SlidingWindowSpec(**attention, sliding_window=layer.window)
    if layer.kind == "chunked":
        return kv.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=layer.window)
    if layer.kind == "mla":
        return kv.MLAAttentionSpec(**attention | {"num_kv_heads": 1, "head_size": 16 * layer.width})
    if layer.kind == "encoder":
        return kv.EncoderOnlyAttentionSpec(**attention)
    assert layer.kind == "mamba", layer
    state = layer.width * 16 * block_size  # float16 numbers
    return kv.MambaSpec(block_size=block_size, shapes=((state,),), dtypes=(torch.float16,))


def group(layers: Sequence[Layer], name: str = "layer", block_size: int = BLOCK_SIZE, uniform: bool = False) -> Any:
    """One KV cache group; of ``UniformTypeKVCacheSpecs`` if its layers differ or ``uniform`` asks for it."""
    specs = {f"{name}.{i}": layer_spec(layer, block_size) for i, layer in enumerate(layers)}
    spec: Any = next(iter(specs.values()))
    if uniform or len(set(layers)) > 1:
        spec = kv.UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=specs)
    return kv.KVCacheGroupSpec(list(specs), spec)


def kv_cache_config(groups: Sequence[Any], num_blocks: int, tensors: Sequence[Any] = ()) -> Any:
    """A ``KVCacheConfig`` made by hand."""
    return kv.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=list(tensors), kv_cache_groups=list(groups))


def plan(vllm_config: Any, groups: Sequence[Any], num_blocks: int) -> Any:
    """The ``KVCacheConfig`` of one worker, with the tensors that this release lays out for ``groups``."""
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups  # from 0.33.0
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    args: list[Any] = [vllm_config, list(groups)]
    if "kv_cache_specs" in inspect.signature(get_kv_cache_config_from_groups).parameters:  # to 0.11.2
        args.append({name: spec for one in groups for name, spec in layer_specs(one).items()})
    vllm_config.cache_config.num_gpu_blocks_override = num_blocks
    return get_kv_cache_config_from_groups(*args, 1 << 50)


def plan_ranks(vllm_config: Any, ranks: Sequence[dict[str, Layer]], num_blocks: int) -> list[Any]:
    """The ``KVCacheConfig`` of each rank, planned as EngineCore does it, for the layers that each rank has."""
    planning = importlib.import_module(PLANNER_MODULE)
    specs = [{layer: layer_spec(one) for layer, one in rank.items()} for rank in ranks]
    vllm_config.cache_config.num_gpu_blocks_override = num_blocks
    args: list[Any] = [vllm_config, specs, [1 << 50] * len(ranks)]
    if len(inspect.signature(planning.get_kv_cache_configs).parameters) == 4:
        args.append(planning.get_global_kv_cache_groups(vllm_config, specs))
    return planning.get_kv_cache_configs(*args)


def layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group."""
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)


def schedulers_form(worker_config: Any) -> Any:
    """What vLLM gives the scheduler for a worker's ``KVCacheConfig``."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    return generate_scheduler_kv_cache_config([worker_config])


def allocated_bytes(config: Any) -> int:
    """Bytes of KV cache that a worker allocates: each backing allocation counted once."""
    seen: dict[Any, int] = {}
    for number, tensor in enumerate(config.kv_cache_tensors):
        if getattr(tensor, "host_resident", False):
            continue
        names_whole_allocation = hasattr(tensor, "layers") or getattr(tensor, "block_stride", 0)
        seen["whole" if names_whole_allocation else number] = tensor.size
    return sum(seen.values())


def has_field(cls: Any, name: str) -> bool:
    return name in {field.name for field in fields(cls)}


def vllm_config(
    extra_config: dict[str, Any] | None = None,
    *,
    world_size: int = 1,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 1024,
    block_size: int = BLOCK_SIZE,
    use_mla: bool = False,
    layout: str = "LBNHC",
) -> Any:
    """A stand-in for ``VllmConfig`` with what planner, specs and offloading read of it.

    A real one needs a model on disk and its inspection in a subprocess. Unknown attributes raise.
    """
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=block_size,
            cache_dtype="auto",
            enable_prefix_caching=False,
            num_gpu_blocks_override=None,
            mamba_cache_mode="none",
            mamba_block_size=None,
            hash_block_size=None,
            prefix_match_unit=None,
            prefix_cache_retention_interval=None,
            kv_cache_layout=layout,
            get_resolved_kv_cache_layout=lambda: _layout(layout),
        ),
        model_config=SimpleNamespace(
            model="tiny",
            dtype=torch.float16,
            max_model_len=max_model_len,
            original_max_model_len=max_model_len,
            use_mla=use_mla,
            supports_kv_cache_grouping=False,
            get_total_num_kv_heads=lambda: 1,
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=world_size,
            tensor_parallel_size=world_size,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_encoder_input_tokens=0,
            disable_hybrid_kv_cache_manager=False,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="OffloadingConnector",
            kv_connector_extra_config=extra_config if extra_config is not None else {},
            engine_id="engine",
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type="cuda"),
        kv_events_config=None,
        speculative_config=None,
        use_v2_model_runner=False,
        max_in_flight_tokens=max_num_batched_tokens,
        num_prefill_lookahead_tokens=0,
    )


def _layout(name: str) -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout[name]


def create_spec(vllm_config: Any, config: Any) -> Any:
    """The offloading spec that vLLM's factory makes, the way this release's connector asks for it."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    number_of_arguments = len(inspect.signature(OffloadingSpecFactory.create_spec).parameters)
    if number_of_arguments == 2:  # 0.14.0-0.25.1
        return OffloadingSpecFactory.create_spec(vllm_config, config)
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    except ImportError:  # to 0.13.0
        return OffloadingSpecFactory.create_spec(vllm_config)
    return OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, config))


def chunks(spec: Any) -> int:
    """The number of chunks that a spec says its pool has."""
    for name in ("num_chunks", "num_blocks", "num_cpu_blocks"):
        if hasattr(spec, name):
            return int(getattr(spec, name))
    raise AssertionError(f"{spec} has no number of chunks")


def request_context() -> Any:
    """A ``ReqContext``."""
    req_context = offload_class("ReqContext")
    return req_context("request") if has_field(req_context, "req_id") else req_context()


def offload_class(name: str) -> Any:
    """A class of ``vllm.v1.kv_offload``, in whatever module this release keeps it."""
    for module in ("base", "abstract", "spec", "mediums", "worker.worker", "cpu.common", "cpu.spec", "cpu"):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(f"vllm.v1.kv_offload.{module}"), name)
    raise AssertionError(f"no {name} in vllm.v1.kv_offload")


def chunks_managed(spec: Any) -> int:
    """The number of chunks that the spec's real manager hands out before it refuses."""
    manager = spec.get_manager()
    prepare_store = inspect.signature(manager.prepare_store).parameters
    more: tuple[Any, ...] = ()
    if "req_context" in prepare_store:  # from 0.20.0
        more = (request_context(),)
        if hasattr(manager, "on_new_request"):
            manager.on_new_request(*more)
    given: set[int] = set()
    while (output := manager.prepare_store([f"key {len(given)}".encode()], *more)) is not None:
        ids = {int(i) for i in output.store_spec.block_ids}
        assert len(ids) == 1 and not ids & given, f"{ids} handed out twice"
        given |= ids
    assert given == set(range(len(given)))
    return len(given)


def emulate_platform(name: str) -> None:
    """Let vLLM believe that it runs on ``cpu``, ``cuda`` or ``rocm``, for modules imported from now on."""
    import vllm.platforms
    from vllm.platforms.interface import Platform, PlatformEnum

    class Emulated(Platform):
        _enum = PlatformEnum[name.upper()]
        device_type = "cpu" if name == "cpu" else "cuda"
        device_name = name

    vllm.platforms._current_platform = Emulated()
    assert vllm.platforms.current_platform.is_cpu() == (name == "cpu")
