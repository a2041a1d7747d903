"""One task: a thread that evaluates a part of an iteration into an outbox."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable

from dataservice.calls import Caller
from dataservice.dataset.context import Context, Share, SplitsFailed
from dataservice.dataset.node import ElementIterator, Node
from dataservice.dataset.stages import StageTimes
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.work.checkpoints import Checkpoints
from dataservice.work.feeds import DynamicSplits, StridedSplits
from dataservice.work.outbox import CacheOutbox, Outbox, SharedOutbox, WindowOutbox
from dataservice.work.outbox.outbox import AHEAD_BYTES
from dataservice.work.task_thread import TaskThread, WithdrawnError
from mpidist import Request
from mpidist.errors import CancelledError, Error, NotFoundError, UnimplementedError

logger = logging.getLogger(__name__)

# The dispatcher keeps no larger state for the case that the worker is lost.
_LARGEST_STATE = 1 << 20
# The time that stages take is measured for one element in so many.
_SAMPLED = 32


class Runner(TaskThread):
    """A task whose elements go to consumers.

    Args:
        task_id: See :class:`TaskThread`, as for the others.
        dispatcher: See there.
        patience_s: See there.
        node_of: See there.
        where: See there.
        cache_bytes: What is kept for other trainers, if the job is read so.
    """

    def __init__(
        self,
        task_id: int,
        dispatcher: Caller,
        patience_s: float,
        node_of: Callable[[pb.Task, Caller], Node],
        where: str,
        cache_bytes: int,
    ) -> None:
        super().__init__(task_id, dispatcher, patience_s, node_of, where)
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._early: list[Callable[[Outbox], None]] = []
        self._outbox: Outbox | None = None
        self._checkpoints: Checkpoints | None = None  # until the task is known
        self._told_index = -1
        self._told_size = False
        self._stages = StageTimes()
        self._began = self._stopped_at = 0.0
        self._ended = False

    # For the worker

    def ask(self, request: Request, body: pb.GetElementRequest) -> None:
        """Local. A consumer's request; it is answered now or later."""
        self._do(lambda outbox: outbox.ask(request, body))

    def release(self, client_id: int, used: list[int]) -> None:
        """Local. See :meth:`Outbox.release`."""
        self._do(lambda outbox: outbox.release(client_id, used))

    def refresh(self, periods: int) -> None:
        """Local. See :meth:`Outbox.refresh`."""
        if self._outbox is not None:
            self._outbox.refresh(periods)

    def close(self, error: Error) -> None:
        """Local. Stop before the next element, and give consumers an error; idempotent."""
        self._do(lambda outbox: outbox.close(error))
        self._scope.close()

    def checkpoint(self, index: int) -> pb.Checkpoint:
        """Local. Where the task can be taken up again, not after an element.

        Raises:
            NotFoundError: It has not begun; the dispatcher knows where.
        """
        if self._checkpoints is None:
            raise NotFoundError(f"{self._where} has not begun")
        return self._checkpoints.before(index)

    def progress(self) -> pb.TaskProgress | None:
        """Local. What the dispatcher shall know, if there is anything new."""
        outbox, checkpoints = self._outbox, self._checkpoints
        if outbox is None or checkpoints is None:
            return None
        progress = pb.TaskProgress(task_id=self._task_id)
        newest, nbytes = checkpoints.newest_index(outbox.needed, _LARGEST_STATE)
        if nbytes > _LARGEST_STATE:
            self._warn_of_state(nbytes)
        if newest > self._told_index:
            self._told_index = newest
            self._add_checkpoint(checkpoints, progress, newest)
        if self._ended:
            progress.ended, progress.total = True, outbox.produced
            progress.used_up = outbox.used_up
        elif not progress.HasField("checkpoint"):
            return None
        return progress

    def _add_checkpoint(
        self, checkpoints: Checkpoints, progress: pb.TaskProgress, index: int
    ) -> None:
        try:
            checkpoint = checkpoints.before(index)
        except UnimplementedError as error:
            # Who takes the part over begins at its beginning.
            logger.info("%s: %s", self._where, error)
            return
        if checkpoint.index != index:
            return
        if len(checkpoint.state) > _LARGEST_STATE:
            self._warn_of_state(len(checkpoint.state))
        else:
            progress.checkpoint.CopyFrom(checkpoint)

    def _warn_of_state(self, nbytes: int) -> None:
        """Log once that the dispatcher gets no checkpoints of this task."""
        if self._told_size:
            return
        self._told_size = True
        logger.warning(
            "%s: the state of its iterator has about %d bytes, and the dispatcher keeps at most "
            "%d. If this worker is lost, another one evaluates the part again from its beginning, "
            "or from its last smaller state. A smaller shuffle buffer, or a shuffle before the map "
            "that makes large elements, makes the state smaller",
            self._where,
            nbytes,
            _LARGEST_STATE,
        )

    def holders(self) -> pb.Holders | None:
        """Local. The clients for which elements are kept; None if there are none."""
        held = self._outbox.holders if self._outbox is not None else []
        return pb.Holders(task_id=self._task_id, client_ids=held) if held else None

    def work(self) -> pb.TaskWork | None:
        """Local. What has been done so far; None before the first element."""
        outbox, began = self._outbox, self._began
        if outbox is None or not began:
            return None
        return pb.TaskWork(
            task_id=self._task_id,
            elements=outbox.produced - outbox.start,
            seconds=(self._stopped_at or time.monotonic()) - began,
            waited_s=outbox.waited_s,
            stages=[pb.Stage(name=name, seconds=s) for name, s in self._stages.own_seconds()],
        )

    # Inside

    def _do(self, what: Callable[[Outbox], None]) -> None:
        """Do something at the outbox, now or when there is one."""
        with self._lock:
            if self._outbox is None:
                self._early.append(what)
                return
        what(self._outbox)

    def _open(self, outbox: Outbox) -> None:
        while True:
            with self._lock:
                early, self._early = self._early, []
                if not early:
                    self._outbox = outbox
                    return
            for what in early:
                what(outbox)

    def _run(self) -> None:
        try:
            task = self._get_task()
            node = self._node_of(task, self._dispatcher)
        except BaseException as error:
            # One that takes requests of all readings, for all of them hear the same.
            self._open(CacheOutbox(self._where, 0, 1))
            self._fail(error)
            return
        self._where += f", dataset {node.summary()}"
        self._open(self._make_outbox(task))
        try:
            self._evaluate(task, node)
        except SplitsFailed as failed:
            self._fail(failed.error)
        except BaseException as error:
            # Whatever a user's function raises is the consumers' to see.
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, WithdrawnError):
            self.close(CancelledError(str(error)))
        # That the task is being stopped, consumers hear from close().
        elif not self._dispatcher.stopped():
            assert self._outbox is not None
            self._outbox.fail(error)

    def _make_outbox(self, task: pb.Task) -> Outbox:
        where, start = self._where, task.checkpoint.index
        if task.reading == pb.SHARED:
            used = RangeSet([0, task.start])
            used.update(RangeSet(task.used.bounds))
            held = {each.client_id: RangeSet(each.ranges.bounds) for each in task.held}
            keeps = task.delivery != pb.AT_MOST_ONCE
            return SharedOutbox(where, start, used, held, keeps, self._finished)
        if task.reading == pb.CACHED:
            return CacheOutbox(where, start, self._cache_bytes)
        limit = AHEAD_BYTES // max(task.num_parts, 1)
        return WindowOutbox(where, start, max(task.num_consumers, 1), self._finished, limit)

    def _evaluate(self, task: pb.Task, node: Node) -> None:
        outbox = self._outbox
        assert outbox is not None
        share = self._share(task, node)
        context = Context(
            (task.seed,),
            task.repetition,
            self._scope,
            self._stages,
            _part(task),
            numbered=True,
            share=share,
        )
        self._checkpoints = checkpoints = Checkpoints(task.checkpoint)
        with node.iterate(context) as elements:
            if task.checkpoint.state:
                elements.set_state(pickle.loads(task.checkpoint.state))
            # So that the beginning is the same for whoever goes on from a state.
            self._take_checkpoint(checkpoints, elements, share, outbox)
            self._began = time.monotonic()
            self._stages.on = True
            for number, element in enumerate(elements):
                self._stages.on = number % _SAMPLED == 0
                if not outbox.put(element):
                    return
                if checkpoints.due:
                    self._take_checkpoint(checkpoints, elements, share, outbox)
        if self._scope.closed:
            # Whoever gets the part next finds out where it ends: here it may have been cut short.
            return
        self._stopped_at = time.monotonic()
        outbox.end()
        self._ended = True

    def _take_checkpoint(
        self,
        checkpoints: Checkpoints,
        elements: ElementIterator,
        share: Share | None,
        outbox: Outbox,
    ) -> None:
        def position() -> int:
            return 0 if share is None else share.splits.marked

        checkpoints.take(outbox.produced, elements, position, outbox.needed)

    def _share(self, task: pb.Task, node: Node) -> Share | None:
        if task.policy != pb.DYNAMIC:
            return None
        if task.reading == pb.ORDERED:
            return Share(StridedSplits(task.part, task.num_parts), node.source_length())
        splits = DynamicSplits(self._task_id, self._dispatcher, self._patience_s)
        return Share(splits, node.source_length())

    def _finished(self) -> None:
        """The number of elements is known."""
        outbox = self._outbox
        assert outbox is not None
        progress = pb.TaskProgress(task_id=self._task_id, ended=True, total=outbox.produced)
        progress.used_up = outbox.used_up
        self._tell_end(progress)


def _part(task: pb.Task) -> tuple[int, ...]:
    """What tells the randomness of a task from that of others."""
    # Static parts must all see the same order, for each takes its own elements of it.
    return () if task.policy in (pb.DATA, pb.FILE_OR_DATA, pb.HINT) else (task.part,)
