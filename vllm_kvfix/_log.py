"""Our lines in vLLM's log.

The logger is a child of vLLM's, because only that one is configured. The API server, EngineCore
and in-process engines speak at INFO; workers and helper processes would repeat it and stay at
DEBUG.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from typing import Any

from vllm_kvfix import _releases
from vllm_kvfix._fix import in_place_of, original_of

logger = logging.getLogger("vllm.kvfix")

_said: set[str] = set()
_in_helper = False
_connector = ""
_at_command_line = False


def find_role() -> None:
    """Note what this process is, by who called us."""
    global _in_helper, _connector, _at_command_line
    frame = sys._getframe(1)
    while frame.f_back is not None:
        spec_name = getattr(frame.f_globals.get("__spec__"), "name", None)  # under `python -m` too
        names = (frame.f_globals.get("__name__"), spec_name)
        if any(name in _releases.HELPER_MODULES for name in names):
            _in_helper = True
        if _releases.ENGINE_CORE in names and frame.f_code.co_name == "__init__":
            config = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
            _connector = getattr(config, "kv_connector", None) or ""
        if _releases.ARGUMENTS in names and frame.f_code.co_name == "add_cli_args":
            _at_command_line = True
        frame = frame.f_back


def in_helper() -> bool:
    """Whether this process is a worker, or the one that inspects a model class.

    A worker that was forked is known by its name only: vLLM does not load plugins in it again.
    """
    return _in_helper or multiprocessing.current_process().name.startswith(_releases.WORKER_PROCESS)


def connector() -> str:
    """In an EngineCore that is about to make a KV connector: its name."""
    return _connector


def at_command_line() -> bool:
    """Whether this is the API server, or another command: the engine is in another process."""
    return _at_command_line


def once(level: int, message: str) -> None:
    """Log ``message`` the first time it is said in this process; in helpers INFO becomes DEBUG."""
    if message in _said:
        return
    _said.add(message)
    if level > logging.INFO:
        logger.log(level, message)
    elif level < logging.INFO or in_helper():
        logger.debug(message)
    elif logger.hasHandlers() and logger.isEnabledFor(level):
        logger.info(message)
    else:
        _say_when_configured(message)


def forget() -> None:
    """Say everything anew, and nothing that is still to be said."""
    _said.clear()
    vllm_logger: Any = sys.modules.get("vllm.logger")
    while configure := original_of(getattr(vllm_logger, "configure_logging", None)):
        vllm_logger.configure_logging = configure


def _say_when_configured(message: str) -> None:
    """From 0.31.0 vLLM sets up its log after it has loaded plugins; a line before that is lost."""
    vllm_logger: Any = sys.modules.get("vllm.logger")
    configure = getattr(vllm_logger, "configure_logging", None)
    if configure is None:
        logger.info(message)
        return

    @in_place_of(configure)
    def configure_and_say(*args: Any, **kwargs: Any) -> Any:
        vllm_logger.configure_logging = configure
        result = configure(*args, **kwargs)
        logger.info(message)
        return result

    vllm_logger.configure_logging = configure_and_say
