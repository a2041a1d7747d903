"""Batches: ``batch``, ``padded_batch``, ``rebatch``, ``unbatch``, ``bucket_by_sequence_length``."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.base import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
    Place,
    Reader,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.spec import (
    ArraySpec,
    Spec,
    batched,
    spec_of,
    unbatched,
    unknown_lengths,
)
from mpidist.errors import InvalidArgumentError, type_name

Array = np.ndarray[Any, Any]

_NUMPY = (np.ndarray, np.generic)
# Dtypes with item sizes that differ from element to element.
_FLEXIBLE = "OSTUV"


class Stack(Protocol):
    """The elements of one batch, as they come."""

    def append(self, element: Any) -> None:
        """Add an element. Raise InvalidArgumentError if it does not match the first one."""

    def result(self) -> Any:
        """Return the batch, which has at least one element."""


class BatchNode(UnaryNode):
    """Makes batches of ``batch_size`` elements; the last one may be smaller, or is left out.

    Over an indexed node, batches are indexed, too. Workers share whole batches, which do not depend
    on the worker.
    """

    parent: Node
    batch_size: int
    drop_remainder: bool

    @abstractmethod
    def stack(self, size: int) -> Stack:
        """Return an empty stack for at most so many elements of one batch."""

    def cardinality(self) -> int:
        count = self.parent.cardinality()
        return count if count < 0 else self._count(count)

    def indexed_length(self) -> int | None:
        below = self.parent.indexed_length()
        return None if below is None else self._count(below)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _BatchReader(self, places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return BatchIterator(self, self.parent.iterate(context))

    def _count(self, elements: int) -> int:
        return (
            elements // self.batch_size if self.drop_remainder else -(-elements // self.batch_size)
        )


def _check_size(method: str, batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"{method} needs a batch_size of at least 1, not {batch_size}")


class BatchIterator(UnaryIterator):
    """One pass; holds nothing between two batches."""

    def __init__(self, node: BatchNode, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._node = node

    def __next__(self) -> Any:
        node = self._node
        stack, count = node.stack(node.batch_size), 0
        elements = itertools.islice(self._parent, node.batch_size)
        for element in elements:
            try:
                stack.append(element)
            except InvalidArgumentError:
                # The next batch begins where it would have begun.
                count += 1 + sum(1 for _ in elements)
                if count < node.batch_size and node.drop_remainder:
                    raise StopIteration from None  # it would be left out
                raise
            count += 1
        if not count or (count < node.batch_size and node.drop_remainder):
            raise StopIteration
        return stack.result()


class _BatchReader(Reader):
    """Batches by their numbers. An element that fails is the error of its batch alone."""

    def __init__(self, node: BatchNode, places: Iterator[Place], context: Context) -> None:
        self._node = node
        # The node below may take places ahead, on another thread.
        self._sizes: deque[int] = deque()
        length = node.parent.indexed_length()
        assert length is not None
        below = _places_of(places, node.batch_size, length, self._sizes)
        self._parent = node.parent.read(below, context)

    def __next__(self) -> Any:
        failed: Exception | None = None
        stack: Stack | None = None
        size, taken = 1, 0
        while taken < size:
            try:
                element = next(self._parent)
            except StopIteration:
                raise
            except Exception as error:  # the next batch begins where it would have begun
                failed = failed or error
            if stack is None:  # the size is known when its first place has been taken
                size = self._sizes.popleft()
                stack = self._node.stack(size)
            if failed is None:
                try:
                    stack.append(element)
                except Exception as error:
                    failed = error
            taken += 1
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        assert stack is not None
        return stack.result()

    def close(self) -> None:
        self._parent.close()


def _places_of(
    places: Iterator[Place], batch_size: int, length: int, sizes: deque[int]
) -> Iterator[Place]:
    """Yield the places of the elements of batches. Append the size of each batch to a queue."""
    for epoch, batch in places:
        indices = range(batch * batch_size, min((batch + 1) * batch_size, length))
        sizes.append(len(indices))
        for index in indices:
            yield epoch, index


@dataclass(frozen=True)
class Batch(BatchNode):
    """Stacks ``batch_size`` elements.

    Attributes:
        parent: The node below.
        batch_size: Elements in a batch.
        drop_remainder: Whether to leave a smaller last batch out.
    """

    parent: Node
    batch_size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        _check_size("batch", self.batch_size)

    def element_spec(self) -> Spec:
        return batched(self.parent.element_spec(), self.batch_size if self.drop_remainder else None)

    def stack(self, size: int) -> Stack:
        return _Stack(size)


def stack(elements: Sequence[Any]) -> Any:
    """Return a batch of elements.

    Raises:
        InvalidArgumentError: Elements differ in structure, shape or dtype.
    """
    rows = _Stack(len(elements))
    for element in elements:
        rows.append(element)
    return rows.result()


class _Stack:
    """Rows of a batch, written in place as they come."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows = 0
        self._first: Any = None
        self._structure: Any = None
        self._columns: list[Array | list[Array]] = []

    def append(self, element: Any) -> None:
        if not self._rows:
            self._first, self._structure = element, tree.structure(element)
            self._columns = [_column(leaf, self._size) for leaf in tree.flatten(element)]
        else:
            tree.check_structure(self._rows, element, self._structure)
        leaves = tree.flatten(element, self._first)
        for component, (column, leaf) in enumerate(zip(self._columns, leaves, strict=True)):
            array: Any = leaf if isinstance(leaf, _NUMPY) else _array(leaf)
            if isinstance(column, list):
                if column:
                    _check_alike(component, column[0], array, self._rows)
                column.append(array)
                continue
            # The common case, without a call.
            if array.dtype != column.dtype or array.shape != column.shape[1:]:
                _check_alike(component, column[0], array, self._rows)
            column[self._rows] = array
        self._rows += 1

    def result(self) -> Any:
        columns = [
            np.stack(column) if isinstance(column, list) else column[: self._rows]
            for column in self._columns
        ]
        return tree.unflatten(self._first, columns)


