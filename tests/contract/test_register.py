"""``register()``: called by vLLM in every process, it never raises and never leaves vLLM half repaired."""

from __future__ import annotations

import functools
import importlib.machinery
import logging
import sys
import types
from typing import Any

import pytest
import vllm
from facts import (
    CONCURRENCY_IS_WRONG,
    POOL_SIZE_IS_GIVEN,
    POOL_SIZE_IS_WRONG,
    SIMPLE_OFFLOAD_IS_ABSENT,
    SIMPLE_OFFLOAD_RANKS_DIFFER,
)
from geometry import PLANNER_MODULE, offload_class
from test_concurrency import NAME, T22, configs_of_case, reported

INFO, WARNING = logging.INFO, logging.WARNING
UTILS = "vllm.v1.core.kv_cache_utils"
FACTORY = "vllm.v1.kv_offload.factory"
WORDS = {
    "offload-pool-size": "not applicable" if POOL_SIZE_IS_GIVEN else "applied" if POOL_SIZE_IS_WRONG else "not needed",
    "simple-offload-ranks": (
        "not applicable" if SIMPLE_OFFLOAD_IS_ABSENT else "applied" if SIMPLE_OFFLOAD_RANKS_DIFFER else "not needed"
    ),
    "max-concurrency": "applied" if CONCURRENCY_IS_WRONG else "not needed",
}
SIMPLE_OFFLOAD = ("vllm.v1.simple_kv_offload.manager", "vllm.v1.simple_kv_offload.worker")


def import_simple_offload() -> None:
    for module in () if SIMPLE_OFFLOAD_IS_ABSENT else SIMPLE_OFFLOAD:
        importlib.import_module(module)


def import_targets() -> tuple[Any, Any]:
    """What engines have imported by the time that they make their connectors."""
    import_simple_offload()
    utils, factory = importlib.import_module(UTILS), importlib.import_module(FACTORY)
    offload_class("CPUOffloadingSpec")
    importlib.import_module(PLANNER_MODULE)
    return utils, factory


def words() -> dict[str, str]:
    from vllm_kvfix import plugin

    return {fix: status.word for fix, status in plugin.statuses().items()}


def state() -> dict[str, Any]:
    """Everything of vLLM that a fix may touch."""
    utils, factory = import_targets()
    cls = factory.OffloadingSpecFactory
    return {
        "planner": {PLANNER_MODULE: importlib.import_module(PLANNER_MODULE).get_kv_cache_configs},
        "utils": {name: value for name, value in vars(utils).items() if name != "get_kv_cache_configs"},
        "registry": dict(cls._registry),
        "factory": dict(vars(cls)),
        "spec": dict(vars(offload_class("CPUOffloadingSpec"))),
        "simple": {
            f"{cls.__name__}.{name}": value
            for module in SIMPLE_OFFLOAD
            if module in sys.modules
            for cls in vars(sys.modules[module]).values()
            if isinstance(cls, type) and cls.__module__ == module
            for name, value in vars(cls).items()
        },
    }


# ---- order, repetition, undoing ----


@pytest.mark.parametrize("imported", ["before", "after"])
def test_every_fix_ends_as_this_release_needs_it(register: Any, imported: str) -> None:
    if imported == "before":
        import_targets()
    register()
    if imported == "after":
        assert words() == dict.fromkeys(WORDS, "waiting")
        repaired = [name for name in sys.modules if name == UTILS or "kv_offload" in name]
        assert repaired == [], "nothing is imported just to be repaired"
        import_targets()
    assert words() == WORDS


@pytest.mark.parametrize("imported", ["before", "after"])
def test_registering_twice_changes_nothing_and_says_nothing_more(register: Any, log: Any, imported: str) -> None:
    if imported == "before":
        import_targets()
    register()
    import_targets()
    once, said = state(), list(log.ours())
    register()
    assert state() == once
    assert log.ours() == said


def test_apply_restore_apply(register: Any) -> None:
    from vllm_kvfix import plugin

    import_targets()
    stock = state()
    register()
    first = state()
    plugin.restore()
    assert state() == stock
    assert words() == {}
    register()
    assert words() == WORDS
    assert {kind: set(value) for kind, value in state().items()} == {kind: set(value) for kind, value in first.items()}
    config, worker = configs_of_case(T22)
    assert reported(config, worker) == T22["right"]


def test_restore_while_waiting_leaves_vllm_as_it_is(register: Any) -> None:
    from vllm_kvfix import plugin

    finders = list(sys.meta_path)
    register()
    plugin.restore()
    assert sys.meta_path == finders
    import_targets()
    config, worker = configs_of_case(T22)
    assert reported(config, worker) == (T22["stock"]["worker"] if CONCURRENCY_IS_WRONG else T22["right"])


