"""The command ``vllm-kvfix``, also ``python -m vllm_kvfix``. Needs no vLLM to start."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from vllm_kvfix import __version__, _pool_command, doctor

_DOCTOR = "judge the vLLM that is installed here, and what is repaired of it"
_POOL = "the arithmetic of the CPU offload pool, without a server"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    parser = argparse.ArgumentParser(prog="vllm-kvfix", description="Fixes for the KV cache of released vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-kvfix {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, module, help_ in (("doctor", doctor, _DOCTOR), ("pool", _pool_command, _POOL)):
        command = commands.add_parser(name, help=help_, description=help_)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        _be_ready_to_print()
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at exit
        if isinstance(error, BrokenPipeError):  # who read the answer, `head` for example, has seen enough
            return 141
        print(f"vllm-kvfix: no answer: {error}", file=sys.stderr)
        return doctor.UNJUDGED
    except Exception:
        traceback.print_exc()  # to be reported; Python itself would end with doctor.LIVE
        return doctor.UNJUDGED
    return status


def _be_ready_to_print() -> None:
    """Whatever the terminal cannot show is escaped; streams that are closed lead nowhere."""
    for name in ("stdin", "stdout", "stderr"):  # the descriptors 0, 1, 2: else a pipe of ours would get one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
