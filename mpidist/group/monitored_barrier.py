"""A barrier that names the ranks that do not come in time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mpidist.errors import DeadlineExceededError
from mpidist.group.operation import RESERVED_TAGS, GroupInfo, Op
from mpidist.group.submission import Submission
from mpidist.work import Work

_TAGS = RESERVED_TAGS[1000:]


class MonitoredBarrier:
    """The monitored barriers of one group.

    Group rank 0 waits for a message from each other member, tells all of them which ranks are late,
    and waits until they have received it. So all fail together. If rank 0 itself is late, the
    others notice after twice the time.

    Args:
        info: The facts about the group.
        submission: The submission of the group.
    """

    def __init__(self, info: GroupInfo, submission: Submission) -> None:
        self._info = info
        self._submission = submission
        self._number = 0

    def run(self, limit: float, name_all: bool) -> None:
        """Collective. Wait for all members.

        Args:
            limit: Seconds.
            name_all: Name all missing ranks instead of the first.

        Raises:
            DeadlineExceededError: A rank did not come in time; on every rank.
        """
        # A late message of this barrier must not be taken for one of the next.
        self._number = (self._number + 1) % len(_TAGS)
        tag, deadline = _TAGS[self._number], time.monotonic() + limit
        gone: list[int] = []
        if self._info.rank:
            missing = self._report_to_first(tag, deadline + limit)
        else:
            missing, gone = self._collect_reports(tag, deadline, limit, name_all)
        if missing or gone:
            self._submission.expects_late_messages = True
            raise self._error(missing, gone, limit)

    def _error(
        self, missing: Sequence[int], gone: Sequence[int], limit: float
    ) -> DeadlineExceededError:
        """Return the error of a barrier.

        Args:
            missing: Group ranks that did not come in time, perhaps this one.
            gone: Group ranks that came in time and gave up before this one came.
            limit: Time limit of the barrier, in seconds.
        """
        rank = self._info.rank
        here = f"rank {self._info.ranks[rank]}, this one, is late"
        reasons = []
        if gone:
            reasons.append(
                f"{here}: rank(s) {self._listed(gone)} came in time, waited for it for "
                f"{2 * limit:g} s and gave up"
            )
        elif rank in missing:
            reasons.append(f"{here}: the others waited for {limit:g} s")
        absent = [other for other in missing if other != rank]
        if absent:
            reasons.append(f"rank(s) {self._listed(absent)} did not come within {limit:g} s")
        error = DeadlineExceededError(
            f"monitored_barrier of group {self._info.name!r}: {'; '.join(reasons)}"
        )
        error.ranks = tuple(self._info.ranks[other] for other in missing)
        return error

    def _listed(self, ranks: Sequence[int]) -> str:
        """Return the world ranks of some members, as text."""
        return ", ".join(str(self._info.ranks[rank]) for rank in ranks)

    def _collect_reports(
        self, tag: int, deadline: float, limit: float, name_all: bool
    ) -> tuple[list[int], list[int]]:
        """Wait for the other members and tell them which ranks are missing.

        Returns:
            Two lists of group ranks: the missing ranks (all, or the first), and the ranks that
            came in time and gave up because this rank was late.
        """
        others = range(1, self._info.size)
        missing = self._silent(others, tag, deadline)
        told = missing if name_all else missing[:1]
        for rank in others:
            verdict = np.zeros(self._info.size, np.int8)
            verdict[told] = 1
            verdict[rank] = rank in missing  # a late rank is told so, whichever others are late
            self._submission.start_message(Op("send", self._info, verdict, root=rank, tag=tag))
        came = [rank for rank in others if rank not in missing]
        # Members that have given up do not answer.
        gone = self._silent(came, tag, max(deadline, time.monotonic() + limit))
        return told, gone

    def _report_to_first(self, tag: int, deadline: float) -> list[int]:
        """Report to the first member. Return the group ranks that are missing."""
        info, start = self._info, self._submission.start_message
        verdict, here = np.zeros(info.size, np.int8), np.ones(1, np.int8)
        start(Op("send", info, here, root=0, tag=tag))
        answer = start(Op("recv", info, None, verdict, root=0, tag=tag))
        if not _ends(answer, deadline):
            return [0]
        start(Op("send", info, here, root=0, tag=tag))
        return [int(rank) for rank in np.flatnonzero(verdict)]

    def _silent(self, ranks: Sequence[int], tag: int, deadline: float) -> list[int]:
        """Return the members that send no message before the deadline."""
        reports = np.zeros((self._info.size, 1), np.int8)
        start = self._submission.start_message
        works = {
            rank: start(Op("recv", self._info, None, reports[rank], root=rank, tag=tag))
            for rank in ranks
        }
        return [rank for rank, work in works.items() if not _ends(work, deadline)]


def _ends(work: Work, deadline: float) -> bool:
    """Return whether a work ends before the deadline."""
    try:
        return work.wait(max(deadline - time.monotonic(), 0.0))
    except DeadlineExceededError:
        return work.is_completed()
