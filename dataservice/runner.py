"""One task: a thread that evaluates a dataset into an outbox."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from dataservice.calls import Caller
from dataservice.dataset.node import Context, Feed, Node, Passes, Scope
from dataservice.outbox import Outbox
from dataservice.proto import dataservice_pb2 as pb
from mpidist import Work
from mpidist.errors import CancelledError, Error

logger = logging.getLogger(__name__)


class Runner:
    """Runs a task from its id alone; everything else is asked of the dispatcher.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher; ends them when the runner is closed.
        dataset_of: The dataset of an id; may wait.
        where: The worker in words, for errors.
    """

    def __init__(
        self, task_id: int, dispatcher: Caller, dataset_of: Callable[[int], Node], where: str
    ) -> None:
        self._task_id = task_id
        self._dispatcher = dispatcher
        self._dataset_of = dataset_of
        self._scope = Scope()
        self.outbox = Outbox(f"{where}, task {task_id}", self._drained)
        self.thread = threading.Thread(
            target=self._run, name=f"dataservice-task-{task_id}", daemon=True
        )

    def _run(self) -> None:
        try:
            request = pb.TaskRequest(task_id=self._task_id)
            task = self._dispatcher.ask("dispatcher/GetTask", request, pb.Task)
            node = self._dataset_of(task.dataset_id)
            self.outbox.where += f", dataset {node.summary()}"
            with node.iterate(self._context(task, node)) as elements:
                for element in elements:
                    if not self.outbox.put(element):
                        return
        except BaseException as error:
            # Whatever a user's function raises is the consumers' to see. That the worker is being
            # stopped, they hear from close().
            if not self._dispatcher.stopped():
                self.outbox.fail(error)
        else:
            self.outbox.end()

    def _context(self, task: pb.Task, node: Node) -> Context:
        feed: Feed | None = None
        if task.policy == pb.DYNAMIC:
            indices = node.source_indices()

            def feed(passes: Passes) -> Iterator[range]:
                return (indices[part.start : part.stop] for part in self._splits(passes))

        # Each task shuffles in its own way, unless the dataset fixes a seed.
        return Context((task.seed, task.worker_number), (task.repetition,), feed, self._scope)

    def _splits(self, passes: Passes) -> Iterator[range]:
        """The parts of a pass that the dispatcher gives to this task, one asked for ahead."""
        coming = self._ask_for_split(passes)
        while True:
            split = pb.Split.FromString(self._dispatcher.finish(coming).body)
            if split.start == split.stop:
                return
            coming = self._ask_for_split(passes)
            yield range(split.start, split.stop)

    def _ask_for_split(self, passes: Passes) -> Work:
        request = pb.GetSplitRequest(task_id=self._task_id, passes=passes)
        return self._dispatcher.start("dispatcher/GetSplit", request)

    def _drained(self) -> None:
        try:
            self._dispatcher.notify("dispatcher/FinishTask", pb.TaskRequest(task_id=self._task_id))
        except Error as error:
            # The consumers have everything; only the dispatcher's books stay open, if it lives.
            logger.warning("task %d: the dispatcher is gone: %s", self._task_id, error)

    def close(self, reason: str) -> None:
        """Local. Stop before the next element; idempotent."""
        self.outbox.close(CancelledError(reason))
        self._scope.close()
