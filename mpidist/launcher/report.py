"""The report on a job that has ended, from the records in its run folder."""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpidist.launcher.hosts import without_address
from mpidist.launcher.job import Result
from mpidist.launcher.layout import Layout
from mpidist.launcher.run_folder import Records, read_records
from mpidist.runner import STOP_STATUS

# When a rank on another host dies, Open MPI ends each rank that was connected to it at once, with a
# bare status. The records of those ranks can be earlier than the record of the dead one.
_BARE_STATUS_DELAY_S = 1.0
TIMEOUT_STATUS = 124  # as timeout(1)
_MOST_WAITS = 8


def describe_signal(number: int) -> str:
    """Return a signal in words, for example ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def first_failure(folder: Path) -> dict[str, Any] | None:
    """Return the earliest failure; None if no rank has failed by itself.

    Args:
        folder: The run folder.

    Returns:
        ``rank``, ``pid``, ``host``, ``reason`` (in words), ``exit_code`` (as a shell shows it) and
        ``time`` (in seconds since the epoch).
    """
    failures: Records = {}
    for rank, record in read_records(folder, "exit").items():
        number, code = record["signal"], record["exit_code"]
        if record["terminated"] or code == 0:
            continue
        if number is None:
            time = record["time"] + _BARE_STATUS_DELAY_S
            facts = {"reason": f"exited with status {code}", "time": time}
        else:
            facts = {"reason": f"killed by {describe_signal(number)}", "exit_code": 128 + number}
        failures[rank] = {**record, **facts}
    # The rank's own reason explains the status that its wrapper sees a little later.
    failures |= read_records(folder, "failure")
    return min(failures.values(), key=lambda failure: failure["time"], default=None)


def stopped_by(folder: Path) -> int:
    """Return the signal after which the job has saved a checkpoint and stopped; 0 if it has not."""
    stopped = _stopped(folder)
    return 0 if stopped is None else int(stopped["stopped_by"])


def saves_on_signal(folder: Path) -> bool:
    """Return whether all ranks with a manager of checkpoints save when they get SIGUSR1."""
    members: list[int] = [record["members"] for record in read_records(folder, "manager").values()]
    return 0 < max(members, default=0) == sum(count > 0 for count in members)


def _stopped(folder: Path) -> dict[str, Any] | None:
    records = read_records(folder, "manager").values()
    return next((record for record in records if record["stopped_by"]), None)


def successful_ranks(folder: Path) -> list[int]:
    """Return the ranks that have ended with status 0, in order."""
    exits = read_records(folder, "exit")
    return sorted(rank for rank, record in exits.items() if record["exit_code"] == 0)


def task_name(folder: Path, layout: Layout, rank: int) -> str:
    """Return ``worker 1``, or ``rank 3`` where the rank's job is not known.

    Args:
        folder: The run folder. The rank's own record there overrules the layout.
        layout: The jobs of the ranks.
        rank: The rank.
    """
    record = read_records(folder, "rank").get(rank, {})
    if record.get("job") is not None and record.get("task") is not None:
        return f"{record['job']} {record['task']}"
    task = layout.task(rank)
    return f"rank {rank}" if task is None else f"{task[0]} {task[1]}"


def report(
    folder: Path,
    layout: Layout,
    result: Result,
    hosts: Sequence[str],
    timeout_s: float | None,
) -> tuple[int, list[str]]:
    """Return the exit status of the job, and the lines to print. The reason is the last line.

    Args:
        folder: The run folder.
        layout: The ranks and their jobs.
        result: The end of the launcher.
        hosts: The hosts that the user gave, if any.
        timeout_s: The time limit of the job.
    """
    status, reason = _reason(folder, layout, result, hosts, timeout_s)
    lines: list[str] = []
    if result.alive:
        lines.append(f"{result.alive} processes of the job cannot be killed; look for them with ps")
    elif result.killed and status == 0:
        number = "1 process" if result.killed == 1 else f"{result.killed} processes"
        lines.append(f"killed {number} that the job left behind")
    if result.signal and not stopped_by(folder):
        lines += _waits(folder, layout)
    return status, [*lines, reason] if reason else lines


def _reason(
    folder: Path, layout: Layout, result: Result, hosts: Sequence[str], timeout_s: float | None
) -> tuple[int, str]:
    """Return the exit status and its reason, "" if there is nothing to explain."""
    if stopped := _stopped(folder):
        # After SIGTERM to this command, the ranks get SIGUSR1.
        name = describe_signal(result.signal or stopped["stopped_by"])
        return STOP_STATUS, (
            f"stopped by {name} after step {stopped['step']}, which is saved in {stopped['path']}; "
            "the same command continues there"
        )
    ended = f"all {layout.ranks} ranks were ended" if layout.ranks > 1 else "the rank was ended"
    if result.signal and not result.had_failed:
        name = "Ctrl-C" if result.signal == signal.SIGINT else describe_signal(result.signal)
        return 128 + result.signal, f"interrupted by {name}; {ended}"
    if result.timed_out and not result.had_failed:
        return TIMEOUT_STATUS, f"the job ran longer than --timeout {timeout_s:g} s; {ended}"
    failure = first_failure(folder)
    if result.status and _output_is_closed() and (failure is None or _is_broken_pipe(failure)):
        return 128 + signal.SIGPIPE, ""  # as any command in a pipe ends, without a message
    if failure is not None:
        name, task = f"rank {failure['rank']}", task_name(folder, layout, failure["rank"])
        pid = f"pid {failure['pid']} on {failure['host']}"
        place = pid if task == name else f"{name}, {pid}"
        alike = _alike(folder, failure)
        more = f"; {alike} more rank{'s' * (alike > 1)}: the same" if alike else ""
        reason = f"{task} ({place}) failed first: {failure['reason']}{more}; {ended}"
        return failure["exit_code"], reason
    left = successful_ranks(folder)
    # Without the folder, which a script may have removed, only the launcher's status is known.
    if result.status == 0 and (len(left) == layout.ranks or not folder.is_dir()):
        return 0, ""
    why = "no rank recorded a reason; look for a message of MPI above"
    if left and len(left) < layout.ranks:
        # MPICH's launcher returns 0 when a rank leaves without ending MPI.
        names = ", ".join(task_name(folder, layout, rank) for rank in left)
        why = f"it ended the others after {names} had left with status 0"
    elif not read_records(folder, "rank") and not left and (unknown := without_address(hosts)):
        named = ", ".join(f"{host} ({problem})" for host, problem in unknown.items())
        why = (
            f"hosts without an address here: {named}; correct --hosts or --hostfile, or give them "
            "one in DNS or /etc/hosts"
        )
    return result.status or 1, f"the launcher ended with status {result.status}; {why}"


def _alike(folder: Path, failure: dict[str, Any]) -> int:
    """Return the number of other ranks with the traceback of a failure."""
    trace = failure.get("traceback")
    failures = read_records(folder, "failure").values()
    alike = sum(other.get("traceback") == trace for other in failures)
    return max(alike - 1, 0) if trace else 0


def _output_is_closed() -> bool:
    """Return whether the reader of our standard output or error has closed it (``| head``)."""
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _is_broken_pipe(failure: dict[str, Any]) -> bool:
    """Return whether a rank failed because the launcher no longer read its output."""
    by_signal: bool = failure["exit_code"] == 128 + signal.SIGPIPE
    reason: str = failure["reason"]
    return by_signal or reason.startswith("BrokenPipeError")


def _waits(folder: Path, layout: Layout) -> list[str]:
    """Return lines about the operations in which ranks were waiting when the job was ended."""
    left = successful_ranks(folder)
    lines = []
    for rank, record in sorted(read_records(folder, "state").items()):
        task = task_name(folder, layout, rank)
        name = task if task == f"rank {rank}" else f"{task} (rank {rank})"
        if rank not in left:
            lines += [
                f"{name} was waiting for {record['time'] - wait['since']:.0f} s: {wait['what']}"
                for wait in record["waits"]
            ]
    more = [f"and {len(lines) - _MOST_WAITS} more such waits"] if len(lines) > _MOST_WAITS else []
    return lines[:_MOST_WAITS] + more
