"""``mpidist run``: run a script on the tasks of a cluster, under the MPI library's launcher."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpidist.dev_shm import REMEDY, SHARED_MEMORY
from mpidist.launcher import rank_wrapper
from mpidist.launcher.hang.automatic import Reporter
from mpidist.launcher.hang.facts import write_job
from mpidist.launcher.host_pool import HostPool, Placement
from mpidist.launcher.hosts import Slots, most_ranks_on_a_host, parse_hosts, read_host_file
from mpidist.launcher.job import (
    Result,
    blocked_signals,
    input_is_elsewhere,
    listen_for_rank_0,
    name_of,
    run_job,
)
from mpidist.launcher.layout import Layout, add_job_options, add_script, layout_of, script_words
from mpidist.launcher.leftovers import end_descendants, no_shared_files, temporary_folder
from mpidist.launcher.report import TIMEOUT_STATUS, first_failure, report, saves_on_signal
from mpidist.launcher.restarts import Restarts, ending_signals, interrupted
from mpidist.launcher.run_folder import clear_records, read_records, write_end
from mpidist.launcher.vendors import Launcher, LauncherError, find_launcher
from mpidist.runner import RUNNER_FILE

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STANDARD_INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_FOR_RANKS = ("MPIDIST_RESTART", "MPIDIST_RESTART_REASON")
_FOR_WRAPPER = ("MPIDIST_RUN_DIR", "MPIDIST_RUN_LABELS", "MPIDIST_RUN_STDIN", *_FOR_RANKS)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a script on the tasks of a cluster",
        description="Run a Python script on the tasks of a cluster: on this host, on the hosts of "
        "the batch job around it, or on the hosts that are given.",
        epilog="Ranks are ordered by job: ps, worker, data, then the others as given. The exit "
        "status comes from the task that failed first: 128 + N if signal N killed it; 124 after "
        "--timeout, 130 after Ctrl-C, 75 after a signal and a checkpoint. Ctrl-\\ shows the line "
        "of each rank, and why the job hangs. "
        "--env MPIDIST_DEBUG=detail compares every collective between the ranks. "
        "--env MPIDIST_STALL_ABORT_S=60 ends a job in which a call waits for a minute.",
        allow_abbrev=False,
    )
    add_job_options(parser)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        metavar="A,B:2,...",
        help="run on these hosts, ranks in their order; N behind a colon is the most ranks that a "
        "host takes. Hosts other than this one need a --run-dir, the script and this Python at the "
        "same paths",
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
    _add_restart_options(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder for process ids, failures and metrics, of one job at a time; kept afterwards. "
        "By default a temporary one, which is removed",
    )
    add_script(parser)
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


def _add_restart_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of restarts after a failure."""
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the job again after a failure, at most N times in a row without a checkpoint "
        "of a later step",
    )
    parser.add_argument(
        "--restart-delay",
        type=float,
        default=0.0,
        metavar="S",
        help="wait S seconds before each restart",
    )
    parser.add_argument(
        "--spare",
        type=int,
        default=0,
        metavar="K",
        help="keep the last K hosts of the list or of the batch job free; restarts use them in "
        "place of lost hosts. Needs --restarts",
    )


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    """Run the job, and print why it failed if it did. Return its exit status."""
    try:
        layout = layout_of(namespace)
        launcher = find_launcher()
        variables = _variables(namespace.env)
        given: Slots = []
        if namespace.hostfile is not None:
            given = read_host_file(namespace.hostfile)
        elif namespace.hosts is not None:
            given = parse_hosts(namespace.hosts)
        pool = HostPool(launcher, given, layout.ranks, namespace.spare)
        job = _Job(namespace, layout, launcher, variables, pool)
        job.command(pool.assign())  # an error without a script, or if the launcher takes no hosts
        _check(namespace, layout.ranks)
    except (ValueError, LauncherError) as error:
        parser.error(str(error))
    try:
        tempfile.TemporaryFile(dir=SHARED_MEMORY).close()
    except OSError as error:
        sys.stderr.write(
            f"mpidist run: MPI keeps files of the job in {SHARED_MEMORY}, and none can be made "
            f"there ({error}): {REMEDY}, and have it writable\n"
        )
        return 1
    # Signals are blocked before anything is made that must be removed.
    with blocked_signals() as signals, temporary_folder("mpidist-run-") as scratch:
        folder = scratch if namespace.run_dir is None else Path(namespace.run_dir).absolute()
        try:
            _prepare(folder, layout, 0)
        except OSError as error:
            parser.error(f"--run-dir must be a folder that you can write ({error})")
        status, lines = _run_attempts(job, folder, scratch, signals)
        with contextlib.suppress(OSError):  # the script may have removed the folder
            write_end(folder, status)
        _print(lines)
        return status