def _check_alike(component: int, first: Array, other: Array, number: int) -> None:
    """Raise InvalidArgumentError unless element ``number`` has the first one's dtype and shape."""
    if first.shape != other.shape or not _same_dtype(first.dtype, other.dtype):
        raise _misfit(component, f"elements 0 and {number}", first, other)


def _same_dtype(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Return whether dtypes are equal except for the byte order and the length of text."""
    if one.kind == other.kind == "V":
        with suppress(TypeError):
            return np.result_type(one, other).kind == "V"
    return tree.native(one) == tree.native(other) or tree.are_text(one, other)


def _misfit(
    component: int, which: str, first: Array, other: Array, leading: int = 0
) -> InvalidArgumentError:
    """Return the error for arrays that differ. It shows shapes without ``leading`` dimensions."""
    one, two = (f"{array.dtype}{list(array.shape[leading:])}" for array in (first, other))
    return InvalidArgumentError(
        f"cannot batch arrays of different dtypes or shapes in component {component}: {which} have "
        f"{one} and {two}"
    )


def _array(leaf: Any) -> Array:
    if not isinstance(leaf, str | bytes):
        raise InvalidArgumentError(
            f"cannot batch objects of type {type_name(leaf)}: elements must be arrays or "
            "numbers on the host (call prefetch_to_device last)"
        )
    return tree.array_of(leaf)


def _column(leaf: Any, size: int) -> Array | list[Array]:
    array = leaf if isinstance(leaf, _NUMPY) else _array(leaf)
    if array.dtype.kind in _FLEXIBLE:
        return []
    return np.empty((size, *array.shape), tree.native(array.dtype))


@dataclass(frozen=True)
class Padding:
    """How elements are padded.

    Attributes:
        shapes: The shape to pad each leaf to, in the structure of elements. None or -1 in a shape,
            or None for a whole one, stands for the longest of the batch. A number is a shape of
            one dimension. An object with ``as_list()`` stands for the shape which that returns.
        values: The padding of each leaf; a single value is for all. None stands for 0, or for the
            empty text.

    Raises:
        InvalidArgumentError: A value is not a scalar.
        TypeError: A length is not a whole number.
    """

    shapes: Any = None
    values: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", _plain(self.shapes))
        if not _are_shapes(self.shapes):
            raise TypeError(
                "padded_shapes must be a shape of whole numbers and None, or a structure of such, "
                f"not {self.shapes!r}"
            )
        for value in tree.flatten(self.values):
            if np.ndim(value):
                raise InvalidArgumentError(
                    f"padding_values must be a scalar, or a structure of such, not {value!r}"
                )

    def stack(self, elements: list[Any]) -> Any:
        """Return a batch of elements.

        Raises:
            InvalidArgumentError: Elements differ in structure, dtype or number of dimensions, or
                one is longer than its shape.
        """
        first = elements[0]
        columns = [[tree.array_of(leaf) for leaf in column] for column in tree.columns(elements)]
        shapes = _for_leaves(self.shapes, first, _is_shape)
        values = _for_leaves(self.values, first, _is_value)
        filled = [
            _filled(number, *facts)
            for number, facts in enumerate(zip(columns, shapes, values, strict=True))
        ]
        return tree.unflatten(first, filled)

    def up_to(self, length: int, element: Any) -> Padding:
        """Return the same padding with a length in place of the lengths that are not given.

        Without shapes, the first dimension of each array gets the length. Scalars stay.

        Args:
            length: The length to fill up to.
            element: Any of the elements.
        """
        given = _for_leaves(self.shapes, element, _is_shape)
        shapes = [
            (length, *[None] * (np.ndim(leaf) - 1))[: np.ndim(leaf)]
            if shape is None
            else [length if one in (None, -1) else one for one in shape]
            for leaf, shape in zip(tree.flatten(element), given, strict=True)
        ]
        return Padding(tree.unflatten(element, shapes), self.values)

    def spec(self, element: Spec, rows: int | None) -> Spec:
        """Return the spec of a batch of ``rows`` elements; None if the number differs."""
        leaves = tree.flatten(element)
        shapes = _for_leaves(self.shapes, element, _is_shape)
        batches = [
            ArraySpec((rows, *_limits(shape, len(leaf.shape))), tree.native(leaf.dtype))
            if isinstance(leaf, ArraySpec)
            else leaf
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return tree.unflatten(element, batches)


def _for_leaves(given: Any, element: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Return the given value for each leaf of an element. A single one is for all leaves below."""
    if given is None or is_leaf(given):
        return [given] * len(tree.flatten(element))
    if isinstance(element, dict) and isinstance(given, dict) and element.keys() == given.keys():
        pairs = [(given[key], value) for key, value in element.items()]
    elif isinstance(element, tuple) and isinstance(given, tuple) and len(element) == len(given):
        pairs = list(zip(given, element, strict=True))
    else:
        raise InvalidArgumentError(
            f"padded_batch got {given!r} for elements of the structure "
            f"{tree.structure(element)!r}: give one for all arrays, or the structure of the "
            "elements"
        )
    return [leaf for own, part in pairs for leaf in _for_leaves(own, part, is_leaf)]


def _plain(shapes: Any) -> Any:
    """Return shapes with a tuple in place of numbers and of shapes of other libraries."""
    if isinstance(shapes, Integral) and not isinstance(shapes, bool):
        return (int(shapes),)
    if hasattr(shapes, "as_list"):
        with suppress(ValueError):  # not even the number of dimensions is known
            return tuple(shapes.as_list())
        return None
    if isinstance(shapes, dict):
        return {key: _plain(shape) for key, shape in shapes.items()}
    if isinstance(shapes, tuple) and not _is_shape(shapes):
        parts = [_plain(shape) for shape in shapes]
        return type(shapes)(*parts) if hasattr(shapes, "_fields") else tuple(parts)
    return shapes


def _is_shape(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(
        one is None or isinstance(one, Integral) for one in given
    )


def _are_shapes(given: Any) -> bool:
    if isinstance(given, dict | tuple) and not _is_shape(given):
        parts = given.values() if isinstance(given, dict) else given
        return all(_are_shapes(part) for part in parts)
    return given is None or _is_shape(given)


def _is_value(given: Any) -> bool:
    return not isinstance(given, tuple | dict)


def _limits(shape: Any, ndim: int) -> list[int | None]:
    if shape is None:
        return [None] * ndim
    if len(shape) != ndim:
        raise InvalidArgumentError(
            f"padded_batch: the shape {shape!r} has {len(shape)} dimensions, but an array of "
            f"the elements has {ndim}"
        )
    return [None if one in (None, -1) else int(one) for one in shape]


def _filled(number: int, column: list[Array], shape: Any, value: Any) -> Array:
    first = column[0]
    for row, array in enumerate(column):
        if array.ndim != first.ndim or not _same_dtype(first.dtype, array.dtype):
            raise _misfit(number, f"elements 0 and {row}", first, array)
    longest = [max(lengths) for lengths in zip(*(array.shape for array in column), strict=True)]
    limits = _limits(shape, first.ndim)
    target = [
        there if limit is None else limit for there, limit in zip(longest, limits, strict=True)
    ]
    if any(there > limit for there, limit in zip(longest, target, strict=True)):
        raise InvalidArgumentError(
            f"padded_batch: component {number} has an array of shape {longest}, which is longer "
            f"than {target}"
        )
    dtype = np.result_type(*column)
    filler = _empty_text(column, dtype) if value is None else _fitting(value, dtype)
    if filler is None:
        result = np.zeros((len(column), *target), dtype)
    else:
        result = np.full((len(column), *target), filler, np.result_type(dtype, filler.dtype))
    for row, array in enumerate(column):
        result[row : row + 1, *(slice(length) for length in array.shape)] = array
    return result


def _empty_text(column: list[Array], dtype: np.dtype[Any]) -> Array | None:
    """Return the padding of objects that are text; None where 0 serves."""
    if dtype.kind == "O":
        for one in (one for array in column for one in array.flat):
            if isinstance(one, str | bytes):
                return np.array(one[:0], object)
    return None


def _fitting(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return a padding value in a dtype. Raise InvalidArgumentError if the dtype cannot hold it.

    A number may be rounded if the dtype is floating, but must stay finite. Text keeps its length.
    """
    given = tree.array_of(value)
    own, kind = given.dtype.kind, dtype.kind
    filler: Array | None = None
    if isinstance(value, str | bytes) and own == "O":  # it ends with NUL
        filler = given if kind in ("O", "U" if isinstance(value, str) else "S") else None
    elif kind == "O" or ((own in "US") == (kind in "US") and (own != "c" or kind == "c")):
        with suppress(OverflowError, TypeError, ValueError), np.errstate(all="ignore"):
            filler = given.astype(kind if kind in "US" else dtype)
    if filler is not None and kind in "biu" and not (filler == given).all():
        filler = None
    if filler is not None and kind == "f":
        infinite = np.isinf(filler) & np.isfinite(given.astype(np.float64))
        filler = None if infinite.any() else filler
    if filler is None:
        raise InvalidArgumentError(
            f"padded_batch: arrays of dtype {dtype} cannot be padded with {value!r}"
        )
    return filler


class _PaddedStack:
    """Elements that are padded when all are there."""

    def __init__(self, padding: Padding) -> None:
        self._padding = padding
        self._elements: list[Any] = []

    def append(self, element: Any) -> None:
        self._elements.append(element)

    def result(self) -> Any:
        return self._padding.stack(self._elements)


@dataclass(frozen=True)
class PaddedBatch(BatchNode):
    """Pads and stacks ``batch_size`` elements.

    Attributes:
        parent: The node below.
        batch_size: Elements in a batch.
        padding: How they are padded.
        drop_remainder: Whether to leave a smaller last batch out.
    """

    parent: Node
    batch_size: int
    padding: Padding
    drop_remainder: bool

    def __post_init__(self) -> None:
        _check_size("padded_batch", self.batch_size)

    def element_spec(self) -> Spec:
        rows = self.batch_size if self.drop_remainder else None
        return self.padding.spec(self.parent.element_spec(), rows)

    def stack(self, size: int) -> Stack:
        return _PaddedStack(self.padding)


@dataclass(frozen=True)
class Rebatch(UnaryNode):
    """Cuts the rows of elements into batches of ``batch_size`` rows.

    Attributes:
        parent: The node below. The arrays of an element have equally many rows.
        batch_size: Rows in a batch.
        drop_remainder: Whether to leave a smaller last batch out.
    """

    parent: Node
    batch_size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        _check_size("rebatch", self.batch_size)

    def cardinality(self) -> int:
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        rows = self.batch_size if self.drop_remainder else None
        return batched(unbatched(self.parent.element_spec()), rows)

    def _iterate(self, context: Context) -> ElementIterator:
        return RebatchIterator(self, context)


class _RowsIterator(UnaryIterator):
    """A pass that cuts elements into rows. It holds the element of the next rows."""

    def __init__(self, parent: ElementIterator, count_rows: Callable[[Any], int]) -> None:
        super().__init__(parent)
        self._count_rows = count_rows
        self._element: Any = None
        self._rows = 0
        self._next = 0

    def get_state(self) -> tuple[Any, int, int, Any]:
        held = self._element if self._next < self._rows else None
        return held, self._rows, self._next, super().get_state()

    def set_state(self, state: tuple[Any, int, int, Any]) -> None:
        self._element, self._rows, self._next, below = state
        super().set_state(below)

    def _has_rows(self) -> bool:
        """Return whether rows are left, after taking the next element if need be."""
        while self._next == self._rows:
            try:
                element = next(self._parent)
            except StopIteration:
                return False
            self._rows, self._next, self._element = self._count_rows(element), 0, element
        return True


class RebatchIterator(_RowsIterator):
    """One pass."""

    def __init__(self, node: Rebatch, context: Context) -> None:
        super().__init__(node.parent.iterate(context), _rebatch_rows)
        self._node = node

    def __next__(self) -> Any:
        pieces, missing = [], self._node.batch_size
        while missing and self._has_rows():
            start, self._next = self._next, min(self._next + missing, self._rows)
            pieces.append(_rows_from(self._element, start, self._next))
            missing -= self._next - start
        if not pieces or (missing and self._node.drop_remainder):
            raise StopIteration
        return _joined(pieces)


def _rebatch_rows(element: Any) -> int:
    leaves = tree.flatten(element)
    if not all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        raise InvalidArgumentError(
            f"rebatch needs arrays with at least one dimension, on the host, not {element!r}"
        )
    return _common_length("rebatch", {len(leaf) for leaf in leaves})


def _common_length(method: str, lengths: set[int]) -> int:
    if len(lengths) != 1:
        raise InvalidArgumentError(
            f"{method} needs arrays with the same number of rows in an element, not "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _rows_from(element: Any, start: int, stop: int) -> Any:
    return tree.map_leaves(lambda array: array[start:stop], element)


def _joined(pieces: Sequence[Any]) -> Any:
    columns = tree.columns(pieces)
    for component, (first, *others) in enumerate(columns):
        for other in others:
            if first.shape[1:] != other.shape[1:] or not _same_dtype(first.dtype, other.dtype):
                raise _misfit(component, "rows", first, other, leading=1)
    # Copies, so that a small batch does not keep the memory of a large one.
    return tree.unflatten(pieces[0], [np.concatenate(column) for column in columns])


@dataclass(frozen=True)
class Unbatch(UnaryNode):
    """Attributes: the node below. The arrays of an element have equally many rows."""

    parent: Node

    def cardinality(self) -> int:
        count = self.parent.cardinality()
        with suppress(ValueError):  # a pass will tell
            if count > 0 and self.parent.has_static_spec:
                rows = _rows_said(self.parent.element_spec())
                return UNKNOWN_CARDINALITY if rows is None else count * rows
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        spec = self.parent.element_spec()
        return spec_of(self.first()) if _has_objects(spec) else unbatched(spec)

    @property
    def has_static_spec(self) -> bool:
        # Only the objects themselves tell their types.
        return self.parent.has_static_spec and not _has_objects(self.parent.element_spec())

    def _iterate(self, context: Context) -> ElementIterator:
        return UnbatchIterator(self.parent.iterate(context))


class UnbatchIterator(_RowsIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator) -> None:
        super().__init__(parent, _unbatch_rows)

    def __next__(self) -> Any:
        if not self._has_rows():
            raise StopIteration
        row = self._next
        self._next += 1
        return tree.map_leaves(lambda array: tree.row(array, row), self._element)


def _has_objects(spec: Spec) -> bool:
    """Return whether the rows of an array are objects."""
    arrays = [leaf for leaf in tree.flatten(spec) if isinstance(leaf, ArraySpec)]
    return any(len(array.shape) == 1 and array.dtype.kind in "OT" for array in arrays)


def _rows_said(spec: Spec) -> int | None:
    """Return the number of rows of the arrays of every element; None if it is unknown."""
    shapes = [leaf.shape for leaf in tree.flatten(spec) if isinstance(leaf, ArraySpec)]
    rows = {shape[0] if shape else None for shape in shapes}
    return rows.pop() if len(rows) == 1 else None


def _unbatch_rows(element: Any) -> int:
    leaves = tree.flatten(element)
    try:
        lengths = {_length(leaf) for leaf in leaves}
    except TypeError as error:
        raise InvalidArgumentError(
            f"unbatch needs arrays with at least one dimension, not {element!r}"
        ) from error
    return _common_length("unbatch", lengths)


def _length(leaf: Any) -> int:
    if isinstance(leaf, str | bytes):
        raise TypeError("text has a length, but no rows")
    return len(leaf)


@dataclass(frozen=True)
class Bucket(UnaryNode):
    """Sorts elements into buckets by their length, and yields each full bucket as a batch.

    Attributes:
        parent: The node below.
        length: Returns the length of an element.
        boundaries: Bucket i takes lengths from boundary i - 1 on and below boundary i.
        sizes: Elements in a batch of each bucket; one more than there are boundaries.
        padding: How batches are padded; None stacks elements as they are.
        to_boundary: Whether to pad to one below the bucket's boundary.
        drop_remainder: Whether to drop the elements that are in the buckets at the end.
    """

    parent: Node
    length: Callable[..., Any]
    boundaries: tuple[int, ...]
    sizes: tuple[int, ...]
    padding: Padding | None
    to_boundary: bool
    drop_remainder: bool

    @classmethod
    def method_name(cls) -> str:
        return "bucket_by_sequence_length"

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.boundaries) + 1 or min(self.sizes) < 1:
            raise ValueError(
                f"bucket_batch_sizes must be {len(self.boundaries) + 1} numbers of at least 1, one "
                f"more than bucket_boundaries, not {list(self.sizes)}"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"bucket_boundaries must ascend, not {list(self.boundaries)}")

    def cardinality(self) -> int:
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        spec = self.parent.element_spec()
        padding = self.padding
        return unknown_lengths(batched(spec, None) if padding is None else padding.spec(spec, None))

    def _iterate(self, context: Context) -> ElementIterator:
        return BucketIterator(self, context)


class BucketIterator(UnaryIterator):
    """One pass; holds the elements in the buckets."""

    def __init__(self, node: Bucket, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._buckets: list[list[Any]] = [[] for _ in node.sizes]
        self._ended = False

    def __next__(self) -> Any:
        while not self._ended:
            try:
                element = next(self._parent)
            except StopIteration:
                self._ended = True
                break
            length = int(tree.call(self._node.length, element, "bucket_by_sequence_length"))
            number = bisect_right(self._node.boundaries, length)
            bucket = self._buckets[number]
            bucket.append(element)
            if len(bucket) == self._node.sizes[number]:
                return self._emptied(number)
        if not self._node.drop_remainder:
            for number, bucket in enumerate(self._buckets):
                if bucket:
                    return self._emptied(number)
        raise StopIteration

    def get_state(self) -> tuple[Sequence[Sequence[Any]], bool, Any]:
        return [list(bucket) for bucket in self._buckets], self._ended, super().get_state()

    def set_state(self, state: tuple[Sequence[Sequence[Any]], bool, Any]) -> None:
        buckets, self._ended, below = state
        self._buckets = [list(bucket) for bucket in buckets]
        super().set_state(below)

    def _emptied(self, number: int) -> Any:
        elements, self._buckets[number] = self._buckets[number], []
        padding = self._node.padding
        if padding is None:
            return stack(elements)
        if self._node.to_boundary:
            if number == len(self._node.boundaries):
                raise InvalidArgumentError(
                    "pad_to_bucket_boundary: an element is as long as the last of the boundaries "
                    f"{list(self._node.boundaries)}, or longer"
                )
            padding = padding.up_to(self._node.boundaries[number] - 1, elements[0])
        return padding.stack(elements)
