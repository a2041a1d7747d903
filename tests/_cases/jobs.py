"""Jobs of their own: a script on several ranks, to its end, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from _cases.leftovers import abandoned, remaining, shared_files
from mpidist.launcher.vendors import find_launcher

GONE_S = 5.0  # what a dead process held may be given back a little after its end


class LauncherStuckError(AssertionError):
    """All ranks have ended, and the launcher has not."""


@dataclass
class Ended:
    """A job that has ended, and the files in /dev/shm that it left, if it may leave any."""

    status: int
    out: str
    err: str
    files: frozenset[str] = frozenset()


def run_ranks(
    folder, count, source, *, timeout_s=30.0, env=None, meddle=None, may_leave_files=False
):
    """Run a script under the library's own launcher, without ``mpidist run``.

    Args:
        folder: An empty one.
        count: Number of ranks.
        source: The script; the common indentation is removed.
        timeout_s: After which the job is killed, and the test fails.
        env: Added to the environment.
        meddle: Called with the launcher's process, which leads a process group, once it has begun.
        may_leave_files: Whether files in /dev/shm are given back, and removed, in place of an
            error.
    """
    launcher = find_launcher()
    command = launcher.command(count)
    given = {**os.environ, **(env or {})}
    environment = launcher.environment(given, count)
    program = [*command, sys.executable]
    return _run(folder, program, source, environment, timeout_s, meddle, may_leave_files)


def run_job(folder, words, source, *, timeout_s=30.0, env=None, meddle=None, inside=()):
    """Run a script under ``mpidist run`` with the words given; arguments as :func:`run_ranks`.

    ``inside`` are words of a command that runs the one that follows them, with a /dev/shm of its
    own: what is left in that one goes with the job.
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
