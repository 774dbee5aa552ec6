"""The door: vLLM calls :func:`register` in every process, before the engine is built.

Switches, read from the environment of the process:

- ``KVFIX_DISABLE``: ``all``, or a comma list of fix ids.
- ``KVFIX_STOCK_SPEC=1``: see :mod:`vllm_kvfix._stock_name`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from types import ModuleType

from vllm_kvfix import __version__, _imports, _log, _releases, metrics
from vllm_kvfix._fix import APPLIED, DISABLED, FAILED, UNKNOWN, WAITING, Fix, Status, disabled_words, one_line
from vllm_kvfix.fixes import max_concurrency, offload_pool_size, simple_offload_ranks

FIXES: tuple[Fix, ...] = (offload_pool_size, simple_offload_ranks, max_concurrency)

_statuses: dict[str, Status] = {}
_lock = threading.RLock()
_told = False  # whether the summary was said at INFO


def register() -> None:
    """Repair what the installed vLLM needs, and say in one line what was done. Never raises.

    May be called any number of times. A fix whose vLLM modules are not imported yet waits for them.
    """
    try:
        with _lock:
            _log.find_role()
            _register()
    except Exception:
        with contextlib.suppress(Exception):  # a log handler may be what raised
            _log.logger.warning("vllm-kvfix could not start", exc_info=True)


def _register() -> None:
    new = [fix for fix in FIXES if fix.ID not in _statuses]
    if not new:
        return
    disabled = _disabled_ids()
    for fix in new:
        if fix.ID in disabled:
            _statuses[fix.ID] = Status(DISABLED, "by KVFIX_DISABLE")
            continue
        _statuses[fix.ID] = _settle(fix)
        if _statuses[fix.ID].word == WAITING:
            settle_late = _settle_late(fix)
            for target in fix.TARGETS:
                if target not in sys.modules:
                    _imports.when_imported(target, settle_late)
    # A line that will be said again, when the rest is settled, is for DEBUG.
    waiting = [fix for fix in FIXES if _statuses[fix.ID].word == WAITING]
    connector = _log.connector()
    early = len(waiting) == len(FIXES) or (connector and connector in [fix.CONNECTOR for fix in waiting])
    _say_summary(loud=not early)
    if not _log.in_helper():
        metrics.serve(statuses)


def restore() -> None:
    """Put vLLM's own code back and forget every status; :func:`register` may follow."""
    global _told
    with _lock:
        _imports.forget()
        _log.forget()
        metrics.forget()
        for fix in FIXES:
            trouble = _undo(fix)
            if trouble:
                _log.once(logging.WARNING, f"vllm-kvfix: {fix.ID}: {trouble}")
        _statuses.clear()
        _told = False


def statuses() -> dict[str, Status]:
    """How each fix stands now, by id; ``applied`` is read back from vLLM at each call."""
    return {fix.ID: _read_back(fix) for fix in FIXES if fix.ID in _statuses}


def _settle(fix: Fix) -> Status:
    """Settle one fix; whatever goes wrong, leave vLLM as it was and say so."""
    try:
        status = fix.settle()
        if status.word == APPLIED and not fix.holds():
            status = Status(FAILED, "vLLM does not call the repaired code")
    except (Exception, SystemExit) as error:
        status = Status(FAILED, one_line(error))
    result = "nothing is repaired"
    if status.word == FAILED:
        result = _undo(fix) or "vLLM runs as it was"
    if status.word in (FAILED, UNKNOWN):
        _log.once(logging.WARNING, f"vllm-kvfix: {fix.ID} {status}; {result}")
    return status


def _undo(fix: Fix) -> str:
    """Put vLLM's own code back; what went wrong, if something did."""
    try:
        fix.restore()
    except Exception as error:
        return f"it could not be undone ({one_line(error)})"
    return ""


def _settle_late(fix: Fix) -> _imports.Callback:
    """The same, at the moment vLLM has imported a target: runs inside vLLM's import statement."""

    def settle_late(module: ModuleType) -> None:
        with _lock:
            _statuses[fix.ID] = _settle(fix)
            if _statuses[fix.ID].word != WAITING:
                _imports.drop(settle_late)
                news = _statuses[fix.ID].word == APPLIED or not _log.at_command_line()
                _say_summary(loud=news or not _told)

    return settle_late


def _read_back(fix: Fix) -> Status:
    status = _statuses[fix.ID]
    if status.word == APPLIED and not fix.holds():
        return Status(FAILED, "replaced by somebody else since")
    return status


def _say_summary(loud: bool) -> None:
    """At INFO, or at DEBUG where it would only repeat what the operator knows."""
    global _told
    _told = _told or loud
    level = logging.INFO if loud else logging.DEBUG
    fixes = ", ".join(f"{id_} {status}" for id_, status in _statuses.items())
    _log.once(level, f"vllm-kvfix {__version__} on vLLM {_releases.vllm_version()}: {fixes}")
    metrics.tell(fixes={id_: status.word for id_, status in _statuses.items()})


def _disabled_ids() -> set[str]:
    """Fix ids that ``KVFIX_DISABLE`` turns off; a word that is no id is named in a WARNING."""
    words = disabled_words()
    known = {fix.ID for fix in FIXES}
    unknown = words - known - {"all"}
    if unknown:
        _log.once(
            logging.WARNING,
            f"vllm-kvfix: KVFIX_DISABLE names {', '.join(map(repr, sorted(unknown)))}, which is no fix; "
            f"write all, or some of {', '.join(sorted(known))}",
        )
    return known if "all" in words else words & known
