"""A task: evaluates a part of an iteration into a buffer or into a stream of a snapshot.

Its inputs are the splits of the source. Its checkpoints are states of its iterator, from which
another worker can continue.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.calls import RpcClient
from dataservice.consumption import mode_of
from dataservice.dataset.base import (
    Context,
    ElementIterator,
    Node,
    Scope,
    Share,
    Splits,
    SplitsFailed,
    StageTimes,
)
from dataservice.dataset.execution import running_function
from dataservice.errors import code_and_message
from dataservice.payload import dumps, indexed_checkpoint
from dataservice.proto import dataservice_pb2 as pb
from dataservice.snapshot.writer import StreamWriter
from dataservice.work.buffers import CrossTrainerBuffer, ElementBuffer, buffer_for
from mpidist import Request, Work
from mpidist.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)

logger = logging.getLogger(__name__)

# The times of the stages are measured for one element in so many.
_SAMPLED = 32
# The number of source indices that one call of StridedSplits.run() returns.
_AT_ONCE = 4096
# The shortest time between two states. Taking them costs at most a fiftieth of the time.
_PERIOD_S = 0.1
_SHARE = 50
# The largest state that the dispatcher keeps for the next worker of the part.
LARGEST_STATE = 1 << 20
# The longest time between two commits, for readers of the unfinished snapshot and for workers that
# may continue the stream.
_COMMIT_S = 10.0
_SHOWN = 60  # characters of a dataset's description in a report


class WithdrawnError(Exception):
    """The dispatcher has given the part of a task to another worker, or given it up."""


class StridedSplits(Splits):
    """Every n-th source index, for a fixed number of parts.

    Args:
        part: Number of the part.
        parts: The number of parts.
    """

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        self._part = part
        self._parts = parts

    def run(self, position: int) -> range:
        """Return indices from a position on. They never end."""
        first = self._part + position * self._parts
        return range(first, first + _AT_ONCE * self._parts, self._parts)


class DynamicSplits(Splits):
    """Splits of the source that a task requests from the dispatcher.

    The next split is requested ahead.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher.
        patience_s: How long to try to reach the dispatcher, in seconds.
    """

    def __init__(self, task_id: int, dispatcher: RpcClient, patience_s: float) -> None:
        super().__init__()
        self._task_id = task_id
        self._dispatcher = dispatcher
        self._patience_s = patience_s
        self._last = 0, range(0)  # position of the first index, and the indices
        self._ahead: tuple[int, Work] | None = None

    def run(self, position: int) -> range:
        """Return indices from a position on; see :class:`Splits`."""
        first, run = self._last
        if not first <= position < first + len(run):
            try:
                split = self._get(position)
                first, run = self._last = position, range(split.start, split.stop)
                if run:
                    self._ask_ahead(position + len(run))
            except Exception as error:
                raise SplitsFailed(error) from error
        return run[position - first :]

    def _ask_ahead(self, position: int) -> None:
        request = pb.GetSplitRequest(task_id=self._task_id, position=position)
        try:
            self._ahead = position, self._dispatcher.start("dispatcher/GetSplit", request)
        except UnavailableError:  # the dispatcher may be restarting; _get() repeats the request
            self._ahead = None

    def _get(self, position: int) -> pb.Split:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == position:
            try:
                return pb.Split.FromString(self._dispatcher.finish(ahead[1]).body)
            except (
                DeadlineExceededError,
                FailedPreconditionError,
                NotFoundError,
                UnavailableError,
            ):
                # The dispatcher may be restarting: request the split again. If another worker has
                # the part now, the second request fails as well.
                pass
        request = pb.GetSplitRequest(task_id=self._task_id, position=position)
        try:
            return self._dispatcher.call_with_retry(
                "dispatcher/GetSplit", request, pb.Split, self._patience_s
            )
        except (FailedPreconditionError, NotFoundError) as error:
            raise WithdrawnError(str(error)) from error


@dataclass(frozen=True)
class _Taken:
    """A state of the iterator.

    Attributes:
        index: Number of elements before it.
        state: The state.
        nbytes: Estimated size of its pickle in bytes.
        position: Position of the next source index.
    """

    index: int
    state: Any
    nbytes: int
    position: int


class Checkpoints:
    """Keeps the newest state that all consumers have passed, and all later states.

    An indexed dataset has a state at every element, so none is kept.

    Args:
        first: The checkpoint that the task began from.
        where: The task and its worker in words, for the log.
        period_s: The shortest time between two states, in seconds, if longer than _PERIOD_S.
        indexed: Whether the dataset is indexed.
    """

    def __init__(
        self, first: pb.Checkpoint, where: str, period_s: float = 0.0, *, indexed: bool = False
    ) -> None:
        self._first = first
        self._indexed = indexed
        self._where = where
        self._period_s = period_s
        self._taken: deque[_Taken] = deque()
        self._lock = threading.Lock()
        self._due = 0.0
        self._impossible: UnimplementedError | None = None
        self._reported = -1  # index of the newest checkpoint that the dispatcher has
        self._has_warned = False

    def is_due(self, *, early: bool = False) -> bool:
        """Return whether to take a state now.

        Args:
            early: Whether to ignore the shortest time between two states.
        """
        return self._impossible is None and (early or time.monotonic() >= self._due)

    def take(
        self,
        index: int,
        elements: ElementIterator,
        position: Callable[[], int],
        needed: int,
    ) -> None:
        """Take a state.

        Args:
            index: Number of elements of the part before the position of the iterator.
            elements: The iterator; no other thread uses it meanwhile.
            position: Returns the position of the next source index; called after the state is
                taken.
            needed: Elements before this index are not needed any more.
        """
        began = time.monotonic()
        if self._indexed:
            self._due = began + max(_PERIOD_S, self._period_s)
            return
        try:
            state = elements.get_state()
        except UnimplementedError as error:
            # Another worker can evaluate the part again from its beginning.
            self._impossible = error
            logger.info("%s has no checkpoints: %s", self._where, error)
            return
        taken = _Taken(index, state, size_of(state), position())
        with self._lock:
            self._taken.append(taken)
            while len(self._taken) > 1 and self._taken[1].index <= needed:
                self._taken.popleft()
        cost = time.monotonic() - began
        self._due = began + cost + max(_PERIOD_S, self._period_s, _SHARE * cost)

    def before(self, index: int) -> pb.Checkpoint:
        """Return the newest checkpoint at or before an element.

        Raises:
            UnimplementedError: A source has no state, or the state cannot be pickled.
        """
        if self._impossible is not None:
            raise self._impossible
        if self._indexed and index > self._first.index:
            return indexed_checkpoint(index)
        newest = self._newest(index)
        if newest is None:
            return self._first
        try:
            state = dumps(newest.state)
        except Exception as error:
            self._impossible = UnimplementedError(
                f"the state of an iterator cannot be pickled: {error!r}"
            )
            logger.info("%s has no checkpoints: %s", self._where, self._impossible)
            raise self._impossible from error
        return pb.Checkpoint(index=newest.index, state=state, position=newest.position)

    def report(self, needed: int) -> pb.Checkpoint | None:
        """Return a checkpoint for the dispatcher, if there is a new one of at most LARGEST_STATE.

        Larger states are not pickled. The first one is logged.

        Args:
            needed: Index of the first element that is still needed.
        """
        if self._indexed:
            if needed <= max(self._reported, self._first.index):
                return None
            self._reported = needed
            return indexed_checkpoint(needed)
        newest, small = self._newest(needed), self._newest(needed, LARGEST_STATE)
        if newest is not None and newest is not small:
            self._warn(newest.nbytes)
        if small is None or small.index <= self._reported or self._impossible is not None:
            return None
        self._reported = small.index
        try:
            checkpoint = self.before(small.index)
        except UnimplementedError:
            return None
        if len(checkpoint.state) > LARGEST_STATE:  # the estimate was too low
            self._warn(len(checkpoint.state))
            return None
        return checkpoint

    def _newest(self, index: int, limit: float = float("inf")) -> _Taken | None:
        """Return the newest state of at most ``limit`` bytes at or before an element."""
        with self._lock:
            fit = [each for each in self._taken if each.index <= index and each.nbytes <= limit]
        return fit[-1] if fit else None

    def _warn(self, nbytes: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s: the state of its iterator has about %d bytes, and the dispatcher keeps at most "
            "%d. If this worker is lost, another one evaluates the part again from its beginning, "
            "or from its last smaller state. A smaller shuffle buffer, or a shuffle before the map "
            "that makes large elements, makes the state smaller",
            self._where,
            nbytes,
            LARGEST_STATE,
        )


def size_of(state: Any) -> int:
    """Return the approximate size of an object's pickle in bytes, without pickling."""
    total, left, seen = 0, [state], set[int]()
    while left:
        each = left.pop()
        if isinstance(each, np.ndarray) and each.dtype != object:
            total += each.nbytes
        elif isinstance(each, str | bytes | bytearray):
            total += len(each)
        elif id(each) not in seen and not isinstance(each, type):
            seen.add(id(each))
            if isinstance(each, dict):
                left += [*each, *each.values()]
            elif isinstance(each, list | tuple | set | deque | np.ndarray):
                left += each
            else:
                left.append(getattr(each, "__dict__", ""))
                total += 8
    return total


