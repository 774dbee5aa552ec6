"""Act on a module when it is imported, without importing it.

vLLM's spec factory and its KV cache code take from milliseconds to seconds to import, and most
processes that load a plugin never need them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]

_waiting: dict[str, list[Callback]] = {}
_asking = threading.local()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once: now if ``name`` is imported, else right after its import.

    ``callback`` then runs inside that import statement; it must not raise.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def drop(callback: Callback) -> None:
    """Do not call ``callback`` any more, whatever is imported."""
    for name, callbacks in list(_waiting.items()):
        _waiting[name] = [other for other in callbacks if other is not callback]
        if not _waiting[name]:
            del _waiting[name]
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


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
        # Another plugin's finder may ask all others in its turn, us too.
        if name not in _waiting or getattr(_asking, "others", False):
            return None
        _asking.others = True
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec = find_spec(name, path, target) if find_spec and finder is not self else None
                if spec is not None:
                    _call_after(spec, name)
                    return spec
            return None
        finally:
            _asking.others = False


def _call_after(spec: ModuleSpec, name: str) -> None:
    exec_module = getattr(spec.loader, "exec_module", None)
    if exec_module is None:
        return

    def exec_then_call(module: ModuleType) -> None:
        exec_module(module)
        callbacks = _waiting.pop(name, [])
        if not _waiting:
            forget()
        for callback in callbacks:
            callback(module)

    # A loader that takes no attribute loads the module as it would; its fix keeps on waiting.
    try:
        spec.loader.exec_module = exec_then_call  # type: ignore[union-attr,method-assign]
    except AttributeError:
        return


_finder = _Finder()
