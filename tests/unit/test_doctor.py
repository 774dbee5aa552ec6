"""``vllm-kvfix doctor`` where there is no vLLM or a broken one, and the report, which keeps secrets."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import vllm_kvfix
from vllm_kvfix import __main__, _private, _report, doctor, plugin

ROOT = Path(__file__).resolve().parents[2]


def schema_of_the_contract_tests():
    spec = importlib.util.spec_from_file_location("kvfix_schema", ROOT / "tests/contract/schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faults = schema_of_the_contract_tests().faults


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("KVFIX_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")


def answer(capsys, *arguments):
    status = __main__.main(["doctor", *arguments])
    return status, capsys.readouterr().out


# ---- no vLLM, or a broken one ----


@pytest.mark.parametrize("arguments", [[], ["--strict"]])
def test_without_vllm_it_says_so(capsys, arguments):
    status, text = answer(capsys, *arguments)
    assert status == 2
    assert "not installed for this Python" in text and sys.executable in text
    assert "NOT LOADED" in text
    status, printed = answer(capsys, "--json", *arguments)
    result = json.loads(printed)
    assert status == 2 and faults(result) == []
    assert (result["vllm"]["found"], result["vllm"]["version"], result["report"]) == (False, None, None)
    assert [row["id"] for row in result["fixes"]] == [fix.ID for fix in plugin.FIXES]
    assert not any(row["live"] or row["judged"] for row in result["fixes"])
    assert result["version"] == vllm_kvfix.__version__


NOISE = """\
import ctypes, logging, subprocess, sys
print("printed")
ctypes.CDLL(None).printf(b"from C\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"])
logging.basicConfig(stream=sys.stdout, level=0)
logging.info("logged")
"""
NO_PYTHON = "this is no python"
BROKEN = {
    "raise ImportError('libcudart.so.13: cannot\\n\\n  open')": "ImportError: libcudart.so.13: cannot open",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "raise OSError(12, 'no memory')": "OSError: [Errno 12] no memory",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "class Panic(BaseException): pass\nraise Panic('rust')": "Panic: rust",
    NO_PYTHON: "SyntaxError: invalid syntax",
    "__version__ = '0.19.1'": "ModuleNotFoundError: No module named 'vllm.plugins'",
}


def program(folder, *arguments):
    """The command as a program of its own, to which ``folder`` is on the path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # C heeds it too
    return subprocess.run(
        [sys.executable, "-m", "vllm_kvfix", *arguments],
        cwd=folder,
        env={**environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("code", BROKEN)
def test_a_vllm_that_cannot_be_imported_is_named_in_one_line(tmp_path, code):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(code if code in NO_PYTHON else NOISE + code)
    ended = program(tmp_path, "doctor", "--json")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    result = json.loads(ended.stdout)
    assert faults(result) == []
    assert (result["vllm"]["found"], result["vllm"]["path"]) == (True, str(tmp_path / "vllm"))
    assert result["vllm"]["error"].startswith(BROKEN[code])
    if code not in NO_PYTHON:
        for said in ("printed", "from C", "from a child"):
            assert said in ended.stderr, "not lost"
    ended = program(tmp_path, "doctor", "--strict")
    assert ended.returncode == 2
    assert BROKEN[code].split(":")[0] in ended.stdout
    assert "printed" not in ended.stdout and "logged" not in ended.stdout + ended.stderr


LIVELY = {  # what a plugin does, and what is said of it
    "import os; os._exit(0)": "ended (0) while loading plugins",
    "import os; os.abort()": "was killed by SIGABRT while loading plugins",
    "import os; os.closerange(3, 99)": "while loading plugins",
    "import threading, time; threading.Thread(target=time.sleep, args=[99]).start()": None,
    "import atexit; atexit.register(print, 'spoken')": None,
    "print('spoken')": None,
}


@pytest.mark.parametrize("code", LIVELY)
def test_whatever_a_plugin_does_to_its_process_there_is_an_answer(tmp_path, code):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.19.1'")
    (tmp_path / "vllm/plugins.py").write_text(f"def load_general_plugins():\n    {code}")
    for options in ([], ["--strict"], ["--report"]):
        ended = program(tmp_path, "doctor", "--json", *options)
        result = json.loads(ended.stdout)
        assert ended.returncode == 2 and faults(result) == []
        assert (result["vllm"]["error"] is None) == (LIVELY[code] is None)
        assert (LIVELY[code] or "") in (result["vllm"]["error"] or "")


def test_output_that_cannot_be_written_is_no_verdict(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('müßig')")
    command = f"{sys.executable} -m vllm_kvfix doctor "
    for redirected, status, out, err in (
        ("", 2, "m\\xfc\\xdfig", ""),
        (">&-", 2, "", ""),
        (">&- 2>&- <&-", 2, "", ""),
        (">/dev/full", 2, "", "No space left on device"),
    ):
        ended = subprocess.run(
            ["bash", "-c", command + redirected],
            env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == status, ended.stderr
        assert out in ended.stdout and err in ended.stderr and "Traceback" not in ended.stderr
        assert len(ended.stderr.splitlines()) == bool(err)


def test_a_folder_named_vllm_is_no_vllm(tmp_path):
    (tmp_path / "vllm").mkdir()
    ended = program(tmp_path, "doctor", "--json")
    result = json.loads(ended.stdout)
    assert ended.returncode == 2 and faults(result) == []
    assert result["vllm"]["found"] is False and "is a folder without code" in result["vllm"]["error"]


def test_ctrl_c_and_a_reader_that_leaves_end_it_without_a_traceback(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise KeyboardInterrupt")
    ended = program(tmp_path, "doctor")
    assert (ended.returncode, ended.stderr) == (130, "")
    command = f"{sys.executable} -m vllm_kvfix doctor --report; echo $? >&2"
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert ended.stderr.strip() == "141"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, f"vllm-kvfix {vllm_kvfix.__version__}"),
        (["--help"], 0, "doctor"),
        (["doctor", "--help"], 0, "--strict"),
        ([], 2, "command"),
        (["docktor"], 2, "invalid choice"),
        (["doctor", "--sctrict"], 2, "unrecognized arguments"),
    ],
)
def test_the_command_line(capsys, arguments, status, said):
    with pytest.raises(SystemExit) as ended:
        __main__.main(arguments)
    assert ended.value.code == status
    assert said in "".join(capsys.readouterr())


# ---- the verdict ----


def row(live=False, judged=True):
    return {"live": live, "judged": judged}


@pytest.mark.parametrize(
    ("rows", "error", "plain", "strict"),
    [
        ([row(), row()], None, 0, 0),
        ([row(), row(live=True)], None, 0, 1),
        ([row(), row(judged=False)], None, 0, 2),
        ([row(judged=False), row(live=True)], None, 0, 1),
        ([row(), row(live=True, judged=False)], None, 0, 1),
        ([row(judged=False), row(judged=False)], None, 2, 2),
        ([row(), row()], "RuntimeError: no licence", 0, 2),
        ([row(), row(live=True)], "RuntimeError: no licence", 0, 1),
    ],
)
def test_exit_status(rows, error, plain, strict):
    result = {"fixes": rows, "plugin": {"error": error}}
    assert doctor.exit_status(result, strict=False) == plain
    assert doctor.exit_status(result, strict=True) == strict


@pytest.mark.parametrize("fix", plugin.FIXES, ids=lambda fix: fix.ID)
def test_each_fix_can_be_told_in_a_row(fix):
    assert fix.UPSTREAM in fix.__doc__
    assert fix.TITLE and len(fix.TITLE) <= 90 and "\n" not in fix.TITLE


# ---- the text ----

ROW = {
    "id": "max-concurrency",
    "title": "reported capacity " * 5,
    "upstream": "https://github.com/vllm-project/vllm/pull/48317",
    "stock": {"word": "affected", "why": ""},
    "status": {"word": "applied", "why": "a reason " * 20},
    "live": False,
    "judged": True,
    "to_do": None,
}
POINT = {"name": "aaa", "value": "a:b", "distribution": "c", "distribution_version": "1", "allowed": False}


def result():
    return {
        "schema": 1,
        "version": "0.1.0",
        "python": {"version": "3.12.1", "executable": "/usr/bin/python3"},
        "vllm": {
            "found": True,
            "version": "0.19.1",
            "path": "/usr/local/lib/python3.12/dist-packages/vllm",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "distribution": "vllm",
            "distribution_version": "0.19.1",
            "error": None,
        },
        "plugin": {
            "entry_point": "kvfix",
            "distribution": "vllm-kvfix",
            "distribution_version": "0.1.0",
            "vllm_plugins": None,
            "allowed": True,
            "loaded": True,
            "why": None,
            "error": None,
            "same_name": [],
            "others": [dict(POINT)],
        },
        "fixes": [copy.deepcopy(ROW)],
        "warnings": [],
        "report": None,
    }


def text(of, width=80, colours=False):
    return "\n".join(doctor._lines(of, width, colours))


def test_the_example_is_of_the_schema_and_the_schema_refuses_others():
    assert faults(result()) == []
    assert faults(_report.with_report(result())) == []
    for spoil in (
        lambda one: one.pop("report"),
        lambda one: one.update(more=1),
        lambda one: one["vllm"].pop("commit"),
        lambda one: one["fixes"][0]["status"].update(word="fine"),
        lambda one: one["plugin"].update(loaded=None),
        lambda one: one.update(schema=2),
        lambda one: one["plugin"]["others"][0].pop("allowed"),
    ):
        spoiled = result()
        spoil(spoiled)
        assert faults(spoiled)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_are_as_wide_as_the_terminal_at_the_most(width):
    lines = text(_report.with_report(result()), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(len(line) > width - 15 for line in lines), "and use it"


def test_what_is_left_out_or_live_is_said():
    said = text(result())
    assert "aaa = a:b (c 1), left out by VLLM_PLUGINS" in said and "0123456789abcdef" in said
    assert "No known bug is live" in said and "KVFIX_DISABLE=all" in said
    bad = result()
    bad["fixes"][0] |= {"live": True, "status": {"word": "not loaded", "why": "the reason"}}
    bad["plugin"] |= {"loaded": False, "why": "the reason", "error": "SystemExit: 3", "same_name": [POINT]}
    bad["warnings"] = ["a warning"]
    said = text(bad)
    assert "Known bugs are live in this vLLM: max-concurrency." in said
    assert said.count("the reason") == 1 and "SystemExit: 3" in said and "a warning" in said
    assert "same name" in said and "Switch off" not in said
    odd = result()
    odd["fixes"][0]["judged"] = False
    assert "Could not be judged: max-concurrency." in text(odd)


@pytest.mark.parametrize(("terminal", "no_color", "coloured"), [(1, "", 1), (1, "1", 0), (0, "", 0)])
def test_colours_on_a_terminal_only(monkeypatch, capsys, terminal, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(terminal))
    _, printed = answer(capsys)
    assert ("\033[" in printed) == bool(coloured)
    _, printed = answer(capsys, "--json")
    assert "\033" not in printed


# ---- the report ----


def test_the_report_has_what_a_maintainer_needs():
    report = _report.with_report(result())["report"]
    for name in ("system", "kernel", "machine", "libc"):
        assert report[name]
    assert report["kernel"] == f"Linux {re.match('[0-9.]+', platform.release())[0]}"
    assert report["torch"] is None and report["platform"] is None, "there is no vLLM here"
    assert set(report["code"]) == {fix.ID for fix in plugin.FIXES}


def test_a_fingerprint_names_the_releases_that_have_it(tmp_path, monkeypatch):
    """The code of a release is known again; other code is of no release."""
    name = "vllm.v1.core.kv_cache_utils:get_max_concurrency_for_kv_cache_config"
    (known,) = {
        rows["max-concurrency"]["fingerprints"][name]
        for release, rows in _report._releases().items()
        if release in ("0.11.0", "0.26.0")
    }
    monkeypatch.setattr(_report.fingerprint, "of_installed", lambda code: {name: known, "a:b": "0" * 16})
    seen = _report.with_report(result())
    code = seen["report"]["code"]["max-concurrency"]
    assert (code[name]["releases"][0], code[name]["releases"][-1]) == ("0.11.0", "0.26.0")
    assert code["a:b"]["releases"] == []
    said = re.sub(r"\s+", " ", text(seen, 120))
    assert f"{name} {known}, as in 0.11.0-0.26.0" in said
    assert "a:b 0000000000000000, as in no release" in said


def test_code_that_cannot_be_read_is_said(monkeypatch):
    def unreadable(code):
        raise SyntaxError("for another Python")

    monkeypatch.setattr(_report.fingerprint, "of_installed", unreadable)
    seen = _report.with_report(result())
    assert faults(seen) == [] and seen["report"]["code_error"] == "SyntaxError: for another Python"
    assert "cannot be read: SyntaxError" in text(seen)


def test_releases_are_told_as_spans():
    every = ["0.1", "0.2", "0.3", "0.10", "0.11"]
    assert _report._spans(["0.1", "0.2", "0.10"], every) == ["0.1-0.2", "0.10"]
    assert _report._spans(every, every) == ["0.1-0.11"]
    assert _report._spans([], every) == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("KVFIX_DISABLE", "all", "all"),
        ("KVFIX_DISABLE", "max-concurrency, hunter2", "max-concurrency,<hidden>"),
        ("KVFIX_STOCK_SPEC", "1", "1"),
        ("KVFIX_STOCK_SPEC", "hunter2", "<hidden>"),
        ("KVFIX_STOCKSPEC", "1", "<hidden>"),
        ("VLLM_PLUGINS", " kvfix", " kvfix"),
        ("VLLM_PLUGINS", "aaa,,hunter2", "aaa,,<hidden>"),
        ("VLLM_PLUGINS", "", ""),
        ("VLLM_USE_SIMPLE_KV_OFFLOAD", "1", "1"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "spawn"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn hunter2", "<hidden>"),
        ("VLLM_API_KEY", "hunter2", None),
        ("HF_TOKEN", "hunter2", None),
    ],
)
def test_variables_are_shown_as_far_as_they_have_their_form(monkeypatch, name, value, shown):
    monkeypatch.setenv(name, value)
    seen = _report.with_report(result())
    assert seen["report"]["variables"].get(name) == shown
    assert "hunter2" not in json.dumps(seen) + text(seen)
    assert (repr(shown) in text(seen)) == (shown is not None)
    if name == "VLLM_PLUGINS":
        assert seen["plugin"]["vllm_plugins"] == shown


WORD = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_+/=.!'\"\\$é", min_size=8, max_size=60)
NAME = st.from_regex(r"[a-z]{4}[0-9a-z]{2,8}", fullmatch=True)
SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VARIABLES = ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "KVFIX_ODD", *_report._VARIABLES]


def posted(of):
    """All that a report shows, in both forms."""
    seen = _report.with_report(of)
    assert faults(seen) == []
    return json.dumps(seen, ensure_ascii=False) + text(seen, 120)


def spread(words):
    """An answer that has these words wherever words of others get."""
    one = result()
    one["vllm"] |= {"error": f"OSError: {words}", "path": words, "version": words}
    one["plugin"] |= {"why": f"because {words}", "error": words, "vllm_plugins": words}
    one["plugin"]["others"][0] |= {"value": words, "distribution": words}
    one["fixes"][0]["stock"]["why"] = f"{words} cannot be"
    one["fixes"][0]["status"]["why"] = f"is {words}, as in no release"
    one["warnings"] = [f"KVFIX_STOCK_SPEC={words.lower()!r} does nothing", f"KVFIX_DISABLE names {words!r}"]
    one["python"]["executable"] = words
    return one


OURS = posted(spread("")).lower()  # words of ours are no secrets


@SOME
@given(secret=WORD, name=st.sampled_from(VARIABLES))
def test_no_secret_of_the_environment_is_posted(secret, name):
    parts = [part.strip() for part in secret.split(",")]
    assume(not any(part[:8].lower() in OURS for part in parts))
    assume(not os.path.exists(secret))  # the place of a secret is none
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, secret)
        shown = posted(spread(secret))
        cut = posted(spread(secret[: max(8, len(secret) - 5)]))
    for part in parts:
        for form in {part, part.lower(), repr(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]}:
            assert form not in shown
        assert part[: max(8, len(part) - 5)] not in cut


