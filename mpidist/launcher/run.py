"""``mpidist run``: run a script on the tasks of a cluster, under the MPI library's launcher."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidist.dev_shm import REMEDY, SHARED_MEMORY
from mpidist.launcher import rank_wrapper
from mpidist.launcher.files import (
    locked_folder,
    remove_abandoned,
    remove_shared_files,
    shared_files,
)
from mpidist.launcher.hosts import assign_slots, most_ranks_on_a_host, parse_hosts, read_host_file
from mpidist.launcher.job import StandardInput, caught_signals, input_is_elsewhere, run_job
from mpidist.launcher.layout import Layout
from mpidist.launcher.options import (
    add_job_options,
    add_script,
    check_script,
    layout_of,
    script_words,
)
from mpidist.launcher.report import clear_records, ended_ranks, first_failure, report, write_end
from mpidist.launcher.vendors import Launcher, LauncherError, find_launcher
from mpidist.runner import RUNNER_FILE

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STANDARD_INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_FOR_WRAPPER = ("MPIDIST_RUN_DIR", "MPIDIST_RUN_LABELS", "MPIDIST_RUN_STDIN")
_SCRATCH = "mpidist-run-"
_EPILOG = (
    "Ranks are ordered by job: ps, worker, data, then the others as given. The exit status is that "
    "of the task that failed first: 128 + N if signal N killed it; 124 after --timeout, 130 after "
    "Ctrl-C."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a script on the tasks of a cluster",
        description="Run a Python script on the tasks of a cluster: on this host, on the hosts of "
        "the batch job around it, or on the hosts that are given.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add_job_options(parser)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        metavar="A,B:2,...",
        help="run on these hosts, ranks in their order; N behind a colon is the most ranks that a "
        "host takes. They need a --run-dir, the script and this Python at the same paths",
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
        "--label", "-l", action="store_true", help="begin every line with the task that wrote it"
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
        help="folder for process ids, failures and metrics, of one job at a time; kept afterwards. "
        "By default a temporary one, which is removed",
    )
    add_script(parser)
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


@dataclass(frozen=True)
class _Job:
    """The job that a command line describes.

    Attributes:
        layout: The ranks and their jobs.
        launcher: The launcher.
        slots: The hosts that the user gave, each with its number of ranks.
        variables: The variables that the user sets for all ranks.
        script: The script and its arguments.
        label: Whether each line of a rank begins with its task.
    """

    layout: Layout
    launcher: Launcher
    slots: tuple[tuple[str, int], ...]
    variables: Mapping[str, str]
    script: Sequence[str]
    label: bool

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> _Job:
        """Return the job; ValueError or LauncherError if there can be none."""
        layout = layout_of(namespace)
        slots: tuple[tuple[str, int], ...] = ()
        launcher = find_launcher()
        if namespace.hostfile is not None:
            slots = assign_slots(read_host_file(namespace.hostfile), layout.ranks)
        elif namespace.hosts is not None:
            slots = assign_slots(parse_hosts(namespace.hosts), layout.ranks)
        variables = _variables(namespace.env)
        return cls(layout, launcher, slots, variables, script_words(namespace), namespace.label)

    def command(self) -> list[str]:
        """Return the command line of the launcher. Each rank runs the script under a wrapper."""
        ours = _FOR_WRAPPER + (("MPIDIST_JOBS",) if self.layout.jobs else ())
        words = self.launcher.command(
            self.layout.ranks,
            cores=len(os.sched_getaffinity(0)),
            root=os.geteuid() == 0,
            variables=(*ours, *self.variables),
            slots=self.slots,
        )
        rank = self.launcher.vendor.rank_variable
        wrapper = [sys.executable, "-I", "-S", str(Path(rank_wrapper.__file__).absolute()), rank]
        return [*words, *wrapper, sys.executable, RUNNER_FILE, rank, *self.script]

    def environment(self, folder: Path, scratch: Path, standard_input: str) -> dict[str, str]:
        """Return the environment of the ranks: that of this command, completed.

        Args:
            folder: The run folder.
            scratch: A temporary folder on this host.
            standard_input: Name of the socket that gives rank 0 its standard input, or "".
        """
        layout, vendor = self.layout, self.launcher.vendor
        environment = self.launcher.environment(
            {**os.environ, **self.variables},
            ranks=most_ranks_on_a_host(layout.ranks, self.slots, os.environ),
            cores=len(os.sched_getaffinity(0)),
        )
        if vendor.scratch_variable and vendor.scratch_choice not in environment:
            environment[vendor.scratch_variable] = str(scratch)
        environment["MPIDIST_RUN_DIR"] = str(folder)
        environment["MPIDIST_RUN_STDIN"] = standard_input
        labelled = range(layout.ranks) if self.label else ()
        jobs = itertools.groupby((layout.task(rank) or ("", rank))[0] for rank in labelled)
        labels = [f"{job}:{len(list(ranks))}" for job, ranks in jobs]
        environment["MPIDIST_RUN_LABELS"] = ",".join(labels)
        environment.pop("MPIDIST_JOBS", None)  # of a job around this one
        if layout.jobs:
            environment["MPIDIST_JOBS"] = str(layout)
        if sys.stdout.isatty():
            # Ranks write to a pipe of the launcher, which copies their bytes to this terminal.
            environment.setdefault("TTY_COMPATIBLE", "1")
            environment.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
        return environment


def _variables(words: list[str]) -> dict[str, str]:
    """Return the variables of --env; ValueError for a word of another form."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ValueError(f"--env {word!r}: {name!r} is not a valid name; use NAME=VALUE")
        if not equals and name not in os.environ:
            raise ValueError(
                f"--env {word!r}: the variable {name} is not set here; use --env {name}=VALUE or "
                "export it"
            )
        if name in (*_FOR_WRAPPER, "MPIDIST_JOBS"):
            raise ValueError(f"--env {word!r}: {name} is set by mpidist run itself")
        variables[name] = value if equals else os.environ[name]
    return variables


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    """Check the command line, and run the job in folders that are removed afterwards."""
    try:
        job = _Job.of(namespace)
        job.command()  # LauncherError if the launcher cannot take the hosts
    except (ValueError, LauncherError) as error:
        parser.error(str(error))
    check_script(parser, namespace)
    _check_pipe(parser, namespace, job.layout.ranks)
    if namespace.timeout is not None and not namespace.timeout > 0:
        parser.error(f"--timeout {namespace.timeout:g} must be positive")
    if namespace.run_dir == "":
        parser.error("--run-dir is empty; name a folder")
    if namespace.stdin and input_is_elsewhere():
        parser.error(
            "--stdin: this command runs in the background of its terminal, whose input belongs to "
            "the foreground; run it there, or redirect its input"
        )
    # Signals are caught before anything is made that must be removed.
    with caught_signals() as signals:
        parent = Path(tempfile.gettempdir())
        # Locks of other hosts may not be seen here, so the name has the host.
        prefix = f"{_SCRATCH}{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"
        remove_abandoned(parent, prefix)
        name, lock = locked_folder(parent, prefix)
        scratch = Path(name)
        folder = scratch if namespace.run_dir is None else Path(namespace.run_dir).absolute()
        try:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                clear_records(folder)
            except OSError as error:
                parser.error(f"--run-dir must be a folder that you can write ({error})")
            return _run_in(folder, scratch, job, namespace, signals)
        finally:
            # A process that cannot be killed may still write here; the report has told of it.
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)


