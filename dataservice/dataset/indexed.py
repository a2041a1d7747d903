"""Nodes whose elements can be computed alone: sources, and transformations of indexed nodes."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dataservice.dataset import tree
from dataservice.dataset.base import (
    ENDLESS,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    FunctionNode,
    IndexedSource,
    IndexReader,
    Node,
    Place,
    Reader,
    SuccessivePasses,
    UnaryIterator,
    UnaryNode,
    pass_epoch,
)
from dataservice.dataset.spec import ArraySpec, Spec, fits, spec_of, unbatched
from mpidist.errors import FailedPreconditionError, InvalidArgumentError

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
        return _Drawn(self.entropy(self.seed, context.seed, epoch)).at

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


@dataclass(frozen=True)
class Map(FunctionNode):
    """Attributes: the node below, and the function. Members of a tuple are its arguments."""

    parent: Node
    function: Callable[..., Any]

    def indexed_length(self) -> int | None:
        return self.parent.indexed_length()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return MapIterator(self.parent.read(places, context), self.function)

    def _iterate(self, context: Context) -> ElementIterator:
        return MapIterator(self.parent.iterate(context), self.function)


class MapIterator(UnaryIterator):
    """One pass. Its state is the state of the pass below."""

    def __init__(self, parent: ElementIterator, function: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._function = function

    def __next__(self) -> Any:
        return mapped(self._function, next(self._parent), self._function)


def mapped(function: Callable[..., Any], element: Any, given: Callable[..., Any]) -> Any:
    """Return the result of a function given to ``map``.

    Args:
        function: The function to call.
        element: The element.
        given: The user's function, for messages.

    Raises:
        InvalidArgumentError: The function returned None. Its ``return`` may be missing.
        Exception: The error of the function.
    """
    result = tree.to_numpy(tree.call(function, element, "map"))
    if result is None:
        raise InvalidArgumentError(
            f"the function {tree.name_of(given)} given to map returned None: it must return an "
            "element"
        )
    return result


@dataclass(frozen=True)
class CheckedSpec(UnaryNode):
    """Elements that are checked against a spec.

    Attributes:
        parent: The node below.
        spec: The spec that its elements must have.
        converts: Whether to convert numbers to the dtype of the spec. Conversions between dtypes of
            whole numbers must keep the values. Other conversions may round.
    """

    parent: Node
    spec: Spec
    converts: bool = False

    def element_spec(self) -> Spec:
        return self.spec

    @property
    def has_static_spec(self) -> bool:
        return True

    def indexed_length(self) -> int | None:
        return self.parent.indexed_length()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return CheckedSpecIterator(self, self.parent.read(places, context))

    def _iterate(self, context: Context) -> ElementIterator:
        return CheckedSpecIterator(self, self.parent.iterate(context))


class CheckedSpecIterator(UnaryIterator):
    """One pass. An element with another spec raises InvalidArgumentError."""

    def __init__(self, node: CheckedSpec, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._node = node

    def __next__(self) -> Any:
        element = next(self._parent)
        if self._node.converts:
            element = _converted(element, self._node.spec)
        if not fits(element, self._node.spec):
            raise InvalidArgumentError(
                f"an element of {self._node.parent.summary()} has the spec {spec_of(element)}, "
                f"but its element_spec is {self._node.spec}"
            )
        return element


def _converted(element: Any, spec: Spec) -> Any:
    """Return an element with the dtypes of a spec, if it has the structure of the spec."""
    if tree.structure(element) != tree.structure(spec):
        return element
    pairs = zip(tree.flatten(element), tree.flatten(spec, element), strict=True)
    return tree.unflatten(element, [_with_dtype(leaf, said) for leaf, said in pairs])


def _with_dtype(leaf: Any, said: Any) -> Any:
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype == said.dtype:
        return leaf
    if not leaf.size:  # the dtype of an empty list means nothing
        return leaf.astype(said.dtype)
    kinds = leaf.dtype.kind, said.dtype.kind
    whole = all(kind in "biu" for kind in kinds)
    numbers = all(kind in "biufc" for kind in kinds)
    if not whole and not (numbers and np.can_cast(leaf.dtype, said.dtype, "same_kind")):
        return leaf
    converted = leaf.astype(said.dtype)
    return leaf if whole and not np.array_equal(converted, leaf) else converted


@dataclass(frozen=True)
class Take(UnaryNode):
    """Attributes: the node below, and the number of elements; -1 takes all."""

    parent: Node
    count: int

    def __post_init__(self) -> None:
        if self.count < -1:
            raise ValueError(f"take needs a count of at least 0, or -1 for all, not {self.count}")

    def indexed_length(self) -> int | None:
        below = self.parent.indexed_length()
        return below if below is None or self.count == -1 else min(below, self.count)

    def cardinality(self) -> int:
        below = self.parent.cardinality()
        if self.count == -1 or self.count == 0:
            return below if self.count else 0
        if below == INFINITE_CARDINALITY:
            return self.count
        return below if below < 0 else min(below, self.count)

    def source_length(self) -> int:
        return self.parent.source_length() if self.count == -1 else self.counted_length()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return self.parent.read(places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        parent = self.parent.iterate(context)
        return parent if self.count == -1 else TakeIterator(parent, self.count)


class _CountingIterator(UnaryIterator):
    """A pass that counts elements.

    Args:
        parent: The pass over the node below.
        number: The count at the beginning.
    """

    def __init__(self, parent: ElementIterator, number: int) -> None:
        super().__init__(parent)
        self._number = number

    def get_state(self) -> tuple[int, Any]:
        return self._number, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        self._number, below = state
        super().set_state(below)


class TakeIterator(_CountingIterator):
    """One pass. Its number is the number of elements that are left."""

    def __next__(self) -> Any:
        if not self._number:
            raise StopIteration
        element = next(self._parent)
        self._number -= 1
        return element


@dataclass(frozen=True)
class Skip(UnaryNode):
    """Attributes: the node below, and the number of elements to drop; -1 drops all."""

    parent: Node
    count: int

    def __post_init__(self) -> None:
        if self.count < -1:
            raise ValueError(f"skip needs a count of at least 0, or -1 for all, not {self.count}")

    def indexed_length(self) -> int | None:
        below = self.parent.indexed_length()
        if below is None or self.count == -1:
            return None if below is None else 0
        return max(below - self.count, 0)

    def cardinality(self) -> int:
        if self.count == -1:
            return 0
        below = self.parent.cardinality()
        return below if below < 0 else max(below - self.count, 0)

    def source_length(self) -> int:
        return self.counted_length()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        count = self.count
        return self.parent.read(((epoch, index + count) for epoch, index in places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return SkipIterator(self.parent.iterate(context), self.count)


class SkipIterator(_CountingIterator):
    """One pass. Its number is the number of elements to drop; -1 drops all."""

    def __next__(self) -> Any:
        if self._number == -1:
            raise StopIteration
        while self._number:
            next(self._parent)
            self._number -= 1
        return next(self._parent)


SHARD_HINT = -1
"""The value of both arguments of ``shard`` if ShardingPolicy.HINT fills them in."""


@dataclass(frozen=True)
class Shard(UnaryNode):
    """Attributes: the node below, the number of shards, and the index of this shard."""

    parent: Node
    num_shards: int
    index: int

    def __post_init__(self) -> None:
        if self.hint:
            return
        if SHARD_HINT in (self.num_shards, self.index):
            raise InvalidArgumentError(
                f"shard needs 0 <= index < num_shards, or SHARD_HINT ({SHARD_HINT}) for both, not "
                f"index {self.index} of {self.num_shards}"
            )
        if self.num_shards < 1 or not 0 <= self.index < self.num_shards:
            raise ValueError(
                f"shard needs 0 <= index < num_shards, not index {self.index} of {self.num_shards}"
            )

    @property
    def hint(self) -> bool:
        """True if ShardingPolicy.HINT has not filled in the arguments yet."""
        return self.num_shards == self.index == SHARD_HINT

    def indexed_length(self) -> int | None:
        below = self.parent.indexed_length()
        return None if below is None or self.hint else len(self._indices(below))

    def cardinality(self) -> int:
        count = self.parent.cardinality()
        if self.hint and count > 0:
            return UNKNOWN_CARDINALITY
        return count if count < 0 else len(self._indices(count))

    def source_length(self) -> int:
        self._check_filled_in()
        return self.counted_length()

    def _indices(self, count: int) -> range:
        """Return the indices of the shard among the indices of the node below."""
        return range(self.index, count, self.num_shards)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        first, step = self.index, self.num_shards
        return self.parent.read(((epoch, first + index * step) for epoch, index in places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        self._check_filled_in()
        return ShardIterator(self.parent.iterate(context), self.num_shards, self.index)

    def _check_filled_in(self) -> None:
        if self.hint:
            raise FailedPreconditionError(
                f"{self.parent.summary()}.shard(SHARD_HINT, SHARD_HINT) can only be read by the "
                "workers of a data service, under distribute(ShardingPolicy.HINT, ...)"
            )


class ShardIterator(_CountingIterator):
    """One pass. Its number is the number of elements to drop before the next of the shard."""

    def __init__(self, parent: ElementIterator, num_shards: int, index: int) -> None:
        super().__init__(parent, index)
        self._num_shards = num_shards

    def __next__(self) -> Any:
        while self._number:
            next(self._parent)
            self._number -= 1
        element = next(self._parent)
        self._number = self._num_shards - 1
        return element


@dataclass(frozen=True)
class Repeat(UnaryNode):
    """Attributes: the node below, and the number of passes; None means infinitely many."""

    parent: Node
    count: int | None

    def cardinality(self) -> int:
        once = self.parent.cardinality()
        if self.count == 0 or once == 0:
            return 0
        if self.count is None:
            return INFINITE_CARDINALITY
        return once if once < 0 else once * self.count

    def indexed_length(self) -> int | None:
        once = self.parent.indexed_length()
        if once is None or once == 0:
            return once
        return ENDLESS if self.count is None else min(once * self.count, ENDLESS)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        once = self.parent.indexed_length()
        assert once is not None
        return self.parent.read(_places_in_passes(places, once, self.count), context)

    def _iterate(self, context: Context) -> ElementIterator:
        # A pass over a data service may be empty because other consumers got all its elements.
        count = 0 if self.cardinality() == 0 else self.count
        ends = count is None and not self.parent.distributed
        return RepeatIterator(self.parent, context, count, ends)


def _places_in_passes(places: Iterator[Place], once: int, count: int | None) -> Iterator[Place]:
    """Yield the places in the node below. Each pass over that node is an epoch."""
    for epoch, index in places:
        number, within = divmod(index, once)
        yield pass_epoch(epoch, number, count), within


class RepeatIterator(SuccessivePasses):
    """Several passes over a node, one after the other.

    Args:
        parent: The node below.
        context: The context of all passes together.
        count: The number of passes; None means infinitely many.
        needs_some: Whether a pass without elements ends the repetition, as in tf.data.
    """

    def __init__(self, parent: Node, context: Context, count: int | None, needs_some: bool) -> None:
        super().__init__()
        self._parent = parent
        self._context = context
        self._count = count
        self._needs_some = needs_some
        self._some = False  # whether the pass has returned an element or raised its error
        self._first = 0  # position where the pass began
        self._started = 0

    def __next__(self) -> Any:
        while True:
            if self._pass is None:
                if self._is_over():
                    raise StopIteration
                self._started += 1
                self._some = False
                self._first = self._place()
                self._pass = self._begin()
            try:
                element = next(self._pass)
            except StopIteration:
                self.close()
            except Exception:
                self._some = True
                raise
            else:
                self._some = True
                return element

    def _is_over(self) -> bool:
        scope = self._context.scope
        if self._started == self._count or (scope is not None and scope.closed):
            return True
        if not self._needs_some or self._started == 0 or self._some:
            return False
        # If other workers got all source indices of the pass, the next pass may have elements.
        return self._context.share is None or self._place() > self._first

    def _place(self) -> int:
        """Return the position where the next pass over the source begins."""
        return 0 if self._context.share is None else self._context.share.splits.start

    def _begin(self) -> ElementIterator:
        return self._parent.iterate(self._context.enter(self._started - 1, self._count))

    def get_state(self) -> tuple[int, bool, int, Any]:
        within = None if self._pass is None else (self._pass.get_state(),)
        return self._started, self._some, self._first, within

    def set_state(self, state: tuple[int, bool, int, Any]) -> None:
        self._started, self._some, self._first, within = state
        if within is not None:
            self._pass = self._begin()
            self._pass.set_state(within[0])


@dataclass(frozen=True)
class Enumerate(UnaryNode):
    """Attributes: the node below, and the first number."""

    parent: Node
    start: int

    def indexed_length(self) -> int | None:
        return self.parent.indexed_length()

    def source_length(self) -> int:
        return self.counted_length()

    def element_spec(self) -> Spec:
        return ArraySpec((), np.int64), self.parent.element_spec()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _EnumerateReader(self, places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return EnumerateIterator(self.parent.iterate(context), self.start)


class _EnumerateReader(Reader):
    def __init__(self, node: Enumerate, places: Iterator[Place], context: Context) -> None:
        # The node below may take places ahead, on another thread.
        self._taken: deque[int] = deque()
        self._start = node.start
        self._parent = node.parent.read(_noted(places, self._taken), context)

    def __next__(self) -> tuple[np.int64, Any]:
        try:
            element = next(self._parent)
        except StopIteration:
            raise
        except Exception:
            self._taken.popleft()
            raise
        return np.int64(self._start + self._taken.popleft()), element

    def close(self) -> None:
        self._parent.close()


def _noted(places: Iterator[Place], taken: deque[int]) -> Iterator[Place]:
    """Yield places, and append their indices to a queue."""
    for place in places:
        taken.append(place[1])
        yield place


class EnumerateIterator(_CountingIterator):
    """One pass. Its number is the next one."""

    def __next__(self) -> tuple[np.int64, Any]:
        self._number += 1  # also if the element fails: it keeps its number
        return np.int64(self._number - 1), next(self._parent)
