"""The command ``vllm-kvfix``, also ``python -m vllm_kvfix``. Needs no vLLM to start."""

from __future__ import annotations

import argparse
import os
import sys
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
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read the answer, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


if __name__ == "__main__":
    sys.exit(main())
