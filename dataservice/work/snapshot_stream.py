"""A stream of a snapshot as the destination of a task's elements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dataservice.errors import WithdrawnError, code_and_message
from dataservice.proto import dataservice_pb2 as pb
from dataservice.snapshot.writer import StreamWriter
from dataservice.work.checkpoints import Checkpoints
from mpidist.errors import AbortedError, UnimplementedError

# The longest time between two commits, for readers of the unfinished snapshot and for workers that
# may continue the stream.
COMMIT_S = 10.0


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
