"""``Dataset.from_generator`` and ``from_source``: elements of anything that Python can iterate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Protocol

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.functions import name_of
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    IndexedSource,
    IndexReader,
    Node,
)
from mpidist.errors import InvalidArgumentError


class RandomAccess(Protocol):
    """What has a length, and elements by their index: a list, torch's and Grain's map datasets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Indexed(IndexedSource):
    """Attributes: something of random access, whose element i is ``source[i]``."""

    source: RandomAccess

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return len(self.source)

    def element(self, index: int) -> Any:
        """Local. See :class:`IndexedSource`."""
        return as_arrays(self.source[index])

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        return f"from_source({type(self.source).__qualname__} of {len(self.source)})"


@dataclass(frozen=True, eq=False)
class Generator(Node):
    """Attributes: makes an iterable for each pass, and its arguments."""

    factory: Callable[..., Iterable[Any]]
    arguments: tuple[Any, ...] = ()

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        """Return 1, because one worker reads all of the iterable."""
        return 1

    def _iterate(self, context: Context) -> ElementIterator:
        if context.share is not None:
            return _SharedIterator(self, IndexReader(1, context.share))
        return GeneratorIterator(iter(self.factory(*self.arguments)), name_of(self.factory))

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        shown = [name_of(self.factory), *map(repr, self.arguments)]
        return f"from_generator({', '.join(shown)})"


class GeneratorIterator(ElementIterator):
    """One pass.

    An iterator that has ``get_state`` and ``set_state`` itself, as Grain's have, or ``state_dict``
    and ``load_state_dict``, as torchdata's, is asked for its state; any other is read again up to
    where it was.

    Args:
        elements: The iterator.
        name: Of what made it, for messages.
    """

    def __init__(self, elements: Iterator[Any], name: str) -> None:
        self._elements = elements
        self._name = name
        self._given = 0
        self._error: Exception | None = None
        self._raised = 0  # id of what was raised last, whose frames would be in a circle with this

    def __next__(self) -> Any:
        element = self._take()
        if element is None:
            raise InvalidArgumentError(f"{self._name} returned None, which is not an element")
        return as_arrays(element)

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        for name in ("get_state", "state_dict"):
            if hasattr(self._elements, name):
                return self._given, (getattr(self._elements, name)(),)
        return self._given, None

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
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
        """Local. See :class:`ElementIterator`."""
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`; not if it is the iterator that raised it."""
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
        return next(self._elements)

    def get_state(self) -> tuple[Any, Any]:
        """Local. See :class:`ElementIterator`."""
        within = None if self._elements is None else (self._elements.get_state(),)
        return self._indices.get_state(), within

    def set_state(self, state: tuple[Any, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        indices, within = state
        self._indices.set_state(indices)
        if within is not None:
            self._elements = self._node.iterate(Context(seed=()))
            self._elements.set_state(within[0])

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._elements is not None:
            self._elements.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._elements is not None and self._elements.goes_on(error)


def as_arrays(element: Any) -> Any:
    """Local. An element with NumPy's arrays where it has numbers, lists, or others' arrays."""
    return tree.map_leaves(_array_of, tree.to_numpy(element))


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "__array__"):
        return leaf
    return np.asarray(tree.on_host(leaf))
