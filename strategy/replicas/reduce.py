"""Values of several replicas: their grouping and reduction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import ReduceOp, host_view
from strategy.array_like import ArrayLike, IndexedSlices, is_on_gpu, on_host, read
from strategy.protocol.layout import HALVES
from strategy.replicas.gpu import added, can_be_added
from strategy.replicas.nest import tree_map, tree_zip

Array = NDArray[Any]

# Halves (float16 and bfloat16) are added in float32.
_WIDE = {dtype: np.dtype(np.float32) for dtype in HALVES}


class PerReplica:
    """One value for each replica of a worker.

    Args:
        values: The values in the order of the replicas.

    Attributes:
        values: The values as a tuple.
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
    """Combine the values of all replicas into one value, usually a PerReplica.

    Args:
        values: One value of each replica. Trees of the same form are combined leaf by leaf. If all
            values are None, or are the same variable, that value is returned.
    """
    return values[0] if len(values) == 1 else tree_zip(_one_or_all, values)


def _one_or_all(values: Sequence[Any]) -> Any:
    first = values[0]
    is_same = first is None or isinstance(first, ArrayLike)
    return first if is_same and all(value is first for value in values) else PerReplica(values)


def own_value(value: Any, number: int) -> Any:
    """Return a tree with the value of one replica in place of each PerReplica."""

    def choose(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if number >= len(leaf.values):
            raise ValueError(f"replica {number} has no value in {leaf!r}")
        return leaf.values[number]

    return tree_map(choose, value)


def gathered(value: Any, axis: int) -> Any:
    """Concatenate the arrays of all replicas along an axis, leaf by leaf."""

    def join(part: Any) -> Any:
        return np.concatenate([as_array(one) for one in local_results(part)], axis=axis)

    return tree_map(join, value)


def local_results(value: Any) -> tuple[Any, ...]:
    """Return the values of a PerReplica; for any other value, a tuple of the value."""
    return value.values if isinstance(value, PerReplica) else (value,)


def reduced(reduce_op: Any, value: Any, axis: int | None = None, *, rounded: bool = False) -> Any:
    """Return the sum or mean of the values of all replicas, added in the order of the replicas.

    float16 and bfloat16 are added in float32. CuPy arrays of one shape and dtype are added on
    the GPU of the first replica, and other values on the host, with the same result.

    Args:
        reduce_op: ``"sum"``, ``"mean"``, or a ReduceOp.
        value: A PerReplica of arrays, numbers or, without ``axis``, IndexedSlices; or one of these;
            or a tree of these.
        axis: Reduce each array along this axis, too. A mean is then the mean of all elements,
            however the elements are distributed over the replicas.
        rounded: If all values are float16, or all are bfloat16, round the float32 result to that
            dtype. False keeps float32, for variables that can hold float32.

    Returns:
        A host array, or IndexedSlices of host arrays. The dtype is that of NumPy's sum or mean,
        except for float16 and bfloat16.

    Raises:
        ValueError: The operation is neither sum nor mean, shapes differ, or there is no such axis.
    """
    op = ReduceOp.of(reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"replicas are reduced by SUM or MEAN, not {reduce_op!r}")
    return tree_map(lambda leaf: _reduced(op, leaf, axis, rounded), value)


def _reduced(op: ReduceOp, value: Any, axis: int | None, rounded: bool) -> Any:
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
        result = result.copy()  # out of pinned memory: the caller may keep it
    return _rounded(result, arrays) if rounded else result


def as_array(value: Any) -> Array:
    """Return an array, a variable, a number or a list as a host array."""
    value = on_host(read(value))
    plain = isinstance(value, int | float | complex | list | tuple | np.generic)
    return np.asarray(value) if plain else host_view(value)


def _whole(op: Any, arrays: Sequence[Array]) -> Any:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"replicas have arrays of different shapes: {sorted(shapes)}")
    if len(arrays) == 1 and arrays[0].dtype.kind not in "biu":
        return arrays[0]
    total = _widened(op, arrays[0])
    for array in arrays[1:]:
        total = total + array
    return total / len(arrays) if op is ReduceOp.MEAN else total


def _along(op: Any, arrays: Sequence[Array], axis: int) -> Any:
    for array in arrays:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"a value of shape {array.shape} has no axis {axis} to reduce along")
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
    rows = _widened(op, given) / count
    return IndexedSlices(_rounded(rows, [given]) if rounded else rows, ids)


def _widened(op: Any, array: Array) -> Array:
    """Return an array in the dtype in which it is added up: for integers and bools, as in NumPy."""
    dtype: Any = _WIDE.get(array.dtype, array.dtype)
    if dtype.kind in "biu":
        dtype = np.dtype(float) if op is ReduceOp.MEAN else np.zeros(0, dtype).sum().dtype
    return array.astype(dtype, copy=False)


def _rounded(result: Any, arrays: Sequence[Any]) -> Any:
    """Return a result in the dtype of the arrays if that is one dtype of halves."""
    dtype = arrays[0].dtype
    alike = all(array.dtype == dtype for array in arrays)
    return result.astype(dtype) if dtype in HALVES and alike else result
