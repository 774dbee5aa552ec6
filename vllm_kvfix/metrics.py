"""How the fixes and the CPU pools stand, on the ``/metrics`` that vLLM serves.

The API server is asked, but the pool is in EngineCore, and what waits in the API server is settled there. So each
EngineCore writes what it knows into a small file, and the API server reads these at each scrape. They are in a folder
beside vLLM's own sockets, under a random name that children inherit, and go when the server ends; what a killed server
leaves goes when the next engine starts.

Nothing of vLLM's is touched. With one API server, ``/metrics`` is prometheus_client's global registry. With several, it
is a new registry at each scrape, made by prometheus-fastapi-instrumentator and not by vLLM; what all registries of that
mode have in common is a ``MultiProcessCollector``, which adds ours beside itself.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from vllm_kvfix import __version__, _imports, _log, _releases
from vllm_kvfix._fix import Status, in_place_of, is_ours, one_line, original_of

INFO = "vllm_kvfix_info"
POOL = ("chunks", "bytes", "budget_bytes", "ranks")
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> help text, names of the labels
    INFO: ("1 for each fix and what became of it: in EngineCore, if it said so.", ("version", "vllm", "fix", "status")),
    "vllm_kvfix_pool_chunks": ("Chunks of the CPU offload pool.", ("engine",)),
    "vllm_kvfix_pool_bytes": ("Bytes that the chunks of the CPU offload pool take on all ranks.", ("engine",)),
    "vllm_kvfix_pool_budget_bytes": ("Bytes that cpu_bytes_to_use gives the CPU offload pool.", ("engine",)),
    "vllm_kvfix_pool_ranks": ("Ranks that keep a part of the CPU offload pool.", ("engine",)),
}

_FOLDER = "_KVFIX_FOLDER"  # whole path of the folder; not for operators, who write KVFIX_
_FOLDERS = re.compile(r"vllm-kvfix-[0-9a-f]{16}")
_FILES = re.compile(r"(\d+)-(\d+)\.json")  # process that started the engine, number of the engine
_MOST = 65_536  # bytes of a file; an engine writes some hundred
_REGISTRY, _MULTIPROCESS = "prometheus_client.registry", "prometheus_client.multiprocess"

Statuses = Callable[[], Mapping[str, Status]]

_news: dict[str, Any] = {}  # what this process, if it is an EngineCore, has to say
_held: int | None = None  # the locked file in which it has said so
_named_by: int | None = None  # the process that made up the name
_named = ""  # the folder that it named
_statuses: Statuses = dict
_registries: weakref.WeakSet[Any] = weakref.WeakSet()


class Engine(NamedTuple):
    """What an EngineCore said."""

    number: int
    fixes: dict[str, str]  # id -> word
    pool: dict[str, float]  # POOL -> number; empty while there is none


# ---- in EngineCore ----


def tell(**news: Any) -> None:
    """Let the API server know ``fixes`` (id -> word) or ``pool`` (POOL -> number) of this EngineCore. Never raises."""
    _news.update(news)  # also before an EngineCore is forked off
    index, folder = _engine_index(), os.environ.get(_FOLDER)
    if index is None or folder is None:
        return
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        first = _held is None
        _write(os.path.join(folder, f"{_parent()}-{index}.json"))
        if first:
            with contextlib.suppress(OSError):  # a place need not be one that can be listed
                _sweep(os.path.dirname(folder))
    except Exception as error:
        _log.once(logging.DEBUG, f"vllm-kvfix: /metrics will not show this engine ({one_line(error)})")


def _write(path: str) -> None:
    """All news. The file is locked before anybody can see it, and stays so to the end of this process."""
    global _held
    with open(f"{path}.new", "w") as file:
        json.dump(_news, file)
        held = os.dup(file.fileno())
    _lock(held)
    os.replace(f"{path}.new", path)
    if _held is not None:
        os.close(_held)
    _held = held


def _sweep(place: str) -> None:
    """Remove what killed servers left: folders in which no engine has a lock. Without engines no server goes on.

    Pids would not tell: containers that share the place see each other's locks, but not each other's processes.
    """
    for name in filter(_FOLDERS.fullmatch, os.listdir(place)):
        folder = os.path.join(place, name)
        with contextlib.suppress(OSError):  # somebody else has removed it
            if os.lstat(folder).st_uid == os.geteuid():
                files = [os.path.join(folder, file) for file in os.listdir(folder) if _FILES.fullmatch(file)]
                if files and not any(map(_is_locked, files)):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_locked(path: str) -> bool:
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Whether this process could take the lock, which it has until it closes the file."""
    import fcntl  # not on Windows, where `vllm-kvfix pool` runs too

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _engine_index() -> int | None:
    """Which EngineCore this process is; None if it is another process."""
    kind, several, number = multiprocessing.current_process().name.partition("_DP")
    if kind != _releases.ENGINE_PROCESS or (several and not number.isdigit()):
        return None
    return int(number or 0)


# ---- in the API server ----


