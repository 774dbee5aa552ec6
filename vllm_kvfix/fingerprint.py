"""Fingerprints of code: two are equal if the code is, whatever its comments, docstrings and layout.

A witness beside the probes of the fixes, never instead of them: equal code answers equally, but other
code may be right, or have the same bug. ``support.json`` has the fingerprint of all code that the
fixes rely on, in every release. Reads source files and imports nothing of vLLM; the same on every
Python from 3.9.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def of_installed(stock_code: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Fingerprints of the installed vLLM's code: ``module:qualified name`` -> 16 hexadecimal digits.

    Args:
        stock_code: qualified name -> vLLM modules that may define it, in some release.

    Raises:
        SyntaxError: a module is not for this Python.
    """
    found = {}
    for name, modules in stock_code.items():
        for module in modules:
            source = _source(module)
            mark = of(source, name) if source is not None else None
            if mark is not None:
                found[f"{module}:{name}"] = mark
    return found


def of(source: str | bytes, qualified_name: str) -> str | None:
    """Fingerprint of a function or class in the source of a module; None if it is not defined there.

    Args:
        source: Python source of a module.
        qualified_name: a name at the top of the module, or a path through classes, as in ``A.__init__``.

    Raises:
        SyntaxError: ``source`` is not for this Python.
    """
    node: Any = ast.parse(source)
    for name in qualified_name.split("."):
        defined = [child for child in node.body if isinstance(child, _NAMED) and child.name == name]
        if not defined:
            return None
        node = defined[-1]  # what a name is in the end
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _canonical(node: Any) -> str:
    """Everything that matters of a syntax tree; Pythons differ in the empty fields that they have."""
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind"}
    if isinstance(node, _NAMED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 puts an empty string after a nested format
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    return f"{type(node).__name__}({','.join(f'{name}={_canonical(fields[name])}' for name in sorted(fields))})"


def _source(module_name: str) -> bytes | None:
    """Source of a vLLM module; None where the installed vLLM has no such module."""
    vllm = importlib.util.find_spec("vllm")
    for place in (vllm.submodule_search_locations if vllm else None) or ():
        path = Path(place, *module_name.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_bytes()
    return None
