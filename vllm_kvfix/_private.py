"""What of a text may be posted in public: words, numbers, versions, and names of code.

Errors and warnings hold words of others, and nobody can list the forms that a secret may have. So everything else is
hidden: paths, addresses, URLs, mail, and whatever is glued together of several things. So are words that are known to
be somebody's: values of variables that are secrets by their name, and names of this machine and its user.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

HIDDEN = "<hidden>"

_OPENING, _CLOSING = "([{<'\"`", ")]}>'\"`,;:.!?"
_NAME = r"[A-Za-z_]\w*"
_RELEASE = (
    r"v?\d+(?:\.\d+){1,2}(?:\.?(?:a|b|rc|dev|post)\d+)*(?:\+(?:cpu|cu\d+|rocm[\d.]+|precompiled|g[0-9a-f]{7,12}))?"
)
_HARMLESS = re.compile(
    rf"""
      (?: [^\w/\\@~\x80-\U0010ffff] | … )*          # signs
    | [A-Za-z]+ (?: ['-] [A-Za-z]+ )* \(?           # words
    | (?: (?=.{{1,10}}$) | (?=\D{{1,48}}$) ) {_NAME} \(?  # names in code; of the long ones, those without digits
    | (?: {_NAME} = ['"]? )? (?: [-+\#]? \d{{1,19}} (?: \.\d+ )? %? | True | False | None )
    | \d{{1,3}} (?: ,\d{{3}} )+                     # 1,000,000
    | {_RELEASE} (?: -{_RELEASE} )?
    | --? [a-z] [a-z-]*                             # options
    | lib [\w+-]{{1,24}} \.so (?: \.\d+ )*          # libraries
    | https://github\.com/vllm-project/ [\w./-]+
    """,
    re.VERBOSE | re.ASCII,
)
_CODE = re.compile(rf"({_NAME})(?:[.:]{_NAME})*\(?", re.ASCII)
_PYTHON = re.compile(r"(.*/)(?:python[\d.]*|(?:site|dist)-packages/([A-Za-z]\w*)[\w./-]*)")
_SYSTEM_FOLDER = re.compile(r"/usr/(?:local/)?(?:bin|lib(?:/python[\d.]+)?)/")

_LOOKS_SECRET = re.compile(
    r"""
      \b (?: hf | gh[pousr] | github_pat | glpat | [spr]k | xox[abeprs] | npm | pypi | dckr_pat ) [-_] [\w-]{8,}
    | \b (?: A[KS]IA | eyJ ) [\w-]{8,}
    | (?i: [\w-]{0,48} (?: token | secret | passw | pwd | key (?!Error\b) | credential )
           \w{0,48} \W{0,2} \s* [=:] \s* (?: '[^']*' | "[^"]*" | \S+ ) )
    | (?i: \b (?: bearer | basic ) \s+ \S+ )
    """,
    re.VERBOSE,
)

_SECRET_VARIABLE = re.compile(
    r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|COOKIE|WEBHOOK|PROXY|(?:^|_)(?:PWD|PAT|DSN|UR[IL])$", re.IGNORECASE
)
# Words of every report: as the value of a secret, or the name of a machine or a user, they tell nothing.
_TELL_NOTHING = frozenset(
    (
        *("admin", "app", "cpu", "cuda", "data", "debian", "docker", "empty", "false", "gpu", "home", "kvfix", "linux"),
        *(
            "localhost",
            "node",
            "nobody",
            "none",
            "null",
            "opt",
            "python",
            "ray",
            "root",
            "server",
            "srv",
            "tmp",
            "torch",
        ),
        *("true", "ubuntu", "user", "usr", "var", "vllm", "worker", "workspace"),
    )
)


def hider(names: Collection[str], odd: Collection[str]) -> Callable[[str], str]:
    """A function that hides in a text what must not be posted.

    Args:
        names: to be shown as they are, of plugins for example.
        odd: to be hidden wherever they are.
    """
    modules = {"vllm", *(name.partition(".")[0] for name in sys.modules)}
    shown = {name for name in names if re.fullmatch(r"[A-Za-z_][\w.:-]*", name)}
    secrets = _forms({*odd, *_secrets()})
    people = sorted(_private_words(), key=len, reverse=True)
    private = re.compile(rf"(?<![^\W_])(?:{'|'.join(map(re.escape, people)) or '(?!)'})(?![^\W_])", re.IGNORECASE)

    def of_word(core: str) -> str | None:
        """What is shown of a word; None if it may begin a path, of which nobody knows where it ends."""
        code = _CODE.fullmatch(core)
        if _HARMLESS.fullmatch(core) or core in shown or (code and code[1] in modules):  # others may be those of hosts
            return core
        path = _PYTHON.fullmatch(core)
        if path and path[2] in {None, *modules}:
            return core if _SYSTEM_FOLDER.fullmatch(path[1]) else f"{HIDDEN}/{core[path.end(1) :]}"
        return None if re.search(r"[/\\~]", core) else HIDDEN

    def hide(text: str) -> str:
        for secret in secrets:
            text = _without(text, secret)
        text = _LOOKS_SECRET.sub(HIDDEN, text)
        seen, done = "", 0
        for word in re.finditer(r"\S+", text):
            if word.start() < done:  # in a path
                continue
            core = word[0].lstrip(_OPENING).rstrip(_CLOSING)
            start = word.start() + word[0].index(core)
            of_core, end = of_word(core), start + len(core)
            if of_core is None:
                quote = text[start - 1 : start]
                end = text.find(quote, start) if quote and quote in "'\"`" else len(text)
                end = len(text) if end < 0 else end
            seen += text[done:start] + (HIDDEN if of_core is None else of_core)
            done = end
        seen = re.sub(rf"{HIDDEN}(?:\s+{HIDDEN})+", HIDDEN, seen + text[done:])
        return private.sub(HIDDEN, seen)

    return hide


def _forms(secrets: Collection[str]) -> list[str]:
    """As they are, and as messages may quote them; longest first."""
    forms = {form for one in secrets for form in (one.strip(), repr(one)[1:-1], " ".join(one.split()))}
    telling = (form for form in forms if len(form) > 3 and form.lower() not in _TELL_NOTHING)
    return sorted(telling, key=len, reverse=True)


def _secrets() -> Iterator[str]:
    """Secrets in the environment. Paths are not among them, which are hidden anyway."""
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and value[:1] != "/":
            yield value


def _without(text: str, secret: str) -> str:
    """The text without the secret, or a part of it: the ends of long messages are cut off."""
    start = re.compile(re.escape(secret[:8]), re.IGNORECASE)
    done = 0
    while found := start.search(text, done):
        end = found.end()
        for one, other in zip(text[end:], secret[8:]):
            if one.lower() != other.lower():
                break
            end += 1
        text = text[: found.start()] + HIDDEN + text[end:]
        done = found.start() + len(HIDDEN)
    return text


def _private_words() -> set[str]:
    """Names of this machine and of who uses it."""
    machine = [platform.node(), os.environ.get("HOSTNAME", "")]
    people = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")]
    homes = [os.path.expanduser("~"), os.environ.get("HOME", "")]
    with contextlib.suppress(OSError):
        machine.append(socket.gethostname())
    with contextlib.suppress(Exception):
        import pwd  # not on Windows

        user = pwd.getpwuid(os.getuid())
        people.append(user.pw_name)
        homes.append(user.pw_dir)
    homes += [os.path.realpath(home) for home in homes]
    names = {*machine, *(name.split(".")[0] for name in machine), *people, *(Path(home).name for home in homes)}
    return {name for name in names if len(name) > 1 and name.lower() not in _TELL_NOTHING}
