"""``Dataset.load``: the elements of a snapshot."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dataservice.dataset.context import Context, Share
from dataservice.dataset.node import UNKNOWN_CARDINALITY, ElementIterator, IndexReader, Node
from dataservice.dataset.spec import Spec
from dataservice.snapshot import metadata
from dataservice.snapshot.layout import ChunkName
from dataservice.snapshot.metadata import Progress
from dataservice.snapshot.reader import ChunkReader
from dataservice.stall import Stall
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
)

_Found = TypeVar("_Found")

# How often to look for more chunks: a file system tells nobody that another host has written.
_LOOK_S = 0.1


@dataclass(frozen=True)
class Load(Node):
    """The elements of a snapshot; workers take its chunks.

    Attributes:
        path: Its folder.
        wait: Whether to wait while it is being saved.
        shard: The only shard whose elements are read; None reads all.
    """

    path: str
    wait: bool
    shard: int | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], wait: bool) -> Load:
        """Local. Look at the snapshot, if it is to be there.

        Raises:
            DataLossError: It is damaged.
            FailedPreconditionError: It is still being saved, and ``wait`` is False.
            NotFoundError: There is none, and ``wait`` is False.
            OpError: The save has failed: what it failed with.
        """
        node = cls(os.path.abspath(path), bool(wait))
        node.look()
        return node

    def look(self) -> Progress | None:
        """Local. How far the save has come; None if it has not begun. Raises as :meth:`of`."""
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
        """Local. See :class:`Node`; unknown until the snapshot is complete."""
        found = self.look()
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
        """Local. All chunks, in the order in which they are read.

        Raises:
            UnimplementedError: There will be more.
        """
        found = self.look()
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
        """Local. See :class:`Node`; waits for the save to begin."""
        found = _Watch(self, Context(seed=(0,))).until(self.look, "its beginning")
        spec = found.metadata.element_spec()
        return super().element_spec() if spec is None else spec

    def _iterate(self, context: Context) -> ElementIterator:
        return LoadIterator(self, context)

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        shard = "" if self.shard is None else f", shard={self.shard}"
        return f"load({self.path!r}, wait={self.wait}{shard})"


class LoadIterator(ElementIterator):
    """One pass; has one chunk open.

    First come the first chunks of all streams, then the second ones, and so on, as far as they are
    there: of a snapshot that is being saved, in the order in which they are found.
    """

    def __init__(self, node: Load, context: Context) -> None:
        self._node = node
        self._watch = _Watch(node, context)
        self._found: Progress | None = None
        self._taken: list[int] = []  # chunks of each stream
        self._reader: ChunkReader | None = None
        self._error: OpError | None = None
        self._share: _Share | None = None
        if context.share is not None:
            self._share = _Share(node.chunks(), context.share)

    def __next__(self) -> Any:
        while not self._watch.closed:
            if self._reader is None:
                self._reader = self._open(self._next_chunk())
            try:
                return self._reader.read()
            except StopIteration:
                self._close_chunk()
            except DataLossError:  # who ignores it goes on with the next chunk
                self._close_chunk()
                raise
        raise StopIteration

    def get_state(self) -> tuple[Any, ...]:
        """Local. See :class:`ElementIterator`: what has been read of each stream, and where it is.

        Its size depends on the number of streams only.
        """
        identity = None if self._found is None else self._found.metadata.identity
        taken = self._share.numbers.get_state() if self._share else list(self._taken)
        within = None if self._reader is None else (self._reader.chunk, self._reader.place)
        return identity, taken, within

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Local. See :class:`ElementIterator`.

        Raises:
            InvalidArgumentError: It is of another snapshot, which was at the same place.
        """
        identity, taken, within = state
        if identity is not None and identity != self._begun().metadata.identity:
            raise InvalidArgumentError(
                f"the state belongs to another snapshot than the one at {self._node.path!r}"
            )
        if self._share is not None:
            self._share.numbers.set_state(taken)
        elif identity is not None:
            self._taken = list(taken)
        if within is not None:
            chunk, place = within
            self._reader = self._open(chunk)
            self._reader.place = place

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._watch.close()
        self._close_chunk()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return error is not self._error

    def _begun(self) -> Progress:
        """What the last look at the snapshot has found."""
        if self._found is None:
            self._found = self._watch.until(self._node.look, "its beginning")
            self._taken = [0] * self._found.metadata.num_streams
        return self._found

    def _open(self, chunk: ChunkName) -> ChunkReader:
        return ChunkReader(self._node.path, self._begun().metadata, chunk)

    def _close_chunk(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _next_chunk(self) -> ChunkName:
        if self._share is not None:
            return self._share.next()
        if self._error is not None:
            raise self._error  # the same, for who ignores errors: it is no other one
        try:
            self._begun()
            chunk = self._watch.until(self._look, "more chunks, or its end")
        except OpError as error:
            self._error = error
            raise
        self._taken[chunk.stream] += 1
        return chunk

    def _look(self) -> ChunkName | None:
        """The next chunk; None if it is not there yet, StopIteration if there is none."""
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
        """The next chunk, if it has been found."""
        ready = [
            (taken, stream)
            for stream, taken in enumerate(self._taken)
            if taken < len(found.counts[stream]) and self._node.shard in (None, stream)
        ]
        if not ready:
            return None
        number, stream = min(ready)
        return ChunkName(stream, number, found.counts[stream][number])


class _Share:
    """The chunks that this process shall read, while others read others."""

    def __init__(self, chunks: list[ChunkName], share: Share) -> None:
        self._chunks = chunks
        self.numbers = IndexReader(len(chunks), share)

    def next(self) -> ChunkName:
        return self._chunks[next(self.numbers)]


class _Watch:
    """Looks at a snapshot until there is something new; any thread can end it."""

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
        """What ``look`` gives, when that is something; StopIteration if the pass is given up."""
        path = self._node.path
        stall = Stall(
            f"the load of the snapshot {path!r}",
            lambda: f"{what}: does somebody save it, and to this folder, as it is seen from here?",
        )
        while not self.closed:
            found = look()
            if found is not None:
                return found
            stall.look()
            self._closed.wait(min(_LOOK_S, stall.due_s))
        raise StopIteration
