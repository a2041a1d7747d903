"""``mpidist run``: a script on the tasks of a cluster, under the MPI library's own launcher."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import socket
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpidist.dev_shm import REMEDY, SHARED_MEMORY
from mpidist.launcher import keeper, records
from mpidist.launcher.hosts import parse_hosts, place, ranks_together, read_host_file
from mpidist.launcher.layout import Layout
from mpidist.launcher.layout_options import add_layout_options, layout_of
from mpidist.launcher.program import add_program, check_pipe, check_program, program_words
from mpidist.launcher.shared_files import SharedFiles, locked_folder, remove_abandoned
from mpidist.launcher.standard_input import StandardInput, is_of_another_process
from mpidist.launcher.supervise import Limits, asked_to_end, supervise
from mpidist.launcher.vendors import Launcher, LauncherError, find_launcher
from mpidist.launcher.verdict import verdict
from mpidist.runner import RUNNER_FILE

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FOR_KEEPER = (
    "MPIDIST_RUN_DIR",
    "MPIDIST_RUN_SHARED",
    "MPIDIST_RUN_LABELS",
    "MPIDIST_RUN_STDIN",
)
_SCRATCH = "mpidist-run-"
_EPILOG = (
    "Ranks are ordered by job: ps, worker, data, then the others as given. The exit status is that "
    "of the task that failed first: 128 + N if signal N killed it; 124 after --timeout, 130 after "
    "Ctrl-C."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Local. Add the subcommand to the command line.

    Args:
        subparsers: What ``add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "run",
        help="run a script on the tasks of a cluster",
        description="Run a Python script on the tasks of a cluster: on this host, on the hosts of "
        "the batch job around it, or on those that are given.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add_layout_options(parser)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        metavar="A,B:2,...",
        help="run on these hosts, ranks in their order; N behind a colon is how many ranks a host "
        "takes. They need a --run-dir, the script and this Python at the same paths",
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="hosts, one a line: A:2, or A slots=2")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for all ranks, or pass this one's value on; may be repeated",
    )
    parser.add_argument(
        "--label", "-l", action="store_true", help="begin every line with the task it is from"
    )
    parser.add_argument(
        "--stdin",
        action="store_true",
        help="rank 0 reads the standard input of this command; rank 0 is the first task of the "
        "first job, ps 0 where there are ps. For all other ranks, and without this option, "
        "standard input is empty",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder for process ids, failures and metrics, of one job at a time; kept afterwards, "
        "but for the temporary one that is the default",
    )
    add_program(parser)
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    """Local. Check the command line, run the job, report."""
    try:
        layout = layout_of(namespace)
        launcher = find_launcher()
        namespace.places = _places(namespace, layout)
        namespace.variables = _variables(namespace.env)
        rank_command(launcher, layout, [], namespace.places)
    except (ValueError, LauncherError) as error:
        parser.error(str(error))
    check_program(parser, namespace)
    check_pipe(parser, namespace, layout.ranks)
    if namespace.timeout is not None and not namespace.timeout > 0:
        parser.error(f"--timeout {namespace.timeout:g} must be positive")
    if namespace.run_dir == "":
        parser.error("--run-dir is empty; name a folder")
    if namespace.stdin and is_of_another_process():
        parser.error(
            "--stdin: this command runs in the background of its terminal, whose input belongs to "
            "the foreground; run it there, or redirect its input"
        )
    with asked_to_end() as signals:
        parent = Path(tempfile.gettempdir())
        # Not those of other hosts, whose locks may not be seen here.
        prefix = f"{_SCRATCH}{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"
        remove_abandoned(parent, prefix)
        name, lock = locked_folder(parent, prefix)
        scratch = Path(name)
        try:
            try:
                folder = (
                    scratch if namespace.run_dir is None else Path(namespace.run_dir).absolute()
                )
                folder.mkdir(parents=True, exist_ok=True)
                records.clear(folder)
            except OSError as error:
                parser.error(f"--run-dir must be a folder that you can write ({error})")
            return _run_in(folder, scratch, launcher, layout, namespace, signals)
        finally:
            # A process that cannot be killed may still write here; the verdict has told of it.
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)


def _places(namespace: argparse.Namespace, layout: Layout) -> tuple[tuple[str, int], ...]:
    """The hosts that are given, with how many ranks each takes; ValueError if they do not fit."""
    if namespace.hostfile is not None:
        return place(read_host_file(namespace.hostfile), layout.ranks)
    return place(parse_hosts(namespace.hosts), layout.ranks) if namespace.hosts is not None else ()


def _variables(words: list[str]) -> dict[str, str]:
    """The variables of --env; ValueError for a word of another form."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ValueError(f"--env {word!r}: {name!r} is no valid name; use NAME=VALUE")
        if not equals and name not in os.environ:
            raise ValueError(
                f"--env {word!r}: the variable {name} is not set here; use --env {name}=VALUE or "
                "export it"
            )
        if name in (*_FOR_KEEPER, "MPIDIST_JOBS"):
            raise ValueError(f"--env {word!r}: {name} is set by mpidist run itself")
        variables[name] = value if equals else os.environ[name]
    return variables


