"""vLLM's OpenAI server, started and asked as operators do it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engines

MODEL_NAME = "tiny"
START_TIMEOUT, ANSWER_TIMEOUT, STOP_TIMEOUT = 240, 120, 60


@dataclass
class Visit:
    """What a server did from its start to its end."""

    answers: list[list[list[int]]] = field(default_factory=list)  # for each round, the token ids of each answer
    chat: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # by name and labels, after the last round
    exit_status: int | None = None
    seconds_to_stop: float = 0
    processes: int = 0  # while it served
    processes_left: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # beside vLLM's sockets, while it served
    files_left: list[str] = field(default_factory=list)
    shared_memory_left: set[str] = field(default_factory=set)
    log: str = ""

    def metric(self, name: str, label: str = "") -> float:
        """The sum over all series of a metric whose labels contain `label`."""
        return sum(value for key, value in self.metrics.items() if key.partition("{")[0] == name and label in key)


def visit(
    release: str,
    model: Path,
    arguments: list[str],
    folder: Path,
    prompts: list[list[int]],
    max_tokens: int,
    rounds: int,
) -> Visit:
    """Start a server, ask all prompts at once, as often as `rounds` says, read its metrics and stop it with SIGTERM."""
    folder.mkdir(parents=True)
    seen = Visit()
    shared_memory = set(os.listdir("/dev/shm"))
    with (
        tempfile.TemporaryDirectory() as sockets,  # short: a socket's path has 107 characters at most
        serving(release, model, arguments, folder, VLLM_RPC_BASE_PATH=sockets) as (process, url),
    ):
        with ThreadPoolExecutor(len(prompts)) as clients:
            for _ in range(rounds):
                seen.answers.append(list(clients.map(lambda prompt: complete(url, prompt, max_tokens), prompts)))
        seen.chat = chat(url, "w3 w4 w5")
        seen.metrics = read_metrics(url)
        seen.processes = len(session(process.pid))
        seen.files = files(sockets)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            seen.exit_status = process.wait(STOP_TIMEOUT)
        seen.seconds_to_stop = time.monotonic() - begin
        deadline = time.monotonic() + 5  # multiprocessing's resource tracker ends a moment after its parent
        while (left := session(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        seen.processes_left = left
        seen.files_left = files(sockets)
    new = set(os.listdir("/dev/shm")) - shared_memory
    seen.shared_memory_left = {name for name in new if not in_use(f"/dev/shm/{name}")}
    seen.log = (folder / "log").read_text(errors="replace")
    return seen


@contextlib.contextmanager
def serving(
    release: str, model: Path, arguments: list[str], folder: Path, **environ: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server's process and its address, once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [engines.interpreter(release), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), *arguments]
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / "log").open("w") as log,
        engines.started(command, engines.environment(folder, **environ), log, subprocess.STDOUT) as process,
    ):
        deadline = time.monotonic() + START_TIMEOUT
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise engines.EngineRunError(f"the server did not start: see {folder / 'log'}")
            time.sleep(0.5)
        yield process, url


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def post(url: str, question: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"model": MODEL_NAME, "temperature": 0, **question}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as response:
        return json.load(response)


def complete(url: str, prompt: list[int], max_tokens: int) -> list[int]:
    question = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return post(f"{url}/v1/completions", question)["choices"][0]["token_ids"]


def chat(url: str, text: str) -> str:
    question = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
    return post(f"{url}/v1/chat/completions", question)["choices"][0]["message"]["content"]


def read_metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def files(folder: str) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]


def session(leader: int) -> list[str]:
    """The living processes of the session that `leader` leads or led."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid_and_name, _, rest = (folder / "stat").read_text().rpartition(")")
            state, _parent, _group, session_id = rest.split()[:4]
            if int(session_id) == leader and state != "Z":
                found.append(pid_and_name)
    return found


def in_use(path: str) -> bool:
    """Whether a living process has mapped the file, or it is gone by now: then another engine made it."""
    try:
        inode = str(os.stat(path).st_ino)  # not the name: a semaphore is mapped before it gets its own
    except FileNotFoundError:
        return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if any(line.split()[4] == inode and "/dev/shm/" in line for line in maps.read_text().splitlines()):
                return True
    return False
