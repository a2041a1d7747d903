"""A task: evaluates a part of an iteration into a buffer or into a stream of a snapshot."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable

from dataservice.calls import RpcClient
from dataservice.consumption import mode_of
from dataservice.dataset.base import Context, Node, Scope, Share, SplitsFailed, StageTimes
from dataservice.errors import WithdrawnError
from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.buffers import CrossTrainerBuffer, ElementBuffer, buffer_for
from dataservice.work.checkpoints import Checkpoints
from dataservice.work.snapshot_stream import COMMIT_S, SnapshotStream
from mpidist import Request, Work
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

# The times of the stages are measured for one element in so many.
_SAMPLED = 32
# The number of source indices that one call of StridedSplits.run() returns.
_AT_ONCE = 4096


class StridedSplits:
    """Every n-th source index, for a fixed number of parts; see :class:`Splits`.

    Args:
        part: Number of the part.
        parts: The number of parts.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position of the first index that the last checkpoint needs.
    """

    def __init__(self, part: int, parts: int) -> None:
        self.start = self.marked = 0
        self._part = part
        self._parts = parts

    def run(self, position: int) -> range:
        """Return indices from a position on. They never end."""
        first = self._part + position * self._parts
        return range(first, first + _AT_ONCE * self._parts, self._parts)

    def mark(self, position: int) -> None:
        """Record the position of the first index that the current checkpoint needs."""
        self.marked = position


class DynamicSplits:
    """Splits of the source that a task requests from the dispatcher; see :class:`Splits`.

    The next split is requested ahead.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher.
        patience_s: How long to try to reach the dispatcher, in seconds.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position of the first index that the last checkpoint needs.
    """

    def __init__(self, task_id: int, dispatcher: RpcClient, patience_s: float) -> None:
        self.start = self.marked = 0
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

    def mark(self, position: int) -> None:
        """Record the position of the first index that the current checkpoint needs."""
        self.marked = position

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
        self._began = self._stopped_at = 0.0
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
            destination.where += f", dataset {dataset.summary()}"
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
            0.0 if stream is None else COMMIT_S,
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
