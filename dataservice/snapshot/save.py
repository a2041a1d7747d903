"""Saving a dataset by this process alone."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dataservice.dataset import tree
from dataservice.dataset.spec import Spec
from dataservice.snapshot import metadata
from dataservice.snapshot.writer import CHUNK_BYTES, StreamWriter
from mpidist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)

if TYPE_CHECKING:
    from dataservice.dataset import Dataset
    from dataservice.dataset.dataset import DatasetIterator

# A save without checkpoints cannot be resumed: the states that its chunks hold are empty.
_NO_STATE = b""
# The beginning of the states of saves with checkpoints, which distinguishes them from states of
# workers.
_HEAD = b"position of Dataset.save\n"


def save(
    dataset: Dataset,
    path: str | os.PathLike[str],
    num_shards: int | None = None,
    shard_func: Callable[..., Any] | None = None,
    *,
    checkpoints: bool = False,
    interval: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write the elements of an iteration to disk; see :meth:`Dataset.save`.

    Args:
        dataset: The dataset.
        path: The folder. It may exist if it is empty. With checkpoints it may contain an unfinished
            save of the same dataset, which is resumed.
        num_shards: The number of streams of files.
        shard_func: Returns the shard of an element.
        checkpoints: Whether the save can be resumed after any error. Otherwise readers of the
            snapshot are told the error.
        interval: The number of elements between checkpoints. None makes one when a chunk is full.
            A resumed save computes the elements of up to two intervals again.
        chunk_bytes: The size at which a chunk is full. It is committed, so that waiting readers can
            read it.

    Raises:
        AlreadyExistsError: The folder contains a complete snapshot, other files, or without
            checkpoints an unfinished snapshot.
        FailedPreconditionError: The folder cannot be written, or the unfinished save has no
            checkpoints.
        InvalidArgumentError: ``shard_func`` does not return one of the shards, or the unfinished
            save is of another dataset, or has another number of shards.
        UnimplementedError: With checkpoints: a source of the dataset has no position.
        ValueError: The number of shards is below 1.
        Exception: Any error of the dataset.
    """
    folder = os.path.abspath(path)
    shards = _Shards(num_shards, shard_func)
    try:
        metadata.create(folder, shards.count, dataset.node.summary(), spec_for_saving(dataset))
    except AlreadyExistsError as error:
        if not checkpoints:
            raise
        _check_resumable(folder, dataset, num_shards, error)
    try:
        with _Streams(folder, chunk_bytes) as streams, iter(dataset) as elements:
            if checkpoints:
                _write_from_checkpoint(streams, elements, shards, interval)
            else:
                _write(streams, elements, shards)
        metadata.finish(folder)
    except BaseException as error:
        if not checkpoints:
            metadata.fail(folder, error)
        raise


def _write(streams: _Streams, elements: DatasetIterator, shards: _Shards) -> None:
    """Write all elements."""
    for index, element in enumerate(elements):
        writer = streams.writer(shards.of(element, index))
        writer.append(element)
        if writer.full:
            writer.commit(_NO_STATE)
    streams.finish(_NO_STATE)


def _write_from_checkpoint(
    streams: _Streams, elements: DatasetIterator, shards: _Shards, interval: int | None
) -> None:
    """Write the elements that are not committed yet, with a checkpoint after each interval."""
    position = _restore(streams, elements)
    shards.known = dict(position.shards)
    counts = dict(position.counts)
    committed = {stream: writer.elements for stream, writer in enumerate(streams.writers)}
    record = position.pack()
    for index, element in enumerate(elements, position.index):
        stream = shards.of(element, index)
        counts[stream] = counts.get(stream, 0) + 1
        if counts[stream] <= committed.get(stream, 0):
            continue  # committed before the save was interrupted
        writer = streams.writer(stream)
        writer.append(element)
        if writer.full if interval is None else (index + 1) % interval == 0:
            # Streams are not committed at one instant. So a commit holds the last position that all
            # of them have passed: a resumed save can begin there, and skip elements.
            streams.commit(record)
            state = elements.get_state()
            record = _Position(index + 1, dict(counts), dict(shards.known), state).pack()
    streams.finish(record)


def spec_for_saving(dataset: Dataset) -> bytes:
    """Return the pickled element_spec of a dataset, or None pickled if it is unknown."""
    spec: Spec | None = None
    # There may be no element to look at, or a function raises an error that saving raises again.
    with contextlib.suppress(ValueError):
        spec = dataset.element_spec
    return metadata.pack_spec(spec)