def _run_attempts(
    job: _Job, folder: Path, scratch: Path, signals: set[int]
) -> tuple[int, list[str]]:
    """Run the job until an attempt is the last one. Return its status, and the lines to print."""
    limit_s, pool = job.namespace.timeout, job.pool
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    restarts = Restarts(job.namespace.restarts, job.namespace.restart_delay)
    placement, reason = pool.assign(), ""

    def is_ending() -> bool:
        pending = signal.sigpending() & ending_signals(signals)
        return bool(pending) or time.monotonic() > deadline

    while True:
        environment = job.environment(folder, scratch, placement)
        environment["MPIDIST_RESTART"] = str(len(restarts.attempts))
        environment["MPIDIST_RESTART_REASON"] = reason
        lost_before = list(pool.lost)
        result = job.attempt(folder, job.command(placement), environment, signals, deadline)
        hosts = [host for host, _ in placement]
        status, lines = report(
            folder, job.layout, result, hosts if pool.has_user_hosts else [], limit_s
        )
        reason = lines.pop() if status and lines else ""
        restarts.add(folder, status, reason, lost_before)
        goes_on = restarts.may_go_on(folder, result)
        if goes_on:
            pool.find_lost(environment, signals, is_ending)
            end_descendants(0.0)  # of probes
        new = [host for host in pool.lost if host not in lost_before]
        if reason and (lost := ", ".join(host for host in new if host in hosts)):
            reason = f"{lost} cannot be reached; {reason}"
            restarts.explain(reason)
        lines += [f"{host} cannot be reached: {pool.lost[host]}" for host in new]
        if not goes_on:
            return status, [*lines, *restarts.summary()]
        try:
            placement = pool.assign()
            _prepare(folder, job.layout, len(restarts.attempts))
        except (ValueError, OSError) as error:
            without = f" without {', '.join(pool.lost)}" if pool.lost else ""
            return status, [*lines, *restarts.summary(), f"no further attempt{without}: {error}"]
        begins = [] if is_ending() else [restarts.announcement(pool.lost)]
        _print([*lines, reason, *begins])
        if number := restarts.wait(signals, deadline):
            status, reason = interrupted(number)
            restarts.add(folder, status, reason, pool.lost)
            return status, restarts.summary()
        if time.monotonic() > deadline:
            reason = f"the job ran longer than --timeout {limit_s:g} s before the next attempt"
            restarts.add(folder, TIMEOUT_STATUS, reason, pool.lost)
            return TIMEOUT_STATUS, restarts.summary()


