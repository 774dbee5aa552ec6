"""register() never raises, undoes what fails, and says in one line how things stand. No vLLM here."""

import importlib
import logging
import multiprocessing
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_kvfix import _log, plugin
from vllm_kvfix._fix import APPLIED, FAILED, NOT_NEEDED, UNKNOWN, WAITING, Status

TARGET = "kvfix_target"


class Example:
    """A fix of the attribute ``number`` of a module: 1 is the bug, 2 is right."""

    ID, TARGETS, CONNECTOR = "example", (TARGET,), ""

    def settle(self):
        module = sys.modules.get(TARGET)
        if module is None:
            return Status(WAITING, "until it is imported")
        if module.number == 2:
            return Status(NOT_NEEDED, "right since 1.0")
        if module.number != 1:
            return Status(UNKNOWN, f"number is {module.number}")
        module.number = 2
        return Status(APPLIED, "")

    def holds(self):
        return sys.modules[TARGET].number == 2

    def restore(self):
        if TARGET in sys.modules:
            sys.modules[TARGET].number = 1


@pytest.fixture
def log(monkeypatch):
    records = []
    handler = SimpleNamespace(level=0, handle=records.append)
    monkeypatch.setattr(_log.logger, "handlers", [handler])
    monkeypatch.setattr(_log.logger, "propagate", False)
    monkeypatch.setattr(_log, "_in_helper", False)
    _log.logger.setLevel(logging.DEBUG)
    return records


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("KVFIX_DISABLE", raising=False)
    monkeypatch.delenv("KVFIX_STOCK_SPEC", raising=False)
    plugin.restore()
    yield
    monkeypatch.undo()
    plugin.restore()
    sys.modules.pop(TARGET, None)


@pytest.fixture
def target(monkeypatch):
    module = ModuleType(TARGET)
    module.number = 1
    monkeypatch.setitem(sys.modules, TARGET, module)
    return module


def use(monkeypatch, *fixes):
    monkeypatch.setattr(plugin, "FIXES", fixes)


def register_from(module, function, spec=None, **arguments):
    """As vLLM calls it: from a function of one of its modules."""
    scope = {"__name__": module, "__spec__": spec, "register": plugin.register}
    exec(f"def {function}({', '.join(arguments)}): register()", scope)
    scope[function](**arguments)


def test_apply_restore_apply(monkeypatch, target):
    use(monkeypatch, Example())
    for _ in range(2):
        plugin.register()
        assert target.number == 2
        assert plugin.statuses() == {"example": Status(APPLIED, "")}
        plugin.restore()
        assert target.number == 1
        assert plugin.statuses() == {}


def test_registering_twice_changes_and_says_nothing_more(monkeypatch, target, log):
    use(monkeypatch, Example())
    plugin.register()
    plugin.register()
    assert [(r.levelname, r.getMessage()) for r in log] == [
        ("INFO", "vllm-kvfix 0.1.0 on vLLM unknown: example applied")
    ]


def test_a_worker_says_it_at_debug(monkeypatch, target, log):
    use(monkeypatch, Example())
    register_from("vllm.v1.worker.worker_base", "init_worker")
    assert [r.levelname for r in log] == ["DEBUG"]


