"""Settings that an operator gets wrong are refused with what to write instead; what stock accepts is accepted."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from facts import POOL_SIZE_IS_GIVEN, VERSION
from geometry import Layer, chunks, chunks_managed, create_spec, group, plan, vllm_config

pytestmark = pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
ROW = 4 * 4096  # bytes of one chunk, in every release


def spec_for(world_size: int = 1, **extra_config: Any) -> Any:
    """The spec of a model whose row takes ``ROW`` bytes on one rank."""
    config = vllm_config({"spec_name": "FixedCPUOffloadingSpec"} | extra_config, world_size=world_size)
    return create_spec(config, plan(config, [group([Layer(width=8)] * 4)], num_blocks=10))


def is_a_right_example(message: str, setting: str, **other: Any) -> bool:
    """Whether the example in ``message`` is one that works."""
    example = re.search(rf'"{setting}": (\d+)', message)
    return example is not None and spec_for(**{setting: int(example[1])} | other) is not None


@pytest.mark.one_process
@pytest.mark.parametrize(
    "value",
    [None, 0, -5, "0", "abc", "", "32 GiB", math.nan, math.inf, -math.inf, True, False, [], {}, ROW - 1, 1],
    ids=repr,
)
def test_a_budget_that_cannot_be_is_refused(register: Any, value: Any) -> None:
    register()
    with pytest.raises(ValueError) as error:
        spec_for(cpu_bytes_to_use=value)
    message = str(error.value)
    assert "cpu_bytes_to_use" in message
    assert value is None or repr(value) in message
    assert is_a_right_example(message, "cpu_bytes_to_use")


def test_a_missing_budget_is_refused(register: Any) -> None:
    register()
    with pytest.raises(ValueError, match="cpu_bytes_to_use is missing") as error:
        spec_for()
    assert is_a_right_example(str(error.value), "cpu_bytes_to_use")


def test_a_budget_below_one_row_names_the_row_and_the_least_budget(register: Any) -> None:
    """Invariant 6, second half. The least budget that the message names is enough, and a byte less is not."""
    register()
    with pytest.raises(ValueError, match=f'"cpu_bytes_to_use": {4 * ROW}\\b'):
        spec_for(world_size=4, cpu_bytes_to_use=4 * ROW - 1)
    assert chunks(spec_for(world_size=4, cpu_bytes_to_use=4 * ROW)) == 1


@pytest.mark.one_process
@pytest.mark.parametrize("value", [34359738368, 34359738368.0, "34359738368", " 34359738368 "], ids=repr)
def test_a_budget_in_any_form_that_stock_accepts_is_accepted(register: Any, value: Any) -> None:
    register()
    assert chunks(spec_for(cpu_bytes_to_use=value)) == 34359738368 // ROW
    assert chunks(spec_for(cpu_bytes_to_use=value, spec_name="CPUOffloadingSpec")) == 34359738368 // ROW or (
        VERSION < (0, 20, 0)
    )


@pytest.mark.one_process
@pytest.mark.only_if(VERSION < (0, 26, 0))
@pytest.mark.parametrize("value", [24, 8, 1, -16, 0, "abc", 17.5], ids=repr)
def test_a_block_size_that_is_no_multiple_is_refused(register: Any, value: Any) -> None:
    register()
    with pytest.raises(ValueError) as error:
        spec_for(cpu_bytes_to_use=1 << 30, block_size=value)
    message = str(error.value)
    assert f"block_size={value!r}" in message
    assert "16 tokens" in message
    assert is_a_right_example(message, "block_size", cpu_bytes_to_use=1 << 30)


@pytest.mark.only_if(VERSION >= (0, 26, 0))
def test_a_block_size_that_is_no_multiple_is_refused_by_vllm_first(register: Any) -> None:
    register()
    with pytest.raises((AssertionError, ValueError)) as error:
        spec_for(cpu_bytes_to_use=1 << 30, block_size=24)
    assert "vllm_kvfix" not in str(error.traceback[-1].path)


@pytest.mark.only_if(VERSION >= (0, 26, 0))
def test_a_negative_block_size_that_vllm_lets_pass_is_refused(register: Any) -> None:
    register()
    with pytest.raises(ValueError, match="block_size=-16") as error:
        spec_for(cpu_bytes_to_use=1 << 30, block_size=-16)
    assert is_a_right_example(str(error.value), "block_size", cpu_bytes_to_use=1 << 30)


@pytest.mark.only_if((0, 21, 0) <= VERSION < (0, 26, 0))
def test_a_block_size_that_is_no_multiple_over_context_parallel_ranks_is_refused(register: Any) -> None:
    """vLLM itself asserts without a word: one block holds 16 tokens of each of two ranks."""
    register()
    config = vllm_config({"spec_name": "FixedCPUOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "block_size": 16})
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match=r'block_size=16 .*\(32 tokens\).*"block_size": 32'):
        create_spec(config, plan(config, [group([Layer(width=8)] * 4)], num_blocks=10))


# ---- KVFIX_STOCK_SPEC=1: installing a hot-fix must not stop a server that started before ----


@pytest.mark.parametrize("spec_name", [None, "CPUOffloadingSpec"])
def test_under_kvfix_stock_spec_a_budget_below_one_row_is_a_warning_and_an_empty_pool(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, spec_name: str | None
) -> None:
    monkeypatch.setenv("KVFIX_STOCK_SPEC", "1")
    register()
    config = vllm_config({"cpu_bytes_to_use": ROW - 1} | ({"spec_name": spec_name} if spec_name else {}))
    spec = create_spec(config, plan(config, [group([Layer(width=8)] * 4)], num_blocks=10))
    assert type(spec).__name__ == "FixedCPUOffloadingSpec"
    assert chunks(spec) == chunks_managed(spec) == 0
    (warning,) = log.ours(30)
    assert f"cpu_bytes_to_use={ROW - 1}" in warning and f'"cpu_bytes_to_use": {ROW}' in warning
