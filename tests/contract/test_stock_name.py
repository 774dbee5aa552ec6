"""Operators who leave the stock spec in place: what they are told, and what ``KVFIX_STOCK_SPEC=1`` changes."""

from __future__ import annotations

import functools
import importlib
import pickle
from typing import Any

import pytest
from facts import CASES, POOL_SIZE_IS_GIVEN, POOL_SIZE_IS_WRONG
from geometry import (
    UNIT,
    Layer,
    chunks,
    create_spec,
    group,
    layer_specs,
    offload_class,
    plan,
    schedulers_form,
    vllm_config,
)
from test_pool_size import both_forms

T01, E01 = CASES["offload_pool"]["T01"], CASES["offload_pool"]["E01"]
STOCK_NAME = [{}, {"spec_name": "CPUOffloadingSpec"}]


@pytest.mark.parametrize("extra_config", STOCK_NAME, ids=["default name", "stock name"])
@pytest.mark.only_if(POOL_SIZE_IS_WRONG)
def test_stock_whose_two_numbers_differ_gets_one_warning_with_both_and_the_remedies(
    register: Any, log: Any, extra_config: dict[str, str]
) -> None:
    register()
    scheduler, worker = both_forms(T01, extra_config)
    assert type(scheduler).__name__ == type(worker).__name__ == "CPUOffloadingSpec"
    assert {"scheduler": chunks(scheduler), "worker": chunks(worker)} == T01["stock"], "stock is left as it was"
    (warning,) = log.ours(30)
    for words in (
        "scheduler 2,184 chunks",
        "worker 39,",
        '"spec_name": "FixedCPUOffloadingSpec"',
        "KVFIX_STOCK_SPEC=1",
        "#39617",
    ):
        assert words in warning


@pytest.mark.only_if(POOL_SIZE_IS_WRONG)
@pytest.mark.parametrize("form", ["scheduler", "worker"])
def test_the_warning_names_the_same_numbers_from_either_form(register: Any, log: Any, form: str) -> None:
    """The scheduler's config does not say that a worker's group is ``UniformTypeKVCacheSpecs``."""
    register()
    config = vllm_config({"cpu_bytes_to_use": 1 << 30})
    worker_config = plan(config, [group([Layer(width=4), Layer(width=2), Layer(width=1)])], num_blocks=100)
    create_spec(config, worker_config if form == "worker" else schedulers_form(worker_config))
    stock = [
        chunks(create_spec(config, form_of_config))
        for form_of_config in (schedulers_form(worker_config), worker_config)
    ]
    (warning,) = log.ours(30)
    assert f"scheduler {stock[0]:,} chunks" in warning and f"worker {stock[1]:,}," in warning


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_stock_whose_two_numbers_agree_gets_no_warning(register: Any, log: Any) -> None:
    register()
    config = vllm_config({"cpu_bytes_to_use": 1 << 30})
    worker_config = plan(config, [group([Layer(width=4)] * 5)], num_blocks=100)
    for form in (worker_config, schedulers_form(worker_config)):
        assert type(create_spec(config, form)).__name__ == "CPUOffloadingSpec"
    assert log.ours(30) == []


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN and not POOL_SIZE_IS_WRONG)
def test_right_stock_gets_no_warning(register: Any, log: Any) -> None:
    register()
    scheduler, worker = both_forms(E01, {})
    assert type(scheduler).__name__ == type(worker).__name__ == "CPUOffloadingSpec"
    assert log.ours(30) == []


@pytest.mark.parametrize("extra_config", STOCK_NAME, ids=["default name", "stock name"])
@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_kvfix_stock_spec_makes_the_stock_name_give_the_fixed_class(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, extra_config: dict[str, str]
) -> None:
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    register()
    scheduler, worker = both_forms(E01, extra_config)
    assert type(scheduler).__name__ == type(worker).__name__ == "FixedCPUOffloadingSpec"
    assert chunks(scheduler) == chunks(worker) == E01["right"]
    assert log.ours(30) == []