@SOME
@given(user=NAME, below=NAME, host=NAME)
@pytest.mark.parametrize("home", ["/home/{}", "/Users/{}", "/data/people/{}", "/root"])
def test_no_path_under_a_home_and_no_name_is_posted(home, user, below, host):
    with pytest.MonkeyPatch.context() as patch:
        folder = home.format(user)
        patch.setenv("HOME", folder)
        patch.setenv("USER", user)
        patch.setattr(platform, "node", lambda: f"{host}.corp.example")
        patch.setattr(_private.socket, "gethostname", lambda: host)
        path = f"{folder}/{below}/lib/python3.12/site-packages/vllm"
        shown = posted(
            spread(f"{path}/x.so (of {user}@{host}), on {host}.corp.example, for {user}, in /tmp/of-{user}/x")
        )
    assert folder not in shown
    for word in (user, below, host):
        assert not re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", shown)
    assert "<hidden>/site-packages/vllm/x.so" in shown


@pytest.mark.parametrize(
    "words",
    [
        "hf_abcdefghijklmnop",
        "ghp_0123456789abcdef",
        "sk-abc123abc123abc123",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxw",
        "Bearer abc.def-123",
        "api_key=abcdef123",
        "password: hunter2hunter2",
        "https://me:pw@registry.corp.example/simple",
        "me@corp.example",
        "10.11.12.13:8000",
        "/home/somebody/models",
        "C:\\Users\\somebody\\models",
    ],
)
def test_what_looks_like_a_secret_is_not_posted(words):
    told = words.split("=")[-1].split(": ")[-1].split()[-1]
    assert told not in posted(spread(words)).replace("\\\\", "\\")


