"""``Dataset.cache``: the elements of the first whole pass, kept for later ones."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.base import Context, ElementIterator, Node, Place, Reader, UnaryNode
from dataservice.dataset.combining import AT_ONCE
from dataservice.snapshot.cache import CacheFile, CacheWriter

_Origin = tuple[tuple[int, ...], int]
"""The seed and the epoch of a pass."""


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
        length = self.indexed_length()
        if length is None:
            raise self.cannot_be_split(
                "elements are cached by their index; call cache before transformations that drop, "
                "shuffle, mix, flatten or group elements"
            )
        return length

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
