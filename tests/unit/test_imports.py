"""Acting on a module when it is imported, without importing it."""

import importlib
import sys

import pytest

from vllm_kvfix import _imports


@pytest.fixture(autouse=True)
def module_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    meta_path = list(sys.meta_path)
    yield tmp_path / "kvfix_example.py"
    _imports.forget()
    sys.modules.pop("kvfix_example", None)
    assert sys.meta_path == meta_path


def test_nothing_is_imported_until_somebody_imports_it(module_file):
    module_file.write_text("number = 1")
    _imports.when_imported("kvfix_example", lambda module: setattr(module, "number", 2))
    assert "kvfix_example" not in sys.modules
    from kvfix_example import number

    assert number == 2


def test_a_module_that_is_being_executed_is_not_imported_yet(module_file):
    module_file.write_text("from vllm_kvfix import _imports\nseen = _imports.imported(__name__)")
    seen = []
    for _ in range(2):  # not waited for, and waited for
        module = importlib.import_module("kvfix_example")
        assert module.seen is None
        assert _imports.imported("kvfix_example") is module
        del sys.modules["kvfix_example"]
        _imports.when_imported("kvfix_example", lambda module: seen.append(_imports.imported("kvfix_example")))
    module = importlib.import_module("kvfix_example")
    assert seen[-1] is module


def test_all_who_wait_are_called_once_and_in_order(module_file):
    module_file.write_text("")
    calls = []
    _imports.when_imported("kvfix_example", lambda module: calls.append(1))
    _imports.when_imported("kvfix_example", lambda module: calls.append(2))
    importlib.reload(importlib.import_module("kvfix_example"))
    assert calls == [1, 2]


def test_a_module_that_fails_raises_its_own_error_and_is_waited_for_still(module_file):
    module_file.write_text("1 / 0")
    calls = []
    _imports.when_imported("kvfix_example", calls.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("kvfix_example")
    assert not calls
    module_file.write_text("number = 3")
    importlib.invalidate_caches()
    assert importlib.import_module("kvfix_example").number == 3
    assert len(calls) == 1


def test_a_module_that_does_not_exist_stays_missing():
    _imports.when_imported("kvfix_no_such_module", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="kvfix_no_such_module"):
        importlib.import_module("kvfix_no_such_module")


def test_who_waits_no_longer_is_not_called(module_file):
    module_file.write_text("")
    calls = []
    _imports.when_imported("kvfix_example", calls.append)
    _imports.when_imported("kvfix_no_such_module", calls.append)
    append = calls.append
    _imports.when_imported("kvfix_example", append)
    _imports.drop(append)
    importlib.import_module("kvfix_example")
    assert len(calls) == 1


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_finder_of_another_plugin_that_asks_all_others_is_no_endless_loop(module_file, monkeypatch, first):
    class Theirs:
        def find_spec(self, name, path=None, target=None):
            if name == "kvfix_example":
                return next(
                    filter(None, (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)), None
                )

    module_file.write_text("")
    calls = []
    _imports.when_imported("kvfix_example", calls.append)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sys.meta_path.insert(0 if first == "theirs" else 1, Theirs())
    module = importlib.import_module("kvfix_example")
    assert calls == [module]
    monkeypatch.undo()