class SnapshotStream:
    """Writes the elements of a task to a stream of a snapshot.

    Args:
        where: The task and its worker in words, for errors.
        lease: The part to write, and the path of the snapshot.
        finished: Called when the dispatcher has to learn of the end, see :meth:`report`.

    Attributes:
        where: As given.
        produced: Number of elements in the stream.
    """

    def __init__(self, where: str, lease: pb.Task, finished: Callable[[], None]) -> None:
        self.where = where
        self.produced = 0
        self._lease = lease
        self._finished = finished
        self._writer: StreamWriter | None = None
        self._result = pb.TaskProgress()

    @contextlib.contextmanager
    def open(self) -> Iterator[pb.Checkpoint | None]:
        """Open the stream; give the checkpoint to begin from, None if the stream is complete."""
        lease = self._lease
        with _unless_fenced():
            writer = StreamWriter(lease.path, lease.part, lease.attempt)
        with writer:
            self._writer = writer
            self.produced = writer.elements
            begin = pb.Checkpoint(index=writer.elements, state=writer.state or b"")
            yield None if writer.finished else begin

    def put(self, element: Any) -> bool:
        """Append an element; return True."""
        assert self._writer is not None
        with _unless_fenced():
            self._writer.append(element)
        self.produced += 1
        return True

    @property
    def is_full(self) -> bool:
        """True if the elements so far should be committed before the usual time."""
        return self._writer is not None and self._writer.full

    def commit(self, checkpoints: Checkpoints) -> None:
        """Make the elements so far durable, together with the state of the iterator behind them."""
        assert self._writer is not None
        try:
            state = checkpoints.before(self.produced).state
        except UnimplementedError:
            # If the worker is lost, another one writes the part again from its beginning. So no
            # element may be committed before the part is complete.
            return
        with _unless_fenced():
            self._writer.commit(state)

    def end(self) -> None:
        """Commit the rest, and tell the dispatcher the number of elements."""
        assert self._writer is not None
        with _unless_fenced():
            self._writer.finish(b"")
        self._result = pb.TaskProgress(ended=True, total=self._writer.elements)
        self._finished()

    def fail(self, error: BaseException) -> None:
        """Tell the dispatcher that the part cannot be saved."""
        code, message = code_and_message(error)
        message = f"{message} (while {self.where} saved its part)"
        self._result = pb.TaskProgress(code=code, message=message)
        self._finished()

    def report(self, progress: pb.TaskProgress) -> None:
        """Fill in how the part has ended, if it has."""
        progress.MergeFrom(self._result)


