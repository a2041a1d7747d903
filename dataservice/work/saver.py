"""One task of a save: a thread that writes a part of a dataset to disk."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Iterator

from dataservice.dataset.context import Context, Share
from dataservice.dataset.node import ElementIterator, Node
from dataservice.errors import code_and_message
from dataservice.proto import dataservice_pb2 as pb
from dataservice.snapshot.writer import StreamWriter
from dataservice.wire import dumps
from dataservice.work.feeds import StridedSplits
from dataservice.work.task_thread import TaskThread, WithdrawnError
from mpidist.errors import AbortedError, Error, UnimplementedError

logger = logging.getLogger(__name__)

# What has been written is committed so often, for readers and for those who may take it up.
_COMMIT_S = 10.0


class Saver(TaskThread):
    """A task whose elements go to disk. Arguments as :class:`TaskThread`."""

    _result: pb.TaskProgress | None = None

    def progress(self) -> pb.TaskProgress | None:
        """Local. How it has ended; None before."""
        return self._result

    def close(self, error: Error) -> None:
        """Local. See :class:`TaskThread`; there are no consumers to hear of an error."""
        self._scope.close()

    # Inside

    def _run(self) -> None:
        try:
            task = self._get_task()
            total = self._save(task, self._node_of(task, self._dispatcher))
        except WithdrawnError as error:
            logger.info("%s was taken away: %s", self._where, error)
        except BaseException as error:
            # Whatever a user's function raises is for those who load the snapshot.
            self._fail(error)
        else:
            if total is not None:
                self._end(pb.TaskProgress(task_id=self._task_id, ended=True, total=total))

    def _save(self, task: pb.Task, node: Node) -> int | None:
        """Write the part; gives the number of its elements, None if it was stopped."""
        with contextlib.ExitStack() as stack:
            with _fenced():
                writer = stack.enter_context(StreamWriter(task.path, task.part, task.attempt))
            if writer.finished:
                return writer.elements
            share = None
            if task.num_parts > 1:
                splits = StridedSplits(task.part, task.num_parts)
                share = Share(splits, node.source_length())
            context = Context(
                (task.seed,), scope=self._scope, part=(task.part,), numbered=True, share=share
            )
            elements = stack.enter_context(node.iterate(context))
            if writer.state is not None:
                elements.set_state(pickle.loads(writer.state))
            due = time.monotonic() + _COMMIT_S
            for element in elements:
                if self._scope.closed:
                    return None
                with _fenced():
                    writer.append(element)
                    if writer.full or time.monotonic() >= due:
                        _commit(writer, elements)
                        due = time.monotonic() + _COMMIT_S
            if self._scope.closed:
                return None
            with _fenced():
                writer.finish(b"")
            return writer.elements

    def _fail(self, error: BaseException) -> None:
        if self._dispatcher.stopped():
            return
        code, message = code_and_message(error)
        message = f"{message} (while {self._where} saved its part)"
        self._end(pb.TaskProgress(task_id=self._task_id, code=code, message=message))

    def _end(self, progress: pb.TaskProgress) -> None:
        self._result = progress
        self._tell_end(progress)


@contextlib.contextmanager
def _fenced() -> Iterator[None]:
    """A later attempt at the stream keeps this one from writing."""
    try:
        yield
    except AbortedError as error:
        raise WithdrawnError(str(error)) from error


def _commit(writer: StreamWriter, elements: ElementIterator) -> None:
    try:
        state = dumps(elements.get_state())
    except UnimplementedError:
        # Should the worker be lost, another one writes the part anew: so nothing may stand before
        # it is whole.
        return
    writer.commit(state)