def test_an_engine_core_that_will_offload_speaks_when_all_is_settled(monkeypatch, tmp_path, log):
    """Its offloading spec is still to come, and then the one line says how everything stands."""
    (tmp_path / f"{TARGET}.py").write_text("number = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_log, "_connector", "")
    other = type("Other", (Example,), {"ID": "other", "settle": lambda self: Status(NOT_NEEDED, "")})()
    offloading = type("Offloading", (Example,), {"CONNECTOR": "OffloadingConnector"})()
    use(monkeypatch, offloading, other)
    connector = SimpleNamespace(kv_connector="OffloadingConnector")
    register_from("vllm.v1.engine.core", "__init__", vllm_config=SimpleNamespace(kv_transfer_config=connector))
    assert [r.levelname for r in log] == ["DEBUG"]
    importlib.import_module(TARGET)
    assert [(r.levelname, r.getMessage().split(": ")[1]) for r in log[1:]] == [
        ("INFO", "example applied, other not needed")
    ]


def test_a_model_inspection_process_says_it_at_debug(monkeypatch, target, log):
    use(monkeypatch, Example())
    spec = SimpleNamespace(name="vllm.model_executor.models.registry")
    register_from("__main__", "_run", spec)
    assert [r.levelname for r in log] == ["DEBUG"]


def test_a_module_that_is_not_imported_yet_is_repaired_when_it_is(monkeypatch, tmp_path, log):
    (tmp_path / f"{TARGET}.py").write_text("number = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    use(monkeypatch, Example())
    plugin.register()
    assert plugin.statuses()["example"].word == "waiting"
    assert TARGET not in sys.modules
    importlib.import_module(TARGET)
    assert sys.modules[TARGET].number == 2
    assert plugin.statuses()["example"].word == APPLIED
    assert log[-1].getMessage().endswith("example applied")


@pytest.mark.parametrize("step", ["settle", "holds", "restore"])
def test_a_fix_that_raises_leaves_the_module_as_it_was(monkeypatch, target, log, step):
    def boom(self):
        raise RuntimeError("boom")

    bad = type("Bad", (Example,), {step: boom, "ID": "bad"})()
    if step == "restore":
        monkeypatch.setattr(Example, "holds", lambda self: False)
    use(monkeypatch, bad, type("Good", (Example,), {"settle": lambda self: Status(UNKNOWN, "odd")})())
    plugin.register()
    assert plugin.statuses()["bad"].word == FAILED
    assert plugin.statuses()["example"] == Status(UNKNOWN, "odd")
    warnings = [r.getMessage() for r in log if r.levelname == "WARNING"]
    assert len(warnings) == 2 and "bad failed" in warnings[0] and "example unknown (odd)" in warnings[1]
    assert "RuntimeError: boom" in warnings[0]
    assert ("vLLM runs as it was" in warnings[0]) == (step != "restore")
    if step == "restore":
        plugin.restore()
        assert "could not be undone (RuntimeError: boom)" in log[-1].getMessage()
    if step != "restore":
        assert target.number == 1


@pytest.mark.parametrize(("caller", "levels"), [("add_cli_args", ["INFO", "DEBUG"]), ("main", ["INFO", "INFO"])])
def test_the_api_server_says_it_once_unless_a_repair_is_on(monkeypatch, tmp_path, log, caller, levels):
    """From 0.24.0 it loads the spec class for its metrics; an engine in this process has real news."""
    (tmp_path / f"{TARGET}.py").write_text("number = 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_log, "_at_command_line", False)
    other = type("Other", (Example,), {"ID": "other", "settle": lambda self: Status(NOT_NEEDED, "")})()
    use(monkeypatch, Example(), other)
    register_from("vllm.engine.arg_utils", caller)
    importlib.import_module(TARGET)
    assert plugin.statuses()["example"].word == NOT_NEEDED
    assert [r.levelname for r in log] == levels


def test_a_fix_that_does_not_hold_is_not_called_applied(monkeypatch, target):
    monkeypatch.setattr(Example, "holds", lambda self: False)
    use(monkeypatch, Example())
    plugin.register()
    assert plugin.statuses()["example"].word == FAILED
    assert target.number == 1


def test_applied_is_read_back_at_each_question(monkeypatch, target):
    use(monkeypatch, Example())
    plugin.register()
    target.number = 7
    assert plugin.statuses()["example"] == Status(FAILED, "replaced by somebody else since")


@pytest.mark.parametrize("value", ["all", " all ", "example", "other, example ,", "all,example"])
def test_disabled_fixes_touch_nothing(monkeypatch, target, value):
    use(monkeypatch, Example())
    monkeypatch.setenv("KVFIX_DISABLE", value)
    plugin.register()
    assert target.number == 1
    assert plugin.statuses()["example"] == Status("disabled", "by KVFIX_DISABLE")


def test_a_word_that_is_no_fix_is_named_once(monkeypatch, target, log):
    use(monkeypatch, Example())
    monkeypatch.setenv("KVFIX_DISABLE", "exampel")
    plugin.register()
    plugin.register()
    assert target.number == 2
    warnings = [r.getMessage() for r in log if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "exampel" in warnings[0] and "example" in warnings[0]


def test_register_survives_its_own_failure(monkeypatch, target, log):
    monkeypatch.setattr(_log, "find_role", lambda: 1 / 0)
    plugin.register()
    assert [r.levelname for r in log] == ["WARNING"]


def test_without_vllm_nothing_is_imported_and_everything_waits():
    code = """
import sys
from vllm_kvfix import plugin
plugin.register()
assert {s.word for s in plugin.statuses().values()} == {"waiting"}, plugin.statuses()
assert not {"vllm", "torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_log_handler_that_raises_takes_nothing_down(monkeypatch, tmp_path, target, log):
    def boom(record):
        raise RuntimeError("handler")

    _log.logger.handlers[0].handle = boom
    use(monkeypatch, Example())
    plugin.register()
    assert target.number == 2
    plugin.restore()
    del sys.modules[TARGET]
    (tmp_path / f"{TARGET}.py").write_text("number = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin.register()
    assert importlib.import_module(TARGET).number == 2


@pytest.mark.parametrize(("name", "level"), [("VllmWorker-1", "DEBUG"), ("EngineCore", "INFO")])
def test_a_forked_worker_is_known_by_its_name(monkeypatch, target, log, name, level):
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    use(monkeypatch, Example())
    plugin.register()
    assert [r.levelname for r in log] == [level]


@pytest.mark.parametrize("root", [False, True], ids=["no handler", "a handler that wants warnings"])
def test_a_line_said_before_vllm_configures_its_log_is_said_when_it_does(monkeypatch, root):
    """As in the API server from 0.31.0: plugins are loaded before the log is set up."""
    lines = []
    vllm_logger = ModuleType("vllm.logger")
    vllm_logger.configure_logging = configure = lambda config: lines.append(config)
    monkeypatch.setitem(sys.modules, "vllm.logger", vllm_logger)
    monkeypatch.setattr(_log.logger, "hasHandlers", lambda: root)
    monkeypatch.setattr(_log.logger, "isEnabledFor", lambda level: level > logging.INFO)
    monkeypatch.setattr(_log.logger, "info", lines.append)
    _log.once(logging.INFO, "first")
    _log.once(logging.INFO, "second")
    assert lines == []
    vllm_logger.configure_logging("configured")
    assert lines == ["configured", "first", "second"]
    assert vllm_logger.configure_logging is configure
    _log.once(logging.INFO, "third")
    _log.forget()
    assert vllm_logger.configure_logging is configure