@contextlib.contextmanager
def _unless_fenced() -> Iterator[None]:
    """Raise WithdrawnError if a later attempt at the stream keeps this one from writing."""
    try:
        yield
    except AbortedError as error:
        raise WithdrawnError(str(error)) from error


class Task:
    """Evaluates a part on a thread of its own. The dispatcher names the part in a lease.

    Args:
        task_id: The dispatcher's number of the task.
        dispatcher: Calls the dispatcher. Its calls end when the worker is closed.
        patience_s: How long to try to reach the dispatcher, in seconds.
        dataset_of: Returns the dataset of a lease. It may call the dispatcher with the given
            client, and these calls end with the task.
        where: The worker in words, for errors.
        cache_bytes: Size of the window that trainers share, for a job with a cross-trainer cache.

    Attributes:
        thread: The thread, which :meth:`start` starts.
    """

    def __init__(
        self,
        task_id: int,
        dispatcher: RpcClient,
        patience_s: float,
        dataset_of: Callable[[pb.Task, RpcClient], Node],
        where: str,
        cache_bytes: int,
    ) -> None:
        self._task_id = task_id
        self._scope = Scope()
        self._dispatcher = RpcClient(
            dispatcher.endpoint,
            dispatcher.peer,
            dispatcher.what,
            lambda: self._scope.closed or dispatcher.stopped(),
        )
        self._patience_s = patience_s
        self._dataset_of = dataset_of
        self._where = f"{where}, task {task_id}"
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        # Calls of the buffer's methods that wait until the task has made the buffer.
        self._postponed: list[Callable[[ElementBuffer], None]] = []
        self._buffer: ElementBuffer | None = None
        self._stream: SnapshotStream | None = None
        self._checkpoints: Checkpoints | None = None  # until the part is known
        self._stages = StageTimes()
        self._shown = "unknown"  # until the part is known
        self._began = self._stopped_at = 0.0
        # The last state that find_wait() has seen: the index of the next element, and the time.
        self._seen = (-1, 0.0)
        self.thread = threading.Thread(
            target=self._run, name=f"dataservice-task-{task_id}", daemon=True
        )

    # For the worker

    def start(self) -> None:
        """Start the thread. Idempotent, but not for several threads at the same time.

        Raises:
            RuntimeError: The process cannot start another thread.
        """
        if self.thread.ident is None:
            self.thread.start()

    def ask(self, request: Request, body: pb.GetElementRequest) -> None:
        """Answer a consumer's request, now or later."""
        self._call_buffer(lambda buffer: buffer.ask(request, body))

    def release(self, client_id: int, used: list[int]) -> None:
        """Send a client no more elements. See :meth:`ElementBuffer.release`."""
        self._call_buffer(lambda buffer: buffer.release(client_id, used))

    def refresh(self, periods: int) -> None:
        """Answer old requests. See :meth:`ElementBuffer.refresh`."""
        if self._buffer is not None:
            self._buffer.refresh(periods)

    def close(self, error: Error) -> None:
        """Stop before the next element, and fail the requests of consumers. Idempotent.

        A task that has not begun must not be started during or after this call.
        """
        if self.thread.ident is None:
            self._set_any_buffer()
        self._call_buffer(lambda buffer: buffer.close(error))
        self._scope.close()

    def checkpoint(self, index: int) -> pb.Checkpoint:
        """Return the newest checkpoint at or before an element.

        Raises:
            NotFoundError: The task has not begun. The dispatcher knows its checkpoint.
            UnimplementedError: A source has no state, or the state cannot be pickled.
        """
        if self._checkpoints is None:
            raise NotFoundError(f"{self._where} has not begun")
        return self._checkpoints.before(index)

    def progress(self) -> pb.TaskProgress | None:
        """Return a new checkpoint and the end of the part; None if both are missing."""
        progress = pb.TaskProgress(task_id=self._task_id)
        if self._stream is not None:
            self._stream.report(progress)
        elif self._buffer is not None and self._checkpoints is not None:
            checkpoint = self._checkpoints.report(self._buffer.needed)
            if checkpoint is not None:
                progress.checkpoint.CopyFrom(checkpoint)
            self._buffer.report(progress)
        is_news = progress.ended or progress.code or progress.HasField("checkpoint")
        return progress if is_news else None

    def find_wait(self) -> tuple[str, Sequence[str], float] | None:
        """Return the wait of a task that has made no element since the last call; None otherwise.

        Only one thread calls this method, in every round of its loop.

        Returns:
            The arguments of :func:`mpidist.mpi.waiting_for`.
        """
        destination, thread = self._buffer or self._stream, self.thread.ident
        if destination is None or thread is None or not self.thread.is_alive():
            return None
        index, since = self._seen
        if index != destination.produced:
            self._seen = destination.produced, time.time()
            return None
        function = running_function([thread])
        if function is not None:
            return f"{function} for output element {index} (dataset {self._shown})", (), since
        awaited = None if self._buffer is None else self._buffer.late_consumers()
        return None if awaited is None else (*awaited, since)

    def holders(self) -> pb.Holders | None:
        """Return the clients that have unacknowledged elements; None if there are none."""
        held = self._buffer.holders if self._buffer is not None else []
        return pb.Holders(task_id=self._task_id, client_ids=held) if held else None

    def work(self) -> pb.TaskWork | None:
        """Return the work done for consumers so far; None before the first element."""
        buffer, began = self._buffer, self._began
        if buffer is None or not began:
            return None
        return pb.TaskWork(
            task_id=self._task_id,
            elements=buffer.produced - buffer.begin.index,
            seconds=(self._stopped_at or time.monotonic()) - began,
            waited_s=buffer.waited_s,
            stages=[pb.Stage(name=name, seconds=s) for name, s in self._stages.own_seconds()],
        )

    # Inside

    def _call_buffer(self, call: Callable[[ElementBuffer], None]) -> None:
        """Call a method of the buffer, now or when there is a buffer."""
        with self._lock:
            if self._stream is not None:
                return  # for dropped requests the endpoint sends an error
            if self._buffer is None:
                self._postponed.append(call)
                return
        call(self._buffer)

    def _set_buffer(self, buffer: ElementBuffer) -> None:
        while True:
            with self._lock:
                postponed, self._postponed = self._postponed, []
                if not postponed:
                    self._buffer = buffer
                    return
            for call in postponed:
                call(buffer)

    def _run(self) -> None:
        try:
            lease = self._get_lease()
            destination = self._make_destination(lease)
            dataset = self._dataset_of(lease, self._dispatcher)
            summary = dataset.summary()
            destination.where += f", dataset {summary}"
            self._shown = f"{summary[:_SHOWN]}..." if len(summary) > _SHOWN else summary
            self._evaluate(lease, dataset, destination)
        except BaseException as error:
            self._set_any_buffer()
            self._fail(error)

    def _set_any_buffer(self) -> None:
        """Make a buffer if there is none, so that all requests get the same error."""
        if self._buffer is None and self._stream is None:
            self._set_buffer(CrossTrainerBuffer(self._where, pb.Checkpoint(), 0))

    def _fail(self, error: BaseException) -> None:
        destination = self._buffer or self._stream
        assert destination is not None
        if isinstance(error, SplitsFailed):
            error = error.error
        if isinstance(error, WithdrawnError):
            logger.info("%s is withdrawn: %s", self._where, error)
            self.close(CancelledError(str(error)))
        elif not self._dispatcher.stopped():
            # Consumers of the job, or readers of the snapshot, get the error, even a BaseException
            # of a user's function. If the task is closed, close() has failed their requests.
            destination.fail(error)

    def _get_lease(self) -> pb.Task:
        """Return the lease of the part. Raise WithdrawnError if another worker has the part."""
        request = pb.TaskRequest(task_id=self._task_id)
        try:
            return self._dispatcher.call_with_retry(
                "dispatcher/GetTask", request, pb.Task, self._patience_s
            )
        except NotFoundError as error:
            raise WithdrawnError(str(error)) from error

    def _make_destination(self, lease: pb.Task) -> ElementBuffer | SnapshotStream:
        if mode_of(lease).writes_snapshot:
            with self._lock:
                self._stream = SnapshotStream(self._where, lease, self._report_end)
                self._postponed.clear()
            return self._stream
        buffer = buffer_for(lease, self._where, self._report_end, self._cache_bytes)
        self._set_buffer(buffer)
        return buffer

    def _evaluate(
        self, lease: pb.Task, dataset: Node, destination: ElementBuffer | SnapshotStream
    ) -> None:
        with destination.open() as begin:
            if begin is None or self._put_elements(lease, dataset, destination, begin):
                destination.end()

    def _put_elements(
        self,
        lease: pb.Task,
        dataset: Node,
        destination: ElementBuffer | SnapshotStream,
        begin: pb.Checkpoint,
    ) -> bool:
        """Evaluate the part from a checkpoint on. Return whether the part has ended."""
        share = self._share(lease, dataset)
        context = Context(
            seed=(lease.seed,),
            epoch=lease.repetition,
            scope=self._scope,
            stages=self._stages,
            part=_part(lease),
            numbered=True,
            share=share,
        )
        stream = self._stream
        checkpoints = Checkpoints(
            begin,
            destination.where,
            0.0 if stream is None else _COMMIT_S,
            indexed=dataset.indexed_length() is not None,
        )
        self._checkpoints = checkpoints
        with dataset.iterate(context) as elements:

            def checkpoint() -> None:
                needed = self._buffer.needed if self._buffer is not None else destination.produced
                checkpoints.take(destination.produced, elements, lambda: _position(share), needed)

            if begin.state:
                elements.set_state(pickle.loads(begin.state))
            # The first state holds the random seed of the part, for workers that continue from it.
            checkpoint()
            self._began = time.monotonic()
            self._stages.on = True
            for number, element in enumerate(elements):
                self._stages.on = number % _SAMPLED == 0
                if self._scope.closed or not destination.put(element):
                    return False
                if checkpoints.is_due(early=stream is not None and stream.is_full):
                    checkpoint()
                    if stream is not None:
                        stream.commit(checkpoints)
        if self._scope.closed:
            # The cancelled pass may have ended early. The next worker finds the end.
            return False
        self._stopped_at = time.monotonic()
        return True

    def _share(self, lease: pb.Task, dataset: Node) -> Share | None:
        """Return the share of the source that the part evaluates; None for the whole source."""
        mode = mode_of(lease)
        if mode.takes_strides(lease):
            return Share(StridedSplits(lease.part, lease.num_parts), dataset.source_length())
        if not mode.takes_splits(lease):
            return None
        splits = DynamicSplits(self._task_id, self._dispatcher, self._patience_s)
        return Share(splits, dataset.source_length())

    def _report_end(self) -> None:
        """Tell the dispatcher how the part has ended. Heartbeats repeat the message."""
        destination = self._buffer or self._stream
        assert destination is not None
        progress = pb.TaskProgress(task_id=self._task_id)
        destination.report(progress)
        try:
            self._dispatcher.notify("dispatcher/FinishTask", pb.WorkerRequest(progress=[progress]))
        except Error as error:
            logger.info("%s: the dispatcher is away: %s", self._where, error)


def _position(share: Share | None) -> int:
    """Return the position of the first source index that the last state needs."""
    return 0 if share is None else share.splits.marked


def _part(lease: pb.Task) -> tuple[int, ...]:
    """Return the numbers that make the random numbers of a task differ from other tasks'."""
    # Static shards must all see the same order, because each takes its elements from it.
    return () if lease.policy in (pb.DATA, pb.FILE_OR_DATA, pb.HINT) else (lease.part,)
