"""The process group, of which every operation is a method."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mpidist.errors import DeadlineExceededError
from mpidist.executor import RequestWork
from mpidist.group.objects import Objects
from mpidist.group.reductions import Reductions
from mpidist.work import Timeout, seconds

# Every MPI has tags up to 32767; users' messages with these would be taken for ours.
_FIRST_TAG = 30000
_TAGS = 2767
_MONITOR_S = 1800.0


class ProcessGroup(Reductions, Objects):
    """Collective. Ranks that act together, over one communicator of their own.

    Methods have the names and the meaning of torch.distributed's functions: ``src`` and ``dst``
    are ranks of the world, ``group_src`` and ``group_dst`` ranks of the group; results are written
    into the arrays given. Arrays are NumPy arrays, or anything in host memory with DLPack or the
    buffer protocol; any strides.

    Without a time limit an operation blocks inside MPI, and the watchdog reports a stall. With
    one, it polls, and raises DeadlineExceededError when the limit passes; the operation then
    stays pending, and the group takes no other until it has completed. All members must make the
    same choice, of ``async_op`` too: MPI does not match blocking calls with others (MPI 4.1, 6.12).

    Args:
        comm: The communicator; the group owns it from now on.
        name: For messages.
        timeout: Time limit of every operation, in seconds or as a timedelta; None for none.

    Attributes:
        name: For messages.
        number: Unique, and equal on all members.
        ranks: World rank of each member.
    """

    _monitored = 0

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Collective. A barrier that names the ranks that do not come.

        The first member waits for a message from each of the others, tells all of them who has not
        come in time, and waits until they have heard it: so all fail together. If the first itself
        does not come, the others notice after twice the time.

        Args:
            timeout: Seconds or a timedelta; by default the group's, or 30 minutes.
            wait_all_ranks: Name all that are missing, not the first alone.

        Raises:
            DeadlineExceededError: Some have not come in time; on every rank that has.
        """
        limit = seconds(timeout)
        limit = self._timeout if limit is None else limit
        limit = _MONITOR_S if limit is None else limit
        # Of this call alone: what comes too late must not be taken for a part of a later one.
        self._monitored = (self._monitored + 1) % _TAGS
        tag, deadline = _FIRST_TAG + self._monitored, time.monotonic() + limit
        if self._rank:
            missing = self._report_to_first(tag, deadline + limit)
        else:
            missing = self._collect_reports(tag, deadline, limit, wait_all_ranks)
        if missing:
            raise DeadlineExceededError(
                f"monitored_barrier of group {self.name!r}: rank(s) "
                f"{', '.join(str(self.ranks[rank]) for rank in missing)} did not come within "
                f"{limit:g} s"
            )

    def _collect_reports(self, tag: int, deadline: float, limit: float, every: bool) -> list[int]:
        """Group ranks that have not come, all or the first, after telling the others."""
        others = range(1, self._size)
        missing = self._silent(others, tag, deadline)
        verdict = np.zeros(self._size, np.int8)
        verdict[missing if every else missing[:1]] = 1
        told = [self._begin(self._send_op(verdict, None, tag, rank)) for rank in others]
        self._abandoned += [work for work in told if not work.is_completed()]
        came = [rank for rank in others if rank not in missing]
        # Those that have given up meanwhile do not answer.
        gone = self._silent(came, tag, max(deadline, time.monotonic() + limit))
        return (missing + gone) if every else (missing + gone)[:1]

    def _report_to_first(self, tag: int, deadline: float) -> list[int]:
        """Group ranks that have not come, as far as the first member says so."""
        verdict = np.zeros(self._size, np.int8)
        here = np.ones(1, np.int8)
        reports = [self._begin(self._send_op(here, None, tag, 0))]
        answer = self._begin(self._recv_op(verdict, None, tag, 0))
        if not _has_ended(answer, deadline):
            self._abandoned += [*reports, answer]
            return [0]
        reports.append(self._begin(self._send_op(here, None, tag, 0)))
        self._abandoned += [work for work in reports if not work.is_completed()]
        return [int(rank) for rank in np.flatnonzero(verdict)]

    def _silent(self, ranks: Sequence[int], tag: int, deadline: float) -> list[int]:
        """Which of the members do not send a message in time."""
        said = np.zeros((self._size, 1), np.int8)
        works = {rank: self._begin(self._recv_op(said[rank], None, tag, rank)) for rank in ranks}
        silent = [rank for rank, work in works.items() if not _has_ended(work, deadline)]
        self._abandoned += [works[rank] for rank in silent]
        return silent


def _has_ended(work: RequestWork, deadline: float) -> bool:
    try:
        return work.wait(max(deadline - time.monotonic(), 0.0))
    except DeadlineExceededError:
        return work.is_completed()