def _check_pipe(parser: argparse.ArgumentParser, namespace: argparse.Namespace, ranks: int) -> None:
    """End the command with an error if the script is a pipe that not all ranks can read."""
    if namespace.module:
        return
    script = namespace.script
    is_input = os.path.abspath(script) in _STANDARD_INPUT
    if is_input and not namespace.stdin:
        parser.error(f"{script} is empty without --stdin: give --stdin and -n 1, or a file")
    if ranks > 1 and (is_input or stat.S_ISFIFO(os.stat(script).st_mode)):
        parser.error(f"only one rank can read the script {script}: give -n 1, or a file")


def _run_in(
    folder: Path,
    scratch: Path,
    job: _Job,
    namespace: argparse.Namespace,
    signals: tuple[int, list[int]],
) -> int:
    """Run the job, and print why it failed if it did. Return its exit status."""
    vendor = job.launcher.vendor
    try:
        before = shared_files(vendor.shared_files)
        tempfile.TemporaryFile(dir=SHARED_MEMORY).close()
    except OSError as error:
        sys.stderr.write(
            f"mpidist run: MPI keeps files of the job in {SHARED_MEMORY}, and none can be made "
            f"there ({error}): {REMEDY}, and have it writable\n"
        )
        return 1
    standard_input = StandardInput() if namespace.stdin else None
    try:
        result = run_job(
            job.command(),
            job.environment(folder, scratch, standard_input.name if standard_input else ""),
            signals,
            failed=lambda: first_failure(folder) is not None,
            ended=lambda: len(ended_ranks(folder)) == job.layout.ranks,
            timeout_s=namespace.timeout,
            standard_input=standard_input,
            passed_on=vendor.passed_on,
        )
    finally:
        remove_shared_files(vendor.shared_files, before)
        if standard_input is not None:
            standard_input.close()
    hosts = [host for host, _ in job.slots]
    status, lines = report(folder, job.layout, result, job.launcher, hosts, namespace.timeout)
    with contextlib.suppress(OSError):  # the script may have removed the folder
        write_end(folder, status)
    if lines:
        # The first newline ends the line in the middle of which a rank may have been ended.
        sys.stderr.write("".join(["\n", *(f"mpidist run: {line}\n" for line in lines)]))
        sys.stderr.flush()
    return status