def serve(statuses: Statuses) -> None:
    """Have every ``/metrics`` of this process tell of the fixes, and of the pools of its engines. Never raises.

    Args:
        statuses: how the fixes stand in this process; told while no engine says how they stand there.
    """
    global _statuses, _named_by, _named
    if _engine_index() is not None:
        return
    _statuses = statuses
    # A process that was not started by multiprocessing is a server of its own, whatever it inherited.
    if _named_by != os.getpid() and (_parent() is None or _FOLDER not in os.environ):
        with contextlib.suppress(OSError):  # the current folder is gone
            _named_by, _named = os.getpid(), _new_folder()
            os.environ[_FOLDER] = _named
            atexit.register(_remove_folder)
    for name, act in ((_REGISTRY, _join_global), (_MULTIPROCESS, _join_multiprocess)):
        module = _imports.imported(name)
        if module is None:
            _imports.when_imported(name, act)
            continue
        with contextlib.suppress(Exception):  # as in an import
            act(module)


def forget() -> None:
    """Leave every registry, put prometheus_client's own code back, and remove the folder."""
    global _named_by, _statuses, _held
    for registry in list(_registries):
        with contextlib.suppress(KeyError):  # somebody else removed us
            registry.unregister(_collector)
    _registries.clear()
    cls: Any = getattr(sys.modules.get(_MULTIPROCESS), "MultiProcessCollector", None)
    stock = original_of(getattr(cls, "__init__", None))
    if stock is not None:
        cls.__init__ = stock
    if _named_by == os.getpid():
        _remove_folder()
        os.environ.pop(_FOLDER, None)
    if _held is not None:
        os.close(_held)
    _named_by, _statuses, _held = None, dict, None
    _news.clear()


def _join_global(module: ModuleType) -> None:
    _join(getattr(module, "REGISTRY", None))


def _join_multiprocess(module: ModuleType) -> None:
    cls: Any = getattr(module, "MultiProcessCollector", None)
    if cls is None or is_ours(cls.__init__):
        return
    stock = cls.__init__

    @in_place_of(stock)
    def init_and_join(self: Any, registry: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, registry, *args, **kwargs)
        _join(registry)

    cls.__init__ = init_and_join


def _join(registry: Any) -> None:
    with contextlib.suppress(Exception):  # it has our names already, or is no registry
        registry.register(_collector)
        _registries.add(registry)


class _Collector:
    """What prometheus_client asks. It has no ``_name``: vLLM unregisters collectors with its own in it."""

    def describe(self) -> list[Any]:
        return [_family(name) for name in GAUGES]

    def collect(self) -> list[Any]:
        try:
            families = {name: _family(name) for name in GAUGES}
            for name, labels, value in samples(_statuses(), _engines()):
                families[name].add_metric(labels, value)
            return [family for family in families.values() if family.samples]
        except Exception as error:  # would take vLLM's own numbers along
            _log.once(logging.DEBUG, f"vllm-kvfix: nothing to show in /metrics ({one_line(error)})")
            return []


_collector = _Collector()


def _family(name: str) -> Any:
    text, labels = GAUGES[name]
    return importlib.import_module("prometheus_client.metrics_core").GaugeMetricFamily(name, text, labels=labels)


def samples(statuses: Mapping[str, Status], engines: Iterable[Engine]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, values of the labels, and value of each sample."""
    engines = list(engines)
    own = [(fix, status.word) for fix, status in statuses.items()]
    said = [item for engine in engines for item in engine.fixes.items()]
    for fix, word in dict.fromkeys(said or own):
        yield INFO, (__version__, _releases.vllm_version(), fix, word), 1
    for engine in engines:
        for name, value in engine.pool.items():
            yield f"vllm_kvfix_pool_{name}", (str(engine.number),), value


def _engines() -> list[Engine]:
    """What the engines of this server said: its children, or those of the parent that it shares with other servers."""
    folder = os.environ.get(_FOLDER, "")
    parents = {str(os.getpid()), str(_parent())}
    found = []
    for file in os.listdir(folder) if os.path.isdir(folder) else ():
        match = _FILES.fullmatch(file)
        if match and match[1] in parents:
            with contextlib.suppress(Exception):  # whatever else is in there
                found.append(_read(os.path.join(folder, file), int(match[2])))
    return sorted(found)


def _read(path: str, index: int) -> Engine:
    """All of it such that prometheus_client can write it: if that fails, vLLM's own numbers are lost too."""
    with open(path, "rb", opener=_open_at_once) as file:
        news = json.loads(file.read(_MOST))
    fixes = {_encodable(fix): _encodable(word) for fix, word in news.get("fixes", {}).items()}
    pool = news.get("pool", {})
    return Engine(index, fixes, {name: float(int(pool[name])) for name in POOL if name in pool})


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting until a pipe is opened at its other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _encodable(text: object) -> str:
    return str(text).encode(errors="replace").decode()


# ---- in both ----


def _parent() -> int | None:
    """The process that started this one by multiprocessing, as vLLM starts its own."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent else None


def _new_folder() -> str:
    """Beside vLLM's own sockets, wherever this process and its children go. It is not made yet.

    Found without ``tempfile``, which would write a file to try the place.
    """
    places = [os.environ.get("VLLM_RPC_BASE_PATH"), os.environ.get("TMPDIR"), "/tmp"]
    place = next((place for place in places if place and os.access(place, os.W_OK | os.X_OK)), "/tmp")
    return os.path.join(os.path.abspath(place), f"vllm-kvfix-{os.urandom(8).hex()}")


def _remove_folder() -> None:
    if _named_by == os.getpid():  # a fork has inherited the wish
        shutil.rmtree(_named, ignore_errors=True)