def test_what_is_needed_is_posted():
    one = result()
    one["fixes"][0]["status"]["why"] = (
        "right since 0.27.0, vLLM #48317, https://github.com/vllm-project/vllm/pull/48317"
    )
    seen = _report.with_report(one)
    assert seen["fixes"] == one["fixes"] and seen["vllm"] == one["vllm"]


@pytest.mark.parametrize(
    ("text", "posted"),
    [
        ("OSError: cannot open /root/My Secret Project/key.pem", "OSError: cannot open <hidden>"),
        ("no file '/home/jane doe/x y' (of 2)", "no file '<hidden>' (of 2)"),
        ("no file '/home/jane doe/x y (of 2)", "no file '<hidden>"),
        ("~joe/x is down", "<hidden>"),
        ("C:\\Users\\somebody somewhere is down", "<hidden>"),
        ("see https://corp.example/x y", "see <hidden>"),
        ("proxy.corp.example:3128 is down", "<hidden> is down"),
        ("joe:hunter2@proxy is down", "<hidden> is down"),
        ("joe@corp.example and fe80::1:2ff:fe34:5, 10.11.12.13 are down", "<hidden> and <hidden>, <hidden> are down"),
        ("pwd=abc is wrong, password: abc is too", "<hidden> is wrong, <hidden> is too"),
        ("Bearer abcdef is wrong", "<hidden> is wrong"),
        ("hf_abcdefghijklmnop sk-abcdefgh AKIAIOSFODNN are wrong", "<hidden> are wrong"),
        ("a1b2c3d4e5f6 is one, müller and 密码 are others", "<hidden> is one, <hidden> and <hidden> are others"),
        ("a in /opt/x/site-packages/vllm/a.py (b)", "a in <hidden>/site-packages/vllm/a.py (b)"),
        ("a in /opt/x/site-packages/acme/a.py", "a in <hidden>"),
        ("a in /opt/my x/site-packages/vllm/a.py", "a in <hidden>"),
        ("/opt/acme/bin/python3.11, of 2", "<hidden>/python3.11, of 2"),
    ],
)
def test_what_is_no_word_number_version_or_name_of_code_is_hidden(text, posted):
    assert _private.hider((), ())(text) == posted


