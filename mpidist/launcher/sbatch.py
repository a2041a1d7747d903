"""``mpidist sbatch``: write a Slurm batch script for a job of tasks, or submit it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from mpidist.launcher.layout import (
    add_job_options,
    add_script,
    job_words,
    layout_of,
    script_words,
)

_SUBMIT_S = 60.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "sbatch",
        help="write a Slurm batch script for a job of tasks, or submit it",
        description="Write a Slurm batch script that runs a Python script on the tasks of a "
        "cluster, by mpidist run inside the allocation.",
        epilog="Other options of sbatch go behind --option, as in  --option=--constraint=ib.",
        allow_abbrev=False,
    )
    add_job_options(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes; 1")
    parser.add_argument("--cpus-per-task", type=int, metavar="N", help="cores of each rank")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each node")
    for name, meta in (("time", "H:MM:SS"), ("partition", "NAME"), ("account", "NAME")):
        parser.add_argument(f"--{name}", metavar=meta, help=f"sbatch's --{name}")
    parser.add_argument("--job-name", metavar="NAME", help="by default the script's name")
    parser.add_argument(
        "--option", action="append", default=[], metavar="WORD", help="another option of sbatch"
    )
    parser.add_argument(
        "--setup", action="append", default=[], metavar="COMMAND",
        help="a shell command before the job, as 'module load mpich'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write the script there, not to stdout")
    parser.add_argument("--submit", action="store_true", help="submit it")
    add_script(parser)
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


def batch_script(namespace: argparse.Namespace) -> str:
    """Return the text of the batch script.

    Args:
        namespace: The options of the command.

    Raises:
        ValueError: The numbers contradict each other, there are more nodes than ranks, a ps on
            each node leaves no rank for a worker, or sbatch would refuse a value.
    """
    layout = layout_of(namespace, namespace.nodes)
    if not 1 <= namespace.nodes <= layout.ranks:
        raise ValueError(f"{layout.ranks} ranks do not run on {namespace.nodes} nodes")
    for name, least in (("cpus_per_task", 1), ("gpus_per_node", 0)):
        number = getattr(namespace, name)
        if number is not None and number < least:
            raise ValueError(f"--{name.replace('_', '-')} {number} must be {least} or more")
    default_name = namespace.script if namespace.module else Path(namespace.script).stem
    options: list[tuple[str, object]] = [
        ("job-name", default_name if namespace.job_name is None else namespace.job_name),
        ("nodes", namespace.nodes),
        ("ntasks", layout.ranks),
        ("cpus-per-task", namespace.cpus_per_task),
        ("gpus-per-node", namespace.gpus_per_node),
        ("time", namespace.time),
        ("partition", namespace.partition),
        ("account", namespace.account),
    ]
    given = [(name, str(value)) for name, value in options if value is not None]
    for name, text in given:
        if not text:
            raise ValueError(f"--{name} is empty; leave it out, or give it")
    if any(not word.startswith("-") for word in namespace.option):
        raise ValueError(f"options of sbatch begin with a dash: {namespace.option}")
    run_folder = '--run-dir "runs/$SLURM_JOB_ID"'  # a path that every node sees
    command = shlex.join([sys.executable, "-m", "mpidist", "run", *job_words(namespace)])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={shlex.quote(text)}" for name, text in given),
        *(f"#SBATCH {word}" for word in namespace.option),
        "",
        *namespace.setup,
        f"exec {command} {run_folder} {shlex.join(script_words(namespace))}",
    ]
    if not all(line.isprintable() for line in lines):
        raise ValueError("a word has characters that are not printable, such as the end of a line")
    return "\n".join([*lines, ""])


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    try:
        text = batch_script(namespace)
    except ValueError as error:
        parser.error(str(error))
    if namespace.output is not None:
        try:
            Path(namespace.output).write_text(text)
        except OSError as error:
            parser.error(f"--output {namespace.output} cannot be written ({error})")
    if namespace.submit:
        return _submit(parser, text)
    if namespace.output is None:
        sys.stdout.write(text)
    return 0


def _submit(parser: argparse.ArgumentParser, text: str) -> int:
    if shutil.which("sbatch") is None:
        parser.error("no sbatch in PATH: --submit needs Slurm; without it the script is printed")
    try:
        done = subprocess.run(["sbatch"], input=text, text=True, timeout=_SUBMIT_S, check=False)
    except subprocess.TimeoutExpired:
        parser.error(f"sbatch has not answered within {_SUBMIT_S:g} s; look with squeue")
    return done.returncode
