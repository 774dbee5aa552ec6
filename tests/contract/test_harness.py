"""The harness itself: a test that cannot fail proves nothing."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from facts import VERSION

pytest_plugins = ["pytester"]
HARNESS = Path(__file__).with_name("conftest.py")


ENDS = {  # body of a test: how it ends, and what pytest says
    "assert 1 == 2": ("FAILED", "assert 1 == 2"),
    "os.kill(os.getpid(), 9)": ("FAILED", "the process of this test died"),
    "time.sleep(60)": ("FAILED", "gave no result within 3 s"),
    "raise SystemExit(3)": ("FAILED", "SystemExit: 3"),
    "pytest.skip('no')": ("SKIPPED", "no"),
    "pass": ("PASSED", ""),
}


IN_ONE_PROCESS = """
seen = []

@pytest.mark.one_process
@pytest.mark.parametrize("number", range(5))
def test_of_five(number):
    seen.append(number)
    assert seen == list(range(number + 1)) and number != 1
    if number == 3:
        os._exit(0)
"""


@pytest.mark.only_if(VERSION == (0, 19, 1))  # the harness is the same on every release, and this takes 5 s
def test_a_test_in_a_process_of_its_own_ends_as_it_should(pytester: pytest.Pytester) -> None:
    conftest = HARNESS.read_text().replace("LIMIT = 60", "LIMIT = 3").replace("gc.collect()", "pass")
    pytester.makeconftest(conftest)
    tests = [f"def test_{number}():\n    {body}\n" for number, body in enumerate(ENDS)]
    pytester.makepyfile("import os, time, pytest\n" + "".join(tests) + IN_ONE_PROCESS)
    output = pytester.runpytest_inprocess("-v", "-rs").stdout.str()
    for number, (outcome, words) in enumerate(ENDS.values()):
        assert re.search(rf"::test_{number} {outcome}", output), output
        assert words in output
    for number, outcome in enumerate(("PASSED", "FAILED", "PASSED", "FAILED", "FAILED")):
        assert re.search(rf"::test_of_five\[{number}\] {outcome}", output), output


@pytest.mark.parametrize("turn", [1, 2])
def test_a_test_starts_from_a_vllm_that_nobody_touched(turn: int) -> None:
    """Both turns see the module unimported, though each imports it."""
    assert "vllm.v1.core.kv_cache_utils" not in sys.modules
    importlib.import_module("vllm.v1.core.kv_cache_utils")
