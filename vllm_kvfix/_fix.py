"""What a fix is, and the words for how it stands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

APPLIED = "applied"
NOT_NEEDED = "not needed"
NOT_APPLICABLE = "not applicable"
DISABLED = "disabled"
UNKNOWN = "unknown"
FAILED = "failed"
WAITING = "waiting"  # vLLM has not imported the module yet; settled at the moment it does


class Status(NamedTuple):
    """How a fix stands in this process: one of the words above, and why."""

    word: str
    why: str

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


class Fix(Protocol):
    """One module of ``vllm_kvfix.fixes``. It may raise: the plugin undoes and reports it."""

    ID: str
    TARGET: str
    """Name of the vLLM module that is repaired, when vLLM imports it."""

    def settle(self, module: ModuleType) -> Status:
        """Recognise the bug in ``module``, repair it only if it is there, and read that back."""

    def holds(self, module: ModuleType) -> bool:
        """Whether the repair is what vLLM would call now."""

    def restore(self, module: ModuleType) -> None:
        """Put vLLM's own code back; harmless when nothing was changed."""


def in_place_of(original: Any) -> Callable[[Any], Any]:
    """Decorator: this function is ours and stands where vLLM's ``original`` stood."""

    def mark(function: Any) -> Any:
        function.kvfix = True
        return functools.wraps(original)(function)

    return mark


def original_of(function: Any) -> Any:
    """vLLM's function, where ours stands in its place; else None."""
    return function.__wrapped__ if getattr(function, "kvfix", False) else None