class _Shards:
    """Assigns elements to streams.

    Args:
        count: The number of streams. None means one, or as many as the function needs.
        function: Returns the number of an element's shard. None deals elements out in turn.

    Attributes:
        count: The number of streams at the beginning.
        known: The streams of shards, where the function decides how many there are.
    """

    def __init__(self, count: int | None, function: Callable[..., Any] | None) -> None:
        self.count = 1 if count is None else count
        self.known: dict[int, int] = {}
        self._grows = count is None
        self._function = function

    def of(self, element: Any, index: int) -> int:
        """Return the stream of an element."""
        if self._function is None:
            return index % self.count
        shard = tree.call_int(self._function, element, "save")
        if self._grows:
            return self.known.setdefault(shard, len(self.known))
        if not 0 <= shard < self.count:
            raise InvalidArgumentError(
                f"shard_func of save returned {shard}, which is not in [0, num_shards) = "
                f"[0, {self.count}): leave num_shards out, and there are as many as it returns"
            )
        return shard


class _Streams:
    """The writers of all streams of a snapshot."""

    def __init__(self, folder: str, chunk_bytes: int) -> None:
        self.writers: list[StreamWriter] = []
        self.folder = folder
        self._chunk_bytes = chunk_bytes
        self._stack = ExitStack()
        # Attempts have ascending numbers. Nothing counts the attempts of interrupted saves.
        self._attempt = time.time_ns()

    def __enter__(self) -> _Streams:
        with self._stack:
            for stream in range(metadata.read(self.folder).num_streams):
                self._open(stream)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def writer(self, stream: int) -> StreamWriter:
        """Return the writer of a stream, which may be the next one that does not exist yet."""
        if stream == len(self.writers):
            metadata.add_stream(self.folder)
            self._open(stream)
        return self.writers[stream]

    def commit(self, state: bytes) -> None:
        """Commit the elements of all streams."""
        for writer in self.writers:
            if not writer.finished:
                writer.commit(state)

    def finish(self, state: bytes) -> None:
        """Commit the rest of all streams, and mark them as finished."""
        self.commit(state)
        for writer in self.writers:
            writer.finish(state)

    def _open(self, stream: int) -> None:
        writer = StreamWriter(self.folder, stream, self._attempt, chunk_bytes=self._chunk_bytes)
        self.writers.append(self._stack.enter_context(writer))


@dataclass(frozen=True)
class _Position:
    """A position in a save with checkpoints.

    Attributes:
        index: The number of elements before it.
        counts: The number of these elements in each stream.
        shards: The streams of shards; see :class:`_Shards`.
        state: The state of the iterator.
    """

    index: int
    counts: dict[int, int]
    shards: dict[int, int]
    state: bytes

    def pack(self) -> bytes:
        """Return the position as the state of a chunk."""
        return _HEAD + pickle.dumps((self.index, self.counts, self.shards, self.state), protocol=5)

    @classmethod
    def unpack(cls, state: bytes) -> _Position:
        """Return the position that :meth:`pack` made a state of."""
        return cls(*pickle.loads(state[len(_HEAD) :]))


def _restore(streams: _Streams, elements: DatasetIterator) -> _Position:
    """Set the iterator to the position from which an interrupted save is resumed, and return it.

    Raises:
        FailedPreconditionError: The save was made without checkpoints.
    """
    states = [writer.state for writer in streams.writers if writer.state is not None]
    if not states:
        return _Position(0, {}, {}, elements.get_state())
    if not all(state.startswith(_HEAD) for state in states):
        raise FailedPreconditionError(
            f"the unfinished save in {streams.folder!r} cannot be resumed, because it was begun "
            "without checkpoint_args or by distributed_save: name another folder, or remove it"
        )
    position = max(map(_Position.unpack, states), key=attrgetter("index"))
    elements.set_state(position.state)
    return position


def _check_resumable(
    folder: str, dataset: Dataset, num_shards: int | None, error: AlreadyExistsError
) -> None:
    """Check that a folder contains a save of a dataset that can be resumed.

    Args:
        folder: The folder.
        dataset: The dataset.
        num_shards: The number of shards, if one was given.
        error: The error to raise if the folder contains no unfinished snapshot.

    Raises:
        InvalidArgumentError: The save is of another dataset, or has another number of shards.
        OpError: The save has failed.
    """
    try:
        found = metadata.progress(folder)
    except NotFoundError:
        raise error from None
    if found.done:
        raise error
    saved, streams = found.metadata.dataset, found.metadata.num_streams
    if saved != dataset.node.summary():
        raise InvalidArgumentError(
            f"the unfinished save in {folder!r} is of the dataset {saved}, not of "
            f"{dataset.node.summary()}: name another folder, or remove it"
        )
    if num_shards is not None and num_shards != streams:
        raise InvalidArgumentError(
            f"the unfinished save in {folder!r} has {streams} shards, not {num_shards}: give the "
            "same number, name another folder, or remove it"
        )
