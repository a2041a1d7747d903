"""``Dataset.cache``: the elements of the first whole pass, kept for later ones.

The file of a cache is one chunk; see :mod:`dataservice.snapshot.format`. Its state has the offsets
of the elements. The file is written under another name, and gets its own when it is complete. It is
locked while it is written. A later writer recognises the files of killed processes by the missing
lock, and removes them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import secrets
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.base import Context, ElementIterator, Node, Place, Reader, UnaryNode
from dataservice.dataset.combining import AT_ONCE
from dataservice.snapshot import format
from dataservice.snapshot.format import BUFFER_BYTES, ChunkReader, ChunkWriter
from dataservice.snapshot.metadata import put_in_place, writing
from mpidist.errors import DataLossError, InvalidArgumentError

_Origin = tuple[tuple[int, ...], int]
"""The seed and the epoch of a pass."""

# The state has the number of elements, their offsets, the offset of the end, and the summary.
_OFFSET = np.dtype("<u8")
_HEAD = format.head(b"cache".ljust(16), 0, 0)
_PART = re.compile(r"\.part-\d+-[0-9a-f]{8}")


class _Memory:
    """The elements cached in this process. They are not pickled with the description.

    Attributes:
        elements: The elements of the first whole pass over a sequential node.
        by_index: The elements of an indexed node, by their index.
        origin: The pass that is cached here, or was cached where a state comes from. If the
            elements are gone, the node below is read as it was in that pass.
    """

    def __init__(self) -> None:
        self.elements: list[Any] | None = None
        self.by_index: dict[int, Any] = {}
        self.origin: _Origin | None = None

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        return _Memory, ()


@dataclass(frozen=True)
class Cache(UnaryNode):
    """Caches elements in memory, or in a file.

    Attributes:
        parent: The node below.
        path: The path of the file; empty for memory.
    """

    parent: Node
    path: str
    _memory: _Memory = field(init=False, repr=False, compare=False, default_factory=_Memory)

    def indexed_length(self) -> int | None:
        by_index = not self.path and self.parent.same_every_epoch
        return self.parent.indexed_length() if by_index else None

    def source_length(self) -> int:
        if self.path:
            raise self.cannot_be_split(
                "every worker would write only its own part into the file; use cache() without "
                "a file name, or save once with distributed_save()"
            )
        return self.indexed_only(
            "elements are cached by their index; call cache before transformations that drop, "
            "shuffle, mix, flatten or group elements"
        )

    def sample(self) -> Node:
        # The elements of the node below are alike, and the cache stays as it is.
        return self.parent.sample()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _CacheReader(self.parent, self._memory.by_index, places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return CacheIterator(self, context)

    @property
    def origin(self) -> _Origin | None:
        """The pass that is cached; None if that is unknown."""
        return self._memory.origin

    def come_from(self, origin: _Origin | None) -> None:
        """Note which pass is cached, or will be."""
        self._memory.origin = origin

    def kept(self) -> _CachedElements | CacheFile | None:
        """Return the elements of a whole pass; None if none has ended.

        Raises:
            DataLossError: The file is damaged.
            InvalidArgumentError: The file belongs to another dataset.
        """
        if self.path:
            return (
                CacheFile(self.path, self.parent.summary()) if os.path.exists(self.path) else None
            )
        return None if self._memory.elements is None else _CachedElements(self._memory.elements)

    def keep(self) -> _MemoryWriter | CacheWriter:
        """Return a writer that caches the elements of a pass."""
        return (
            CacheWriter(self.path, self.parent.summary())
            if self.path
            else _MemoryWriter(self._memory)
        )


class _CacheReader(Reader):
    """Reads elements by their index. Takes cached ones, and caches the others.

    Args:
        parent: The node below.
        kept: The cached elements by index. Other readers may add to it.
        places: Places of the elements.
        context: The context of the pass.
    """

    def __init__(
        self, parent: Node, kept: dict[int, Any], places: Iterator[Place], context: Context
    ) -> None:
        self._parent = parent
        self._kept = kept
        self._places = places
        self._context = context
        self._coming: deque[Place] = deque()
        self._missing: set[int] = set()  # indices that the reader below gives next
        self._reader: ElementIterator | None = None

    def __next__(self) -> Any:
        if not self._coming:
            self._take()
        place = self._coming.popleft()
        index = place[1]
        if index in self._missing:
            self._missing.discard(index)
        elif index in self._kept:  # an element may be None
            return tree.copy_structure(self._kept[index])
        else:  # it has failed a moment ago
            with self._parent.read(iter([place]), self._context) as once:
                return self._keep(index, next(once))
        assert self._reader is not None
        return self._keep(index, next(self._reader))

    def _keep(self, index: int, element: Any) -> Any:
        kept = self._kept[index] = tree.read_only(element)
        return tree.copy_structure(kept)

    def _take(self) -> None:
        """Take several places, so that the node below can read ahead among the missing ones."""
        self._coming.extend(islice(self._places, AT_ONCE))
        if not self._coming:
            raise StopIteration
        missing: dict[int, Place] = {}
        for place in self._coming:
            if place[1] not in self._kept:
                missing.setdefault(place[1], place)
        self._missing = set(missing)
        self.close()
        self._reader = self._parent.read(iter(missing.values()), self._context)

    def close(self) -> None:
        """Close the reader of the node below."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class CacheIterator(ElementIterator):
    """One pass over the cached elements, or over the node below, with caching."""

    def __init__(self, node: Cache, context: Context) -> None:
        self._node = node
        self._context = context
        self._kept = node.kept()
        self._given = 0
        self._parent: ElementIterator | None = None
        self._keeping: _MemoryWriter | CacheWriter | None = None
        if self._kept is None:
            self._begin(node.origin or (context.seed, context.epoch))

    def _begin(self, origin: _Origin) -> None:
        """Read the node below, and cache its elements."""
        seed, epoch = origin
        self._context = dataclasses.replace(self._context, seed=seed, epoch=epoch)
        self._parent = self._node.parent.iterate(self._context)
        self._keeping = self._node.keep()

    def __next__(self) -> Any:
        if self._kept is not None:
            if self._given >= len(self._kept):
                self._kept.close()
                raise StopIteration
            self._given += 1
            return self._kept.element(self._given - 1)
        assert self._parent is not None
        try:
            element = next(self._parent)
        except StopIteration:
            if self._keeping is not None:
                self._keeping.finish()
                self._node.come_from(self._origin)
                self._keeping = None
            raise
        self._given += 1
        if self._keeping is not None:
            element = self._keeping.add(element)
        return element

    @property
    def _origin(self) -> _Origin:
        return self._context.seed, self._context.epoch

    def get_state(self) -> tuple[int, Any, _Origin | None]:
        if self._parent is None:
            return self._given, None, self._node.origin
        return self._given, (self._parent.get_state(),), self._origin

    def set_state(self, state: tuple[int, Any, _Origin | None]) -> None:
        # If the cached elements are gone, the node below is read from its beginning, and its
        # elements are cached again.
        given, below, origin = state
        if self._kept is None and origin is not None:
            self.close()
            self._node.come_from(origin)
            self._begin(origin)
        if self._kept is None and below is not None:
            assert self._parent is not None
            self._parent.set_state(below[0])
            self._give_up()  # the first elements are not here
        elif self._kept is None:
            self._skip_to(given)
        self._given = given

    def _skip_to(self, given: int) -> None:
        """Cache elements until ``given`` are cached, or the node below ends."""
        failure: Exception | None = None
        while self._given < given:
            try:
                next(self)
            except StopIteration:
                return
            except Exception as error:
                # Errors were raised before the state was taken. An error that ended the pass then
                # is raised again by each call.
                if error is failure and not self.goes_on(error):
                    raise
                failure = error

    def close(self) -> None:
        self._give_up()
        if self._parent is not None:
            self._parent.close()
        if self._kept is not None:
            self._kept.close()

    def goes_on(self, error: Exception) -> bool:
        return self._parent is None or self._parent.goes_on(error)

    def _give_up(self) -> None:
        if self._keeping is not None:
            self._keeping.give_up()
            self._keeping = None


