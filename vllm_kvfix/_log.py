"""Our lines in vLLM's log.

The logger is a child of vLLM's, because only that one is configured. The API server, EngineCore
and in-process engines speak at INFO; workers and helper processes would repeat it and stay at
DEBUG.
"""

from __future__ import annotations

import logging
import os
import sys

from vllm_kvfix import _releases

logger = logging.getLogger("vllm.kvfix")

_said: set[str] = set()
_quiet = False


def find_role() -> None:
    """Note what this process is by who called us: a worker or helper, or one that speaks."""
    global _quiet
    frame = sys._getframe(1)
    while frame.f_back is not None and not _quiet:
        _quiet = frame.f_globals.get("__name__") in _releases.HELPER_MODULES
        frame = frame.f_back


def once(level: int, message: str) -> None:
    """Log ``message`` the first time it is said in this process; in helpers INFO becomes DEBUG."""
    if message in _said:
        return
    _said.add(message)
    if _quiet and level == logging.INFO:
        level = logging.DEBUG
    handler = _stand_in_handler()
    if handler is None:
        logger.log(level, message)
    elif level >= logging.INFO:
        handler.handle(logger.makeRecord(logger.name, level, __file__, 0, message, (), None))


def forget() -> None:
    """Say everything anew."""
    _said.clear()


def _stand_in_handler() -> logging.Handler | None:
    """A handler for one line when vLLM has not set up its own log yet, or None.

    From 0.31.0 that happens after plugins are loaded, and the API server's line would be lost.
    """
    if logger.hasHandlers() or os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "0":
        return None
    handler = logging.StreamHandler(sys.stderr)  # stdout may be the answer of `vllm --version`
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [kvfix] %(message)s", "%m-%d %H:%M:%S")
    )
    return handler
