"""Jobs of their own: a script on several ranks, to its end, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

from _cases.leftovers import abandoned, remaining, shared_files
from mpidist.cli.vendors import find_launcher

GONE_S = 5.0  # what a dead process held may be given back a little after its end


@dataclass
class Ended:
    """A job that has ended."""

    status: int
    out: str
    err: str


def run_ranks(folder, count, source, *, timeout_s=30.0, env=None):
    """Run a script under the library's own launcher, without ``mpidist run``.

    Args:
        folder: An empty one.
        count: Number of ranks.
        source: The script; the common indentation is removed.
        timeout_s: After which the job is killed, and the test fails.
        env: Added to the environment.
    """
    launcher = find_launcher()
    cores = len(os.sched_getaffinity(0))
    command = launcher.command(count, cores=cores, root=os.geteuid() == 0)
    given = {**os.environ, **(env or {})}
    environment = launcher.environment(given, ranks=count, cores=cores)
    return _run(folder, [*command, sys.executable], source, environment, timeout_s)


def run_job(folder, words, source, *, timeout_s=30.0, env=None):
    """Run a script under ``mpidist run`` with the words given; arguments as :func:`run_ranks`."""
    command = [sys.executable, "-m", "mpidist", "run", *words]
    return _run(folder, command, source, {**os.environ, **(env or {})}, timeout_s)


def _run(folder, command, source, env, timeout_s):
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
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=10)
        finally:
            process.kill()
        raise AssertionError(f"the job did not end within {timeout_s:g} s\n{out}\n{err}") from None
    shown = f"\n{out}\n{err}"
    left = remaining(str(path), GONE_S)
    assert not left, f"processes are left: {left}{shown}"
    files = abandoned(before, GONE_S)
    assert not files, f"left in /dev/shm: {files}{shown}"
    return Ended(process.returncode, out, err)
