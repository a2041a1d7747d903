"""How a job of ``mpidist run`` ended: the exit status, and what to print."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mpidist.launcher import records
from mpidist.launcher.hosts import without_address
from mpidist.launcher.layout import Layout
from mpidist.launcher.supervise import Ending, Result
from mpidist.launcher.vendors import Launcher

_TIMEOUT_STATUS = 124  # as timeout(1)
_MOST_WAITS = 8


def verdict(
    folder: Path,
    layout: Layout,
    result: Result,
    launcher: Launcher,
    hosts: Sequence[str],
    timeout_s: float | None,
) -> tuple[int, list[str]]:
    """Local. The exit status, and the lines to print, the reason last.

    Args:
        folder: The job's folder.
        layout: The ranks and their jobs.
        result: What the supervisor saw.
        launcher: What started the ranks.
        hosts: Those that were given to it, if any.
        timeout_s: How long the job might take.
    """
    status, reason = _ending(folder, layout, result, hosts, timeout_s)
    itself = result.ending in (Ending.ITSELF, Ending.STUCK)
    foreign = _foreign(folder, launcher) if status and itself else ""
    stood = _waits(folder, layout) if result.ending in (Ending.SIGNAL, Ending.TIMEOUT) else []
    said = [_survivors(result, status), foreign, *stood, reason]
    return status, [line for line in said if line]


def _ending(
    folder: Path, layout: Layout, result: Result, hosts: Sequence[str], timeout_s: float | None
) -> tuple[int, str]:
    """Local. The exit status, and why, if there is more to say than that all is well."""
    ended = f"all {layout.ranks} ranks were ended" if layout.ranks > 1 else "the rank was ended"
    if result.ending is Ending.SIGNAL:
        name = (
            "Ctrl-C" if result.signal == signal.SIGINT else records.describe_signal(result.signal)
        )
        return 128 + result.signal, f"interrupted by {name}; {ended}"
    if result.ending is Ending.TIMEOUT:
        return _TIMEOUT_STATUS, f"the job ran longer than --timeout {timeout_s:g} s; {ended}"
    failure = records.first_failure(folder)
    if result.status and _has_no_reader() and (failure is None or _is_broken_pipe(failure)):
        return 128 + signal.SIGPIPE, ""  # as of any command in a pipe, without a word
    if failure is not None:
        task = records.task_name(folder, layout, failure.rank)
        rank = "" if task == f"rank {failure.rank}" else f"rank {failure.rank}, "
        place = f"{rank}pid {failure.pid} on {failure.host}"
        return failure.exit_code, f"{task} ({place}) failed first: {failure.reason}; {ended}"
    left = records.ended_well(folder)
    # A script may have removed the folder: then the launcher's word counts.
    if result.status == 0 and (len(left) == layout.ranks or not folder.is_dir()):
        return 0, ""
    why = "no rank recorded a reason; look for a message of MPI above"
    if left and len(left) < layout.ranks:
        # Some launchers call it success when a rank leaves without ending MPI.
        names = ", ".join(records.task_name(folder, layout, rank) for rank in left)
        why = f"it ended the others after {names} had left with status 0"
    elif not left and (unknown := without_address(hosts)):
        named = ", ".join(f"{host} ({problem})" for host, problem in unknown.items())
        why = (
            f"hosts without an address here: {named}; correct --hosts or --hostfile, or give them "
            "one in DNS or /etc/hosts"
        )
    return result.status or 1, f"the launcher ended with status {result.status}; {why}"


def _has_no_reader() -> bool:
    """Return whether the reader of our standard output or standard error has left (``| head``)."""
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _is_broken_pipe(failure: records.Failure) -> bool:
    """Return whether a rank failed because the launcher no longer took its output."""
    by_signal = failure.exit_code == 128 + signal.SIGPIPE
    return by_signal or failure.reason.startswith("BrokenPipeError")


def _waits(folder: Path, layout: Layout) -> list[str]:
    """Local. Lines about what ranks have waited for, for long, when they were ended."""
    left = records.ended_well(folder)
    lines = [
        f"{_name(folder, layout, rank)} was waiting for "
        f"{record['time'] - wait['since']:.0f} s: {wait['what']}"
        for rank, record in sorted(records.read(folder, "waits").items())
        if rank not in left
        for wait in record["waits"]
    ]
    more = [f"and {len(lines) - _MOST_WAITS} more such waits"] if len(lines) > _MOST_WAITS else []
    return lines[:_MOST_WAITS] + more


def _name(folder: Path, layout: Layout, rank: int) -> str:
    task = records.task_name(folder, layout, rank)
    return task if task == f"rank {rank}" else f"{task} (rank {rank})"


def _survivors(result: Result, status: int) -> str:
    """Local. The line about processes that outlived the launcher, if any."""
    if result.alive:
        return f"{result.alive} processes of the job cannot be killed; look for them with ps"
    if result.killed and status == 0:
        number = "1 process" if result.killed == 1 else f"{result.killed} processes"
        return f"killed {number} that the job left behind"
    return ""


def _foreign(folder: Path, launcher: Launcher) -> str:
    """Local. The line about a launcher from PATH that is not the library's, if it is not.

    To ask the library takes as long as to start it, so only a job whose ranks did not come so far
    asks.
    """
    beside_python = Path(launcher.path).parent == Path(sys.executable).parent
    if beside_python or records.read(folder, "rank"):
        return ""
    from mpidist.launcher.doctor import mismatch  # of use to failed jobs alone

    return mismatch(launcher)
