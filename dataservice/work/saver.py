"""One task of a save: a thread that writes a part of a dataset to disk."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable

from dataservice.calls import Caller
from dataservice.dataset.node import Context, ElementIterator, Node, Scope
from dataservice.proto import dataservice_pb2 as pb
from dataservice.snapshot import metadata
from dataservice.snapshot.packing import packer
from dataservice.snapshot.writer import StreamWriter
from dataservice.work.feeds import StridedFeed
from mpidist.errors import (
    AbortedError,
    Error,
    NotFoundError,
    OpError,
    UnimplementedError,
    UnknownError,
)

logger = logging.getLogger(__name__)

# What has been written is committed so often, for readers and for those who may take it up.
_COMMIT_S = 10.0


class Saver:
    """Runs a task from its id alone.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher; ends them when the worker is closed.
        patience_s: For how long it may be away.
        node_of: What a task evaluates; may wait.
        where: The worker in words, for errors.
    """

    def __init__(
        self,
        task_id: int,
        dispatcher: Caller,
        patience_s: float,
        node_of: Callable[[pb.Task], Node],
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
        self._where = where
        self._result: pb.TaskProgress | None = None
        self.thread = threading.Thread(
            target=self._run, name=f"dataservice-save-{task_id}", daemon=True
        )

    def progress(self) -> pb.TaskProgress | None:
        """Local. How it has ended; None before."""
        return self._result

    def close(self) -> None:
        """Local. Stop before the next element; idempotent."""
        self._scope.close()

    def _run(self) -> None:
        try:
            request = pb.TaskRequest(task_id=self._task_id)
            task = self._dispatcher.ask_patiently(
                "dispatcher/GetTask", request, pb.Task, self._patience_s
            )
            total = self._save(task, self._node_of(task))
        except (AbortedError, NotFoundError) as error:
            # Another worker has the task now.
            logger.info("%s: task %d was taken away: %s", self._where, self._task_id, error)
        except BaseException as error:
            self._fail(error)
        else:
            if total is not None:
                self._tell(pb.TaskProgress(task_id=self._task_id, ended=True, total=total))

    def _save(self, task: pb.Task, node: Node) -> int | None:
        """Write the part; gives the number of its elements, None if it was stopped."""
        name = metadata.read(task.path).compression
        with StreamWriter(task.path, task.part, task.attempt, compress=packer(name)) as writer:
            if writer.finished:
                return writer.elements
            feed = StridedFeed(node, task.part, task.num_parts) if task.num_parts > 1 else None
            context = Context((task.seed,), (0,), feed, self._scope)
            with node.iterate(context) as elements:
                if writer.state is not None:
                    elements.set_state(pickle.loads(writer.state))
                due = time.monotonic() + _COMMIT_S
                for element in elements:
                    if self._scope.closed:
                        return None
                    writer.append(element)
                    if writer.full or time.monotonic() >= due:
                        _commit(writer, elements)
                        due = time.monotonic() + _COMMIT_S
                if self._scope.closed:
                    return None
                writer.finish(b"")
            return writer.elements

    def _fail(self, error: BaseException) -> None:
        if self._dispatcher.stopped():
            return
        known = (
            error
            if isinstance(error, OpError)
            else UnknownError(f"{type(error).__qualname__}: {error}")
        )
        message = f"{known} (while {self._where} saved its part)"
        self._tell(pb.TaskProgress(task_id=self._task_id, code=known.code, message=message))

    def _tell(self, progress: pb.TaskProgress) -> None:
        """Say how it has ended; heartbeats say so, too, should this be lost."""
        self._result = progress
        try:
            self._dispatcher.notify("dispatcher/FinishTask", pb.WorkerRequest(progress=[progress]))
        except Error as error:
            logger.info("task %d: the dispatcher is away: %s", self._task_id, error)


def _commit(writer: StreamWriter, elements: ElementIterator) -> None:
    try:
        state = pickle.dumps(elements.get_state(), protocol=5)
    except UnimplementedError:
        # Should the worker be lost, another one writes the part anew: so nothing may stand before
        # it is whole.
        return
    writer.commit(state)