def test_nothing_is_waited_for_once_every_fix_is_settled(register: Any) -> None:
    """Also where the stock spec is in the one of its two modules, and the other never comes."""
    register()
    import_targets()
    (ours,) = [finder for finder in sys.meta_path if type(finder).__module__.startswith("vllm_kvfix")]
    targets = {target for fix in importlib.import_module("vllm_kvfix.plugin").FIXES for target in fix.TARGETS}
    assert {ours.find_spec(target) for target in targets} == {None}


def test_a_module_that_is_waited_for_is_imported_as_ever(register: Any) -> None:
    """Same loader type, same spec, reloadable; the fix survives a reload or says that it is gone."""
    register()
    utils, _ = import_targets()
    assert utils.__spec__.name == UTILS and utils.__spec__.origin == utils.__file__
    assert isinstance(utils.__spec__.loader, importlib.machinery.SourceFileLoader)
    assert utils.__spec__.loader.get_source(UTILS)


# ---- what the operator reads ----


def is_summary(line: str, expected: dict[str, str]) -> bool:
    """Whether ``line`` is the one that names both versions and how each fix stands."""
    from vllm_kvfix import __version__

    begins = line.startswith(f"vllm-kvfix {__version__} on vLLM {vllm.__version__}: ")
    return begins and all(f"{fix} {word}" in line for fix, word in expected.items())


def test_one_info_line_says_what_was_done(register: Any, log: Any) -> None:
    import_targets()
    register()
    (line,) = log.ours(INFO)
    assert is_summary(line, WORDS)
    assert log.ours(WARNING) == []


def test_a_process_that_never_imports_the_modules_says_it_waits_at_debug(register: Any, log: Any) -> None:
    """As ``vllm --version`` of 0.19.1."""
    register()
    assert log.ours(INFO) == log.ours(WARNING) == []
    (line,) = log.ours()
    assert is_summary(line, dict.fromkeys(WORDS, "waiting"))


def test_modules_imported_later_are_settled_and_said_at_info(register: Any, log: Any) -> None:
    register()
    import_targets()
    assert is_summary(log.ours(INFO)[-1], WORDS)
    assert len(set(log.ours(INFO))) == len(log.ours(INFO)) <= len(WORDS)


def start_engine_core(register: Any, connector: str | None) -> None:
    """As vLLM calls general plugins in EngineCore."""
    namespace = {"__name__": "vllm.v1.engine.core", "load_general_plugins": register}
    exec("class EngineCore:\n    def __init__(self, vllm_config):\n        load_general_plugins()", namespace)
    transfer = types.SimpleNamespace(kv_connector=connector) if connector else None
    namespace["EngineCore"](types.SimpleNamespace(kv_transfer_config=transfer))


def test_enginecore_without_a_connector_says_one_info_line_at_once(register: Any, log: Any) -> None:
    importlib.import_module(UTILS)
    start_engine_core(register, None)
    (line,) = log.ours(INFO)
    assert is_summary(line, {"max-concurrency": WORDS["max-concurrency"]})


@pytest.mark.parametrize(
    ("connector", "fix"),
    [
        ("OffloadingConnector", "offload-pool-size"),
        pytest.param(
            "SimpleCPUOffloadConnector", "simple-offload-ranks", marks=pytest.mark.only_if(not SIMPLE_OFFLOAD_IS_ABSENT)
        ),
    ],
)
def test_enginecore_says_one_info_line_when_all_that_it_will_use_is_settled(
    register: Any, log: Any, connector: str, fix: str
) -> None:
    importlib.import_module(UTILS)
    start_engine_core(register, connector)
    settled_early = words()[fix] != "waiting"  # 0.32.0 imports all that with kv_cache_utils
    assert len(log.ours(INFO)) == settled_early
    if connector == "OffloadingConnector":
        importlib.import_module(PLANNER_MODULE)
        importlib.import_module(FACTORY)
        offload_class("CPUOffloadingSpec")
    else:
        import_simple_offload()
    (line,) = log.ours(INFO)
    assert is_summary(line, {name: WORDS[name] for name in (fix, "max-concurrency")})


HELPERS = ["vllm.v1.worker.worker_base", "vllm.worker.worker_base", "vllm.model_executor.models.registry"]


@pytest.mark.parametrize("caller", HELPERS)
@pytest.mark.parametrize("imported", ["before", "after"])
def test_workers_and_helpers_say_it_at_debug(register: Any, log: Any, caller: str, imported: str) -> None:
    if imported == "before":
        import_targets()
    exec("def load_general_plugins(): register()\nload_general_plugins()", {"__name__": caller, "register": register})
    import_targets()
    assert words() == WORDS
    assert log.ours(INFO) == []
    assert any(line.startswith("vllm-kvfix 0.") for line in log.ours())


