"""What a maintainer needs of an install, and nothing that its owner would not post in public."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_kvfix import _private, fingerprint, plugin
from vllm_kvfix._fix import one_line

_BOOLEAN = r"[0-9]|true|false|yes|no|on|off"
# The variables that change what the fixes do, and what each may hold: nothing else is shown of it.
_VARIABLES = {
    "KVFIX_DISABLE": "|".join(["all", *(fix.ID for fix in plugin.FIXES)]),
    "KVFIX_STOCK_SPEC": _BOOLEAN,
    "NO_COLOR": _BOOLEAN,
    "VLLM_ENABLE_V1_MULTIPROCESSING": _BOOLEAN,
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS": r"\d{1,9}",
    "VLLM_LOGGING_LEVEL": "DEBUG|INFO|WARNING|ERROR|CRITICAL",
    "VLLM_PLUGINS": "kvfix",  # and the names of plugins that are there
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "KVFIX_STOCK_SPEC|KVFIX_DISABLE",
    "VLLM_TARGET_DEVICE": "cuda|rocm|xpu|cpu|tpu|empty",
    "VLLM_USE_SIMPLE_KV_OFFLOAD": _BOOLEAN,
    "VLLM_USE_V1": _BOOLEAN,
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn|fork|forkserver",
}
# Fields whose words are ours, or of one form.
_PLAIN = {"schema", "id", "title", "upstream", "to_do", "word", "variables", "code", "commit"}
_OF_PLUGINS = ("name", "value", "distribution", "distribution_version")


def with_report(result: dict[str, Any]) -> dict[str, Any]:
    """The doctor's answer with the report in it, all of it fit to be posted."""
    points = (*result["plugin"]["others"], *result["plugin"]["same_name"])
    names = {point["name"] for point in points}
    shown, odd = variables(names)
    report = {**_system(), "variables": shown, **_code()}
    hide = _private.hider({point[key] or "" for point in points for key in _OF_PLUGINS}, odd)
    posted = {name: _hidden(value, hide) for name, value in {**result, "report": report}.items()}
    posted["plugin"]["vllm_plugins"] = shown["VLLM_PLUGINS"]
    return posted


def _hidden(value: Any, hide: Callable[[str], str]) -> Any:
    """Any JSON value with its texts hidden as far as they must be."""
    if isinstance(value, dict):
        return {name: item if name in _PLAIN else _hidden(item, hide) for name, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, hide) for item in value]
    return hide(value) if isinstance(value, str) else value


def facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The report as lines of text: name and value."""
    for name in ("system", "kernel", "machine", "libc", "torch", "platform"):
        yield name, report[name] or "unknown"
    shown = [f"{name}={value!r}" for name, value in report["variables"].items() if value is not None]
    yield "variables", ", ".join(shown) or "none of those that matter is set"
    if report["code_error"]:
        yield "code", f"cannot be read: {report['code_error']}"
    releases = list(_releases())
    for name, seen in {name: seen for code in report["code"].values() for name, seen in code.items()}.items():
        known = f"as in {', '.join(_spans(seen['releases'], releases))}" if seen["releases"] else "as in no release"
        yield "code", f"{name} {seen['fingerprint']}, {known}"


# ---- what there is ----


def _system() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    with contextlib.suppress(Exception):
        version = version or importlib.metadata.version("torch")
    builds = {name: getattr(getattr(torch, "version", None), name, None) for name in ("cuda", "hip", "xpu")}
    built = "".join(f", {name} {number}" for name, number in builds.items() if number)
    uname = platform.uname()
    return {
        "system": _distribution() or uname.system,
        "kernel": f"{uname.system} {re.split('[^0-9.]', uname.release)[0]}",  # who built it is nobody's business
        "machine": uname.machine,
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "torch": f"{version}{built}" if version else None,
        "platform": _platform(),
    }


def _distribution() -> str | None:
    for file in ("/etc/os-release", "/usr/lib/os-release"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            told = dict(re.findall(r'^(ID|VERSION_ID)="?([\w.-]+)"?$', Path(file).read_text(), re.MULTILINE))
            return " ".join(filter(None, (told.get("ID"), told.get("VERSION_ID")))) or None
    return None


def _platform() -> str | None:
    """The platform that vLLM has chosen; it is not made to choose one."""
    chosen = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    return None if chosen is None else type(chosen).__name__


def variables(plugins: set[str]) -> tuple[dict[str, str | None], set[str]]:
    """The variables that matter, each with its value as far as it has the form that it should have; and the rest of it.

    Of ``KVFIX_`` variables that there are not, the name alone: it may be a slip of the pen.
    """
    shown: dict[str, str | None] = dict.fromkeys(_VARIABLES)
    odd = set()
    for name, value in os.environ.items():
        if name in _VARIABLES:
            hidden = {word for word in value.split(",") if not _is_shown(name, word, plugins)}
            shown[name] = ",".join(_private.HIDDEN if word in hidden else word for word in value.split(","))
            odd |= hidden
        elif re.fullmatch(r"KVFIX_[A-Z_]{1,40}", name):
            shown[name] = _private.HIDDEN
            odd.add(value)
    return shown, odd


def _is_shown(name: str, word: str, plugins: set[str]) -> bool:
    word = word.strip(" ")  # spaces matter to vLLM, and are shown
    if name == "VLLM_PLUGINS" and word in plugins:
        return True
    return not word or re.fullmatch(_VARIABLES[name], word, re.IGNORECASE) is not None


def _code() -> dict[str, Any]:
    """Fingerprints of the code that the fixes rely on, and the releases in which it is the same."""
    table = _releases()
    found: dict[str, Any] = {"code": {}, "code_error": None}
    for fix in plugin.FIXES:
        try:
            marks = fingerprint.of_installed(fix.STOCK_CODE)
        except Exception as error:
            marks, found["code_error"] = {}, one_line(error)
        found["code"][fix.ID] = {
            name: {"fingerprint": mark, "releases": [one for one, rows in table.items() if _has(rows, name, mark)]}
            for name, mark in marks.items()
        }
    return found


def _has(rows: dict[str, Any], name: str, mark: str) -> bool:
    """Whether a release has this code, whichever fix asked for it."""
    return any(row["fingerprints"].get(name) == mark for row in rows.values())


def _spans(some: list[str], every: list[str]) -> list[str]:
    """Releases as spans of neighbours: ["0.11.0-0.13.0", "0.19.1"]."""
    spans: list[list[str]] = []
    for position, release in enumerate(every):
        if release in some:
            if position and spans and spans[-1][-1] == every[position - 1]:
                spans[-1].append(release)
            else:
                spans.append([release])
    return [span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]


def _releases() -> dict[str, Any]:
    try:
        table = json.loads(Path(__file__).with_name("support.json").read_text())
    except (OSError, ValueError):  # packed by somebody without it
        return {}
    return dict(table["releases"])
