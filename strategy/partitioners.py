"""Partitioners: into how many parts a variable is divided. Pure.

A partitioner is a function of shape and dtype to the number of parts along each axis, of which at
most one is not 1; or to one number alone, of ranges of the flattened elements. All workers must use
the same. The names, arguments and results are TensorFlow's; :class:`FlatPartitioner` is our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from strategy.shared.numbers import whole_number
from strategy.shared.parts import Shape

_Counts = Callable[[Shape, np.dtype[Any]], list[int]]


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> _Counts:
    """Local. So many parts along an axis, or as many as it is long.

    Args:
        num_shards: Positive.
        axis: Which.
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
    """Local. As few parts along an axis as are not larger than so many bytes, about.

    Args:
        max_shard_bytes: Positive. A part has at least one slice of the axis, however large.
        axis: Which.
        bytes_per_string_element: Of no use here, for variables hold no strings; positive.
        max_shards: At most so many parts, if given.
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
    """Local. As many parts along an axis as have at least so many bytes, about.

    Args:
        max_partitions: At most so many parts.
        axis: Which.
        min_slice_size: In bytes.
        bytes_per_string_element: Of no use here, for variables hold no strings; positive.
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
    """What the classes have in common: they are called as one of the functions above is."""

    def __init__(self, partition: _Counts) -> None:
        self._partition = partition

    def __call__(self, shape: Shape, dtype: np.dtype[Any]) -> list[int]:
        """Local. The number of parts along each axis."""
        return self._partition(shape, dtype)


class FixedShardsPartitioner(_ByFunction):
    """So many parts along the first axis, or as many as it is long.

    Args:
        num_shards: Positive.
    """

    def __init__(self, num_shards: int) -> None:
        super().__init__(fixed_size_partitioner(num_shards))


class MinSizePartitioner(_ByFunction):
    """As many parts along the first axis as have at least so many bytes, about.

    Args:
        min_shard_bytes: Positive.
        max_shards: At most so many parts.
        bytes_per_string: Of no use here, for variables hold no strings; positive.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        super().__init__(
            min_max_variable_partitioner(max_shards, 0, min_shard_bytes, bytes_per_string)
        )


class MaxSizePartitioner(_ByFunction):
    """As few parts along the first axis as are not larger than so many bytes, about.

    Args:
        max_shard_bytes: Positive. A part has at least one row, however large.
        max_shards: At most so many parts, if given.
        bytes_per_string: Of no use here, for variables hold no strings; positive.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        super().__init__(
            variable_axis_size_partitioner(max_shard_bytes, 0, bytes_per_string, max_shards)
        )


class FlatPartitioner:
    """So many ranges of the flattened elements, as long as each other: the best balance.

    Rows of such a variable are pulled and pushed element by element; where rows matter, divide
    along the first axis.

    Args:
        num_shards: Positive.
    """

    def __init__(self, num_shards: int) -> None:
        _at_least_one(num_shards=num_shards)
        self._count = num_shards

    def __call__(self, shape: Shape, dtype: np.dtype[Any]) -> int:
        """Local. The number of ranges."""
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
