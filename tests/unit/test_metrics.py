"""What engines say reaches their server, and nobody else. No prometheus_client here: see tests/contract for that."""

import contextlib
import fcntl
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
    monkeypatch.delenv("_KVFIX_FOLDER", raising=False)
    metrics.forget()
    yield tmp_path
    metrics.forget()


@pytest.fixture
def folder(place):
    metrics.serve(lambda: OWN)
    assert os.path.dirname(os.environ["_KVFIX_FOLDER"]) == str(place)
    return Path(os.environ["_KVFIX_FOLDER"])


def in_process(name, work, *arguments):
    """Run it as vLLM runs its processes, and return what it returns."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: there.send(work(*arguments)), name=name)
    process.start()
    process.join(30)
    process.kill()
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
        f"{pid}-8.json": json.dumps({"pool": {"chunks": 10**400}}),  # no number for prometheus_client
        f"{pid}-10.json": json.dumps({"pool": POOL, "more": "." * 100_000}),  # it may have no end
        f"{pid}-8.json.new": json.dumps({"pool": POOL}),
        f"{pid}.json": json.dumps({"pool": POOL}),
        f"{pid + 1}-9.json": json.dumps({"pool": POOL}),  # of another server
    }
    for name, text in rubbish.items():
        (folder / name).write_text(text)
    (folder / f"{pid}-11.json").mkdir()
    os.mkfifo(folder / f"{pid}-12.json")
    there = os.listdir("/dev/fd")
    assert in_process("ApiServer_0", metrics._engines) == [metrics.Engine(1, {}, POOL)]
    assert metrics._engines() == [metrics.Engine(1, {}, POOL)]
    assert os.listdir("/dev/fd") == there


def test_a_pipe_that_somebody_has_open_is_not_waited_for(folder):
    say("EngineCore_DP1", pool=POOL)
    pipe = folder / f"{os.getpid()}-2.json"
    os.mkfifo(pipe)
    with open(pipe, "r+b", buffering=0):
        assert in_process("ApiServer_0", metrics._engines) == [metrics.Engine(1, {}, POOL)]


def test_words_can_be_written_whatever_they_are(folder):
    say("EngineCore", fixes={"one": "\ud800"})
    ((_, labels, _),) = told(metrics._engines())
    assert labels == ("one", "?")


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
    Path(os.environ["_KVFIX_FOLDER"]).write_text("a file")

    def engine():
        said = []
        monkeypatch.setattr(_log, "once", lambda level, message: said.append((level, message)))
        metrics.tell(pool=POOL)
        return said

    ((level, message),) = in_process("EngineCore", engine)
    assert level == 10 and "FileExistsError" in message
    assert metrics._engines() == []


def place_of_new_folder():
    return os.path.dirname(metrics._new_folder())


@pytest.mark.parametrize("unusable", ["", "/nowhere"])
def test_without_a_place_of_vllms_it_is_the_one_for_temporary_files(monkeypatch, tmp_path, unusable):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", unusable)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert place_of_new_folder() == str(tmp_path)
    monkeypatch.setenv("TMPDIR", unusable)
    assert place_of_new_folder() == "/tmp"
    monkeypatch.delenv("TMPDIR")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    assert place_of_new_folder() == "/tmp"


@pytest.mark.parametrize("variable", ["VLLM_RPC_BASE_PATH", "TMPDIR"])
def test_a_relative_place_is_the_same_wherever_a_process_goes(monkeypatch, tmp_path, variable):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    monkeypatch.setenv(variable, "there")
    monkeypatch.chdir(tmp_path)
    there, elsewhere = Path("there").absolute(), Path("elsewhere").absolute()
    there.mkdir()
    elsewhere.mkdir()
    metrics.serve(lambda: OWN)
    monkeypatch.chdir(elsewhere)
    say("EngineCore", pool=POOL)
    assert [folder.parent for folder in tmp_path.glob("*/vllm-kvfix-*")] == [there]
    assert metrics._engines() == [metrics.Engine(0, {}, POOL)]
    metrics.forget()
    assert list(tmp_path.glob("*/*")) == []


def test_where_no_place_can_be_told_nothing_is_said(monkeypatch, tmp_path):
    """The current folder is gone."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", ".")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    metrics.serve(lambda: OWN)
    say("EngineCore", pool=POOL)
    assert metrics._engines() == []


# ---- what a killed server leaves ----


@pytest.fixture
def other(place):
    """The folder of another server."""
    return place / "vllm-kvfix-0123456789abcdef"


