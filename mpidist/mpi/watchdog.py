"""The thread that checks whether the pending operations of this rank can still complete."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mpidist.config import config
from mpidist.mpi import metrics, records
from mpidist.mpi.pending import (
    ALL_MEMBERS,
    PendingOp,
    PendingOps,
    Wait,
    WatchedCall,
    missing_rank,
    waits,
)
from mpidist.runner import current_frames

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_STATE_PERIOD_S = 1.0
_LEAVE_TAG = 1
_CALLS_TAG = 2
# Seconds of waiting in a collective after which its call is compared with those of the other ranks.
_COMPARED_AFTER_S = 5.0
_CALLS_PERIOD_S = 1.0
_MAX_SHOWN = 4  # ranks in a message
# Collectives that no rank leaves before all have joined. A rank may leave another one, such as a
# broadcast, and wait in the next collective while the data of other ranks is still in transfer.
_SYNCHRONIZING = ("barrier", "all_reduce", "all_gather", "reduce_scatter")
_TRANSFER_S = 300.0  # longest such transfer
# Seconds after which a received call is outdated: a rank that still waits would have sent it again.
_CALLS_VALID_S = 5.0


def _expected(operation: PendingOp) -> tuple[str, ...]:
    """Return the members that must make a call which the flight recorder does not have."""
    if operation.peer != ALL_MEMBERS:
        return ()
    return tuple(f"rank {rank}" for rank in operation.members)


class Watchdog:
    """The watchdog thread, and the leave notes that it reads until it is stopped.

    Args:
        control: Carries the messages between watchdogs.
        pending: The pending operations of this rank.
        identity: This rank.
        end_job: Ends the job; gets the reason and the stacks of all threads.

    Attributes:
        left: Time at which the leave note of each rank that has left arrived.
    """

    def __init__(
        self,
        control: MPI.Intracomm,
        pending: PendingOps,
        identity: records.Identity,
        end_job: Callable[[str, str], Any],
    ) -> None:
        self.left: dict[int, float] = {}
        self._control = control
        self._pending = pending
        self._identity = identity
        self._end_job = end_job
        self._counts_of_left: dict[int, dict[int, int]] = {}
        self._looked = 0.0
        self._offset_s = time.time() - time.monotonic()  # fixed, so that no moment is missed
        self._calls_sent = 0.0
        # By group and rank: sequence number and call of the blocking collective in which the rank
        # waits, and the times at which the first and the last message about it arrived.
        self._blocked: dict[tuple[int, int], tuple[int, str, float, float]] = {}
        self._sending: list[MPI.Request] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpidist-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. From now on the caller of :meth:`read_note` reads the leave notes."""
        self._stop.set()
        self._thread.join()
        self._write_state((), time.monotonic())

    def send_notes(self) -> list[MPI.Request]:
        """Send a leave note to every other rank. Return the requests of the messages."""
        counts = dict(self._pending.counts)
        others = [rank for rank in range(self._control.size) if rank != self._control.rank]
        return [self._control.isend(counts, rank, _LEAVE_TAG) for rank in others]

    def read_note(self) -> bool:
        """Read one leave note. Return False if none has arrived."""
        received = self._receive(_LEAVE_TAG)
        if received is None:
            return False
        rank, self._counts_of_left[received[0]] = received
        self.left[rank] = time.monotonic()
        return True

    def _receive(self, tag: int) -> tuple[int, Any] | None:
        """Return the sender and the object of a message that has arrived, or None."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self._control.improbe(tag=tag, status=status)
        return None if message is None else (status.source, message.recv())

    def _watch(self) -> None:
        from mpi4py import MPI

        written = time.monotonic()
        while not self._stop.wait(_PERIOD_S) and not MPI.Is_finalized():
            while self.read_note():
                pass
            now = time.monotonic()
            pending = self._pending.observe(now)
            if now - written >= _STATE_PERIOD_S:
                written = now
                self._write_state(pending, now)
            self._check(pending, now)
            self._compare_calls(pending, now)
            del pending  # a reference would keep the arrays of the operations alive

    def _write_state(self, pending: Sequence[tuple[PendingOp, float]], now: float) -> None:
        at = time.time()
        shown = [
            Wait(
                operation.describe(), _expected(operation), at - (now - since), operation.slot, True
            )
            for operation, since in pending
        ]
        shown += list(waits.values())
        long = [asdict(wait) for wait in shown if at - wait.since >= _STATE_PERIOD_S]
        counts = dict(self._pending.counts)
        records.write_state(self._identity, metrics.snapshot(), long, counts)

    def _check(self, pending: Sequence[tuple[PendingOp, float]], now: float) -> None:
        """Report long waits. End the job if an operation can never complete, or waits too long."""
        before, self._looked = self._looked, now
        for operation, since in pending:
            waited_s = now - since
            gone = missing_rank(operation, since, self.left, self._counts_of_left, now)
            if gone is not None:
                self._end(
                    f"{operation.describe()} waits for rank {gone}, whose script has ended; every "
                    "rank of a group must make the same calls"
                )
            if waited_s > config.stall_abort_s:
                self._end(
                    f"{operation.describe()} has waited for {waited_s:.0f} s, the limit set by "
                    "MPIDIST_STALL_ABORT_S"
                )
            if isinstance(operation, WatchedCall) and waited_s > max(
                operation.limit_s, config.stall_s
            ):
                self._end(operation.overdue(waited_s))
            if self._passes(since, before, now):
                self._report_stall(operation, waited_s)
        for wait in list(waits.values()):
            began = wait.since - self._offset_s
            if wait.tasks and self._passes(began, before, now):
                records.write_stall(self._identity, wait.what, now - began)

    def _passes(self, since: float, before: float, now: float) -> bool:
        """Return whether a wait has become long, or very long, since the last look."""
        return any(
            before - since <= limit_s < now - since
            for limit_s in (config.stall_s, records.STALLS_AGAIN * config.stall_s)
        )

    def _report_stall(self, operation: PendingOp, waited_s: float) -> None:
        """Tell ``mpidist run``, which reports on all ranks. Without it, log a warning."""
        if records.write_stall(self._identity, operation.describe(), waited_s):
            return
        # Messages are not compared.
        hint = " (MPIDIST_DEBUG=detail shows collectives that differ)"
        logger.warning(
            "%s: %s has waited for %.0f s; the other ranks have not made the call, or are stuck "
            "themselves%s",
            self._identity,
            operation.describe(),
            waited_s,
            hint if operation.sequence else "",
        )

    def _compare_calls(self, pending: Sequence[tuple[PendingOp, float]], now: float) -> None:
        """Compare the collectives in which ranks have waited for long. End the job if they differ.

        No error can be raised in threads that are inside MPI.
        """
        calls = {
            (operation.group_number, operation.sequence): operation
            for operation, since in pending
            if operation.sequence and now - since >= _COMPARED_AFTER_S
        }
        while (received := self._receive(_CALLS_TAG)) is not None:
            rank, (place, other, is_blocking) = received
            if is_blocking:
                self._note_blocked(rank, place, other, now)
            if place in calls and (call := calls[place].call()) not in ("", other):
                self._end(
                    "the ranks of a group call different collectives: "
                    f"{calls[place].describe()} is {call} on rank {self._control.rank} and "
                    f"{other} on rank {rank}"
                )
        for operation, since in pending:
            if operation.is_blocking and now - since >= config.stall_s:
                self._check_positions(operation, now)
        if now - self._calls_sent < _CALLS_PERIOD_S:
            return
        self._calls_sent = now
        self._sending = [request for request in self._sending if not request.Test()]
        for place, operation in calls.items():
            if call := operation.call():
                self._sending += [
                    self._control.isend((place, call, operation.is_blocking), rank, _CALLS_TAG)
                    for rank in operation.members
                    if rank != self._control.rank
                ]

    def _note_blocked(self, rank: int, place: tuple[int, int], call: str, now: float) -> None:
        group, sequence = place
        before = self._blocked.get((group, rank))
        first = before[2] if before is not None and before[0] == sequence else now
        self._blocked[group, rank] = sequence, call, first, now

    def _check_positions(self, operation: PendingOp, now: float) -> None:
        """End the job if all members wait in blocking collectives of different sequence numbers.

        Then a rank has skipped a collective or called an extra one. If any member is not blocked,
        that member may be late, and the other members must wait.
        """
        positions = {self._control.rank: (operation.sequence, operation.call())}
        shortest_s = math.inf
        for rank in operation.members:
            if rank != self._control.rank:
                sequence, call, first, last = self._blocked.get(
                    (operation.group_number, rank), (0, "", now, now)
                )
                waited_s = _COMPARED_AFTER_S + now - first
                if now - last > _CALLS_VALID_S or waited_s < config.stall_s:
                    return
                positions[rank] = sequence, call
                shortest_s = min(shortest_s, waited_s)
        highest = max(positions.values())[0]
        behind = [call for sequence, call in positions.values() if sequence < highest]
        needed_s = config.stall_s
        if any(call.partition("(")[0] not in _SYNCHRONIZING for call in behind):
            needed_s = max(config.stall_s, _TRANSFER_S)
        if behind and shortest_s >= needed_s:
            shown = "; ".join(
                f"rank {rank} in {call}, its number {sequence}"
                for rank, (sequence, call) in sorted(positions.items())[:_MAX_SHOWN]
            )
            self._end(
                f"all ranks of a group wait in different collectives: {shown}; a rank has skipped "
                "a collective or called an extra one (set MPIDIST_DEBUG=detail to find the call)"
            )

    def _end(self, reason: str) -> None:
        """End the job, and print the stacks of all other threads."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in current_frames().items()
            if ident != threading.get_ident()
        ]
        self._end_job(reason, "\n".join(stacks))
