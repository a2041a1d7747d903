"""``Dataset.load``: the elements of a snapshot."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dataservice.dataset.context import Context
from dataservice.dataset.node import UNKNOWN_CARDINALITY, ElementIterator, IndexReader, Node
from dataservice.dataset.spec import Spec
from dataservice.snapshot import metadata
from dataservice.snapshot.format import ChunkName
from dataservice.snapshot.metadata import Progress
from dataservice.snapshot.reader import ChunkReader, open_chunk
from dataservice.stall import SlowWait
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
)

_Found = TypeVar("_Found")

# The time between two looks for more chunks. No file system notifies of the writes of other hosts.
_POLL_S = 0.1


@dataclass(frozen=True)
class Load(Node):
    """The elements of a snapshot. Workers share its chunks.

    Attributes:
        path: The folder of the snapshot.
        wait: Whether to wait for a save that has not ended.
        shard: The only shard whose elements are read; None reads all.
    """

    path: str
    wait: bool
    shard: int | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], wait: bool) -> Load:
        """Describe the elements of a snapshot, which must exist unless ``wait`` is True.

        Raises:
            DataLossError: The snapshot is damaged.
            FailedPreconditionError: It is still being saved, and ``wait`` is False.
            NotFoundError: There is none, and ``wait`` is False.
            OpError: The save has failed. This is its error.
        """
        node = cls(os.path.abspath(path), bool(wait))
        node.progress()
        return node

    def progress(self) -> Progress | None:
        """Return the progress of the save; None if it has not begun. Raises as :meth:`of`."""
        try:
            found = metadata.progress(self.path)
        except NotFoundError:
            if self.wait:
                return None
            raise
        if not (found.done or self.wait):
            raise FailedPreconditionError(
                f"the snapshot {self.path!r} is not complete: give wait=True to read it while "
                "it is being saved, or remove it if its save has ended"
            )
        return found

    def cardinality(self) -> int:
        """Return the number of elements. It is unknown until the snapshot is complete."""
        found = self.progress()
        if found is None or not found.done:
            return UNKNOWN_CARDINALITY
        return sum(chunk.elements for chunk in self.chunks())

    def shards(self) -> list[Load]:
        """Return a description for each shard of a snapshot that is complete."""
        streams = metadata.read(self.path).num_streams
        return [dataclasses.replace(self, shard=stream) for stream in range(streams)]

    def source_length(self) -> int:
        """Return the number of chunks."""
        return len(self.chunks())

    def chunks(self) -> list[ChunkName]:
        """Return all chunks in the order in which they are read.

        Raises:
            UnimplementedError: The snapshot is still being saved.
        """
        found = self.progress()
        if found is None or not found.done:
            raise self.cannot_be_split("it is still being saved")
        return sorted(
            (
                ChunkName(stream, number, elements)
                for stream, chunks in enumerate(found.counts)
                for number, elements in enumerate(chunks)
                if self.shard in (None, stream)
            ),
            key=lambda chunk: (chunk.number, chunk.stream),
        )

    def element_spec(self) -> Spec:
        """Return the element_spec, after waiting for the save to begin; see :class:`Node`."""
        found = _Poll(self, Context(seed=(0,))).until(self.progress, "its beginning")
        spec = found.metadata.element_spec()
        return super().element_spec() if spec is None else spec

    def _iterate(self, context: Context) -> ElementIterator:
        return LoadIterator(self, context)

    def summary(self) -> str:
        """Return the text of the call."""
        shard = "" if self.shard is None else f", shard={self.shard}"
        return f"load({self.path!r}, wait={self.wait}{shard})"


class LoadIterator(ElementIterator):
    """Reads the chunks of a snapshot one after the other.

    The first chunks of all streams come first, then the second ones, and so on. The chunks of a
    snapshot that is still being saved come in the order in which they are found.
    """

    def __init__(self, node: Load, context: Context) -> None:
        self._node = node
        self._poll = _Poll(node, context)
        self._found: Progress | None = None
        self._taken: list[int] = []  # the number of chunks taken from each stream
        self._chunk: ChunkName | None = None
        self._reader: ChunkReader | None = None
        self._error: OpError | None = None
        # With a share, other processes read other chunks.
        self._shared = [] if context.share is None else node.chunks()
        self._numbers = (
            None if context.share is None else IndexReader(len(self._shared), context.share)
        )

    def __next__(self) -> Any:
        while not self._poll.closed:
            reader = self._reader or self._open(self._next_chunk())
            try:
                return reader.read()
            except StopIteration:
                self._close_chunk()
            except DataLossError:  # a caller that ignores it continues with the next chunk
                self._close_chunk()
                raise
        raise StopIteration

    def get_state(self) -> tuple[Any, ...]:
        """Return the chunks taken from each stream, and the position in the open chunk.

        The size of the state depends on the number of streams only.
        """
        identity = None if self._found is None else self._found.metadata.identity
        taken = self._numbers.get_state() if self._numbers else list(self._taken)
        if self._reader is None or self._chunk is None:
            return identity, taken, None
        chunk = self._chunk
        position = self._reader.position
        return identity, taken, ((chunk.stream, chunk.number, chunk.elements), position)

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Continue from a state.

        Raises:
            InvalidArgumentError: The folder had another snapshot when the state was taken.
        """
        identity, taken, within = state
        if identity is not None and identity != self._begun().metadata.identity:
            raise InvalidArgumentError(
                f"the state belongs to another snapshot than the one at {self._node.path!r}"
            )
        if self._numbers is not None:
            self._numbers.set_state(taken)
        elif identity is not None:
            self._taken = list(taken)
        if within is not None:
            chunk, position = within
            self._open(ChunkName(*chunk)).position = position

    def close(self) -> None:
        """End the waits and close the chunk."""
        self._poll.close()
        self._close_chunk()

    def goes_on(self, error: Exception) -> bool:
        """Return False for the error of a failed save, which comes again; see the base class."""
        return error is not self._error

    def _begun(self) -> Progress:
        """Return the latest known progress. Wait for the save to begin."""
        if self._found is None:
            self._found = self._poll.until(self._node.progress, "its beginning")
            self._taken = [0] * self._found.metadata.num_streams
        return self._found

    def _open(self, chunk: ChunkName) -> ChunkReader:
        self._reader = open_chunk(self._node.path, self._begun().metadata, chunk)
        self._chunk = chunk
        return self._reader

    def _close_chunk(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _next_chunk(self) -> ChunkName:
        if self._numbers is not None:
            return self._shared[next(self._numbers)]
        if self._error is not None:
            raise self._error  # the same object: for callers that ignore errors it is no new one
        try:
            self._begun()
            chunk = self._poll.until(self._look, "more chunks, or its end")
        except OpError as error:
            self._error = error
            raise
        self._taken[chunk.stream] += 1
        return chunk

    def _look(self) -> ChunkName | None:
        """Return the next chunk; None if it is not committed yet.

        Raises:
            StopIteration: There are no more chunks.
        """
        found = self._begun()
        chunk = self._first_of(found)
        if chunk is None and not found.done:
            found = self._found = metadata.progress(self._node.path)
            added = len(found.counts) - len(self._taken)
            self._taken += [0] * added  # streams for new shards of shard_func
            chunk = self._first_of(found)
        if chunk is None and found.done:
            raise StopIteration
        return chunk

    def _first_of(self, found: Progress) -> ChunkName | None:
        """Return the first of the committed chunks that have not been taken."""
        ready = [
            (taken, stream)
            for stream, taken in enumerate(self._taken)
            if taken < len(found.counts[stream]) and self._node.shard in (None, stream)
        ]
        if not ready:
            return None
        number, stream = min(ready)
        return ChunkName(stream, number, found.counts[stream][number])


class _Poll:
    """Polls a snapshot until there is something new. Any thread can end the wait."""

    def __init__(self, node: Load, context: Context) -> None:
        self._node = node
        self._closed = threading.Event()
        if context.scope is not None:
            context.scope.add(self)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()

    def until(self, look: Callable[[], _Found | None], what: str) -> _Found:
        """Call ``look`` until it returns something, and return that.

        Raises:
            StopIteration: The wait has been ended.
        """
        path = self._node.path
        slow_wait = SlowWait(
            f"the load of the snapshot {path!r}",
            lambda: f"{what}: does somebody save it, and to this folder, as it is seen from here?",
        )
        while not self.closed:
            found = look()
            if found is not None:
                return found
            slow_wait.check()
            self._closed.wait(min(_POLL_S, slow_wait.due_s))
        raise StopIteration
