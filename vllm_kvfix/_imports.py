"""Act on a module when it is imported, without importing it.

vLLM's spec factory and its KV cache code take from milliseconds to seconds to import, and most
processes that load a plugin never need them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]

_waiting: dict[str, list[Callback]] = {}
_executed: set[str] = set()
_asking = threading.local()


def imported(name: str) -> ModuleType | None:
    """The module, if all of it has been executed: in a circle of imports it may be there in part."""
    module = sys.modules.get(name)
    in_part = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if in_part and name not in _executed else module


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once, right after the import of ``name``, which is still to come.

    ``callback`` runs inside that import statement, and what it raises is lost.
    """
    _waiting.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def drop(callback: Callback) -> None:
    """Do not call ``callback`` any more, whatever is imported."""
    for name, callbacks in list(_waiting.items()):
        _waiting[name] = [other for other in callbacks if other is not callback]


def forget() -> None:
    """Wait for nothing any more."""
    _waiting.clear()
    _executed.clear()
    # Only here: another thread may be going through the list, and would skip a finder.
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder:
    """Lets the other finders find a module that is waited for, and adds the call to its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another plugin's finder may ask all others in its turn, us too.
        if not _waiting.get(name) or getattr(_asking, "others", False):
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
        _executed.discard(name)
        exec_module(module)
        _executed.add(name)
        for callback in _waiting.pop(name, []):
            # Not even a log handler that raises may break an import of vLLM's.
            with contextlib.suppress(Exception):
                callback(module)

    # A loader that takes no attribute loads the module as it would; its fix keeps on waiting.
    try:
        spec.loader.exec_module = exec_then_call  # type: ignore[union-attr,method-assign]
    except AttributeError:
        return


_finder = _Finder()