@pytest.mark.parametrize("caller", ["vllm.engine.arg_utils", "vllm.entrypoints.cli.main"])
def test_the_api_server_says_it_at_info(register: Any, log: Any, caller: str) -> None:
    import_targets()
    exec("register()", {"__name__": caller, "register": register})
    assert len(log.ours(INFO)) == 1


# ---- KVFIX_DISABLE ----


@pytest.mark.parametrize(
    ("value", "off"),
    [
        ("all", set(WORDS)),
        (" all ", set(WORDS)),
        (" max-concurrency , offload-pool-size ", {"offload-pool-size", "max-concurrency"}),
        ("max-concurrency", {"max-concurrency"}),
        ("offload-pool-size,", {"offload-pool-size"}),
        ("", set()),
        (" , ,", set()),
    ],
)
def test_kvfix_disable_leaves_those_parts_of_vllm_alone(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, value: str, off: set[str]
) -> None:
    import_targets()
    stock = state()
    monkeypatch.setenv("KVFIX_DISABLE", value)
    register()
    assert words() == WORDS | dict.fromkeys(off, "disabled")
    assert log.ours(WARNING) == []
    if "max-concurrency" in off:
        assert state()["utils"] == stock["utils"]
    if "offload-pool-size" in off:
        assert all(state()[name] == stock[name] for name in ("registry", "factory", "spec"))
    if off == set(WORDS):
        assert state() == stock


def test_an_unknown_id_in_kvfix_disable_is_named_in_one_warning(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_targets()
    monkeypatch.setenv("KVFIX_DISABLE", "max-concurency, offload-pool-size, 17")
    register()
    register()
    assert words() == WORDS | {"offload-pool-size": "disabled"}
    (warning,) = log.ours(WARNING)
    assert "KVFIX_DISABLE" in warning and "max-concurency" in warning and "17" in warning
    assert "max-concurrency" in warning.replace("max-concurency", ""), "and what to write instead"


# ---- a vLLM that others changed: left as it is, one line ----


def one_warning_and_word(register: Any, log: Any, fix: str, word: str, *named: str) -> None:
    register()
    register()
    assert words() == WORDS | {fix: word}, "the other fix is not disturbed"
    (warning,) = log.ours(WARNING)
    assert warning.startswith("vllm-kvfix") and "\n" not in warning
    for text in (fix, *named):
        assert text in warning


def third_party(config: Any, cache_config: Any) -> float:
    return 42.0


@pytest.mark.parametrize("how", ["replaced", "wrapped", "wrapped, still wrong"])
def test_who_patched_first_is_left_alone_and_named(register: Any, log: Any, how: str) -> None:
    utils, _ = import_targets()
    stock = getattr(utils, NAME)
    theirs: Any = third_party
    if how == "wrapped":
        theirs = functools.wraps(stock)(third_party)
    elif how == "wrapped, still wrong":

        @functools.wraps(stock)
        def theirs(config: Any, cache_config: Any) -> float:
            return float(stock(config, cache_config)) + 0.0

    setattr(utils, NAME, theirs)
    if how == "wrapped, still wrong" and not CONCURRENCY_IS_WRONG:
        register()
        assert words() == WORDS
    else:
        one_warning_and_word(register, log, "max-concurrency", "unknown", NAME)
        assert f"test_register.{'third_party' if 'wrong' not in how else 'test_who'}" in log.ours(WARNING)[0]
    assert getattr(utils, NAME) is theirs


def test_a_third_party_that_repaired_it_already_is_not_disturbed(register: Any, log: Any) -> None:
    utils, _ = import_targets()

    def right(config: Any, cache_config: Any) -> float:
        specs = [one.kv_cache_spec for one in cache_config.kv_cache_groups]
        blocks = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs)
        return float(cache_config.num_blocks / blocks)

    setattr(utils, NAME, right)
    register()
    assert words()["max-concurrency"] == "not needed"
    assert getattr(utils, NAME) is right
    assert log.ours(WARNING) == []


def test_who_patches_after_us_is_seen(register: Any) -> None:
    utils, _ = import_targets()
    register()
    setattr(utils, NAME, third_party)
    assert words()["max-concurrency"] == ("failed" if CONCURRENCY_IS_WRONG else WORDS["max-concurrency"])


