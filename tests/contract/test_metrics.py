"""``/metrics`` as vLLM's own app serves it, with one API server and with several; prometheus_client is the real one."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm
import yaml
from facts import POOL_SIZE_IS_GIVEN
from fastapi import FastAPI
from fastapi.testclient import TestClient
from geometry import Layer, chunks, create_spec, group, plan, vllm_config
from test_register import WORDS, import_targets

DOCS = Path(__file__).parents[2] / "docs"
FORK = multiprocessing.get_context("fork")  # an engine that starts at once; vLLM spawns its own
WAITING = dict.fromkeys(WORDS, "waiting")
BUDGET, ROW = 1_000_000, 4096  # bytes; ROW of two ranks with pages of 1 + 3 UNITs each
POOL = {"chunks": 30, "bytes": 7_864_320, "budget_bytes": 8_000_000, "ranks": 2}
LATE = ("vllm.v1.metrics", "prometheus_client", "prometheus_fastapi_instrumentator")

Samples = list[tuple[str, float]]


@pytest.fixture(params=["one API server", "several API servers"])
def servers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """With several, vLLM itself sets this variable."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if request.param != "one API server":
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return request.param


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fork that only ends would leave its folder; and engines here end before their server, so others would sweep."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    yield
    if "vllm_kvfix.plugin" in sys.modules:
        sys.modules["vllm_kvfix.plugin"].restore()


def make_app() -> Any:
    """An app that has vLLM's ``/metrics``."""
    app = FastAPI()
    try:
        metrics = importlib.import_module("vllm.entrypoints.serve.instrumentator.metrics")  # from 0.13.0
    except ModuleNotFoundError:
        importlib.import_module("vllm.entrypoints.openai.api_server").mount_metrics(app)
    else:
        metrics.attach_router(app)
    return app


def scrape(app: Any, accept: str = "text/plain") -> str:
    response = TestClient(app).get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    return response.text


