"""Values of several replicas, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import ReduceOp, host_view
from strategy.array_like import ArrayLike, is_on_gpu, on_host, read
from strategy.gpus import added, can_be_added
from strategy.shared.shard import HALVES
from strategy.slices import IndexedSlices

Array = NDArray[Any]

# What halves are added in.
_WIDE = {dtype: np.dtype(np.float32) for dtype in HALVES}


class PerReplica:
    """One value for each replica of a worker.

    Args:
        values: In the order of the replicas.

    Attributes:
        values: The same, as a tuple.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a PerReplica cannot be taken apart like a tuple, for its parts are the replicas': use "
            "its values, or strategy.experimental_local_results"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a PerReplica has no {name!r}: it holds a value of each replica; strategy.group(...) "
            "waits for all, strategy.reduce(...) and strategy.experimental_local_results(...) give "
            "what they are"
        )

    def __repr__(self) -> str:
        return f"PerReplica({list(self.values)!r})"


def regrouped(values: Sequence[Any]) -> Any:
    """Local. What all replicas gave, as one structure with PerReplica in it.

    Args:
        values: One of each replica. Tuples, lists and dicts that are alike are taken apart; None of
            all is None, and a variable that all share is itself.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, ArrayLike) and all(value is first for value in values):
        return first
    kinds = {type(value) for value in values}
    if kinds <= {dict} and all(value.keys() == first.keys() for value in values):
        return {key: regrouped([value[key] for value in values]) for key in first}
    if kinds in ({tuple}, {list}) and len({len(value) for value in values}) == 1:
        return type(first)(regrouped(parts) for parts in zip(*values, strict=True))
    return None if kinds == {type(None)} else PerReplica(values)


def own_value(value: Any, number: int) -> Any:
    """Local. A replica's part of a structure with PerReplica in it."""
    if isinstance(value, PerReplica):
        if number >= len(value.values):
            raise ValueError(f"replica {number} has no value in {value!r}")
        return value.values[number]
    if type(value) in (tuple, list):
        return type(value)(own_value(part, number) for part in value)
    if type(value) is dict:
        return {key: own_value(part, number) for key, part in value.items()}
    return value


def mapped(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Local. What a function gives for each value of tuples, lists and dicts, or for one alone.

    Args:
        function: Called with the values at one place of all structures.
        structure: Tuples, lists and dicts of values, or one value.
        others: More of the kind, alike.
    """
    if type(structure) is dict:
        return {
            key: mapped(function, value, *(other[key] for other in others))
            for key, value in structure.items()
        }
    if type(structure) in (tuple, list):
        parts = zip(structure, *others, strict=True)
        return type(structure)(mapped(function, *values) for values in parts)
    return function(structure, *others)


def gathered(value: Any, axis: int) -> Any:
    """Local. The arrays of all replicas, joined along an axis; in tuples, lists and dicts too."""

    def join(part: Any) -> Any:
        return np.concatenate([as_array(one) for one in local_results(part)], axis=axis)

    return mapped(join, value)


def local_results(value: Any) -> tuple[Any, ...]:
    """Local. The values of all replicas; of one that is not PerReplica, itself alone."""
    return value.values if isinstance(value, PerReplica) else (value,)


def reduced(reduce_op: Any, value: Any, axis: int | None = None, *, rounded: bool = False) -> Any:
    """Local. Sum or mean of the values of all replicas, in their order; halves in float32.

    CuPy's arrays of one shape and dtype are added up on the GPU of the first replica, others on the
    host, with the same result.

    Args:
        reduce_op: ``"sum"`` or ``"mean"``, or the ReduceOp.
        value: PerReplica of arrays or numbers, or one of those; of IndexedSlices too, without an
            axis; or tuples, lists and dicts of all these.
        axis: Also along this axis of each: a mean then is that of all elements, however they are
            distributed over the replicas.
        rounded: Whether what comes of halves of one dtype is rounded to that in the end; otherwise
            it stays float32, for variables that can hold it.

    Returns:
        A host array, of the dtype that NumPy's sum or mean has but for halves; IndexedSlices of
        those.

    Raises:
        ValueError: Another operation is asked for, or shapes differ.
    """
    op = ReduceOp.of(reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"replicas are reduced by SUM or MEAN, not {reduce_op!r}")
    if type(value) in (tuple, list, dict):
        return mapped(lambda part: reduced(op, part, axis, rounded=rounded), value)
    values = local_results(value)
    if any(isinstance(one, IndexedSlices) for one in values):
        return _rows(op, values, axis, rounded)
    if axis is None and can_be_added(values):
        dtype = values[0].dtype
        total = added(values, _WIDE.get(dtype, dtype), len(values) if op is ReduceOp.MEAN else 1)
        return _rounded(total, values) if rounded else total
    arrays = [as_array(one) for one in values]
    result = _whole(op, arrays) if axis is None else _along(op, arrays, axis)
    if is_on_gpu(values[0]) and result is arrays[0]:
        result = result.copy()  # in memory that may be kept, not pinned
    return _rounded(result, arrays) if rounded else result


def as_array(value: Any) -> Array:
    """Local. An array as one of the host; a variable, a number or a list, too."""
    value = on_host(read(value))
    plain = isinstance(value, int | float | complex | list | tuple | np.generic)
    return np.asarray(value) if plain else host_view(value)


def _whole(op: Any, arrays: Sequence[Array]) -> Any:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"replicas have arrays of different shapes: {sorted(shapes)}")
    if len(arrays) == 1:
        return arrays[0]
    total = _widened(arrays[0])
    for array in arrays[1:]:
        total = total + array
    return total / len(arrays) if op is ReduceOp.MEAN else total


def _along(op: Any, arrays: Sequence[Array], axis: int) -> Any:
    sums = [array.sum(axis=axis, dtype=_WIDE.get(array.dtype)) for array in arrays]
    total = _whole(ReduceOp.SUM, sums)
    return total / sum(array.shape[axis] for array in arrays) if op is ReduceOp.MEAN else total


def _rows(op: Any, values: Sequence[Any], axis: int | None, rounded: bool) -> IndexedSlices:
    if axis is not None or not all(isinstance(one, IndexedSlices) for one in values):
        raise ValueError("IndexedSlices are reduced with others only, and not along an axis")
    count = len(values) if op is ReduceOp.MEAN else 1
    given = np.concatenate([as_array(one.values) for one in values])
    ids = np.concatenate([np.asarray(one.indices).reshape(-1) for one in values])
    if count == 1:
        return IndexedSlices(given, ids)
    rows = _widened(given) / count
    return IndexedSlices(_rounded(rows, [given]) if rounded else rows, ids)


def _widened(array: Array) -> Array:
    return array.astype(_WIDE.get(array.dtype, array.dtype), copy=False)


def _rounded(result: Any, arrays: Sequence[Any]) -> Any:
    """A result of arrays, in their dtype if they are halves of one."""
    dtype = arrays[0].dtype
    alike = all(array.dtype == dtype for array in arrays)
    return result.astype(dtype) if dtype in HALVES and alike else result
