"""The last words of a command line: a script or a module, and its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path


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
    """End the command with an error if the script does not exist.

    Args:
        parser: The parser of the command.
        namespace: Its arguments.
    """
    if not namespace.module and not Path(namespace.script).exists():
        parser.error(f"no script {namespace.script!r} here; give the path of a Python file")


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
