"""A trial of MPI with device memory, in processes of its own: what is wrong there ends only them.

It is a job of two ranks, since what a rank sends to itself may never come to a transport. Where no
such job begins, as on hosts where ranks are started by a batch system alone, one process tries it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mpidist.runtime.launch import without_launcher

BEGUN, RIGHT = "the trial begins", "all values are right"
"""What its first rank says on lines of its own."""

_SCRIPT = str(Path(__file__).absolute().with_name("trial_ranks.py"))
_LIMIT_S = 30.0  # of a job; to start Python, CuPy and CUDA takes most of it
_GRACE_S = 5.0  # for a launcher to end its ranks
_TIMED_OUT = 124  # the status of mpidist run


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        right: Whether device memory went through MPI, and every value was right.
        text: What was proven, or what went wrong.
    """

    right: bool
    text: str


@dataclass(frozen=True)
class _Ended:
    status: int | None  # None if it did not end in time
    out: str
    err: str


def carry_out(env: Mapping[str, str]) -> Outcome:
    """Local. Have device memory sent and reduced by processes of their own.

    Args:
        env: Usually ``os.environ``.
    """
    clean = without_launcher(env)
    # As here, also where the script has put folders there by itself.
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    limit = f"{_LIMIT_S:g}"
    job = [sys.executable, "-P", "-m", "mpidist", "run", "-n", "2", "--timeout", limit, _SCRIPT]
    ended = _run(job, clean)
    if BEGUN in ended.out.splitlines():
        return _outcome(ended, "two ranks of this host")
    alone = _run([sys.executable, "-P", _SCRIPT], clean)
    outcome = _outcome(alone, "one rank, with messages to itself,")
    return Outcome(outcome.right, f"{outcome.text} (no two ranks began here: {_last(ended)})")


def _outcome(ended: _Ended, who: str) -> Outcome:
    if ended.status == 0 and RIGHT in ended.out.splitlines():
        return Outcome(True, f"{who} sent and reduced it, and got the right values")
    return Outcome(False, f"{who} tried, and failed: {_last(ended)}")


def _last(ended: _Ended) -> str:
    """Why a job has failed, as its last line says."""
    if ended.status is None:
        return f"it did not end within {_LIMIT_S:g} s"
    lines = [line.strip() for line in ended.err.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with status {ended.status}"


def _run(command: list[str], env: Mapping[str, str]) -> _Ended:
    # Files, and no pipes: what a job leaves behind would hold those open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0
            )
        except OSError as error:
            return _Ended(1, "", str(error))
        status: int | None = None
        try:
            status = process.wait(_LIMIT_S + _GRACE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher then ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _Ended(None if status == _TIMED_OUT else status, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
