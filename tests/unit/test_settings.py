"""Bad settings get an error that names the setting, the value, and what to write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix import settings


@pytest.mark.parametrize("value", [34359738368, 34359738368.0, "34359738368", " 34359738368 "])
def test_what_vllm_accepts_is_accepted(value):
    assert settings.cpu_bytes_to_use({"cpu_bytes_to_use": value}) == 34359738368


@pytest.mark.parametrize(
    "value", [0, -1, 10**400, "", "abc", "32GiB", "1e9", float("nan"), float("inf"), True, [], {}, 0.5, "-5"]
)
def test_what_cannot_be_a_budget_is_refused_by_name_and_value(value):
    with pytest.raises(ValueError) as error:
        settings.cpu_bytes_to_use({"cpu_bytes_to_use": value})
    message = str(error.value)
    assert f"cpu_bytes_to_use={value!r}" in message
    assert '"cpu_bytes_to_use": 34359738368' in message


@pytest.mark.parametrize("extra_config", [{}, {"cpu_bytes_to_use": None}])
def test_a_missing_budget_says_what_to_write(extra_config):
    with pytest.raises(ValueError, match=r'cpu_bytes_to_use is missing.*"cpu_bytes_to_use": 34359738368'):
        settings.cpu_bytes_to_use(extra_config)


@given(st.integers(1, 256), st.integers(1, 64))
def test_whole_blocks_are_accepted(gpu_block_size, factor):
    settings.check_block_size({"block_size": gpu_block_size * factor}, gpu_block_size)
    settings.check_block_size({"block_size": str(gpu_block_size * factor)}, gpu_block_size)
    settings.check_block_size({}, gpu_block_size)


@given(st.integers(2, 256), st.one_of(st.integers(-1000, 10_000), st.just("abc"), st.just(float("inf"))))
def test_other_block_sizes_are_refused_with_one_that_is_right(gpu_block_size, value):
    if isinstance(value, int) and value > 0 and value % gpu_block_size == 0:
        return
    with pytest.raises(ValueError, match="block_size=") as error:
        settings.check_block_size({"block_size": value}, gpu_block_size)
    advice = int(str(error.value).split('"block_size": ')[1].split(",")[0])
    settings.check_block_size({"block_size": advice}, gpu_block_size)


def test_the_least_budget_that_is_advised_is_enough():
    message = settings.below_one_row(1000, 3604480, 4)
    assert "cpu_bytes_to_use=1000" in message
    assert '"cpu_bytes_to_use": 3604480' in message


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (3 << 19, "1.50 MiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_that_leaves_one(size, text):
    assert settings.human(size) == text