@pytest.mark.only_if(POOL_SIZE_IS_GIVEN)
def test_kvfix_stock_spec_passes_num_cpu_blocks_through(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    register()
    assert chunks(create_spec(vllm_config({"num_cpu_blocks": 37}), None)) == 37


@pytest.mark.parametrize("switch", ["0", "", None])
@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_without_kvfix_stock_spec_the_stock_name_gives_the_stock_class(
    register: Any, monkeypatch: pytest.MonkeyPatch, switch: str | None
) -> None:
    if switch is not None:
        monkeypatch.setenv("KVFIX_STOCK_SPEC", switch)
    register()
    assert {type(spec).__name__ for spec in both_forms(E01, {})} == {"CPUOffloadingSpec"}


@pytest.mark.parametrize("disabled", ["all", "offload-pool-size"])
@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_kvfix_disable_wins_over_kvfix_stock_spec(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    """Behaves as stock: no fixed class, no warning, and our name is unknown to vLLM."""
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    monkeypatch.setenv("KVFIX_DISABLE", disabled)
    register()
    assert {type(spec).__name__ for spec in both_forms(E01, {})} == {"CPUOffloadingSpec"}
    assert log.ours(30) == []
    with pytest.raises(ValueError, match="Unsupported spec type: FixedCPUOffloadingSpec"):
        both_forms(E01, {"spec_name": "FixedCPUOffloadingSpec"})


# ---- EngineCore and its workers are processes of their own, with environments of their own ----


@pytest.mark.only_if(POOL_SIZE_IS_WRONG)
@pytest.mark.parametrize("in_engine_core", [True, False])
@pytest.mark.parametrize("in_worker", [True, False])
@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_worker_goes_with_enginecore_or_does_not_start(
    enter: Any, in_engine_core: bool, in_worker: bool, imported: str
) -> None:
    """A fixed scheduler over a stock worker would hand out chunks that the worker does not have."""
    layers = group([Layer(width=4), Layer(width=2), Layer(width=1)])
    config = vllm_config({"cpu_bytes_to_use": 1 << 20})

    if imported == "before":
        importlib.import_module("vllm.v1.core.kv_cache_utils")
    enter("vllm.v1.engine.core", in_engine_core)
    from vllm.v1.core import kv_cache_utils

    (planned,) = kv_cache_utils.get_kv_cache_configs(config, [layer_specs(layers)], [100 * 7 * UNIT])
    scheduler = create_spec(config, schedulers_form(planned))
    sent = pickle.loads(pickle.dumps(planned))
    enter("vllm.v1.worker.worker_base", in_worker)
    if in_engine_core == in_worker:
        worker = create_spec(config, sent)
        assert type(worker) is type(scheduler)
        assert type(worker).__name__ == ("FixedCPUOffloadingSpec" if in_worker else "CPUOffloadingSpec")
        assert (chunks(worker) == chunks(scheduler)) == in_worker
    else:
        with pytest.raises(RuntimeError, match="KVFIX_STOCK_SPEC=1"):
            create_spec(config, sent)


@pytest.mark.parametrize("disabled", ["all", "offload-pool-size"])
@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_kvfix_disable_refuses_the_fixed_spec_that_a_module_path_still_finds(
    register: Any, monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    monkeypatch.setenv("KVFIX_DISABLE", disabled)
    register()
    by_path = {"spec_name": "FixedCPUOffloadingSpec", "spec_module_path": "vllm_kvfix.spec"}
    with pytest.raises(ValueError, match=f"KVFIX_DISABLE='{disabled}'.*spec_name='FixedCPUOffloadingSpec'"):
        both_forms(E01, by_path)


@pytest.fixture
def opaque_stock_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plugin has wrapped the stock constructor, and what it does cannot be found out."""
    stock = offload_class("CPUOffloadingSpec")
    init = stock.__init__

    @functools.wraps(init)
    def theirs(self: Any, config: Any, *rest: Any) -> None:
        if not (hasattr(config, "kv_transfer_config") or hasattr(config, "extra_config")):
            raise TypeError("no config of vLLM")
        init(self, config, *rest)

    monkeypatch.setattr(stock, "__init__", theirs)


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_a_fixed_spec_over_an_unknown_stock_spec_is_right_or_refused(
    register: Any, log: Any, opaque_stock_spec: None
) -> None:
    """Never a scheduler and a worker with two numbers under our name."""
    importlib.import_module("vllm.v1.kv_offload.factory")
    register()
    assert len(log.ours(30)) == 1 and "TypeError: no config of vLLM" in log.ours(30)[0]
    fixed = {"spec_name": "FixedCPUOffloadingSpec"}
    if POOL_SIZE_IS_WRONG:
        with pytest.raises(RuntimeError, match=r"does not know the CPUOffloadingSpec.*Take spec_name back"):
            both_forms(E01, fixed)
    else:
        assert [chunks(spec) for spec in both_forms(E01, fixed)] == [E01["right"]] * 2


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_kvfix_stock_spec_leaves_an_unknown_stock_spec_alone(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, opaque_stock_spec: None
) -> None:
    importlib.import_module("vllm.v1.kv_offload.factory")
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    register()
    assert {type(spec).__name__ for spec in both_forms(E01, {})} == {"CPUOffloadingSpec"}
    assert any("KVFIX_STOCK_SPEC does nothing" in warning for warning in log.ours(30))
