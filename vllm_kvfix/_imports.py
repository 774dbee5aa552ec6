"""Act on a module when it is imported, without importing it.

vLLM's spec factory and its KV cache code take from 5 ms to seconds to import, and most processes
that load a plugin never need them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]

_waiting: dict[str, Callback] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once, right after the import of ``name``, which is still to come.

    ``callback`` runs inside that import statement and must not raise.
    """
    _waiting[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget() -> None:
    """Wait for nothing any more."""
    _waiting.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder:
    """Lets the other finders find a module that is waited for, and adds the call to its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _call_after(spec, name)
                    return spec
        return None


def _call_after(spec: ModuleSpec, name: str) -> None:
    loader = spec.loader
    if loader is None or not hasattr(loader, "exec_module"):
        return
    exec_module = loader.exec_module

    def exec_then_call(module: ModuleType) -> None:
        exec_module(module)
        callback = _waiting.pop(name, None)
        if not _waiting:
            forget()
        if callback is not None:
            callback(module)

    try:
        loader.exec_module = exec_then_call  # type: ignore[method-assign]
    except AttributeError:  # a loader that takes no attribute: the module loads as it would
        return


_finder = _Finder()
