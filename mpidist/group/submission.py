"""The order in which the operations of a group run, their time limits, and their errors."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import time as wall_time
from typing import TYPE_CHECKING, Any

from mpidist.errors import DeadlineExceededError, GroupBrokenError
from mpidist.group.backend import Backend
from mpidist.group.consistency import (
    ASYNC_WAIT_S,
    COMPARED_AT_FIRST,
    PERIOD,
    Comparison,
    checksum_of,
    signature_of,
)
from mpidist.group.gpu_operation import GpuOp
from mpidist.group.gpu_rule import GpuRule
from mpidist.group.ipc_backend import IpcBackend
from mpidist.group.mpi_backend import MpiBackend, backend_error, in_one_line
from mpidist.group.nccl_backend import NcclBackend
from mpidist.group.operation import SHAPED, SIZED, GroupInfo, Op, Signature
from mpidist.mpi import PendingOps, fork, pending_ops, watched
from mpidist.recorder import group_recorder
from mpidist.work import Work, gather_works

if TYPE_CHECKING:
    from mpi4py import MPI

_POLLED = 4  # number of pending Works that each call polls
# Longest wait in one operation before pending comparisons are tested again, in seconds.
_SLICE_S = 0.02


class Submission:
    """Runs the operations of one group. Collectives start in the order in which they are submitted.

    Args:
        comm: The communicator of the group.
        info: The facts about the group.
        limit: Time limit of every operation, in seconds; None for none.
        debug: The group's ``MPIDIST_DEBUG``: ``"off"``, ``"info"`` or ``"detail"``.
        rule: The rule for arrays on GPUs.
        device: Index of this rank's GPU, or None.

    Attributes:
        limit: Time limit of every operation, in seconds; None for none.
        freed: True once the group was destroyed.
        expects_late_messages: True after a ``monitored_barrier`` without all members.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        info: GroupInfo,
        limit: float | None,
        debug: str,
        rule: GpuRule,
        device: int | None,
    ) -> None:
        self.limit = limit
        self.freed = False
        self.expects_late_messages = False
        self._comm = comm
        self._info = info
        self._number = info.number
        self._waits: PendingOps = pending_ops
        self._record = group_recorder(info.number, info.name, info.ranks)
        self._counts, self._current = self._waits.counts, self._waits.current
        self._sequence = 0
        self._refusing = False  # True if ``freed``, ``_broken_by`` or ``_late`` is set
        self._broken_by: str | None = None  # the operation that broke the group, in words
        self._difference: BaseException | None = None  # the ValueError of the failed comparison
        self._late: Work | None = None
        self._state_lock = threading.Lock()  # protects these four, and ``_uncompared``
        # MPI uses the arrays of pending works, whether or not the caller keeps the handles.
        self._pending: OrderedDict[int, Work] = OrderedDict()
        self._backend = MpiBackend(comm, self._waits, self._pending)
        self._error = self._backend.error
        self._run_by_backend = self._backend.run
        self._rule, self._device = rule, device
        self._gpu_backend: NcclBackend | IpcBackend | None = None  # made by the first operation
        # MPI requires the collectives of a group in one order, whichever thread calls them.
        self._turn = threading.Lock()
        self._collecting: dict[int, list[Op]] = {}  # by thread
        self._compares = debug != "off"
        self._compares_all = debug == "detail"
        self._log: list[Signature] = []  # since the last comparison
        self._next_compared = 1  # number of a collective
        # Works that depend on a pending comparison, in the order of their starts.
        self._uncompared: list[_UncomparedWork] = []

    def submit(self, op: Op, async_op: bool, outputs: Sequence[Any] | None = None) -> Work | None:
        """Collective. Run or start a collective.

        Args:
            op: The operation.
            async_op: Return a Work instead of waiting for the result.
            outputs: The arrays that ``result()`` of the Work returns, as a list; by default
                ``op.outputs``.

        Returns:
            A Work if ``async_op``, else None. None within a ``with coalesce()`` block, which only
            records the operation.

        Raises:
            DeadlineExceededError: The time limit passed.
            DistBackendError: MPI failed.
            GroupBrokenError: The group cannot go on after an earlier operation.
            ValueError: The members call different operations.
        """
        if self._collecting and self._collect(op, outputs):
            return None
        limit = self.limit if op.limit is None else op.limit
        if fork.unusable:  # the lock may be locked for ever in a forked child
            fork.check_mpi()
        if self._pending:  # before the lock is taken: callbacks of works may submit operations
            self._poll_pending()
        comparison, left, record = None, limit, self._record
        if self._uncompared and not async_op:
            if self._refusing:
                self._check_usable()
            left = self._wait_for_comparisons(left)
        if not self._turn.acquire(False):  # by keyword it takes twice as long
            left = self._wait_for_turn(op, limit, left)
        try:
            if self._refusing:
                self._check_usable()
            self._sequence = sequence = op.sequence = self._sequence + 1
            self._counts[self._number] = sequence
            if self._compares:
                # The usual signatures are made here: a call would double their cost.
                nonblocking = limit is not None or bool(async_op)
                array = op.recv if op.send is None else op.send
                signature = op.signature
                if signature is not None and signature[5] is nonblocking:
                    pass  # a prepared operation that runs again
                elif op.name == "barrier":
                    signature = "barrier", 0, -1, -1, "", nonblocking
                elif array is not None and op.name in SHAPED:
                    shape, kind = array.shape, array.dtype.char
                    signature = op.name, +op.reduce, op.root, shape, kind, nonblocking
                elif array is not None and op.name in SIZED:
                    signature = op.name, 0, op.root, array.nbytes, "", nonblocking
                else:
                    signature = signature_of(op, nonblocking)
                op.signature = signature
                self._log.append(signature)
            if record is not None:
                slot = record.begin(op, op.signature or op.facts())
            if self._compares and sequence >= self._next_compared:
                comparison, left = self._compare(op, left, async_op)
            if async_op and outputs is not None:
                op.outputs = list(outputs)
            # This collective may start while the comparison of an earlier one is pending. Its Work
            # must not succeed before that comparison.
            if comparison is None and self._uncompared:
                comparison = self._uncompared[-1].comparison
            if (
                not async_op
                and comparison is None
                and (op.__class__ is not GpuOp or (limit is None and not self._has_queued()))
            ):
                self._run(op, limit, left)
                if record is not None:
                    record.times[slot] = wall_time()
                return None
            work = self._start(op) if comparison is None else self._start_uncompared(op, comparison)
        finally:
            self._turn.release()
        work.limit = limit
        if record is not None:
            self._record_end(op, work)
        if async_op:
            return work
        self._wait_within(op, work, limit, left)
        return None

    def submit_for_result(self, op: Op, *, continues: bool = False) -> None:
        """Collective. Run a collective whose result the caller needs at once.

        Args:
            op: The collective.
            continues: Whether an earlier collective of the same operation has run. An error then
                always breaks the group.

        Raises:
            ValueError: This thread collects operations.
            Exception: As in :meth:`submit`.
        """
        if self.is_collecting():
            raise ValueError(
                f"{op.name} of objects or of unequal parts needs its result at once: group "
                f"{self._info.name!r} cannot collect it for later"
            )
        try:
            self.submit(op, False)
        except ValueError:  # on all members alike
            raise
        except BaseException as error:
            if op.sequence or continues:
                self.mark_broken(op.name, error)
            raise

    def run_message(self, op: Op) -> int:
        """Send or receive. Return the group rank of the peer."""
        fork.check_mpi()
        self.check_alive()
        limit = self.limit if op.limit is None else op.limit
        record = self._record
        if record is not None:
            record.begin(op, op.facts())
            record.locate(op)
        self._run(op, limit, limit)
        if record is not None:
            record.end(op)
        return op.root

    def run_message_of_collective(self, op: Op) -> None:
        """Send or receive a message that is part of a collective. An error breaks the group."""
        try:
            self.run_message(op)
        except BaseException as error:
            self.mark_broken(op.name, error)
            raise

    def start_message(self, op: Op) -> Work:
        """Start a send or a receive and return its Work."""
        self._poll_pending()
        record = self._record
        if record is not None:
            record.begin(op, op.facts())
            record.locate(op)
        work = self._start(op)
        work.limit = self.limit if op.limit is None else op.limit
        if record is not None:
            self._record_end(op, work)
        return work

    def wait_for_all(self, name: str, works: Sequence[Work], limit: float) -> None:
        """Wait for collectives that were started, within one time limit.

        Args:
            name: Their common name, for messages.
            works: Their Works.
            limit: Seconds.

        Raises:
            DeadlineExceededError: The limit passed. The group refuses new collectives until these
                have ended.
        """
        whole = gather_works(name, list(works))
        whole.block(time.monotonic() + limit)
        if not whole.is_completed():
            self._set_late(whole)
            raise self._past_its_limit(name, limit)
        whole.wait()

    @contextmanager
    def collecting(self) -> Iterator[list[Op]]:
        """Collect the collectives that this thread submits in the block; none of them starts."""
        thread = threading.get_ident()
        outer = self._collecting.get(thread)
        ops: list[Op] = []
        self._collecting[thread] = ops
        try:
            yield ops
        finally:
            del self._collecting[thread]
            if outer is not None:
                self._collecting[thread] = outer

    def is_collecting(self) -> bool:
        """Return whether this thread collects operations."""
        return bool(self._collecting) and threading.get_ident() in self._collecting

    def mark_broken(self, name: str, error: BaseException, *, differs: bool = False) -> None:
        """Refuse all later collectives, since other ranks may be in another collective.

        Args:
            name: The operation that broke the group. The first one is kept.
            error: Its error. Only the text is kept, because a traceback keeps arrays.
            differs: Whether the error comes from a comparison. Later GroupBrokenErrors then have it
                as their cause.
        """
        if differs:
            reason = f"differed between ranks ({in_one_line(error)})"
        elif isinstance(error, DeadlineExceededError):
            reason = "was left halfway by its time limit"
        elif isinstance(error, Exception):
            reason = f"was left halfway by an error ({in_one_line(error)})"
        else:
            reason = f"was left halfway by an interrupt ({type(error).__name__})"
        with self._state_lock:
            if self._broken_by is None:
                self._broken_by = f"{name} {reason}"
                self._difference = error if differs else None
            self._refusing = True

    def test_comparisons(self) -> None:
        """Test the pending comparisons in order, so that all members end them in one order.

        A difference ends all operations that started before their comparisons ended.
        """
        for work in list(self._uncompared):
            if not work.comparison.is_completed():
                return
            error = work.comparison.error
            if error is not None:
                self.mark_broken(work.name, error, differs=isinstance(error, ValueError))
                with self._state_lock:
                    broken, self._uncompared = self._uncompared, []
                for one in broken:
                    one.complete(error=error)
                return
            with self._state_lock, suppress(ValueError):  # another thread has removed it
                self._uncompared.remove(work)

    def forget(self, work: Work) -> None:
        """Remove a work that has ended from the pending works."""
        self._pending.pop(id(work), None)

    def check_alive(self) -> None:
        """Raise ValueError if the group was destroyed."""
        if self.freed:
            raise ValueError(f"group {self._info.name!r} was destroyed and cannot be used any more")

    def free(self) -> None:
        """Collective. Release the communicator, unless a member may still have messages on it.

        Raises:
            ValueError: The members have called different collectives since the last comparison.
        """
        self.check_alive()
        self.freed = self._refusing = True
        if self._gpu_backend is not None:
            late = self._late is not None and not self._late.is_completed()
            if late or self._broken_by is not None:
                self._gpu_backend.abandon()
            else:
                self._gpu_backend.free()  # waits for its pending operations
        pending = [work for work in list(self._pending.values()) if not work.is_completed()]
        clean = not pending and not self.expects_late_messages and self._broken_by is None
        with watched(f"the release of group {self._info.name!r}", self._comm.Get_group()):
            calls = (self._sequence, checksum_of(self._log)[1]) if self._compares else (0, 0)
            different = self._backend.free(clean=clean, calls=calls)
        if different is not None:
            info = self._info
            raise ValueError(
                f"the members of group {info.name!r} have called different collectives: rank "
                f"{info.ranks[info.rank]} has called {self._sequence}, and rank "
                f"{info.ranks[different]} has not called the same ones. Results since number "
                f"{self._sequence - len(self._log) + 1} may be wrong. Set MPIDIST_DEBUG=detail to "
                "get an error at the call"
            )

    def abort(self) -> None:
        """Refuse every later operation. The communicator is not released."""
        self.freed = self._refusing = True

    # Inside

    def _run(self, op: Op, limit: float | None, left: float | None) -> None:
        """Run an operation within the rest of its time limit. One on GPUs has no limit."""
        key, late = id(op), None
        self._current[key] = op
        try:
            if op.__class__ is GpuOp:
                self._backend_for_gpus().run(op)
            elif left is None:
                self._run_by_backend(op)
            else:
                late = self._backend.run_within(op, time.monotonic() + left)
        except BaseException as error:  # an interrupt between two messages, too
            self._handle_failure(op, error)
            if isinstance(error, self._error):
                self.check_alive()
                raise backend_error(op, error) from error
            raise
        finally:
            self._current.pop(key, None)
        if late is not None:
            if self._record is not None:
                self._record_end(op, late)
            raise self._keep_late(op, late, limit)
        if op.finish is not None:
            op.finish()

    def _record_end(self, op: Op, work: Work) -> None:
        """Record the end of an operation when its Work ends."""
        assert self._record is not None
        work.add_done_callback(self._record.end_callback(op))

    def _start(self, op: Op) -> Work:
        fork.check_mpi()
        self.check_alive()  # Open MPI's nonblocking calls may crash where blocking ones fail
        try:
            backend: Backend = self._backend
            if op.__class__ is GpuOp:
                backend = self._backend_for_gpus()
            return backend.start(op)
        except BaseException as error:
            self._handle_failure(op, error)
            if isinstance(error, self._error):
                raise backend_error(op, error) from error
            raise

    def _handle_failure(self, op: Op, error: BaseException) -> None:
        """Take back the count of a failed collective. Break the group if it was left halfway."""
        if self._record is not None:
            self._record.end(op, failed=True)
        if op.sequence:
            if op.halfway:
                self.mark_broken(op.name, error)
            # If this rank leaves now, the watchdogs of the waiting ranks must end the job.
            self._counts[self._number] = op.sequence - 1

    def _has_queued(self) -> bool:
        """Return whether an operation on GPUs must wait for earlier ones.

        It then waits without the lock, since the callbacks of earlier ones may submit operations.
        """
        return self._gpu_backend is not None and self._gpu_backend.has_queued

    def _backend_for_gpus(self) -> NcclBackend | IpcBackend:
        """Return the backend that the group's rule names. Collective at the first call."""
        if self._gpu_backend is None:
            assert self._device is not None
            try:
                kind = NcclBackend if self._rule.backend == "nccl" else IpcBackend
                self._gpu_backend = kind(
                    self._comm, self._device, self._waits, self._pending, self.mark_broken
                )
            except BaseException as error:
                self.mark_broken("first operation on GPUs", error)
                raise
        return self._gpu_backend

    def _poll_pending(self) -> None:
        """Test some of the pending works, in turn, for callers that do not wait for theirs."""
        if self._uncompared:
            self.test_comparisons()
        if self._late is not None:
            self._late.is_completed()
        for key, work in list(itertools.islice(self._pending.items(), _POLLED)):
            if not work.is_completed():
                with suppress(KeyError):  # another thread has completed it meanwhile
                    self._pending.move_to_end(key)

    def _wait_for_turn(self, op: Op, limit: float | None, left: float | None) -> float | None:
        """Wait for the operation of another thread. Return the rest of the limit.

        Args:
            op: The operation.
            limit: Its time limit, for the message.
            left: The rest of the limit.
        """
        if left is None:
            self._turn.acquire()
            return None
        began = time.monotonic()
        if not self._turn.acquire(timeout=min(max(left, 0.0), threading.TIMEOUT_MAX)):
            info = self._info
            raise DeadlineExceededError(
                f"{op.name} of group {info.name!r} has not begun within {limit:g} s on rank "
                f"{info.ranks[info.rank]}: another thread's operation is running"
            )
        return max(left - (time.monotonic() - began), 0.0)

    def _start_uncompared(self, op: Op, comparison: Work) -> Work:
        """Start an operation while a comparison is pending, and return its Work."""
        try:
            work = _UncomparedWork(comparison, self._start(op), self)
        except BaseException as error:
            self.mark_broken(op.name, error)
            raise
        self._pending[id(work)] = work
        with self._state_lock:
            self._uncompared.append(work)
        return work

    def _compare(
        self, op: Op, limit: float | None, async_op: bool
    ) -> tuple[Work | None, float | None]:
        """Collective. Compare the logs of all members before an operation.

        Returns:
            The Work of the comparison if it is still pending, else None; and the rest of the limit.
            An asynchronous operation waits at most ASYNC_WAIT_S, except under ``detail``. Other
            operations wait up to the time limit.

        Raises:
            ValueError: The logs differ; on all members.
        """
        number, began = op.sequence, time.monotonic()
        if self._record is not None:
            self._record.locate(op)
        if self._compares_all or number < COMPARED_AT_FIRST:
            self._next_compared = number + 1
        else:
            self._next_compared = (number // PERIOD + 1) * PERIOD
        try:
            log, self._log = self._log, []
            comparison = Comparison(op, log, self._comm)
            work = self._start(comparison)
            wait_s = limit
            if async_op and not self._compares_all:
                wait_s = ASYNC_WAIT_S if op.sequence <= COMPARED_AT_FIRST else 0.0
            work.block(math.inf if wait_s is None else time.monotonic() + wait_s)
            pending = None if work.is_completed() else work
            if pending is None:
                work.wait()
        except BaseException as error:
            if self._record is not None:
                self._record.end(op, failed=True)
            # Other ranks may have started the operation.
            self.mark_broken(op.name, error, differs=isinstance(error, ValueError))
            raise
        left = None if limit is None else max(limit - (time.monotonic() - began), 0.0)
        return pending, left

    def _wait_for_comparisons(self, limit: float | None) -> float | None:
        """Wait for the comparisons of operations that have started. Return the rest of the limit.

        A blocking operation would not return from MPI if a comparison failed meanwhile.
        """
        deadline = math.inf if limit is None else time.monotonic() + limit
        for work in list(self._uncompared):
            # One registration for the whole loop: the watchdog counts from the registration.
            with work.waiting():
                while (
                    work in self._uncompared
                    and not self._refusing
                    and (now := time.monotonic()) < deadline
                ):
                    work.comparison.block(min(deadline, now + _SLICE_S))
                    self.test_comparisons()
        return None if limit is None else max(deadline - time.monotonic(), 0.0)

    def _set_late(self, work: Work) -> None:
        with self._state_lock:
            self._late, self._refusing = work, True

    def _keep_late(self, op: Op, work: Work, limit: float | None) -> DeadlineExceededError:
        """Keep the Work of an operation that is past its limit. Return the error to raise."""
        assert limit is not None
        if op.sequence:
            self._set_late(work)
        else:
            op.late = work
        hint = "; a monitored_barrier() before it names the late ranks" if op.sequence else ""
        return self._past_its_limit(op.describe(), limit, hint)

    def _wait_within(self, op: Op, work: Work, limit: float | None, left: float | None) -> None:
        """Wait for the rest of a time limit, in seconds; without a limit until the end."""
        try:
            work.wait(left)
        except DeadlineExceededError:
            if limit is None:
                raise
            raise self._keep_late(op, work, limit) from None

    def _past_its_limit(self, text: str, limit: float, hint: str = "") -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{text} has not completed within {limit:g} s on rank "
            f"{self._info.ranks[self._info.rank]}; after the timeout it stays pending, and its "
            f"arrays must not be used{hint}"
        )

    def _collect(self, op: Op, outputs: Sequence[Any] | None) -> bool:
        ops = self._collecting.get(threading.get_ident())
        if ops is None:
            return False
        if outputs is not None:
            op.outputs = list(outputs)
        ops.append(op)
        return True

    def _check_usable(self) -> None:
        self.check_alive()
        group, rank = f"group {self._info.name!r}", self._info.ranks[self._info.rank]
        late = self._late
        # The test comes first: the end of the Work may break the group.
        late_is_pending = late is not None and not late.is_completed()
        if self._broken_by is not None:
            raise GroupBrokenError(
                f"{group} is broken on rank {rank}: its {self._broken_by}, so ranks may be at "
                "different collectives; make a new group"
            ) from self._difference
        if late is not None and late_is_pending:
            raise GroupBrokenError(
                f"{group} takes no collective on rank {rank}: its {late.name} is past its time "
                "limit and still pending; wait until the missing ranks have joined it, or make a "
                "new group of the ranks that answer"
            )
        with self._state_lock:
            if self._late is late:
                self._late = None
            broken = self._broken_by is not None
            self._refusing = self.freed or broken or self._late is not None


