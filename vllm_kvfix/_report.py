"""What a maintainer needs of an install, and nothing that its owner would not post in public."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_kvfix import fingerprint, plugin
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
_NOT_SHOWN = "<not shown>"
_TELLING = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|COOKIE|DSN|WEBHOOK", re.IGNORECASE)
# Names that many have: to hide them would only make the report unreadable.
_TELL_NOTHING = {"root", "admin", "user", "nobody", "ubuntu", "debian", "localhost", "vllm", "kvfix", "ray", "app"}
# Fields whose words are ours, or have one form.
_PLAIN = {"schema", "id", "title", "upstream", "word", "variables", "code", "commit"}

_PATTERNS = (
    (r"\b(?:hf|gh[pousr]|github_pat|glpat|sk|pk|rk|xox[abeprs]|npm|pypi|dckr_pat)[-_][\w-]{8,}", "<token>"),
    (r"\bA[KS]IA[0-9A-Z]{12,}|\beyJ[\w-]{8,}(?:\.[\w-]+)*", "<token>"),
    (r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{6,}", "<token>"),
    (r"(?i)\b[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|credential)[\w-]*\W{0,2}\s*[=:]\s*\S+", "<secret>"),
    (r"\b[a-z][a-z0-9+.-]*://(?!github\.com/vllm-project/)\S+", "<url>"),
    (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*", "<mail>"),
    (r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])", "<address>"),
)


def with_report(result: dict[str, Any]) -> dict[str, Any]:
    """The doctor's answer with the report in it, all of it fit to be posted."""
    names = {point["name"] for point in (*result["plugin"]["others"], *result["plugin"]["same_name"])}
    report = {**_system(), "variables": variables(names), **_code()}
    hide = _hider(names)
    return {
        name: hide(value) if name != "plugin" else {**hide(value), "vllm_plugins": report["variables"]["VLLM_PLUGINS"]}
        for name, value in {**result, "report": report}.items()
    }


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
        "kernel": f"{uname.system} {uname.release}",
        "machine": uname.machine,
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "torch": f"{version}{built}" if version else None,
        "platform": _platform(),
    }


def _distribution() -> str | None:
    for file in ("/etc/os-release", "/usr/lib/os-release"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            named = re.search(r'^PRETTY_NAME="?([^"\n]*)', Path(file).read_text(), re.MULTILINE)
            return named[1] if named else None
    return None


def _platform() -> str | None:
    """The platform that vLLM has chosen; it is not made to choose one."""
    chosen = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    return None if chosen is None else type(chosen).__name__


def variables(plugins: set[str]) -> dict[str, str | None]:
    """The variables that matter, each with its value as far as it has the form that it should have.

    Of ``KVFIX_`` variables that there are not, the name alone: it may be a slip of the pen.
    """
    shown: dict[str, str | None] = dict.fromkeys(_VARIABLES)
    for name in os.environ:
        if name in _VARIABLES:
            shown[name] = ",".join(
                word if _is_shown(name, word, plugins) else _NOT_SHOWN for word in os.environ[name].split(",")
            )
        elif re.fullmatch(r"KVFIX_[A-Z_]{1,40}", name):
            shown[name] = _NOT_SHOWN
    return shown


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


# ---- what must not be seen ----


def _hider(plugins: set[str]) -> Any:
    """A function that goes through any JSON value and hides what its owner would not post."""
    words = sorted(_private_words(plugins), key=len, reverse=True)
    private = [(re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", re.IGNORECASE), "<name>") for word in words]
    patterns = [(re.compile(pattern), text) for pattern, text in _PATTERNS]
    homes, secrets = _homes(), _secrets(plugins)

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item if name in _PLAIN else hide(item) for name, item in value.items()}
        if isinstance(value, list):
            return [hide(item) for item in value]
        if not isinstance(value, str):
            return value
        for secret, text in secrets:
            value = _without(value, secret, text)
        value = homes.sub(_without_home, value)
        for pattern, text in (*patterns, *private):
            value = pattern.sub(text, value)
        return value

    return hide


def _secrets(plugins: set[str]) -> list[tuple[str, str]]:
    """Texts to hide wherever they are, longest first: secrets in the environment, and what is no word of ours."""
    found = {}
    for name, value in os.environ.items():
        if name in _VARIABLES:
            odd = [word.strip() for word in value.split(",") if not _is_shown(name, word, plugins)]
            found.update(dict.fromkeys(odd, _NOT_SHOWN))
        elif (_TELLING.search(name) or name.startswith("KVFIX_")) and not os.path.exists(value):
            found[value.strip()] = "<secret>"
    for text, by in list(found.items()):  # as messages may quote it
        found.update(dict.fromkeys((repr(text)[1:-1], " ".join(text.split())), by))
    return sorted(((text, by) for text, by in found.items() if len(text) > 3), key=lambda one: -len(one[0]))


def _without(text: str, secret: str, by: str) -> str:
    """The text without the secret, or a part of it: the ends of long messages are cut off."""
    start = re.compile(re.escape(secret[:8]), re.IGNORECASE)
    done = 0
    while found := start.search(text, done):
        end = found.end()
        for one, other in zip(text[end:], secret[8:]):
            if one.lower() != other.lower():
                break
            end += 1
        text = text[: found.start()] + by + text[end:]
        done = found.start() + len(by)
    return text


def _private_words(plugins: set[str]) -> set[str]:
    """Names of this machine and of who uses it."""
    machine = [platform.node(), os.environ.get("HOSTNAME", "")]
    with contextlib.suppress(OSError):
        machine.append(socket.gethostname())
    names = {*machine, *(name.split(".")[0] for name in machine)}
    names.update(os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER"))
    names.update(Path(home).name for home in _home_folders())
    return {name for name in names if len(name) > 1 and name.lower() not in _TELL_NOTHING}


def _home_folders() -> list[str]:
    folders = [os.path.expanduser("~"), os.environ.get("HOME", "")]
    with contextlib.suppress(Exception):
        import pwd  # not on Windows

        folders.append(pwd.getpwuid(os.getuid()).pw_dir)
    folders += [os.path.realpath(folder) for folder in folders if folder]
    # An image for any user may have HOME=/, which is nobody's.
    return [folder.rstrip("/") for folder in folders if len(folder.rstrip("/")) > 1 and folder.startswith("/")]


def _homes() -> re.Pattern[str]:
    """Paths under anybody's home, up to their end."""
    own = "|".join(re.escape(folder) for folder in sorted(set(_home_folders()), key=len, reverse=True))
    anybodys = r"(?:/var)?/(?:home|Users)/[^/\s'\"]+|/root|[A-Z]:\\+Users\\+[^\\\s'\"]+"
    return re.compile(rf"(?:{own + '|' if own else ''}{anybodys})(?![\w-])(?:[/\\][^\s'\"`:;,)\]>]*)?", re.IGNORECASE)


def _without_home(path: re.Match[str]) -> str:
    """Where in Python's packages a file is may be known, but not where those are."""
    packages = re.search(r"/(?:site|dist)-packages(?:/.*)?$", path[0])
    return f"~/...{packages[0]}" if packages else "~/..."
