"""Sources outside of the program: files, Python iterables, snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from dataservice.calls import SlowWait
from dataservice.dataset import tree
from dataservice.dataset.arguments import check_path
from dataservice.dataset.base import (
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    IndexedSource,
    IndexReader,
    Node,
)
from dataservice.dataset.spec import Spec
from dataservice.snapshot import metadata
from dataservice.snapshot.format import ChunkName, ChunkReader
from dataservice.snapshot.metadata import Progress
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
)

_BY_SUFFIX = {
    ".txt": "text", ".csv": "text", ".jsonl": "json", ".ndjson": "json", ".npy": "npy",
    ".npz": "npz",
}  # fmt: skip


@dataclass(frozen=True)
class Files(Node):
    """The elements of some files, one file after the other; workers take files.

    Attributes:
        paths: The files.
        format: The format of all files.
    """

    paths: tuple[str, ...]
    format: str

    @classmethod
    def of(cls, patterns: str | os.PathLike[str] | Sequence[Any], form: str | None) -> Files:
        """Find the files.

        Raises:
            NotFoundError: No file has a name or pattern.
            TypeError: A name is not a path.
            ValueError: The format is unknown, or the names do not tell it.
        """
        paths = matching_files("from_files", "files", patterns)
        found = {_BY_SUFFIX.get(os.path.splitext(path)[1].lower(), "") for path in paths}
        form = form or (found.pop() if len(found) == 1 else "")
        if form not in _READERS:
            raise ValueError(
                f"the format of {paths[0]!r} and the other files is not known by their names: give "
                f"one of {sorted(_READERS)}, not {form!r}"
            )
        return cls(tuple(paths), form)

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def _iterate(self, context: Context) -> ElementIterator:
        return FilesIterator(self, IndexReader(len(self.paths), context.share))

    def summary(self) -> str:
        return f"from_files({len(self.paths)} of {self.format}, {self.paths[0]!r}, ...)"


def matching_files(method: str, argument: str, patterns: Any) -> list[str]:
    """Return the absolute paths of the files of a name or pattern, or of several.

    Args:
        method: The method of the dataset, for messages.
        argument: The name of the method's argument, for messages.
        patterns: Names and patterns. The files of a pattern are sorted.

    Raises:
        NotFoundError: There are no files, or none of a name or pattern.
        TypeError: A name is not a path.
    """
    if isinstance(patterns, str | bytes | os.PathLike):
        patterns = [patterns]
    given = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    if not given:
        raise NotFoundError(f"{method} is given no files")
    return [
        os.path.abspath(path)
        for pattern in given
        for path in _matching(method, check_path(method, argument, pattern))
    ]


def _matching(method: str, pattern: str) -> list[str]:
    """Return the files of a name or pattern. A name that exists is never taken for a pattern."""
    if os.path.exists(pattern):
        return [pattern]
    folder, rest = os.path.split(pattern)
    while folder and not os.path.isdir(folder):
        folder, part = os.path.split(folder)
        rest = os.path.join(part, rest)
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), rest)))
    if not paths:
        raise NotFoundError(f"{method}: no file has the name or pattern {pattern!r}")
    return paths


class FilesIterator(ElementIterator):
    """One pass; has one file open."""

    def __init__(self, node: Files, numbers: IndexReader) -> None:
        self._node = node
        self._numbers = numbers
        self._number = -1
        self._reader: FileReader | None = None

    def __next__(self) -> Any:
        while True:
            if self._reader is None:
                self._open(next(self._numbers))
            assert self._reader is not None
            try:
                return self._reader.read()
            except StopIteration:
                self.close()
            except OSError as error:
                self.close()
                raise DataLossError(
                    f"cannot read {self._node.paths[self._number]!r} to its end: {error}"
                ) from error

    def get_state(self) -> tuple[Any, int, int | None]:
        place = None if self._reader is None else self._reader.place
        return self._numbers.get_state(), self._number, place

    def set_state(self, state: tuple[Any, int, int | None]) -> None:
        numbers, number, place = state
        self._numbers.set_state(numbers)
        if place is not None:
            self._open(number)
            assert self._reader is not None
            self._reader.place = place

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def goes_on(self, error: Exception) -> bool:
        return True

    def _open(self, number: int) -> None:
        self._number = number
        path = self._node.paths[number]
        try:
            self._reader = _READERS[self._node.format](path)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path!r} here any more") from error
        except (OSError, ValueError) as error:
            raise DataLossError(f"cannot read {path!r}: {error}") from error


class FileReader(Protocol):
    """The elements of a file."""

    place: int
    """The position of the next element; may be set."""

    def read(self) -> Any:
        """Return the next element. Raise StopIteration at the end."""

    def close(self) -> None:
        """Close the file."""


class Lines:
    """Lines of text in UTF-8, without their ends.

    Args:
        path: The file.
        parse: Makes an element of a line.
    """

    def __init__(self, path: str, parse: Callable[[str], Any] = tree.to_numpy) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - until close()
        self._parse = parse

    @property
    def place(self) -> int:
        """The position of the next line in bytes."""
        return self._file.tell()

    @place.setter
    def place(self, place: int) -> None:
        self._file.seek(place)

    def read(self) -> Any:
        """Return the element of the next line."""
        start = self._file.tell()
        line = self._file.readline()
        if not line:
            raise StopIteration
        try:
            return self._parse(line.decode().rstrip("\r\n"))
        except ValueError as error:
            raise DataLossError(
                f"cannot read the line at byte {start} of {self._path!r}: {error}"
            ) from error

    def close(self) -> None:
        self._file.close()


def _json_lines(path: str) -> Lines:
    return Lines(path, lambda line: tree.to_numpy(json.loads(line)))


class Rows:
    """Rows of arrays.

    Args:
        arrays: Arrays, or dicts of them, with equally many rows.
        path: The file.
    """

    def __init__(self, arrays: Any, path: str) -> None:
        lengths = {len(array) if array.ndim else -1 for array in tree.flatten(arrays)}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(f"its arrays have no rows, or not equally many: {sorted(lengths)}")
        self._arrays = arrays
        self._rows = lengths.pop()
        self.place = 0

    def read(self) -> Any:
        """Return the next row."""
        if self.place >= self._rows:
            raise StopIteration
        self.place += 1
        return tree.map_leaves(lambda array: np.array(array[self.place - 1])[()], self._arrays)

    def close(self) -> None:
        self._arrays = None


def _npy(path: str) -> Rows:
    return Rows(np.load(path, mmap_mode="r"), path)


def _npz(path: str) -> Rows:
    with np.load(path) as file:
        return Rows(dict(file), path)


_READERS: dict[str, Callable[[str], FileReader]] = {
    "text": Lines,
    "json": _json_lines,
    "npy": _npy,
    "npz": _npz,
}


class RandomAccess(Protocol):
    """A sequence with random access: a list, or a map dataset of torch or Grain."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Indexed(IndexedSource):
    """Attributes: a sequence with random access. Element i is ``source[i]``."""

    source: RandomAccess

    def cardinality(self) -> int:
        return len(self.source)

    def element(self, index: int) -> Any:
        return as_arrays(self.source[index])

    def summary(self) -> str:
        return f"from_source({type(self.source).__qualname__} of {len(self.source)})"


