"""A function that several modules bind by name is replaced in each, imported or not, and put back."""

import importlib
import sys

import pytest

from vllm_kvfix import _bound, _imports
from vllm_kvfix._fix import in_place_of, is_ours

DEFINED_IN = ("kvfix_defines", "kvfix_defines_later")
CALLER = "kvfix_calls"
CALLERS = (*DEFINED_IN, CALLER)


def ours(function):
    @in_place_of(function)
    def doubled():
        return 2 * function()

    return doubled


def replace_in(module):
    _bound.replace(module, "number", ours)


@pytest.fixture(autouse=True)
def modules(monkeypatch, tmp_path):
    (tmp_path / f"{DEFINED_IN[0]}.py").write_text("def number(): return 1")
    (tmp_path / f"{DEFINED_IN[1]}.py").write_text("def number(): return 10")
    (tmp_path / f"{CALLER}.py").write_text(f"from {DEFINED_IN[0]} import number")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    _imports.forget()
    for name in CALLERS:
        sys.modules.pop(name, None)


def numbers():
    return [importlib.import_module(name).number() for name in CALLERS]


@pytest.mark.parametrize("imported", [(), DEFINED_IN[:1], DEFINED_IN[1:], CALLERS])
def test_it_is_replaced_wherever_it_is_bound_and_put_back(imported):
    for name in imported:
        importlib.import_module(name)
    for _ in range(2):  # the second time changes nothing
        _bound.replace_in_all(CALLERS, DEFINED_IN, replace_in)
    assert numbers() == [2, 20, 2]
    _bound.put_back(CALLERS, "number", replace_in)
    assert numbers() == [1, 10, 1]


def test_it_is_replaced_once_however_often_it_was_asked_for():
    calls = []
    replace_in = calls.append  # the same object each time
    for _ in range(2):
        _bound.replace_in_all(CALLERS, DEFINED_IN, replace_in)
    numbers()
    assert [module.__name__ for module in calls] == list(DEFINED_IN)


def test_what_was_waited_for_is_left_alone_once_it_is_put_back():
    _bound.replace_in_all(CALLERS, DEFINED_IN, replace_in)
    _bound.put_back(CALLERS, "number", replace_in)
    assert numbers() == [1, 10, 1]


def test_a_module_without_it_is_left_alone(tmp_path):
    (tmp_path / f"{DEFINED_IN[0]}.py").write_text("")
    importlib.invalidate_caches()
    _bound.replace_in_all(DEFINED_IN, DEFINED_IN, replace_in)
    assert not hasattr(importlib.import_module(DEFINED_IN[0]), "number")
    assert is_ours(importlib.import_module(DEFINED_IN[1]).number)