def rank_command(
    launcher: Launcher,
    layout: Layout,
    program: list[str],
    places: Sequence[tuple[str, int]] = (),
    variables: Sequence[str] = (),
) -> list[str]:
    """Local. The command line that runs a program on every rank, each under its keeper.

    Args:
        launcher: The launcher.
        layout: The ranks.
        program: The program and its arguments.
        places: Hosts, and how many ranks each takes; by default the launcher knows.
        variables: Names of environment variables that every rank must get, besides our own.

    Returns:
        The words of the command.

    Raises:
        LauncherError: The launcher takes no hosts.
    """
    ours = _FOR_KEEPER + (("MPIDIST_JOBS",) if layout.jobs else ())
    words = launcher.command(
        layout.ranks,
        cores=len(os.sched_getaffinity(0)),
        root=os.geteuid() == 0,
        variables=(*ours, *variables),
        places=places,
    )
    isolated = [sys.executable, "-I", "-S", str(Path(keeper.__file__).absolute())]
    return [*words, *isolated, launcher.vendor.rank_variable, *program]


def rank_environment(
    launcher: Launcher,
    layout: Layout,
    folder: Path,
    scratch: Path,
    shared: str,
    places: Sequence[tuple[str, int]] = (),
    *,
    variables: Mapping[str, str] | None = None,
    label: bool = False,
) -> dict[str, str]:
    """Local. The environment of the ranks: the user's, completed.

    Args:
        launcher: The launcher.
        layout: The ranks and their jobs.
        folder: The job's folder.
        scratch: A folder on this host that goes with the job.
        shared: One in memory, likewise.
        places: See :func:`rank_command`.
        variables: What the user sets besides.
        label: Whether every line that ranks print is to begin with their task.

    Returns:
        A new environment.
    """
    cores = len(os.sched_getaffinity(0))
    together = ranks_together(layout.ranks, places, os.environ)
    given = {**os.environ, **(variables or {})}
    environment = launcher.environment(given, ranks=together, cores=cores)
    environment["MPIDIST_RUN_DIR"] = str(folder)
    vendor = launcher.vendor
    if vendor.scratch_variable and vendor.scratch_choice not in environment:
        environment[vendor.scratch_variable] = str(scratch)
    folders = [name for name in vendor.shared_folders if name not in environment]
    environment |= dict.fromkeys(folders, shared)
    environment["MPIDIST_RUN_SHARED"] = ",".join(folders)
    jobs = [(layout.task(rank) or ("", rank))[0] for rank in range(layout.ranks)] if label else []
    runs = [f"{job}:{len(list(ranks))}" for job, ranks in itertools.groupby(jobs)]
    environment["MPIDIST_RUN_LABELS"] = ",".join(runs)
    environment.pop("MPIDIST_JOBS", None)  # of a job around this one
    if layout.jobs:
        environment["MPIDIST_JOBS"] = str(layout)
    if sys.stdout.isatty():
        # Ranks write to a pipe of the launcher, which hands their bytes to this terminal.
        environment.setdefault("TTY_COMPATIBLE", "1")
        environment.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    return environment


def _run_in(
    folder: Path,
    scratch: Path,
    launcher: Launcher,
    layout: Layout,
    namespace: argparse.Namespace,
    signals: tuple[int, list[int]],
) -> int:
    """Local. Run the job with its folder, and say how it failed if it did."""
    try:
        shared_files = SharedFiles(launcher.vendor.shared_files)
    except OSError as error:
        sys.stderr.write(
            f"mpidist run: MPI keeps files of the job in {SHARED_MEMORY}, and none can be made "
            f"there ({error}): {REMEDY}, and have it writable\n"
        )
        return 1
    program = [sys.executable, RUNNER_FILE, launcher.vendor.rank_variable]
    program += program_words(namespace)
    places, variables = namespace.places, namespace.variables
    environment = rank_environment(
        launcher,
        layout,
        folder,
        scratch,
        shared_files.folder,
        places,
        variables=variables,
        label=namespace.label,
    )
    standard_input = StandardInput() if namespace.stdin else None
    environment["MPIDIST_RUN_STDIN"] = standard_input.name if standard_input else ""
    try:
        result = supervise(
            rank_command(launcher, layout, program, places, list(variables)),
            environment,
            Limits(run_s=namespace.timeout),
            signals,
            failed=lambda: records.first_failure(folder) is not None,
            ended=lambda: len(records.ended(folder)) == layout.ranks,
            shared_files=shared_files,
            standard_input=standard_input,
            passed_on=launcher.vendor.passed_on,
        )
    finally:
        shared_files.close()
        if standard_input is not None:
            standard_input.close()
    hosts = [host for host, _ in places]
    status, said = verdict(folder, layout, result, launcher, hosts, namespace.timeout)
    with contextlib.suppress(OSError):  # the folder was removed: nobody looks there
        records.write_end(folder, status)
    if said:
        # A rank may have been ended in the middle of a line of its own.
        sys.stderr.write("".join(["\n", *(f"mpidist run: {line}\n" for line in said)]))
        sys.stderr.flush()
    return status