@pytest.mark.parametrize("text", ["HF_TOKEN=ab", "my-api_key: xy", "A_KEY = 'a b'", 'x_password="it is"', "PWD: a"])
def test_what_is_called_a_secret_is_hidden_with_its_name(text):
    assert _private.hider((), ())(f"see {text} of it") == f"see {_private.HIDDEN} of it"


def test_long_texts_take_no_time_by_their_square():
    """Of 8,000 characters, some once took two seconds; these would take minutes."""
    code = (
        "from vllm_kvfix import _private\n"
        "hide = _private.hider((), ())\n"
        "for part in ('a-', 'key-', 'token', 'x/', 'a.', '1,000', 'sk-', '/usr/lib/python3', ' '):\n"
        "    hide(part * (100_000 // len(part)))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize(
    "text",
    [
        "not installed for this Python: /usr/bin/python3, /usr/local/lib/python3.12/dist-packages/vllm/a_b.py",
        "ImportError: cannot import name 'get_x' from 'vllm.v1.core' (/usr/lib/python3/dist-packages/vllm/v1/core.py)",
        "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory [Errno 12]",
        "right since 0.33.0; 0.14.0-0.19.1, 0.20.0rc1, 0.32.1+cu129, vLLM #39617, (1,024, 12.5%, -3) = [20, 21]",
        "f() takes (vllm_config, kv_cache_config), see https://github.com/vllm-project/vllm/pull/48317",
        "KeyError: 'hidden_size' of get_max_concurrency_for_kv_cache_config, pathlib.Path and json:loads",
        "write --kv-transfer-config or cpu_bytes_to_use=16 or KVFIX_STOCK_SPEC='1'",
        "offload-pool-size isn't fp8_e4m3",
        'two  spaces,\na line … and "signs": {3!}',
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", "/usr"),
        ("USER", "python"),
        ("VLLM_API_KEY", "vllm"),
        ("TOKENIZERS_PARALLELISM", "true"),
        ("SSL_KEY", "/usr/local"),
        ("HOME", "/"),
    ],
)
def test_what_a_maintainer_reads_is_shown(monkeypatch, text, name, value):
    monkeypatch.setenv(name, value)
    assert _private.hider((), ())(text) == text
