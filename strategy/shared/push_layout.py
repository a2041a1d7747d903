"""The layout of the arrays of a push, which workers write and servers read.

Both sides go through the changes in order. Row numbers and element indices are separate arrays.
Values below :data:`JOINED_BYTES` are joined in one array for each dtype. So a push of many small
variables costs little more than a push of one. Larger values are separate arrays. The values of
whole variables are divided into slices of at most :data:`SLICE_BYTES`, so that each message fits
into the shared memory of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors

if TYPE_CHECKING:
    from strategy.connection.change import Change

Array = NDArray[Any]

JOINED_BYTES = 16 << 10
SLICE_BYTES = 16 << 20

_INT64 = np.dtype(np.int64)


def arrays_of(changes: Sequence[Change]) -> list[Array]:
    """Return the C-contiguous arrays of a push. Some may share memory with the given values."""
    arrays: list[Array | list[Change]] = []
    joined: dict[np.dtype[Any], list[Change]] = {}
    for change in changes:
        arrays += [numbers for numbers in (change.ids, change.places) if numbers is not None]
        dtype = change.travels_in
        if change.data.size * dtype.itemsize >= JOINED_BYTES:
            values = _as_sent(change)
            arrays += slices_of(values) if change.is_whole else [values]
        elif dtype in joined:
            joined[dtype].append(change)
        else:
            joined[dtype] = [change]
            arrays.append(joined[dtype])
    return [_joined(part) if isinstance(part, list) else part for part in arrays]


def messages_of(arrays: Sequence[Array]) -> list[list[Array]]:
    """Divide arrays into messages of at most :data:`SLICE_BYTES`, unless one array is larger."""
    messages: list[list[Array]] = [[]]
    nbytes = 0
    for array in arrays:
        if messages[-1] and nbytes + array.nbytes > SLICE_BYTES:
            messages.append([])
            nbytes = 0
        messages[-1].append(array)
        nbytes += array.nbytes
    return messages


def slices_of(flat: Array) -> list[Array]:
    """Divide a flat array into slices of at most :data:`SLICE_BYTES`."""
    step = SLICE_BYTES // flat.itemsize
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def _as_sent(change: Change) -> Array:
    """Return the flat values in the dtype that is sent, without a copy if possible."""
    data, dtype = change.data, change.travels_in
    if data.dtype == dtype and change.scale == 1.0 and data.flags.c_contiguous:
        return data.reshape(-1)
    return _joined([change])


def _joined(changes: Sequence[Change]) -> Array:
    """Copy the values of changes that are sent in one dtype into one flat array."""
    dtype, scale = changes[0].travels_in, changes[0].scale
    sizes = [change.data.size for change in changes]
    flat = np.empty(sum(sizes), dtype)
    if all(change.data.dtype == dtype and change.scale == scale for change in changes):
        np.concatenate([change.data.reshape(-1) for change in changes], out=flat)
        if scale != 1.0:
            copy_scaled(flat, flat, scale)
        return flat
    begin = 0
    for change, size in zip(changes, sizes, strict=True):
        part = flat[begin : begin + size].reshape(change.data.shape)
        copy_scaled(part, change.data, change.scale)
        begin += size
    return flat


def copy_scaled(target: Array, source: Array, scale: float) -> None:
    """Copy an array, converted to the dtype of the target, and multiplied."""
    if scale == 1.0:
        np.copyto(target, source, casting="same_kind")
    else:  # not in the precision of halves or integers, where the factor may be nothing
        wide = np.result_type(source.dtype, target.dtype, np.float32)
        np.multiply(source, scale, out=target, dtype=wide, casting="unsafe")


class ArrayReader:
    """Reader of the arrays of a push, in the order of its changes.

    Args:
        arrays: The arrays of the push, flat uint8.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays: Iterator[Array] = iter(arrays)
        self._joined: dict[np.dtype[Any], Array] = {}  # the joined values that were not read yet

    def numbers(self) -> NDArray[np.int64]:
        """Return the next row numbers or element indices."""
        return self._next(_INT64)

    def values(self, dtype: np.dtype[Any], size: int) -> Array:
        """Return the next values, flat.

        Raises:
            InvalidArgumentError: The push has fewer values.
        """
        if size * dtype.itemsize < JOINED_BYTES:
            return self.joined_values(dtype, size)
        return _checked(self._next(dtype), size)

    def slices(self, dtype: np.dtype[Any], size: int) -> list[Array]:
        """Return the next values of a whole variable, in slices; see :meth:`values`."""
        if size * dtype.itemsize <= SLICE_BYTES:
            return [self.values(dtype, size)]
        step = SLICE_BYTES // dtype.itemsize
        return [
            _checked(self._next(dtype), min(step, size - start)) for start in range(0, size, step)
        ]

    def joined_values(self, dtype: np.dtype[Any], size: int) -> Array:
        """Return the next values of small changes; see :meth:`values`."""
        if dtype not in self._joined:
            self._joined[dtype] = self._next(dtype)
        left = self._joined[dtype]
        self._joined[dtype] = left[size:]
        return _checked(left[:size], size)

    def _next(self, dtype: np.dtype[Any]) -> Array:
        array = next(self._arrays, None)
        if array is None or array.nbytes % dtype.itemsize:
            nbytes = 0 if array is None else array.nbytes
            raise errors.InvalidArgumentError(
                f"a push has {nbytes} bytes where an array of {dtype} is needed"
            )
        flat = array.view(dtype)
        flags = flat.flags  # compiled rules take aligned, writable arrays only
        return flat if flags.aligned and flags.writeable else flat.copy()


def _checked(values: Array, size: int) -> Array:
    if values.size != size:
        raise errors.InvalidArgumentError(
            f"a push has {values.size} values of {values.dtype} where {size} are needed"
        )
    return values
