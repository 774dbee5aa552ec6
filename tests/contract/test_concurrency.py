"""How many requests of ``max_model_len`` fit: what vLLM reports, stock and repaired.

vLLM logs this number at start, and from 0.24.0 exports it in ``vllm:cache_config_info``.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
from facts import CASES, CONCURRENCY_IS_WRONG, VERSION
from geometry import Layer, group, kv_cache_config, plan, schedulers_form, vllm_config

T22 = CASES["max_concurrency"]["T22"]
CONTROLS = {name: case for name, case in CASES["max_concurrency"].items() if name != "T22"}
NAME = "get_max_concurrency_for_kv_cache_config"


def configs_of_case(case: dict[str, Any]) -> tuple[Any, Any]:
    """``VllmConfig`` and a worker's ``KVCacheConfig`` (without tensors) of a case."""
    config = vllm_config(
        max_model_len=case["max_model_len"], max_num_batched_tokens=8192, block_size=case["block_size"]
    )
    groups = []
    for number, one in enumerate(case["groups"]):
        layer = Layer("sliding", window=1024) if one["kind"] == "sliding" else Layer()
        uniform = one["kind"] == "uniform"
        groups.append(group([layer] * one["layers"], f"group.{number}", case["block_size"], uniform=uniform))
    return config, kv_cache_config(groups, case["num_blocks"])


def reported(config: Any, cache_config: Any) -> float:
    """What vLLM computes, through the name that it calls."""
    from vllm.v1.core import kv_cache_utils

    return float(getattr(kv_cache_utils, NAME)(config, cache_config))


def swapped(cache_config: Any) -> Any:
    return kv_cache_config(cache_config.kv_cache_groups[::-1], cache_config.num_blocks)


def test_stock_depends_on_form_and_order_of_the_groups_until_0_26_0() -> None:
    config, worker = configs_of_case(T22)
    answers = {
        "worker": reported(config, worker),
        "worker, groups swapped": reported(config, swapped(worker)),
        "scheduler": reported(config, schedulers_form(worker)),
    }
    if CONCURRENCY_IS_WRONG:
        assert answers == T22["stock"]
    else:
        assert answers == dict.fromkeys(T22["stock"], T22["right"])


@pytest.mark.parametrize("case", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize("repaired", [False, True], ids=["stock", "repaired"])
def test_cases_of_one_page_size_are_right_on_stock_and_repaired(
    register: Any, case: dict[str, Any], repaired: bool
) -> None:
    if repaired:
        register()
    config, worker = configs_of_case(case)
    for form in (worker, schedulers_form(worker), swapped(worker)):
        assert round(reported(config, form), 2) == case["right"]


@pytest.mark.parametrize("imported", ["before", "after"])
def test_repaired_gives_one_right_number_for_every_form_and_order(register: Any, imported: str) -> None:
    if imported == "before":
        importlib.import_module("vllm.v1.core.kv_cache_utils")
    register()
    config, worker = configs_of_case(T22)
    for form in (worker, swapped(worker), schedulers_form(worker), schedulers_form(swapped(worker))):
        assert reported(config, form) == T22["right"]


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
@pytest.mark.parametrize("imported", ["before", "after"])
def test_an_affected_function_is_replaced_and_restored(register: Any, imported: str) -> None:
    from vllm_kvfix import plugin

    if imported == "after":
        register()
        assert plugin.statuses()["max-concurrency"].word == "waiting"
    from vllm.v1.core import kv_cache_utils

    if imported == "before":
        stock = getattr(kv_cache_utils, NAME)
        register()
    assert plugin.statuses()["max-concurrency"].word == "applied"
    fixed = getattr(kv_cache_utils, NAME)
    assert isinstance(fixed, types.FunctionType)
    assert fixed.__name__ == NAME and fixed.__module__ == kv_cache_utils.__name__
    plugin.restore()
    restored = getattr(kv_cache_utils, NAME)
    assert restored is not fixed
    if imported == "before":
        assert restored is stock
    config, worker = configs_of_case(T22)
    assert reported(config, worker) == T22["stock"]["worker"]


@pytest.mark.only_if(not CONCURRENCY_IS_WRONG)
@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_right_function_is_not_needed_and_untouched(register: Any, imported: str) -> None:
    from vllm_kvfix import plugin

    if imported == "after":
        register()
    from vllm.v1.core import kv_cache_utils

    before = dict(vars(kv_cache_utils))
    if imported == "before":
        register()
    assert plugin.statuses()["max-concurrency"].word == "not needed"
    function = getattr(kv_cache_utils, NAME)
    assert function.__globals__ is vars(kv_cache_utils) and not hasattr(function, "__wrapped__")
    changed = {name for name, value in vars(kv_cache_utils).items() if before.get(name) is not value}
    assert changed <= {"get_kv_cache_configs"}, "another fix stamps what it plans"


def test_the_operator_reads_the_right_number(register: Any, log: Any) -> None:
    """In the log of every release, and from 0.24.0 in what ``vllm:cache_config_info`` is made of."""
    register()
    from vllm.v1.core import kv_cache_utils as utils

    config, worker = configs_of_case(T22)
    tokens = int(T22["right"] * T22["max_model_len"])
    if hasattr(utils, "get_kv_cache_capacity"):
        for form in (worker, schedulers_form(worker)):
            assert utils.get_kv_cache_capacity(config, form) == (tokens, T22["right"])
    if hasattr(utils, "update_kv_cache_capacity"):  # from 0.28.0
        utils.update_kv_cache_capacity(config, worker)
        assert config.cache_config.kv_cache_max_concurrency == T22["right"]
        assert config.cache_config.kv_cache_size_tokens == tokens
    elif hasattr(utils, "_report_kv_cache_config"):  # 0.11.1-0.23.0
        utils._report_kv_cache_config(config, worker)
    elif not hasattr(utils, "get_kv_cache_capacity"):  # 0.11.0: logs while it plans
        plan(config, worker.kv_cache_groups, worker.num_blocks)
    else:  # 0.24.0-0.27.1: logged by EngineCore, from what get_kv_cache_capacity gave
        return
    (line,) = log.vllms("Maximum concurrency for")
    assert "Maximum concurrency for 16,000 tokens per request: 5.00x" in line
    if VERSION >= (0, 20, 1):
        assert log.vllms("KV cache size: 80,000 tokens")


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
def test_no_groups_and_groups_that_take_no_block_are_no_division_by_zero(register: Any) -> None:
    register()
    encoder_only = group([Layer("encoder")] * 2)
    config = vllm_config()
    assert reported(config, kv_cache_config([], 1)) == 0.0
    assert reported(config, kv_cache_config([encoder_only], 100)) == 0.0
    both = kv_cache_config([encoder_only, group([Layer()] * 2)], 128)
    assert reported(config, both) == 2.0, "encoder-only layers take no block of the pool"
