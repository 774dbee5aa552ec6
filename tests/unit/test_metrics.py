"""What engines say reaches their server, and nobody else. No prometheus_client here: see tests/contract for that."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvfix import __version__, _log, metrics
from vllm_kvfix._fix import APPLIED, FAILED, NOT_NEEDED, UNKNOWN, WAITING, Status

FORK = multiprocessing.get_context("fork")
POOL = {"chunks": 30, "bytes": 7_864_320, "budget_bytes": 8_000_000, "ranks": 2}
OWN = {"one": Status(WAITING, "until vLLM imports it"), "two": Status(NOT_NEEDED, "right since 1.0")}


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Where vLLM has its sockets."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.delenv("_KVFIX_SERVER", raising=False)
    metrics.forget()
    yield tmp_path
    metrics.forget()


@pytest.fixture
def folder(place):
    metrics.serve(lambda: OWN)
    return place / f"vllm-kvfix-{os.environ['_KVFIX_SERVER']}"


def in_process(name, work, *arguments):
    """Run it as vLLM runs its processes, and return what it returns."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: there.send(work(*arguments)), name=name)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    return here.recv()


def say(name, **news):
    in_process(name, lambda: metrics.tell(**news))


def told(engines, statuses=OWN):
    return [(name, labels[2:] or labels, value) for name, labels, value in metrics.samples(statuses, engines)]


# ---- what is said ----


def test_without_an_engine_a_server_says_how_its_own_fixes_stand():
    assert list(metrics.samples(OWN, [])) == [
        ("vllm_kvfix_info", (__version__, "unknown", "one", WAITING), 1),
        ("vllm_kvfix_info", (__version__, "unknown", "two", NOT_NEEDED), 1),
    ]


def test_an_engine_knows_better():
    engine = metrics.Engine(0, {"one": APPLIED, "two": NOT_NEEDED}, POOL)
    assert told([engine]) == [
        ("vllm_kvfix_info", ("one", APPLIED), 1),
        ("vllm_kvfix_info", ("two", NOT_NEEDED), 1),
        ("vllm_kvfix_pool_chunks", ("0",), 30),
        ("vllm_kvfix_pool_bytes", ("0",), 7_864_320),
        ("vllm_kvfix_pool_budget_bytes", ("0",), 8_000_000),
        ("vllm_kvfix_pool_ranks", ("0",), 2),
    ]


def test_engines_that_agree_say_it_once_and_one_that_does_not_is_seen():
    engines = [metrics.Engine(number, {"one": FAILED if number == 2 else APPLIED}, {}) for number in range(3)]
    assert told(engines) == [("vllm_kvfix_info", ("one", word), 1) for word in (APPLIED, FAILED)]


def test_every_sample_is_of_a_described_gauge():
    for name, labels, _ in metrics.samples(OWN, [metrics.Engine(0, {"one": UNKNOWN}, POOL)]):
        assert len(labels) == len(metrics.GAUGES[name][1])


# ---- from engine to server ----


def test_engines_in_the_order_of_their_numbers(folder):
    for number in (10, 2):
        say(f"EngineCore_DP{number}", fixes={"one": APPLIED})
        say(f"EngineCore_DP{number}", fixes={"one": APPLIED}, pool=POOL | {"chunks": number})
    assert metrics._engines() == [
        metrics.Engine(2, {"one": APPLIED}, POOL | {"chunks": 2}),
        metrics.Engine(10, {"one": APPLIED}, POOL | {"chunks": 10}),
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in folder.iterdir()) == [f"{os.getpid()}-10.json", f"{os.getpid()}-2.json"]


@pytest.mark.parametrize(("name", "number"), [("EngineCore", 0), ("EngineCore_DP0", 0), ("EngineCore_DP12", 12)])
def test_the_number_of_an_engine(folder, name, number):
    say(name, pool=POOL)
    assert metrics._engines() == [metrics.Engine(number, {}, POOL)]


@pytest.mark.parametrize(
    "name", ["VllmWorker-0", "ApiServer_0", "EngineCoreActor", "EngineCore_DP", "EngineCore_DPx", "Process-1"]
)
def test_only_an_engine_writes(folder, name):
    say(name, fixes={"one": APPLIED}, pool=POOL)
    metrics.tell(fixes={"one": APPLIED}, pool=POOL)
    assert not folder.exists()
    assert metrics._engines() == []


def test_a_forked_engine_says_what_was_settled_before_the_fork(folder):
    metrics.tell(fixes={"one": APPLIED})
    say("EngineCore", pool=POOL)
    assert metrics._engines() == [metrics.Engine(0, {"one": APPLIED}, POOL)]


