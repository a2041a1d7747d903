"""Sources that compute or hold their elements: numbers, arrays, lists."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dataservice.dataset import tree
from dataservice.dataset.base import (
    ENDLESS,
    INFINITE_CARDINALITY,
    Context,
    ElementIterator,
    IndexedSource,
    IndexReader,
    Node,
    Place,
    Reader,
)
from dataservice.dataset.spec import ArraySpec, Spec, spec_of, unbatched

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Range(IndexedSource):
    """The numbers of a Python range, as np.int64.

    Attributes:
        start: The first.
        stop: Where to end, exclusive.
        step: The distance.
    """

    start: int
    stop: int
    step: int

    def __post_init__(self) -> None:
        numbers = range(self.start, self.stop, self.step)
        ends = (numbers[0], numbers[-1]) if numbers else ()
        if not all(_LOWEST <= end <= _HIGHEST for end in ends) or numbers[_HIGHEST:]:
            raise ValueError(f"{numbers}: all numbers and their count must fit into 64 bits")

    def cardinality(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def element_spec(self) -> Spec:
        return ArraySpec((), np.int64)

    @property
    def has_static_spec(self) -> bool:
        return True

    def element(self, index: int) -> np.int64:
        return np.int64(self.start + index * self.step)


@dataclass(frozen=True, eq=False)
class TensorSlices(IndexedSource):
    """Element i holds ``array[i]`` of every array, as a read-only view.

    Attributes:
        arrays: Dicts and tuples, nested, of arrays of shape (rows, ...).
        rows: Their common first dimension.
    """

    arrays: Any
    rows: int

    @classmethod
    def of(cls, tensors: Any) -> Self:
        """Check the arrays, and describe their rows.

        Raises:
            ValueError: There is no array, one has no dimension, or their lengths differ.
        """
        arrays = tree.map_leaves(_read_only, tree.with_dicts(tensors))
        lengths = [len(array) for array in tree.flatten(arrays)]
        if not lengths:
            raise ValueError("from_tensor_slices and from_tensors need at least one array")
        if len(set(lengths)) > 1:
            raise ValueError(f"the arrays must have the same number of rows, not {lengths}")
        return cls(arrays, lengths[0])

    def cardinality(self) -> int:
        return self.rows

    def element_spec(self) -> Spec:
        if self.rows and not self.has_static_spec:
            return spec_of(self.element(0))
        return unbatched(spec_of(self.arrays))

    @property
    def has_static_spec(self) -> bool:
        # Only the objects themselves tell their types.
        return not any(array.dtype.kind in "OT" for array in tree.flatten(self.arrays))

    def element(self, index: int) -> Any:
        return tree.map_leaves(lambda array: tree.row(array, index), self.arrays)

    def summary(self) -> str:
        shown = tree.map_leaves(lambda array: f"{array.dtype}{list(array.shape)}", self.arrays)
        return f"from_tensor_slices({shown!r})"


class Tensors(TensorSlices):
    """A single element that holds the arrays. As slices, they have one row."""

    def summary(self) -> str:
        shown = tree.map_leaves(lambda array: f"{array.dtype}{list(array.shape[1:])}", self.arrays)
        return f"from_tensors({shown!r})"


def as_only_row(leaf: Any) -> np.ndarray[Any, Any]:
    """Return an array with the given leaf as its only row."""
    array: np.ndarray[Any, Any] = tree.array_of(tree.on_host(leaf))[np.newaxis]
    return array


def _read_only(leaf: Any) -> np.ndarray[Any, Any]:
    # A view, because elements that were changed in place would change the next pass.
    array = tree.array_of(tree.on_host(leaf)).view()
    if array.ndim == 0:
        raise ValueError(f"from_tensor_slices needs arrays with rows, not the scalar {leaf!r}")
    array.flags.writeable = False
    return array


Numbers = Callable[[int], np.int64]
"""Returns the element of an index."""


class Endless(Node):
    """A source of whole numbers, as np.int64, without an end."""

    def cardinality(self) -> int:
        """Return INFINITE_CARDINALITY."""
        return INFINITE_CARDINALITY

    def indexed_length(self) -> int | None:
        return ENDLESS

    def element_spec(self) -> Spec:
        """Return the spec of a number."""
        return ArraySpec((), np.int64)

    @property
    def has_static_spec(self) -> bool:
        return True

    @abstractmethod
    def numbers(self, context: Context, epoch: int) -> Numbers:
        """Return the function that computes the elements of an epoch."""

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _EndlessReader(self, places, context)


class _EndlessReader(Reader):
    def __init__(self, node: Endless, places: Iterator[Place], context: Context) -> None:
        self._numbers_of = lru_cache(maxsize=2)(partial(node.numbers, context))
        self._places = places

    def __next__(self) -> np.int64:
        epoch, index = next(self._places)
        return self._numbers_of(epoch)(index)


@dataclass(frozen=True)
class Counter(Endless):
    """Attributes: the first number, and the distance from each to the next."""

    start: int
    step: int

    def numbers(self, context: Context, epoch: int) -> Numbers:
        start, step = self.start, self.step
        return lambda index: np.int64(start + index * step)


_AT_ONCE = 1024
"""The number of random numbers drawn at once."""


@dataclass(frozen=True)
class Random(Endless):
    """Numbers from 0 on and below 2 ** 32, all alike.

    Attributes:
        seed: Fixes the numbers of each pass; None differs from run to run.
        rerandomize_each_iteration: Whether passes differ from each other.
    """

    seed: int | None
    rerandomize_each_iteration: bool
    _fixed: int = field(repr=False, compare=False, default=0)

    @classmethod
    def of(cls, seed: int | None, rerandomize: bool) -> Random:
        """Check the arguments, and describe the numbers.

        Raises:
            ValueError: The seed is negative.
        """
        if seed is not None and seed < 0:
            raise ValueError(f"a seed cannot be negative: {seed}")
        # Passes that must agree without a seed need one that belongs to the description.
        return cls(seed, rerandomize, secrets.randbits(63))

    def indexed_length(self) -> int | None:
        """Return ENDLESS, but None if all passes have the same numbers without a seed.

        Those numbers are this process's own: another one could not go on without their seed.
        """
        return ENDLESS if self.seed is not None or self.rerandomize_each_iteration else None

    def source_length(self) -> int:
        """Return 1 if the node is sequential, because one worker makes all elements."""
        return 1 if self.indexed_length() is None else ENDLESS

    @property
    def same_every_epoch(self) -> bool:
        return not self.rerandomize_each_iteration

    def numbers(self, context: Context, epoch: int) -> Numbers:
        """Return the function that computes the elements of an epoch."""
        if not self.rerandomize_each_iteration:
            assert self.seed is not None
            return _Drawn((self.seed,)).at
        if self.seed is None:
            return _Drawn((*context.seed, crc32(self.summary().encode()), epoch)).at
        return _Drawn((self.seed, epoch)).at

    def _iterate(self, context: Context) -> ElementIterator:
        return _RandomIterator(self._fixed, IndexReader(1, context.share))


class _RandomIterator(ElementIterator):
    """One pass, in the process that gets its only index; the seed is in the state."""

    def __init__(self, seed: int, indices: IndexReader) -> None:
        self._drawn = _Drawn((seed,))
        self._seed = seed
        self._indices = indices
        self._place: int | None = None  # of the next number; None before the index is had

    def __next__(self) -> np.int64:
        if self._place is None:
            next(self._indices)
            self._place = 0
        self._place += 1
        return self._drawn.at(self._place - 1)

    def get_state(self) -> tuple[int, int, int | None]:
        return self._indices.get_state(), self._seed, self._place

    def set_state(self, state: tuple[int, int, int | None]) -> None:
        position, self._seed, self._place = state
        self._drawn = _Drawn((self._seed,))
        self._indices.set_state(position)

    def close(self) -> None:
        pass  # holds no threads and no connections


class _Drawn:
    """Random numbers by their index, drawn a block at a time; the last block is kept."""

    def __init__(self, entropy: tuple[int, ...]) -> None:
        self._entropy = entropy
        self._number = -1
        self._block: NDArray[np.int64] = np.empty(0, np.int64)

    def at(self, place: int) -> np.int64:
        number, within = divmod(place, _AT_ONCE)
        if number != self._number:
            random = np.random.default_rng((*self._entropy, number))
            self._block = random.integers(1 << 32, size=_AT_ONCE, dtype=np.int64)
            self._number = number
        found: np.int64 = self._block[within]
        return found


@dataclass(frozen=True, eq=False)
class InMemory(IndexedSource):
    """Attributes: the elements, in memory."""

    elements: list[Any]

    def cardinality(self) -> int:
        return len(self.elements)

    def element(self, index: int) -> Any:
        return self.elements[index]

    def summary(self) -> str:
        return f"{len(self.elements)} elements"

    def identity_values(self) -> Iterable[Any]:
        """Return the number of elements.

        Users iterate over many windows and save the state of none, so this must be fast.
        """
        return (len(self.elements),)