def ours(text: str) -> Samples:
    found = [line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm_kvfix")]
    return sorted((series, float(value)) for series, _, value in found)


def others(text: str) -> set[str]:
    """What is in it that is not ours, without its values."""
    names = {re.sub(r" [^ ]*$", "", line) for line in text.splitlines() if "vllm_kvfix" not in line}
    return {name for name in names if not name.startswith("http_")}  # it counts the scrapes


def expected(words: dict[str, str], **pools: dict[str, float]) -> Samples:
    from vllm_kvfix import __version__

    versions = f'version="{__version__}",vllm="{vllm.__version__}"'
    info = [(f'vllm_kvfix_info{{fix="{fix}",status="{word}",{versions}}}', 1.0) for fix, word in words.items()]
    return sorted(
        info
        + [
            (f'vllm_kvfix_pool_{name}{{engine="{engine[1:]}"}}', value)
            for engine, numbers in pools.items()
            for name, value in numbers.items()
        ]
    )


def in_process(name: str, work: Callable[[], Any]) -> None:
    """Do it in a process that multiprocessing starts under this name, as vLLM starts its own."""
    process = FORK.Process(target=work, name=name)
    process.start()
    process.join()
    assert process.exitcode == 0


def tell(**news: Any) -> None:
    importlib.import_module("vllm_kvfix.metrics").tell(**news)


# ---- what a scrape says ----


def test_a_server_tells_of_its_fixes_and_then_what_its_engine_says(register: Any, servers: str) -> None:
    before = scrape(make_app())
    register()
    app = make_app()
    text = scrape(app)
    assert ours(text) == expected(WAITING) and "vllm_kvfix_pool" not in text
    in_process("EngineCore", lambda: tell(fixes=WORDS))
    assert ours(scrape(app)) == expected(WORDS)
    in_process("EngineCore", lambda: tell(fixes=WORDS, pool=POOL))
    text = scrape(app)
    assert ours(text) == expected(WORDS, _0=POOL)
    assert others(text) == others(before)
    assert text.count("# TYPE vllm_kvfix_info gauge\n") == 1
    openmetrics = scrape(app, "application/openmetrics-text; version=1.0.0")
    assert ours(openmetrics) == expected(WORDS, _0=POOL)


@pytest.mark.only_if(not POOL_SIZE_IS_GIVEN)
def test_the_pool_and_the_words_are_those_of_the_engine(register: Any, servers: str) -> None:
    """In the API server, a fix of what only engines import waits. Workers, which have the same spec, tell nothing."""
    register()
    app = make_app()

    def make_spec() -> None:
        import_targets()
        config = vllm_config({"spec_name": "FixedCPUOffloadingSpec", "cpu_bytes_to_use": BUDGET}, world_size=2)
        assert chunks(create_spec(config, plan(config, [group([Layer(), Layer(width=3)])], 8))) == BUDGET // ROW

    in_process("VllmWorker-0", make_spec)
    assert ours(scrape(app)) == expected(WAITING)
    in_process("EngineCore_DP0", make_spec)
    pool = {"chunks": BUDGET // ROW, "bytes": BUDGET // ROW * ROW, "budget_bytes": BUDGET, "ranks": 2}
    assert ours(scrape(app)) == expected(WORDS, _0=pool)


def test_several_engines_and_several_servers(register: Any) -> None:
    """Each server, a child of the same process as the engines, tells of all of them."""
    register()
    in_process("EngineCore_DP1", lambda: tell(fixes=WORDS | {"max-concurrency": "failed"}, pool=POOL | {"chunks": 7}))
    in_process("EngineCore_DP0", lambda: tell(fixes=WORDS, pool=POOL))
    here, there = FORK.Pipe(duplex=False)

    def server() -> None:
        register()
        there.send(scrape(make_app()))

    for number in range(2):
        in_process(f"ApiServer_{number}", server)
        also = expected({"max-concurrency": "failed"})
        assert ours(here.recv()) == sorted(expected(WORDS, _0=POOL, _1=POOL | {"chunks": 7}) + also)


def test_any_version_of_a_fork_can_be_read_back(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    version = '0.19.1+"our own",\n\\{x}'
    monkeypatch.setattr(vllm, "__version__", version)
    register()
    families = {family.name: family for family in text_string_to_metric_families(scrape(make_app()))}
    assert {sample.labels["vllm"] for sample in families["vllm_kvfix_info"].samples} == {version}


# ---- once, whatever happens, and undone ----


@pytest.mark.parametrize("imported", ["before", "after"])
def test_each_series_is_there_once(register: Any, servers: str, imported: str) -> None:
    """Registered and reloaded again and again, vLLM's metrics unregistered, its app made anew."""
    from vllm_kvfix import metrics

    if imported == "after":
        for name in [name for name in sys.modules if name.startswith(LATE)]:
            del sys.modules[name]
    else:
        make_app()
    register()
    assert imported == "before" or not [name for name in sys.modules if name.startswith(LATE)]
    register()
    apps = [make_app()]
    importlib.import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics()
    assert ours(scrape(apps[0])) == expected(WAITING)
    importlib.reload(metrics).serve(sys.modules["vllm_kvfix.plugin"].statuses)
    apps.append(make_app())
    assert [ours(scrape(app)) for app in apps] == [expected(WAITING)] * 2
    init = importlib.import_module("prometheus_client.multiprocess").MultiProcessCollector.__init__
    assert not hasattr(init.__wrapped__, "__wrapped__")


def test_restore_leaves_prometheus_client_as_it_was(register: Any, servers: str) -> None:
    import prometheus_client
    from prometheus_client import multiprocess

    from vllm_kvfix import plugin

    init, environ = multiprocess.MultiProcessCollector.__init__, dict(os.environ)
    collectors = set(prometheus_client.REGISTRY._collector_to_names)
    app = make_app()
    for _ in range(2):
        register()
        in_process("EngineCore", lambda: tell(pool=POOL))
        assert ours(scrape(app)) == expected(WAITING, _0=POOL)
        folder = os.environ["_KVFIX_FOLDER"]
        assert os.stat(folder).st_mode & 0o777 == 0o700
        plugin.restore()
        assert ours(scrape(app)) == []
        assert not os.path.exists(folder)
        assert multiprocess.MultiProcessCollector.__init__ is init
        assert set(prometheus_client.REGISTRY._collector_to_names) >= collectors
        assert not [one for one in prometheus_client.REGISTRY._collector_to_names if "kvfix" in type(one).__module__]
        assert dict(os.environ) == environ


def test_vllms_own_metrics_survive_a_fault_of_ours(
    register: Any, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kvfix import metrics

    app = make_app()
    before = others(scrape(app))
    register()
    monkeypatch.setattr(metrics, "samples", lambda *_: [("no such metric", (), 1)])
    text = scrape(app)
    assert ours(text) == []
    assert others(text) == before


def test_registries_of_others(register: Any, tmp_path: Path) -> None:
    """Each is told at once of all names; one that has them already, or is none, is no harm."""
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    from vllm_kvfix import metrics

    register()
    registry = CollectorRegistry()
    for one in (None, registry, registry):
        MultiProcessCollector(one, path=str(tmp_path))
    for known in (REGISTRY, registry):
        assert {name for name in known._names_to_collectors if "kvfix" in name} == set(metrics.GAUGES)


@pytest.mark.parametrize("unknown", ["of another kind", "missing"])
def test_what_is_not_prometheus_client_is_left_alone(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    for name in ("prometheus_client.registry", "prometheus_client.multiprocess"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].MultiProcessCollector = int if unknown == "of another kind" else None  # type: ignore[attr-defined]
    import_targets()
    register()
    from vllm_kvfix import plugin

    assert {fix: status.word for fix, status in plugin.statuses().items()} == WORDS
    assert not [line for line in log.ours() if "metrics" in line or "could not start" in line]


# ---- docs/alerts.yml, docs/grafana.json ----


def test_the_alerts_and_the_dashboard_ask_for_what_there_is() -> None:
    from vllm_kvfix import _fix, metrics

    rules = [rule for one in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"] for rule in one["rules"]]
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    queries = [rule["expr"] for rule in rules] + [t["expr"] for panel in panels for t in panel["targets"]]
    asked = set(re.findall(r"vllm_kvfix\w*", " ".join(queries)))
    assert asked == set(metrics.GAUGES)
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 3
    assert all({"summary", "description"} <= set(rule["annotations"]) for rule in rules)
    statuses = {
        word for query in queries for words in re.findall(r'status=~"([^"]*)"', query) for word in words.split("|")
    }
    assert statuses == {_fix.UNKNOWN, _fix.FAILED}
    labels = {label for _, names in metrics.GAUGES.values() for label in names} | {"job", "instance"}
    for query in queries:
        by = ",".join(re.findall(r"(?:by|on) \(([^)]*)\)", query) + re.findall(r"(\w+)=~", query))
        assert set(filter(None, re.split(r"[ ,]+", by))) <= labels
    vllms = set(re.findall(r"vllm:\w+", " ".join(queries)))
    loggers = (Path(vllm.__file__).parent / "v1/metrics/loggers.py").read_text()
    assert vllms == {"vllm:num_requests_running"}
    assert f'"{vllms.pop()}"' in loggers