@contextlib.contextmanager
def engine(folder, name="EngineCore"):
    """An engine that has said something in this folder, until it is killed."""
    here, there = FORK.Pipe()

    def live():
        os.environ["_KVFIX_FOLDER"] = str(folder)
        metrics.tell(fixes={"one": APPLIED})
        metrics.tell(pool=POOL)
        there.send("said")
        there.recv()

    process = FORK.Process(target=live, name=name)
    process.start()
    assert here.recv() == "said"
    try:
        yield
    finally:
        process.kill()
        process.join()


def test_what_a_killed_server_left_goes_when_the_next_engine_starts(folder, other):
    with engine(other, "EngineCore_DP0"), engine(other, "EngineCore_DP1"):
        pass
    assert other.exists()
    say("VllmWorker-0", pool=POOL)
    assert other.exists()
    say("EngineCore", pool=POOL)
    assert not other.exists()
    assert metrics._engines() == [metrics.Engine(0, {}, POOL)]


def test_what_is_of_a_server_that_lives_stays(folder, other):
    with engine(other, "EngineCore_DP1"):
        with engine(other, "EngineCore_DP0"):
            pass
        say("EngineCore", pool=POOL)
        assert len(list(other.iterdir())) == 2


def test_a_worker_that_was_forked_off_and_lives_holds_it_too(folder, other):
    """It is ended later than the engine; nobody removes a folder of which something runs."""
    here, there = os.pipe()

    def fork():
        os.environ["_KVFIX_FOLDER"] = str(other)
        metrics.tell(pool=POOL)
        if os.fork() == 0:
            os.close(there)
            os.read(here, 1)
            os._exit(0)

    process = FORK.Process(target=fork, name="EngineCore")
    process.start()
    process.join()
    say("EngineCore", pool=POOL)
    assert other.exists()
    os.close(here)
    os.close(there)


@pytest.mark.parametrize("name", ["vllm-kvfix-demo-0123456789abcdef", "vllm-kvfix-0123456789abcdef0", "vllm"])
def test_what_has_another_name_stays(folder, place, name):
    with engine(place / name):
        pass
    say("EngineCore", pool=POOL)
    assert (place / name).exists()


def test_what_no_engine_has_written_or_another_user_has_stays(folder, place, other, monkeypatch):
    other.mkdir()
    (other / "0-0.txt").write_text("{}")
    (place / f"vllm-kvfix-{1:016x}").write_text("a file")
    with engine(place / "elsewhere"):
        pass
    (place / f"vllm-kvfix-{2:016x}").symlink_to("elsewhere")
    say("EngineCore", pool=POOL)
    assert len(list(place.iterdir())) == 5
    with engine(other):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    say("EngineCore", pool=POOL)
    assert len(list(other.iterdir())) == 2
    assert metrics._engines() == [metrics.Engine(0, {}, POOL)]


def test_where_locks_cannot_be_had_it_is_said_all_the_same(folder, other, monkeypatch):
    """And nothing can be known of others."""
    with engine(other):
        pass
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.stat("/nowhere"))
    say("EngineCore", pool=POOL)
    assert other.exists()
    assert metrics._engines() == [metrics.Engine(0, {}, POOL)]


def test_a_place_that_cannot_be_listed_is_no_trouble(folder, other, place, monkeypatch):
    with engine(other):
        pass
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: os.stat("/nowhere") if path == str(place) else listdir(path))
    monkeypatch.setattr(_log, "once", lambda level, message: os._exit(1))
    say("EngineCore", pool=POOL)
    assert metrics._engines() == [metrics.Engine(0, {}, POOL)]


# ---- whose name it is ----


def serve_and_return_name():
    metrics.serve(dict)
    return os.environ.get("_KVFIX_FOLDER")


def test_one_name_for_a_server_and_all_that_it_starts():
    name = serve_and_return_name()
    assert name == serve_and_return_name()
    assert in_process("ApiServer_0", serve_and_return_name) == name


def test_a_server_under_a_launcher_that_has_no_name_makes_one_up():
    names = {in_process("Process-1", serve_and_return_name) for _ in range(2)}
    assert len(names) == 2 and None not in names
    assert "_KVFIX_FOLDER" not in os.environ


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
print(os.path.basename(os.environ["_KVFIX_FOLDER"]), *os.listdir(os.environ["VLLM_RPC_BASE_PATH"]))
"""


def test_a_server_of_its_own_takes_no_name_over_and_leaves_nothing(folder, place):
    with engine(folder):
        ended = subprocess.run(
            [sys.executable, "-c", SERVER], capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
    assert ended.returncode == 0, ended.stderr
    name, *there = ended.stdout.split()
    assert name != folder.name
    assert sorted(there) == sorted([folder.name, name])
    assert list(place.iterdir()) == [folder]


def test_what_is_forgotten_leaves_nothing(folder, place):
    say("EngineCore", pool=POOL)
    metrics.forget()
    assert list(place.iterdir()) == []
    assert "_KVFIX_FOLDER" not in os.environ
