"""What all tasks of a data worker have in common."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from dataservice.calls import Caller
from dataservice.dataset.context import Scope
from dataservice.dataset.node import Node
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import Error, NotFoundError

logger = logging.getLogger(__name__)


class WithdrawnError(Exception):
    """The task is this worker's no more: its part is given to another one, or given up."""


class TaskThread(ABC):
    """Runs a task from its id alone; everything else is asked of the dispatcher.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher; ends them when the worker is closed.
        patience_s: For how long it may be away.
        node_of: What a task evaluates; may wait, with a caller that the end of the task ends.
        where: The worker in words, for errors.

    Attributes:
        thread: To be started; runs the task.
    """

    def __init__(
        self,
        task_id: int,
        dispatcher: Caller,
        patience_s: float,
        node_of: Callable[[pb.Task, Caller], Node],
        where: str,
    ) -> None:
        self._task_id = task_id
        self._scope = Scope()
        self._dispatcher = Caller(
            dispatcher.endpoint,
            dispatcher.peer,
            dispatcher.what,
            lambda: self._scope.closed or dispatcher.stopped(),
        )
        self._patience_s = patience_s
        self._node_of = node_of
        self._where = f"{where}, task {task_id}"
        self.thread = threading.Thread(
            target=self._run, name=f"dataservice-task-{task_id}", daemon=True
        )

    @abstractmethod
    def progress(self) -> pb.TaskProgress | None:
        """Local. What the dispatcher shall know, if there is anything."""

    @abstractmethod
    def close(self, error: Error) -> None:
        """Local. Stop before the next element, and give consumers an error; idempotent."""

    @abstractmethod
    def _run(self) -> None:
        """The body of the thread."""

    def _get_task(self) -> pb.Task:
        """What the task is; WithdrawnError if it is another worker's now."""
        request = pb.TaskRequest(task_id=self._task_id)
        try:
            return self._dispatcher.ask_patiently(
                "dispatcher/GetTask", request, pb.Task, self._patience_s
            )
        except NotFoundError as error:
            raise WithdrawnError(str(error)) from error

    def _tell_end(self, progress: pb.TaskProgress) -> None:
        """Say how it has ended; heartbeats say so, too, should this be lost."""
        try:
            self._dispatcher.notify("dispatcher/FinishTask", pb.WorkerRequest(progress=[progress]))
        except Error as error:
            logger.info("%s: the dispatcher is away: %s", self._where, error)
