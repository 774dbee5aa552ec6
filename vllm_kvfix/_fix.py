"""What a fix is, and the words for how it stands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

APPLIED = "applied"
NOT_NEEDED = "not needed"
NOT_APPLICABLE = "not applicable"
DISABLED = "disabled"
UNKNOWN = "unknown"
FAILED = "failed"
WAITING = "waiting"  # for vLLM to import what is to be judged; settled at that moment

# What the code of the installed vLLM was found to be; or UNKNOWN.
AFFECTED = "affected"
RIGHT = "right"
ABSENT = "absent"  # there is nothing that could have the bug


class Status(NamedTuple):
    """How a fix stands in this process, or what vLLM's code is: one of the words above, and why."""

    word: str
    why: str

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


class Fix(Protocol):
    """One module of ``vllm_kvfix.fixes``. It may raise: the plugin undoes and reports it."""

    ID: str
    TITLE: str
    """What it repairs, for who has one line to read."""
    UPSTREAM: str
    """Where vLLM's developers fixed or discuss it."""
    TARGETS: tuple[str, ...]
    """Names of the vLLM modules it needs. It imports none of them, but waits until vLLM does."""
    CONNECTOR: str
    """The KV connector whose engines settle it after ``register()``; empty if that has nothing to do with one."""
    STOCK_CODE: dict[str, tuple[str, ...]]
    """The code that it judges, replaces or wraps: qualified name -> modules that may define it."""

    def stock(self) -> Status:
        """What vLLM's own code is, whether it is repaired here or not; WAITING while it is not imported."""

    def settle(self) -> Status:
        """Recognise the bug, repair it only if it is there; WAITING while a target is missing.

        Called by ``register()``, and after the import of each target until it does not wait.
        """

    def holds(self) -> bool:
        """Whether the repair is what vLLM would call now."""

    def restore(self) -> None:
        """Put vLLM's own code back; harmless when nothing was changed."""


def unrepaired(verdict: Status) -> Status:
    """How a fix stands that found this and leaves vLLM alone."""
    word = {RIGHT: NOT_NEEDED, ABSENT: NOT_APPLICABLE}.get(verdict.word, UNKNOWN)
    return Status(word, verdict.why)


def one_line(error: BaseException) -> str:
    """Type and text of an error, for a log line: some errors have a page of text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def disabled_words() -> set[str]:
    """The words of ``KVFIX_DISABLE``: ``all``, fix ids, or what the operator mistook for one."""
    return {word.strip().lower() for word in os.environ.get("KVFIX_DISABLE", "").split(",")} - {""}


def in_place_of(original: Any) -> Callable[[Any], Any]:
    """Decorator: this function is ours and stands where vLLM's ``original`` stood."""

    def mark(function: Any) -> Any:
        functools.update_wrapper(function, original)
        function.kvfix = function  # itself: a mere flag would travel to whoever wraps ours
        return function

    return mark


def is_ours(function: Any) -> bool:
    return function is not None and getattr(function, "kvfix", None) is function


def original_of(function: Any) -> Any:
    """vLLM's function, where ours stands in its place; else None."""
    return function.__wrapped__ if is_ours(function) else None
