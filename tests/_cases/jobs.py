"""Separate jobs: a script on several ranks, and a check of its leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from _cases.leftovers import abandoned, remaining, shared_files
from mpidist.launcher.vendors import find_launcher

GONE_S = 5.0  # resources of a dead process may be released slightly later


class LauncherStuckError(AssertionError):
    """Raised when all ranks have ended and the launcher has not."""


@dataclass
class Ended:
    """The result of a job, with the files left in /dev/shm if the job may leave files."""

    status: int
    out: str
    err: str
    files: frozenset[str] = frozenset()


def run_ranks(
    folder, count, source, *, timeout_s=30.0, env=None, meddle=None, may_leave_files=False
):
    """Run a script under the launcher of the MPI library, without ``mpidist run``.

    Args:
        folder: An empty folder.
        count: Number of ranks.
        source: The script. Its common indentation is removed.
        timeout_s: Limit in seconds. At the limit, the job is killed and the test fails.
        env: Variables added to the environment.
        meddle: Called after the start with the launcher's process, which leads a process group.
        may_leave_files: Whether files left in /dev/shm are removed and returned. Otherwise they are
            an error.
    """
    launcher = find_launcher()
    command = launcher.command(count)
    given = {**os.environ, **(env or {})}
    environment = launcher.environment(given, count)
    program = [*command, sys.executable]
    return _run(folder, program, source, environment, timeout_s, meddle, may_leave_files)


def run_job(folder, words, source, *, timeout_s=30.0, env=None, meddle=None, inside=()):
    """Run a script under ``mpidist run`` with the given words. See :func:`run_ranks`.

    ``inside`` is a command that runs the job with a private /dev/shm. Files left there vanish with
    the job.
    """
    command = [*inside, sys.executable, "-m", "mpidist", "run", *words]
    environment = {**os.environ, **(env or {})}
    return _run(folder, command, source, environment, timeout_s, meddle, own_files=bool(inside))


def _run(folder, command, source, env, timeout_s, meddle, may_leave_files=False, own_files=False):
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    before = shared_files()
    process = subprocess.Popen(
        [*command, str(path)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        if meddle is not None:
            meddle(process)
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        ranks = [line for line in remaining(str(path)) if line.startswith(sys.executable)]
        process.terminate()
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate(timeout=10)
        kind = AssertionError if ranks else LauncherStuckError
        raise kind(f"the job did not end within {timeout_s:g} s\n{ranks}\n{out}\n{err}") from None
    shown = f"\n{out}\n{err}"
    left = remaining(str(folder), GONE_S)
    assert not left, f"processes are left: {left}{shown}"
    files = set() if own_files else abandoned(before, GONE_S)
    assert may_leave_files or not files, f"left in /dev/shm: {files}{shown}"
    for name in files:
        (Path("/dev/shm") / name).unlink()
    return Ended(process.returncode, out, err, frozenset(files))