def test_whatever_else_is_in_the_folder_is_ignored(folder):
    say("EngineCore_DP1", pool=POOL)
    pid = os.getpid()
    rubbish = {
        f"{pid}-0.json": "",
        f"{pid}-2.json": '{"fixes": {"one"',
        f"{pid}-3.json": "[]",
        f"{pid}-4.json": '{"pool": {"chunks": "many"}}',
        f"{pid}-5.json": '{"pool": 7}',
        f"{pid}-6.json": "[" * 100_000,
        f"{pid}-7.json": '{"pool": {"chunks": 1e999}}',
        f"{pid}-8.json.new": json.dumps({"pool": POOL}),
        f"{pid}.json": json.dumps({"pool": POOL}),
        f"{pid + 1}-9.json": json.dumps({"pool": POOL}),  # of another server
    }
    for name, text in rubbish.items():
        (folder / name).write_text(text)
    (folder / f"{pid}-11.json").mkdir()
    assert metrics._engines() == [metrics.Engine(1, {}, POOL)]


def test_servers_of_one_parent_share_its_engines_and_not_each_others(folder):
    say("EngineCore_DP0", pool=POOL)

    def server():
        say("EngineCore_DP1", pool=POOL)
        return [engine.number for engine in metrics._engines()]

    assert in_process("ApiServer_0", server) == [0, 1]
    assert in_process("ApiServer_1", server) == [0, 1]
    assert [engine.number for engine in metrics._engines()] == [0]


def test_a_place_that_cannot_be_written_is_no_harm(place, monkeypatch):
    metrics.serve(lambda: OWN)
    (place / f"vllm-kvfix-{os.environ['_KVFIX_SERVER']}").write_text("a file")

    def engine():
        said = []
        monkeypatch.setattr(_log, "once", lambda level, message: said.append((level, message)))
        metrics.tell(pool=POOL)
        return said

    ((level, message),) = in_process("EngineCore", engine)
    assert level == 10 and "FileExistsError" in message
    assert metrics._engines() == []


@pytest.mark.parametrize("unusable", ["", "/nowhere"])
def test_without_a_place_of_vllms_it_is_the_one_for_temporary_files(monkeypatch, tmp_path, unusable):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", unusable)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert metrics._folder("abc") == f"{tmp_path}/vllm-kvfix-abc"
    monkeypatch.setenv("TMPDIR", unusable)
    assert metrics._folder("abc") == "/tmp/vllm-kvfix-abc"
    monkeypatch.delenv("TMPDIR")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    assert metrics._folder("abc") == "/tmp/vllm-kvfix-abc"


# ---- whose name it is ----


def serve_and_return_name():
    metrics.serve(dict)
    return os.environ.get("_KVFIX_SERVER")


def test_one_name_for_a_server_and_all_that_it_starts():
    name = serve_and_return_name()
    assert name == serve_and_return_name()
    assert in_process("ApiServer_0", serve_and_return_name) == name


def test_a_server_under_a_launcher_that_has_no_name_makes_one_up():
    names = {in_process("Process-1", serve_and_return_name) for _ in range(2)}
    assert len(names) == 2 and None not in names
    assert "_KVFIX_SERVER" not in os.environ


def test_an_engine_makes_no_name_up():
    """Nobody would read what it says under it, nor remove it when the engine is killed."""
    assert in_process("EngineCore", serve_and_return_name) is None


SERVER = """\
import multiprocessing, os, sys
from vllm_kvfix import metrics
metrics.serve(dict)
assert "prometheus_client" not in sys.modules
engine = multiprocessing.get_context("fork").Process(target=lambda: metrics.tell(pool={}), name="EngineCore")
engine.start()
engine.join()
if os.fork() == 0:
    sys.exit()  # not the one that removes the folder
os.wait()
print(os.environ["_KVFIX_SERVER"], *os.listdir(os.environ["VLLM_RPC_BASE_PATH"]))
"""


def test_a_server_of_its_own_takes_no_name_over_and_leaves_nothing(folder, place):
    say("EngineCore", pool=POOL)
    ended = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr
    name, *there = ended.stdout.split()
    assert name != os.environ["_KVFIX_SERVER"]
    assert sorted(there) == sorted([folder.name, f"vllm-kvfix-{name}"])
    assert list(place.iterdir()) == [folder]


def test_what_is_forgotten_leaves_nothing(folder, place):
    say("EngineCore", pool=POOL)
    metrics.forget()
    assert list(place.iterdir()) == []
    assert "_KVFIX_SERVER" not in os.environ