@pytest.mark.parametrize("switch", ["0", "1"])
def test_who_has_taken_our_spec_name_keeps_it_and_is_named(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv("KVFIX_STOCK_SPEC", switch)
    _, factory = import_targets()
    factory.OffloadingSpecFactory.register_spec("FixedCPUOffloadingSpec", "other_plugin.spec", "TheirSpec")
    before = state()
    one_warning_and_word(register, log, "offload-pool-size", "unknown", "taken by other_plugin.spec.TheirSpec")
    after = state()
    assert (after["registry"], after["spec"]) == (before["registry"], before["spec"])


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_stock_spec_that_lives_elsewhere_is_said_at_once(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """EngineCore waits for the modules that every release has; without a word it would wait for ever."""
    monkeypatch.setenv("KVFIX_STOCK_SPEC", switch)
    factory = importlib.import_module(FACTORY).OffloadingSpecFactory
    del factory._registry["CPUOffloadingSpec"]
    factory.register_spec("CPUOffloadingSpec", "vllm.v1.kv_offload.elsewhere", "CPUOffloadingSpec")
    import_simple_offload()
    importlib.import_module(UTILS)
    one_warning_and_word(register, log, "offload-pool-size", "unknown", "vllm.v1.kv_offload.elsewhere")


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
def test_who_wraps_ours_is_not_taken_for_us(register: Any) -> None:
    """``functools.wraps`` copies attributes: a mark of ours must not make theirs ours."""
    utils, _ = import_targets()
    register()
    ours = getattr(utils, NAME)

    @functools.wraps(ours)
    def theirs(config: Any, cache_config: Any) -> float:
        return float(ours(config, cache_config))

    setattr(utils, NAME, theirs)
    plugin = importlib.import_module("vllm_kvfix.plugin")
    plugin.restore()
    assert getattr(utils, NAME) is theirs
    register()
    status = plugin.statuses()["max-concurrency"]
    assert status.word == "not needed" and "as in no release, and right" in status.why


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
def test_our_own_repair_is_not_taken_for_upstreams(register: Any) -> None:
    """As after a reload of the plugin, whose memory of what it did is gone."""
    import_targets()
    register()
    importlib.reload(importlib.import_module("vllm_kvfix.plugin")).register()
    assert words() == WORDS


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_factory_without_its_class_is_one_warning(register: Any, log: Any, imported: str) -> None:
    if imported == "after":
        register()
    factory = importlib.import_module(FACTORY)
    del factory.OffloadingSpecFactory
    if imported == "before":
        register()
        (warning,) = log.ours(WARNING)
        assert "offload-pool-size" in warning and "OffloadingSpecFactory" in warning
    importlib.import_module(UTILS)
    assert words()["max-concurrency"] == WORDS["max-concurrency"]
    assert words()["offload-pool-size"] in ("waiting", "unknown", "failed")


@pytest.mark.parametrize("fix", sorted(WORDS))
@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_fix_that_raises_inside_leaves_vllm_as_it_was(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, fix: str, imported: str
) -> None:
    """It raises at the worst moment: when everything is changed and about to be read back."""
    from vllm_kvfix import plugin

    (module,) = (one for one in plugin.FIXES if fix == one.ID)
    settle = module.settle

    def settle_then_break() -> Any:
        status = settle()
        if status.word == "waiting":
            return status
        raise RuntimeError("broken")

    monkeypatch.setattr(module, "settle", settle_then_break)
    if imported == "before":
        import_targets()
        before = state()
    register()
    import_targets()
    assert words() == WORDS | {fix: "failed"}
    (warning,) = log.ours(WARNING)
    assert fix in warning and "broken" in warning
    if imported == "before":
        mine = {
            "max-concurrency": {"utils"},
            "offload-pool-size": {"registry", "factory", "spec"},
            "simple-offload-ranks": {"simple"},
        }[fix]
        assert {name: state()[name] for name in mine} == {name: before[name] for name in mine}
    if fix == "max-concurrency":
        config, worker = configs_of_case(T22)
        assert reported(config, worker) == (T22["stock"]["worker"] if CONCURRENCY_IS_WRONG else T22["right"])


def test_register_itself_never_raises(register: Any, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvfix import plugin

    import_targets()
    before = state()
    monkeypatch.setattr(plugin, "FIXES", (types.SimpleNamespace(),))
    register()
    (warning,) = log.ours(WARNING)
    assert warning == "vllm-kvfix could not start"
    assert state() == before


@pytest.mark.only_if(CONCURRENCY_IS_WRONG)
def test_a_repair_that_does_not_hold_is_undone(register: Any, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back through the name that vLLM calls: if that gives another answer, it is not "applied"."""
    from vllm_kvfix import concurrency

    utils, _ = import_targets()
    stock = getattr(utils, NAME)
    monkeypatch.setattr(concurrency, "max_concurrency", lambda *args: 1.0)
    one_warning_and_word(register, log, "max-concurrency", "failed")
    assert getattr(utils, NAME) is stock