@dataclass(frozen=True, eq=False)
class Generator(Node):
    """Attributes: the function that makes an iterable for each pass, and its arguments."""

    factory: Callable[..., Iterable[Any]]
    arguments: tuple[Any, ...] = ()

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        """Return 1, because one worker reads all of the iterable."""
        return 1

    def _iterate(self, context: Context) -> ElementIterator:
        if context.share is not None:
            return _SharedIterator(self, IndexReader(1, context.share))
        return GeneratorIterator(iter(self.factory(*self.arguments)), tree.name_of(self.factory))

    def summary(self) -> str:
        shown = [tree.name_of(self.factory), *map(repr, self.arguments)]
        return f"from_generator({', '.join(shown)})"


class GeneratorIterator(ElementIterator):
    """One pass.

    If the iterator has ``get_state`` and ``set_state``, as in Grain, or ``state_dict`` and
    ``load_state_dict``, as in torchdata, its own state is saved. Any other iterator is read again
    up to its position.

    Args:
        elements: The iterator.
        name: The name of the factory, for messages.
    """

    def __init__(self, elements: Iterator[Any], name: str) -> None:
        self._elements = elements
        self._name = name
        self._given = 0
        self._error: Exception | None = None
        self._raised = 0  # id of the last error; a reference to the error would make a circle

    def __next__(self) -> Any:
        element = self._take()
        if element is None:
            raise InvalidArgumentError(f"{self._name} returned None, which is not an element")
        return as_arrays(element)

    def get_state(self) -> tuple[int, Any]:
        for name in ("get_state", "state_dict"):
            if hasattr(self._elements, name):
                return self._given, (getattr(self._elements, name)(),)
        return self._given, None

    def set_state(self, state: tuple[int, Any]) -> None:
        given, own = state
        if own is not None:
            name = "set_state" if hasattr(self._elements, "set_state") else "load_state_dict"
            getattr(self._elements, name)(own[0])
        else:
            for _ in range(given):
                with contextlib.suppress(Exception):  # raised where the state was taken
                    self._take()
        self._given = given

    def close(self) -> None:
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()

    def goes_on(self, error: Exception) -> bool:
        # An iterator that has raised the error itself raises it again.
        return self._raised != id(error)

    def _take(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            element = next(self._elements)
        except StopIteration:
            raise
        except Exception as error:
            self._given += 1
            self._raised = id(error)
            if isinstance(self._elements, GeneratorType):
                self._error = error  # a generator is over then, which must not pass for its end
            raise
        self._given += 1
        self._raised = 0
        return element


class _SharedIterator(ElementIterator):
    """One pass, in the process that gets its only index."""

    def __init__(self, node: Generator, indices: IndexReader) -> None:
        self._node = node
        self._indices = indices
        self._elements: ElementIterator | None = None

    def __next__(self) -> Any:
        if self._elements is None:
            next(self._indices)
            self._elements = self._node.iterate(Context(seed=()))
        try:
            return next(self._elements)
        except StopIteration:
            next(self._indices)  # ends, so that the next pass begins behind the index
            raise

    def get_state(self) -> tuple[Any, Any]:
        within = None if self._elements is None else (self._elements.get_state(),)
        return self._indices.get_state(), within

    def set_state(self, state: tuple[Any, Any]) -> None:
        indices, within = state
        self._indices.set_state(indices)
        if within is not None:
            self._elements = self._node.iterate(Context(seed=()))
            self._elements.set_state(within[0])

    def close(self) -> None:
        if self._elements is not None:
            self._elements.close()

    def goes_on(self, error: Exception) -> bool:
        return self._elements is not None and self._elements.goes_on(error)


def as_arrays(element: Any) -> Any:
    """Return an element with NumPy arrays in place of numbers, lists and arrays of others."""
    return tree.map_leaves(_array_of, tree.to_numpy(element))


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "__array__"):
        return leaf
    return np.asarray(tree.on_host(leaf))


_Found = TypeVar("_Found")

# The time between two looks for more chunks. No file system notifies of the writes of other hosts.
_POLL_S = 0.1


@dataclass(frozen=True)
class Load(Node):
    """The elements of a snapshot. Workers share its chunks.

    Attributes:
        path: The folder of the snapshot.
        wait: Whether to wait for a save that has not ended.
        shard: The only shard to read; None reads all shards.
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
        # Waits for the save to begin.
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
        self._reader = metadata.open_chunk(self._node.path, self._begun().metadata, chunk)
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

    def until(self, look: Callable[[], _Found | None], awaited: str) -> _Found:
        """Call ``look`` until it returns something, and return that.

        Raises:
            StopIteration: The wait has been ended.
        """
        path = self._node.path
        slow_wait = SlowWait(
            f"the load of the snapshot {path!r}",
            lambda: f"{awaited}: check that a process saves the snapshot, and to this folder",
            lambda: (f"{awaited} of the snapshot {path!r}", ()),
        )
        try:
            while not self.closed:
                found = look()
                if found is not None:
                    return found
                slow_wait.check()
                self._closed.wait(min(_POLL_S, slow_wait.due_s))
        finally:
            slow_wait.close()
        raise StopIteration
