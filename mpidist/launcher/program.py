"""The last words of a command line: a script or a module, and its arguments."""

from __future__ import annotations

import argparse
import os
import stat

_STANDARD_INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add ``[-m] script [args ...]`` to a command.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "-m", action="store_true", dest="module",
        help="the script is the name of a module, which runs as under python -m",
    )  # fmt: skip
    parser.add_argument("script", help="a Python script, or a folder or zip file with __main__.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def check_program(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    """End the command with an error if no script or module is named, or the script does not exist.

    Args:
        parser: The parser of the command.
        namespace: Its arguments.
    """
    kind = "module" if namespace.module else "script"
    if not namespace.script:
        parser.error(f"the name of the {kind} is empty; give one")
    if not namespace.module and not os.path.exists(namespace.script):
        parser.error(f"no script {namespace.script!r} here; give the path of a Python file")


def check_pipe(parser: argparse.ArgumentParser, namespace: argparse.Namespace, ranks: int) -> None:
    """End the command with an error if the script is a pipe that not all ranks can read.

    Args:
        parser: The parser of the command.
        namespace: Its arguments.
        ranks: Number of ranks.
    """
    if namespace.module:
        return
    script = namespace.script
    given = os.path.abspath(script) in _STANDARD_INPUT
    if given and not namespace.stdin:
        parser.error(f"{script} is empty without --stdin: give --stdin and -n 1, or a file")
    if ranks > 1 and (given or stat.S_ISFIFO(os.stat(script).st_mode)):
        parser.error(f"only one rank can read the script {script}: give -n 1, or a file")


def program_words(namespace: argparse.Namespace) -> list[str]:
    """Return ``-m``, the script and its arguments as words of a command line.

    Args:
        namespace: The arguments of the command.

    Returns:
        The words. A script whose name begins with a dash gets ``./`` before it, so that no command
        takes it for an option.
    """
    script = namespace.script
    if namespace.module:
        return ["-m", script, *namespace.args]
    return [f"./{script}" if script.startswith("-") else script, *namespace.args]