def _prepare(folder: Path, layout: Layout, attempt: int) -> None:
    """Make the run folder, or remove the records of an earlier attempt from it.

    Args:
        folder: The run folder.
        layout: The ranks and their jobs.
        attempt: Number of earlier attempts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear_records(folder)
    write_job(folder, layout, attempt)


@dataclass(frozen=True)
class _Job:
    """The facts that hold for all attempts of a job.

    Attributes:
        namespace: The options.
        layout: The ranks and their jobs.
        launcher: The MPI library's launcher.
        variables: The variables of --env.
        pool: The hosts.
    """

    namespace: argparse.Namespace
    layout: Layout
    launcher: Launcher
    variables: Mapping[str, str]
    pool: HostPool

    def command(self, placement: Placement) -> list[str]:
        """Return the command line of the launcher. Each rank runs the script under a wrapper."""
        jobs = ["MPIDIST_JOBS"] if self.layout.jobs else []
        rank = self.launcher.vendor.rank_variable
        wrapper = [sys.executable, "-I", "-S", str(Path(rank_wrapper.__file__).absolute()), rank]
        return [
            *self.launcher.command(
                self.layout.ranks, (*_FOR_WRAPPER, *jobs, *self.variables), placement
            ),
            *wrapper,
            *(sys.executable, RUNNER_FILE, rank),
            *script_words(self.namespace),
        ]

    def environment(self, folder: Path, scratch: Path, placement: Placement) -> dict[str, str]:
        """Return the environment of the launcher: that of this command, with more variables."""
        environment = self.launcher.environment(
            {**os.environ, **self.variables},
            most_ranks_on_a_host(self.layout.ranks, placement, os.environ),
        )
        vendor = self.launcher.vendor
        if vendor.scratch_variable and vendor.scratch_choice not in environment:
            environment[vendor.scratch_variable] = str(scratch)
        environment.pop("MPIDIST_JOBS", None)  # of a job around this one
        if self.layout.jobs:
            environment["MPIDIST_JOBS"] = str(self.layout)
        environment["MPIDIST_RUN_DIR"] = str(folder)
        environment["MPIDIST_RUN_LABELS"] = _labels(self.layout) if self.namespace.label else ""
        if sys.stdout.isatty():
            # Ranks write to a pipe of the launcher, which copies their bytes to this terminal.
            environment.setdefault("TTY_COMPATIBLE", "1")
            environment.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
        return environment

    def attempt(
        self,
        folder: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        signals: set[int],
        deadline: float,
    ) -> Result:
        """Run the job once."""
        lost_before, vendor = len(self.pool.lost), self.launcher.vendor
        standard_input = listen_for_rank_0() if self.namespace.stdin else None
        name = name_of(standard_input) if standard_input else ""
        with no_shared_files(vendor.shared_files):
            return run_job(
                command,
                {**environment, "MPIDIST_RUN_STDIN": name},
                signals,
                failed=lambda: (
                    first_failure(folder) is not None or len(self.pool.lost) > lost_before
                ),
                ended=lambda: len(read_records(folder, "exit")) == self.layout.ranks,
                saves=lambda: saves_on_signal(folder),
                awaits_manager=self.namespace.restarts > 0,
                reporter=Reporter(folder, partial(self.pool.find_lost_of, environment, signals)),
                timeout_s=self.namespace.timeout,
                deadline=deadline,
                standard_input=standard_input,
                passed_on=vendor.passed_on,
            )


def _print(lines: Sequence[str]) -> None:
    """Print lines of this command to standard error."""
    if lines:
        # The first newline ends the line in the middle of which a rank may have been ended.
        sys.stderr.write("".join(["\n", *(f"mpidist run: {line}\n" for line in lines)]))
        sys.stderr.flush()


def _check(namespace: argparse.Namespace, ranks: int) -> None:
    """Raise a ValueError for options that do not fit together or to this process."""
    script = namespace.script
    is_input = not namespace.module and os.path.abspath(script) in _STANDARD_INPUT
    if is_input and not namespace.stdin:
        raise ValueError(f"{script} is empty without --stdin: give --stdin and -n 1, or a file")
    is_pipe = not namespace.module and stat.S_ISFIFO(os.stat(script).st_mode)
    if ranks > 1 and (is_input or is_pipe):
        raise ValueError(f"only one rank can read the script {script}: give -n 1, or a file")
    if namespace.timeout is not None and not namespace.timeout > 0:
        raise ValueError(f"--timeout {namespace.timeout:g} must be positive")
    if namespace.restarts < 0:
        raise ValueError(f"--restarts {namespace.restarts} is negative; give 0 or more")
    if not 0 <= namespace.restart_delay < math.inf:
        raise ValueError(f"--restart-delay {namespace.restart_delay:g} is not a number of seconds")
    if namespace.restart_delay and not namespace.restarts:
        raise ValueError("--restart-delay: there are no restarts; give --restarts, too")
    if namespace.restarts and namespace.stdin:
        raise ValueError("--stdin can be read only once: leave out --restarts, or read a file")
    if namespace.spare < 0:
        raise ValueError(f"--spare {namespace.spare} is negative; give 0 or more")
    if namespace.spare and not namespace.restarts:
        raise ValueError("--spare: only restarts use the spare hosts; give --restarts, too")
    if namespace.run_dir == "":
        raise ValueError("--run-dir is empty; name a folder")
    if namespace.stdin and input_is_elsewhere():
        raise ValueError(
            "--stdin: this command runs in the background of its terminal, whose input belongs to "
            "the foreground; run it there, or redirect its input"
        )


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


def _labels(layout: Layout) -> str:
    """Return the jobs and numbers of tasks in rank order; see the wrapper."""
    names = [(layout.task(rank) or ("", 0))[0] for rank in range(layout.ranks)]
    return ",".join(f"{job}:{len(list(ranks))}" for job, ranks in itertools.groupby(names))