class _UncomparedWork(Work):
    """The Work of an operation that started before its comparison, or an earlier one, had ended.

    If the comparison finds a difference, the Work ends with the error. MPI's operation stays
    pending.

    Args:
        comparison: The Work of the comparison.
        work: The Work of the operation.
        submission: The submission of the group.

    Attributes:
        comparison: The Work of the comparison.
    """

    def __init__(self, comparison: Work, work: Work, submission: Submission) -> None:
        super().__init__(work.name, self._drive_parts)
        self.comparison = comparison
        self._work = work
        self._submission = submission

    def is_completed(self) -> bool:
        """Return whether the operation has ended, or the members differ."""
        if not self._done:
            self._submission.test_comparisons()
            self._test_parts()
        return self._done

    def _test_parts(self) -> None:
        compared = self.comparison.is_completed() and self.comparison.error is None
        if compared and self._work.is_completed():
            error = self._work.error
            self.complete(None if error is not None else self._work.result(), error)

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        """End the work; see :meth:`mpidist.Work.complete`."""
        self._submission.forget(self)
        super().complete(value, error)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the watchdog, in the block, that a thread waits for the operation."""
        with self.comparison.waiting(), self._work.waiting():
            yield

    def _drive_parts(self, _: Work, deadline: float) -> None:
        with self.waiting():
            while not self.is_completed() and (now := time.monotonic()) < deadline:
                part = self._work if self.comparison.is_completed() else self.comparison
                # In slices, because the comparison of an earlier operation may fail meanwhile.
                part.block(min(deadline, now + _SLICE_S))
