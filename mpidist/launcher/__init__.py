"""The command ``mpidist``.

Each subcommand is a module with ``add_parser(subparsers)``, which adds a parser whose default
``run`` is a function of the parsed arguments that returns the exit status. Nothing here imports
mpi4py: the commands start and watch jobs from outside the MPI world.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from mpidist import __version__
from mpidist.errors import did_you_mean

__all__ = ["main"]

_COMMANDS = ("run", "top", "timeline", "doctor", "sbatch")


class _Parser(argparse.ArgumentParser):
    """Reports bad input in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        if "are required: script" in message:  # ", args" follows before Python 3.14
            message = f"no script is named; put it after the options: {self.prog} -n 2 train.py"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _open_standard_streams() -> None:
    """Open /dev/null for closed standard streams (``>&-``), before a file takes their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status.

    Args:
        arguments: The words after the command's name; ``sys.argv[1:]`` by default.
    """
    _open_standard_streams()
    parser: argparse.ArgumentParser = _Parser(
        prog="mpidist", description="Distributed training on MPI."
    )
    parser.add_argument("--version", action="version", version=f"mpidist {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        # A job must not wait for the imports of other commands.
        for command in words[:1] if words and words[0] in _COMMANDS else _COMMANDS:
            import_module(f"mpidist.launcher.{command}").add_parser(subparsers)
    except ValueError as error:  # a variable of the environment is not valid
        parser.error(str(error))
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        chosen = subparsers.choices.get(words[0], parser)
        hint = did_you_mean(unknown[0].partition("=")[0], chosen._option_string_actions)
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        status: int = namespace.run(namespace)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status
