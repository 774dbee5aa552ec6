"""A function of vLLM's that several modules bind by name: ours stands in its place in each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_kvfix import _imports
from vllm_kvfix._fix import is_ours, original_of


def replace(module: ModuleType, name: str, ours: Callable[[Any], Any]) -> None:
    """Put what ``ours`` makes of vLLM's function in its place, if the module has it and that is not done yet."""
    function = getattr(module, name, None)
    if function is not None and not is_ours(function):
        setattr(module, name, ours(function))


def replace_in_all(callers: tuple[str, ...], defined_in: tuple[str, ...], replace_in: _imports.Callback) -> None:
    """Replace it in the modules that are imported, and where it is defined as soon as that is: who binds it later gets
    ours.

    Args:
        callers: modules that have the function under its name, those that define it among them.
        defined_in: of these, those that define it, in some release.
        replace_in: calls :func:`replace`; the same function each time.
    """
    _imports.drop(replace_in)  # once for all: it forgets every module that was waited for
    for caller in callers:
        module = _imports.imported(caller)
        if module is not None:
            replace_in(module)
        elif caller in defined_in:
            _imports.when_imported(caller, replace_in)


def put_back(callers: tuple[str, ...], name: str, replace_in: _imports.Callback) -> None:
    """Put vLLM's own function back into all of them, and wait for none."""
    _imports.drop(replace_in)
    for caller in callers:
        function = original_of(getattr(sys.modules.get(caller), name, None))
        if function is not None:
            setattr(sys.modules[caller], name, function)
