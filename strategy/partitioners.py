"""Partitioners: functions that return the number of parts of a variable. Pure.

A partitioner is a function of shape and dtype. It returns the number of parts along each axis, of
which at most one is not 1, or a single number of ranges of the flattened elements. The first worker
that creates a variable decides its parts. The names, arguments and results are TensorFlow's, except
for :class:`FlatPartitioner`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from strategy.protocol.checks import whole_number
from strategy.protocol.partition import Shape

_Counts = Callable[[Shape, np.dtype[Any]], list[int]]


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> _Counts:
    """Return a partitioner with a fixed number of parts along an axis.

    Args:
        num_shards: Number of parts, positive. An axis of length n has at most n parts.
        axis: The axis to divide.
    """
    _at_least_one(num_shards=num_shards)

    def partition(shape: Shape, dtype: np.dtype[Any]) -> list[int]:
        return _along(shape, axis, num_shards)

    return partition


def variable_axis_size_partitioner(
    max_shard_bytes: int,
    axis: int = 0,
    bytes_per_string_element: int = 16,
    max_shards: int | None = None,
) -> _Counts:
    """Return a partitioner with as few parts along an axis as a limit on their size allows.

    Args:
        max_shard_bytes: Approximate maximum size of a part in bytes, positive. A part has at least
            one slice of the axis, however large.
        axis: The axis to divide.
        bytes_per_string_element: No effect, because variables hold no strings; positive.
        max_shards: Maximum number of parts; None for no maximum.
    """
    _at_least_one(max_shard_bytes=max_shard_bytes, bytes_per_string=bytes_per_string_element)
    if max_shards is not None:
        _at_least_one(max_shards=max_shards)

    def partition(shape: Shape, dtype: np.dtype[Any]) -> list[int]:
        length = shape[_checked(shape, axis)]
        slice_bytes = math.prod(shape) // max(length, 1) * dtype.itemsize
        slices = max(1, max_shard_bytes // max(slice_bytes, 1))
        count = -(-length // slices)
        return _along(shape, axis, count if max_shards is None else min(count, max_shards))

    return partition


def min_max_variable_partitioner(
    max_partitions: int = 1,
    axis: int = 0,
    min_slice_size: int = 256 << 10,
    bytes_per_string_element: int = 16,
) -> _Counts:
    """Return a partitioner with as many parts along an axis as a minimum size allows.

    Args:
        max_partitions: Maximum number of parts.
        axis: The axis to divide.
        min_slice_size: Approximate minimum size of a part in bytes.
        bytes_per_string_element: No effect, because variables hold no strings; positive.
    """
    _at_least_one(
        max_partitions=max_partitions,
        min_slice_size=min_slice_size,
        bytes_per_string=bytes_per_string_element,
    )

    def partition(shape: Shape, dtype: np.dtype[Any]) -> list[int]:
        nbytes = math.prod(shape) * dtype.itemsize
        return _along(shape, axis, min(max_partitions, -(-nbytes // min_slice_size)))

    return partition


class _ByFunction:
    """Base of the partitioner classes that wrap one of the functions above."""

    def __init__(self, partition: _Counts) -> None:
        self._partition = partition

    def __call__(self, shape: Shape, dtype: np.dtype[Any]) -> list[int]:
        """Return the number of parts along each axis."""
        return self._partition(shape, dtype)


class FixedShardsPartitioner(_ByFunction):
    """A fixed number of parts along the first axis.

    Args:
        num_shards: Number of parts, positive. An axis of length n has at most n parts.
    """

    def __init__(self, num_shards: int) -> None:
        super().__init__(fixed_size_partitioner(num_shards))


class MinSizePartitioner(_ByFunction):
    """As many parts along the first axis as a minimum size allows.

    Args:
        min_shard_bytes: Approximate minimum size of a part in bytes, positive.
        max_shards: Maximum number of parts.
        bytes_per_string: No effect, because variables hold no strings; positive.

    Example:
        >>> import numpy as np
        >>> from strategy import partitioners
        >>> by_size = partitioners.MinSizePartitioner(256 << 10, max_shards=3)
        >>> by_size((1000, 512), np.dtype("float32"))  # 2 MB
        [3, 1]
        >>> by_size((512,), np.dtype("float32"))
        [1]
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        super().__init__(
            min_max_variable_partitioner(max_shards, 0, min_shard_bytes, bytes_per_string)
        )


class MaxSizePartitioner(_ByFunction):
    """As few parts along the first axis as a limit on their size allows.

    Args:
        max_shard_bytes: Approximate maximum size of a part in bytes, positive. A part has at least
            one row, however large.
        max_shards: Maximum number of parts; None for no maximum.
        bytes_per_string: No effect, because variables hold no strings; positive.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        super().__init__(
            variable_axis_size_partitioner(max_shard_bytes, 0, bytes_per_string, max_shards)
        )


class FlatPartitioner:
    """A fixed number of ranges of the flattened elements, of equal length for the best balance.

    Rows of such a variable are pulled and pushed element by element. If you use rows, divide along
    the first axis instead.

    Args:
        num_shards: Number of ranges, positive. A variable of n elements has at most n ranges.
    """

    def __init__(self, num_shards: int) -> None:
        _at_least_one(num_shards=num_shards)
        self._count = num_shards

    def __call__(self, shape: Shape, dtype: np.dtype[Any]) -> int:
        """Return the number of ranges."""
        return max(1, min(self._count, math.prod(shape)))


def _along(shape: Shape, axis: int, count: int) -> list[int]:
    counts = [1] * len(shape)
    axis = _checked(shape, axis)
    counts[axis] = max(1, min(count, shape[axis]))
    return counts


def _checked(shape: Shape, axis: int) -> int:
    if not 0 <= axis < len(shape):
        raise ValueError(f"a variable of shape {shape} has no axis {axis} to be divided along")
    return axis


def _at_least_one(**named: int) -> None:
    for name, value in named.items():
        if whole_number(**{name: value}) < 1:
            raise ValueError(f"{name} must be positive, not {value!r}")
