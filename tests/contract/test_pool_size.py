"""The number of chunks in the CPU pool: stock vLLM's, and that of ``FixedCPUOffloadingSpec``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from facts import (
    ATTENTION_FREE_IS_REFUSED,
    CASES,
    MANAGER_ASSERTS_ONE_GROUP,
    POOL_SIZE_IS_GIVEN,
    POOL_SIZE_IS_WRONG,
    ROCM_HAS_NO_SHARED_REGION,
    ROW_ALIGNMENT,
    SEVERAL_UNIFORM_GROUPS,
    SINGLE_COPY_OF_MLA,
)
from geometry import (
    BLOCK_SIZE,
    UNIT,
    Layer,
    allocated_bytes,
    chunks,
    chunks_managed,
    create_spec,
    emulate_platform,
    group,
    has_field,
    kv,
    plan,
    schedulers_form,
    vllm_config,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st

FIXED = "FixedCPUOffloadingSpec"
sized_by_vllm = pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)


@pytest.fixture(params=["named", "named, with module path", "with module path, plugin not loaded"])
def choice(request: pytest.FixtureRequest, register: Any) -> dict[str, str]:
    """The three ways to choose the fixed spec in ``kv_connector_extra_config``."""
    if request.param != "with module path, plugin not loaded":
        register()
    return {"spec_name": FIXED} | ({} if request.param == "named" else {"spec_module_path": "vllm_kvfix.spec"})


def both_forms(case: dict[str, Any], extra_config: dict[str, Any]) -> tuple[Any, Any]:
    """The scheduler's and a worker's spec of a case."""
    config = vllm_config(extra_config | {"cpu_bytes_to_use": case["budget"]}, world_size=case["world_size"])
    layers = [Layer(width=page // UNIT) for count, page in case["pages"] for _ in range(count)]
    worker_config = plan(config, [group(layers)], num_blocks=100)
    assert allocated_bytes(worker_config) == 100 * case["bytes_per_block"]
    return create_spec(config, schedulers_form(worker_config)), create_spec(config, worker_config)


@pytest.mark.one_process
@sized_by_vllm
@pytest.mark.parametrize("case", CASES["offload_pool"].values(), ids=CASES["offload_pool"])
def test_stock_gives_two_wrong_numbers_until_0_19_1_and_one_right_number_after(case: dict[str, Any]) -> None:
    scheduler, worker = both_forms(case, {})
    if POOL_SIZE_IS_WRONG:
        assert {"scheduler": chunks(scheduler), "worker": chunks(worker)} == case["stock"]
        assert chunks(scheduler) > chunks(worker), "the scheduler hands out chunks that the worker does not have"
    else:
        assert chunks(scheduler) == chunks(worker) == case["right"]


@pytest.mark.one_process
@sized_by_vllm
@pytest.mark.parametrize("case", CASES["offload_pool"].values(), ids=CASES["offload_pool"])
def test_fixed_gives_the_scheduler_and_the_worker_the_right_number(
    case: dict[str, Any], choice: dict[str, str]
) -> None:
    scheduler, worker = both_forms(case, choice)
    assert type(scheduler).__name__ == type(worker).__name__ == FIXED
    assert chunks(scheduler) == chunks(worker) == case["right"]
    assert chunks_managed(scheduler) == case["right"]


@pytest.mark.only_if(POOL_SIZE_IS_GIVEN)
def test_fixed_passes_num_cpu_blocks_through_and_says_so(choice: dict[str, str], log: Any) -> None:
    spec = create_spec(vllm_config(choice | {"num_cpu_blocks": 37}), None)
    assert type(spec).__name__ == FIXED
    assert chunks(spec) == chunks_managed(spec) == 37
    said = [line for line in log.ours() if "37 chunks" in line and "num_cpu_blocks" in line]
    assert len(said) == 1, log.ours()


# ---- over drawn geometries ----


@dataclass(frozen=True)
class Geometry:
    groups: tuple[tuple[Layer, ...], ...]
    num_blocks: int
    world_size: int
    blocks_per_chunk: int
    says_tokens: bool  # the chunk is given in tokens (block_size) or in blocks (blocks_per_chunk, from 0.26.0)
    rows: int  # rows that the budget holds
    left_over: float  # share of one more row in the budget, below 1
    packed: bool  # all layers' pages of a block side by side in one allocation
    policy: str

    def bytes_per_block(self) -> int:
        """Bytes that one rank must keep for one block: groups share memory, layers of a group do not."""
        if len({layer.width for layers in self.groups for layer in layers}) == 1:
            return max(map(len, self.groups)) * self.groups[0][0].width * UNIT
        return sum(layer.width for layer in self.groups[0]) * UNIT

    def layout(self) -> str:
        """Name of the layout of the tensors, from 0.29.0."""
        mixed = len(self.groups) > 1 and len({layer.width for layer in self.groups[0]}) > 1
        return "BLHNC" if self.packed or mixed else "LBNHC"


ALL_KINDS = ("full", "sliding", "chunked", "mla", "mamba")
width = st.integers(1, 6)


@st.composite
def one_group(draw: st.DrawFn) -> tuple[tuple[Layer, ...], ...]:
    layer = Layer(draw(st.sampled_from(ALL_KINDS)), draw(width))
    return ((layer,) * draw(st.integers(1, 6)),)


@st.composite
def uniform_group(draw: st.DrawFn) -> tuple[tuple[Layer, ...], ...]:
    """One group of layers of different pages: ``UniformTypeKVCacheSpecs``."""
    kind = draw(st.sampled_from(["full", "mla", "sliding"]))
    return (tuple(Layer(kind, draw(width)) for _ in range(draw(st.integers(2, 5)))),)


@st.composite
def several_groups(draw: st.DrawFn) -> tuple[tuple[Layer, ...], ...]:
    """Groups of one page size; the i-th layers of all groups share a tensor."""
    one_width = draw(width)
    kinds = draw(st.lists(st.sampled_from(ALL_KINDS), min_size=2, max_size=4))
    return tuple((Layer(kind, one_width),) * draw(st.integers(1, 5)) for kind in kinds)


@st.composite
def several_uniform_groups(draw: st.DrawFn) -> tuple[tuple[Layer, ...], ...]:
    """Groups that each have the same number of layers of each page size."""
    widths = draw(st.lists(width, min_size=2, max_size=3, unique=True)) * draw(st.integers(1, 2))
    kinds = draw(st.lists(st.sampled_from(["full", "mla", "sliding"]), min_size=2, max_size=3))
    return tuple(tuple(Layer(kind, width) for width in widths) for kind in kinds)


any_groups = one_group() | uniform_group() | several_groups()
if SEVERAL_UNIFORM_GROUPS:
    any_groups |= several_uniform_groups()
PACKS_ON_REQUEST = has_field(kv.KVCacheTensor, "block_stride")

geometries = st.builds(
    Geometry,
    groups=any_groups,
    num_blocks=st.integers(1, 300),
    world_size=st.sampled_from([1, 2, 4, 8]),
    blocks_per_chunk=st.integers(1, 8),
    says_tokens=st.booleans(),
    rows=st.integers(1, 40),
    left_over=st.floats(0, 0.9999),
    packed=st.booleans() if PACKS_ON_REQUEST else st.just(False),
    policy=st.sampled_from(["lru", "arc"]),
)
every_geometry = settings(max_examples=80, derandomize=True, database=None, deadline=None)


def extra_config_of(geometry: Geometry, row: int) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": geometry.rows * row + int(geometry.left_over * row),
        "eviction_policy": geometry.policy,
    }
    if has_field_blocks_per_chunk() and not geometry.says_tokens:
        extra["blocks_per_chunk"] = geometry.blocks_per_chunk
    elif geometry.blocks_per_chunk > 1 or geometry.says_tokens:
        extra["block_size"] = BLOCK_SIZE * geometry.blocks_per_chunk
    if geometry.packed and not has_field(kv.KVCacheTensor, "layers"):
        extra["enable_cross_layers_blocks"] = "true"  # 0.24.0-0.28.0
    return extra


def has_field_blocks_per_chunk() -> bool:
    try:
        from vllm.v1.kv_offload.config import OffloadingCacheConfig
    except ImportError:
        return False
    return has_field(OffloadingCacheConfig, "blocks_per_chunk")


@sized_by_vllm
def test_pool_of_any_geometry_is_one_number_fits_the_budget_and_leaves_less_than_one_row(register: Any) -> None:
    """Invariants 1 to 3: one N everywhere; N rows fit; one more would not. And the manager manages N chunks."""
    register()

    @every_geometry
    @given(geometries)
    def check(geometry: Geometry) -> None:
        needed = geometry.bytes_per_block() * geometry.blocks_per_chunk * geometry.world_size
        row = -(-needed // ROW_ALIGNMENT) * ROW_ALIGNMENT
        extra = extra_config_of(geometry, row)
        config = vllm_config(
            extra | {"spec_name": FIXED},
            world_size=geometry.world_size,
            layout=geometry.layout(),
        )
        groups = [group(layers, f"group.{i}") for i, layers in enumerate(geometry.groups)]
        worker_config = plan(config, groups, geometry.num_blocks)
        note(f"{worker_config}")
        assert allocated_bytes(worker_config) == geometry.bytes_per_block() * geometry.num_blocks
        scheduler = create_spec(config, schedulers_form(worker_config))
        budget = extra["cpu_bytes_to_use"]
        for rank in range(geometry.world_size):
            config.parallel_config.rank = rank
            assert chunks(create_spec(config, worker_config)) == chunks(scheduler)
        config.parallel_config.rank = 0
        assert chunks(scheduler) * needed <= budget
        assert budget - chunks(scheduler) * row < row
        assert chunks(scheduler) == geometry.rows
        if MANAGER_ASSERTS_ONE_GROUP and len(groups) > 1:
            with pytest.raises(AssertionError):
                scheduler.get_manager()
        else:
            assert chunks_managed(scheduler) == geometry.rows
        if not POOL_SIZE_IS_WRONG:
            config.kv_transfer_config.kv_connector_extra_config = extra
            assert chunks(create_spec(config, worker_config)) == chunks(scheduler), "upstream's own number"

    check()


@sized_by_vllm
@pytest.mark.parametrize("form", ["worker", "scheduler"])
def test_no_gpu_blocks_give_an_empty_pool(register: Any, form: str) -> None:
    """Invariant 6, first half."""
    register()
    config = vllm_config({"spec_name": FIXED, "cpu_bytes_to_use": 1 << 30})
    worker_config = plan(config, [group([Layer(), Layer(width=2)])], num_blocks=0)
    spec = create_spec(config, worker_config if form == "worker" else schedulers_form(worker_config))
    assert chunks(spec) == chunks_managed(spec) == 0


@sized_by_vllm
@pytest.mark.only_if(not ATTENTION_FREE_IS_REFUSED)
def test_a_model_without_attention_gets_an_empty_pool(register: Any) -> None:
    """One block, no tensor, no group; stock 0.14.0-0.19.1 asserts, 0.23.0-0.25.1 divide by zero."""
    register()
    config = vllm_config({"spec_name": FIXED, "cpu_bytes_to_use": 1 << 30})
    assert chunks(create_spec(config, plan(config, [], num_blocks=1))) == 0


@pytest.mark.only_if(ATTENTION_FREE_IS_REFUSED)
def test_a_model_without_attention_is_refused_by_vllm(register: Any) -> None:
    register()
    config = vllm_config({"spec_name": FIXED, "cpu_bytes_to_use": 1 << 30})
    with pytest.raises(Exception) as error:
        create_spec(config, plan(config, [], num_blocks=1))
    assert "vllm_kvfix" not in str(error.traceback[-1].path)


@pytest.mark.only_if(SINGLE_COPY_OF_MLA)
@pytest.mark.parametrize(("platform", "copies"), [("cuda", 1), ("rocm", 1), ("cpu", 4)])
def test_mla_on_four_ranks_takes_one_copy_where_stock_keeps_one(register: Any, platform: str, copies: int) -> None:
    """One copy in the region that all ranks share, on CUDA, and on ROCm to 0.30.0; the CPU platform has no region."""
    emulate_platform(platform)
    register()
    budget = 1000 * 4 * ROW_ALIGNMENT
    config = vllm_config({"cpu_bytes_to_use": budget, "spec_name": FIXED}, world_size=4, use_mla=True)
    worker_config = plan(config, [group([Layer("mla", ROW_ALIGNMENT // UNIT)])], num_blocks=100)
    if hasattr(worker_config, "kv_tp_replicas"):
        worker_config.kv_tp_replicas = 4
    spec = create_spec(config, worker_config)
    if platform == "rocm" and ROCM_HAS_NO_SHARED_REGION:
        copies = 4
    assert chunks(spec) == budget // (ROW_ALIGNMENT * copies)
    del config.kv_transfer_config.kv_connector_extra_config["spec_name"]
    assert chunks(create_spec(config, worker_config)) == chunks(spec)