class _CachedElements:
    """Elements in memory."""

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __len__(self) -> int:
        return len(self._elements)

    def element(self, index: int) -> Any:
        return tree.copy_structure(self._elements[index])

    def close(self) -> None:
        """Do nothing."""


class _MemoryWriter:
    """Caches elements in memory at the end of a pass."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self._elements: list[Any] = []

    def add(self, element: Any) -> Any:
        # Read-only, because a write would change the elements of later passes.
        self._elements.append(tree.read_only(element))
        return tree.copy_structure(self._elements[-1])

    def finish(self) -> None:
        self._memory.elements = self._elements

    def give_up(self) -> None:
        self._elements = []


class CacheWriter:
    """Writes the file of a cache. An unfinished file goes with this object, or with the process.

    Args:
        path: The file. Its folder is made.
        summary: The dataset as text.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """

    def __init__(self, path: str, summary: str) -> None:
        self._path = path
        self._summary = summary
        self._offsets: list[int] = []
        with writing(f"the cache {path!r}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _remove_abandoned(path)
            file, self._part = _locked_part(path)
            self._chunk = ChunkWriter(file, _HEAD)
        self._finalizer = weakref.finalize(self, _discard, self._chunk, self._part, os.getpid())

    def add(self, element: Any) -> Any:
        """Write the next element, and return it.

        Raises:
            Exception: The element cannot be pickled. The others are still written.
            FailedPreconditionError: The file cannot be written. It is given up.
        """
        pieces = format.pack_element(element, None)
        if self._finalizer.alive:
            try:
                with writing(f"the cache {self._path!r}"):
                    offset = self._chunk.file.tell()
                    self._chunk.write(pieces)
            except BaseException:
                self.give_up()  # a record may be written in part
                raise
            self._offsets.append(offset)
        return element

    def finish(self) -> None:
        """Complete the file, and give it its name.

        Raises:
            FailedPreconditionError: The file cannot be written. It is given up.
        """
        if not self._finalizer.alive:
            return
        self._offsets.append(self._chunk.file.tell())
        # The summary may have file names that are not UTF-8.
        summary = self._summary.encode("utf-8", "surrogatepass")
        index = np.array(self._offsets, _OFFSET).tobytes() + summary
        try:
            with writing(f"the cache {self._path!r}"):
                self._chunk.finish(format.COUNT.pack(self._chunk.elements) + index)
                # On a file system without locks between hosts, another host may have removed the
                # file. Then a later iteration writes the cache.
                with suppress(FileNotFoundError):
                    put_in_place(self._part, self._path)
        finally:
            self.give_up()  # which finds no file if it has its name
        _remove_abandoned(self._path)

    def give_up(self) -> None:
        """Remove the unfinished file. Idempotent."""
        self._finalizer()


class CacheFile:
    """The elements of a file.

    Args:
        path: The file.
        summary: The dataset as text.

    Raises:
        DataLossError: The file is damaged, or is no cache.
        InvalidArgumentError: It is the cache of another dataset.
    """

    def __init__(self, path: str, summary: str) -> None:
        remedy = "Remove it, and the next iteration writes the cache anew"
        try:
            self._reader = ChunkReader(path, _HEAD, None, None, remedy)
        except IsADirectoryError as error:
            raise DataLossError(f"the cache {path!r} is a folder; name a file") from error
        except DataLossError as error:
            raise _misfit(path) from error
        try:
            known = self._read_index()
        except DataLossError as error:
            self.close()
            raise _misfit(path) from error
        if known != summary:
            self.close()
            raise InvalidArgumentError(
                f"the cache {path!r} was written for {known}, not for {summary}: remove it, or "
                "use another file"
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def element(self, index: int) -> Any:
        """Return the element of an index.

        Raises:
            DataLossError: It is damaged. The others can still be read.
            FailedPreconditionError: It cannot be unpickled here.
        """
        self._reader.position = int(self._offsets[index]), index
        return self._reader.read()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._reader.close()

    def _read_index(self) -> str:
        """Read the offsets of the elements and of the end. Return the summary."""
        state = self._reader.state()
        (count,) = format.COUNT.unpack_from(state)
        self._offsets = np.frombuffer(state, _OFFSET, count + 1, format.COUNT.size)
        with suppress(StopIteration):
            self.element(count)  # checks the end
        summary = state[format.COUNT.size + self._offsets.nbytes :]
        return summary.decode("utf-8", "surrogatepass")


def _misfit(path: str) -> DataLossError:
    return DataLossError(f"the file {path!r} is not a cache, or is damaged: remove it")


def _locked_part(path: str) -> tuple[BinaryIO, str]:
    """Make a new file, which is locked as long as it is open. Return it and its name."""
    while True:
        part = f"{path}.part-{os.getpid()}-{secrets.token_hex(4)}"
        file = open(part, "xb", BUFFER_BYTES)  # noqa: SIM115 - until finish() or give_up()
        with suppress(OSError):  # without locks no process removes it
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(part):
            return file, part
        file.close()  # another process removed it before it was locked


def _remove_abandoned(path: str) -> None:
    """Remove the unfinished files of killed processes."""
    folder, name = os.path.split(path)
    for found in os.listdir(folder):
        if not found.startswith(name) or _PART.fullmatch(found, len(name)) is None:
            continue
        part = os.path.join(folder, found)
        # The file may be locked by its writer, already removed, or another user's.
        with suppress(OSError), open(part, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)


def _discard(chunk: ChunkWriter, part: str, writer: int) -> None:
    if os.getpid() != writer:
        # A forked process drops the iterator that its parent continues. Closing the file must not
        # write the buffer, which the parent writes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), chunk.file.fileno())
        return
    with suppress(OSError):
        os.unlink(part)
    chunk.close()
