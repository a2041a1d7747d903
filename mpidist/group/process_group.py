"""The process group, of which every operation is a method."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from mpidist.errors import DeadlineExceededError
from mpidist.executor import RequestWork
from mpidist.group.coalescing import Coalescing, coalesce
from mpidist.group.objects import Objects
from mpidist.group.prepared import Prepared, check_repeatable
from mpidist.group.reductions import Reductions
from mpidist.op import RESERVED_TAGS, Op
from mpidist.work import Timeout, seconds

_TAGS = RESERVED_TAGS[1000:]
_MONITOR_S = 1800.0


class ProcessGroup(Reductions, Objects):
    """Collective. Ranks that act together, over one communicator of their own.

    Methods have the names and the meaning of torch.distributed's functions: ``src`` and ``dst``
    are ranks of the world, ``group_src`` and ``group_dst`` ranks of the group; results are written
    into the arrays given. Arrays are NumPy arrays, or anything with DLPack, the CUDA array
    interface or the buffer protocol; any strides.

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

    repeatable: ClassVar[tuple[str, ...]] = (
        "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scan", "broadcast",
        "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
        "all_to_all_single", "barrier",
    )  # fmt: skip
    """What :meth:`prepare` takes, beside messages; not exscan, whose first rank gets nothing."""

    _monitored = 0

    def coalesce(self, async_ops: bool = False) -> AbstractContextManager[Coalescing]:
        """Collective. Begin all collectives called in a ``with`` block together, at its end.

        Those of arrays up to 256 KiB that are of one kind, dtype and root (of broadcasts, of any
        dtype) become one; the others follow in order. What a call in the block would return is
        None, and arrays have their results after the block, or after ``wait()``::

            with group.coalesce(async_ops=True) as begun:
                for gradient in gradients:
                    group.all_reduce(gradient)
            begun.wait()

        What one of them writes must be used by no other, nor change in the block. All members
        must call the same in the same order. Messages are not collected; operations
        on objects, and all_gather_ragged, are a ValueError. If the block raises, none begins.

        Args:
            async_ops: End the block at once; ``wait()`` of what it gives, or its ``work``, tells
                when the operations have ended.
        """
        return coalesce(self, f"coalesced operations of group {self.name!r}", async_ops)

    def prepare(self, name: str, *args: Any, **kwargs: Any) -> Prepared:
        """Local. One operation that will be repeated, checked once.

        What remains for each repetition is the call of MPI; it matches plain calls of the same
        operation on other members::

            reduce_gradient = group.prepare("all_reduce", gradient)
            for batch in batches:
                gradient[:] = ...
                reduce_gradient()

        Args:
            name: One of :attr:`repeatable`, ``"send"`` or ``"recv"``.
            args: Its arguments, but ``async_op``.
            kwargs: The same.

        Returns:
            The operation, to be called, or begun by ``start()``.

        Raises:
            ValueError: There is no such operation, or it would work on copies of its arrays:
                they are strided, or of a type that MPI does not reduce.
        """
        if "async_op" in kwargs:
            raise TypeError("prepare takes no async_op: call what it gives, or start() it")
        submit: Callable[[Op, bool], Any] = self._message
        if name in ("send", "recv"):
            make = self._send_op if name == "send" else self._recv_op
            op = make(*args, **kwargs)
        elif name in self.repeatable:
            with self.collecting() as ops:
                getattr(self, name)(*args, **kwargs)
            (op,) = ops
            submit = self._repeating(name, op, args, kwargs)
        else:
            raise ValueError(
                f"{name!r} cannot be prepared; what can: {', '.join(self.repeatable)}, send, recv"
            )
        check_repeatable(op, (*args, *kwargs.values()))
        return Prepared(op, submit)

    def _repeating(
        self, name: str, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[Op, bool], Any]:
        """What carries out, or begins, an operation that was prepared from these arguments."""
        return self.submit

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Collective. Run a barrier that names the ranks that do not come in time.

        The first member waits for a message from each of the others, tells all of them which ranks
        have not come in time, and waits until they have heard it: so all fail together. If the
        first itself does not come, the others notice after twice the time. A rank that comes later
        is told that it is the late one.

        Args:
            timeout: Seconds or a timedelta; by default the group's, or 30 minutes.
            wait_all_ranks: Name all that are missing, not the first alone.

        Raises:
            DeadlineExceededError: A rank has not come in time; on every rank. The message names
                it.
        """
        limit = seconds(timeout)
        limit = self._timeout if limit is None else limit
        limit = _MONITOR_S if limit is None else limit
        # Of this call alone: what comes too late must not be taken for a part of a later one.
        self._monitored = (self._monitored + 1) % len(_TAGS)
        tag, deadline = _TAGS[self._monitored], time.monotonic() + limit
        gone: list[int] = []
        if self._rank:
            missing = self._report_to_first(tag, deadline + limit)
        else:
            missing, gone = self._collect_reports(tag, deadline, limit, wait_all_ranks)
        if missing or gone:
            raise self._blame(missing, gone, limit)

    def _blame(
        self, missing: Sequence[int], gone: Sequence[int], limit: float
    ) -> DeadlineExceededError:
        """Return the error of a monitored barrier.

        Args:
            missing: Group ranks that have not come in time; this one, if it is late.
            gone: Group ranks that came in time, and gave up before this one came.
            limit: Time limit of the barrier, in seconds.
        """
        reasons = []
        if gone:
            reasons.append(
                f"rank {self.ranks[self._rank]}, this one, is late: rank(s) {self._listed(gone)} "
                f"came in time, waited for it for {2 * limit:g} s and gave up"
            )
        elif self._rank in missing:
            reasons.append(
                f"rank {self.ranks[self._rank]}, this one, is late: the others waited for "
                f"{limit:g} s"
            )
        absent = [rank for rank in missing if rank != self._rank]
        if absent:
            reasons.append(f"rank(s) {self._listed(absent)} did not come within {limit:g} s")
        return DeadlineExceededError(
            f"monitored_barrier of group {self.name!r}: {'; '.join(reasons)}"
        )

    def _listed(self, ranks: Sequence[int]) -> str:
        """Return the world ranks of some members, as text."""
        return ", ".join(str(self.ranks[rank]) for rank in ranks)

    def _collect_reports(
        self, tag: int, deadline: float, limit: float, every: bool
    ) -> tuple[list[int], list[int]]:
        """Wait for the other members, and tell them which ones are missing.

        Returns:
            The group ranks that have not come, all or the first; and those that came in time and
            have given up meanwhile, since this one came late.
        """
        others = range(1, self._size)
        missing = self._silent(others, tag, deadline)
        told = missing if every else missing[:1]
        for rank in others:
            verdict = np.zeros(self._size, np.int8)
            verdict[told] = 1
            verdict[rank] = rank in missing  # a late rank is told so, whichever others are late
            self._begin_message(Op("send", self, verdict, root=rank, tag=tag))
        came = [rank for rank in others if rank not in missing]
        # Those that have given up meanwhile do not answer.
        gone = self._silent(came, tag, max(deadline, time.monotonic() + limit))
        return told, gone

    def _report_to_first(self, tag: int, deadline: float) -> list[int]:
        """Report to the first member, and return the group ranks that it says are missing."""
        verdict = np.zeros(self._size, np.int8)
        here = np.ones(1, np.int8)
        self._begin_message(Op("send", self, here, root=0, tag=tag))
        answer = self._begin_message(Op("recv", self, None, verdict, root=0, tag=tag))
        if not _has_ended(answer, deadline):
            return [0]
        self._begin_message(Op("send", self, here, root=0, tag=tag))
        return [int(rank) for rank in np.flatnonzero(verdict)]

    def _silent(self, ranks: Sequence[int], tag: int, deadline: float) -> list[int]:
        """Return the members that do not send a message in time."""
        said = np.zeros((self._size, 1), np.int8)
        works = {
            rank: self._begin_message(Op("recv", self, None, said[rank], root=rank, tag=tag))
            for rank in ranks
        }
        return [rank for rank, work in works.items() if not _has_ended(work, deadline)]


def _has_ended(work: RequestWork, deadline: float) -> bool:
    try:
        return work.wait(max(deadline - time.monotonic(), 0.0))
    except DeadlineExceededError:
        return work.is_completed()
