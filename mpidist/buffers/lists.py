"""Lists of arrays as one buffer, and arrays that overlap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpidist.buffers.host_view import Array, check_array, host_view
from mpidist.buffers.packing import (
    NATIVE,
    OnComplete,
    as_mpi_buffer,
    chain_callbacks,
    is_contiguous,
)
from mpidist.gpu import HostStaging, layout_of


def host_views(arrays: Sequence[object], *, read: bool = True) -> list[Array]:
    """Return the memory of each array; see :func:`mpidist.host_view`."""
    return [a if a.__class__ is np.ndarray else host_view(a, read=read) for a in arrays]


def flatten(arrays: Sequence[Array]) -> Array:
    """Return arrays of one dtype as one flat array; a view if they are adjacent in memory."""
    joined = _joined(arrays)
    if joined is not None:
        return joined
    # Without dtype, the bytes of a foreign order would be swapped.
    return np.concatenate([array.reshape(-1) for array in arrays], dtype=arrays[0].dtype)


def flat_output(arrays: Sequence[Array]) -> tuple[Array, OnComplete]:
    """Return one flat array to receive the data of several arrays of one dtype.

    Args:
        arrays: Writable arrays of any strides that do not overlap.

    Returns:
        The flat array, and a callback that copies it to the arrays, or None if it is their memory.

    Raises:
        ValueError: An array is read-only, or overlaps another or itself.
    """
    on_devices = [array for array in arrays if isinstance(array, HostStaging)]
    joined = None if on_devices else _joined(arrays, write=True)
    if joined is not None:
        return joined, None
    check_outputs(arrays)
    memory = np.empty(sum([array.size for array in arrays]), arrays[0].dtype)

    def copy_out() -> None:
        unflatten_into(memory, arrays)
        for array in on_devices:
            array.upload()

    return memory, copy_out


def as_mpi_parts(
    sources: Sequence[Array], targets: Sequence[Array]
) -> tuple[list[Array], list[Array], OnComplete]:
    """Return flat arrays that MPI can read and write in place of two lists of arrays.

    Args:
        sources: The arrays to read. Arrays that may overlap a target are copied.
        targets: The arrays to write, at least one, of the dtype of the sources.

    Returns:
        Both lists, and a callback for the time when MPI has ended, or None.

    Raises:
        ValueError: A target is read-only, or overlaps another or itself.
    """
    check_outputs(targets)
    given, _ = flat_buffers(copy_overlapping_inputs(sources, targets), write=False)
    taken, on_complete = flat_buffers(targets, write=True)
    return given, taken, on_complete


def flat_buffers(arrays: Sequence[Array], *, write: bool) -> tuple[list[Array], OnComplete]:
    """Return each array flat, as MPI can move it; see :func:`as_mpi_buffer`."""
    buffers = [as_mpi_buffer(array, write=write) for array in arrays]
    parts = [part if part.ndim == 1 else part.reshape(-1) for part, _ in buffers]
    return parts, chain_callbacks([on_complete for _, on_complete in buffers])


def unflatten_into(memory: Array, arrays: Sequence[Array]) -> None:
    """Copy consecutive parts of a flat array into arrays."""
    start = 0
    for array in arrays:
        end = start + array.size
        part = memory[start:end]
        array[...] = part if array.ndim == 1 else part.reshape(array.shape)
        start = end


def check_outputs(arrays: Sequence[Array]) -> None:
    """Raise ValueError if an array is read-only, or overlaps another or itself.

    Args:
        arrays: Arrays of one dtype.
    """
    if arrays[0].dtype.hasobject or [array for array in arrays if not _lies_writable(array)]:
        for array in arrays:
            check_array(array, write=True)
    if are_distinct_owners(arrays):
        return
    arrays = [layout_of(array) for array in arrays]
    if _ascending(arrays):
        return
    spans = [(*span, number) for number, array in enumerate(arrays) for span in _span(array)]
    for one, other in overlaps(spans):
        if one != other and np.shares_memory(arrays[one], arrays[other]):
            raise ValueError(
                f"arrays {min(one, other)} and {max(one, other)} of a list that receives have "
                "memory in common: the data of one would overwrite the other"
            )


def _lies_writable(array: Array) -> bool:
    return array.__class__ is np.ndarray and array.flags.carray


def _ascending(arrays: Sequence[Array]) -> bool:
    """Return whether arrays are contiguous and in ascending order of memory, gaps allowed."""
    address_of, end = address_function(), 0
    for array in arrays:
        if not array.flags.c_contiguous:
            return False
        start = address_of(array)
        if start < end:
            return False
        end = start + array.nbytes
    return True


def all_direct(sources: Sequence[Any], targets: Sequence[Any]) -> bool:
    """Return whether MPI can read and write two lists of arrays without copies.

    One quick pass finds most such lists: all arrays are MPI arrays of one dtype, and either each
    owns its memory, or the targets are in ascending order and no source is between them. False
    means only that a slower check has to decide.

    Args:
        sources: The arrays to read.
        targets: The arrays to write, at least one.
    """
    first = targets[0]
    if first.__class__ is not np.ndarray:
        return False
    dtype = first.dtype
    if dtype.type not in NATIVE or not dtype.isnative:
        return False
    address_of, low, high = address_function(), -1, 0
    ascending = True
    for array in targets:
        if array.__class__ is not np.ndarray or array.dtype is not dtype or not array.flags.carray:
            return False
        start = address_of(array)
        if low < 0:
            low = start
        ascending = ascending and start >= high
        high = start + array.nbytes
    for array in sources:
        if array.__class__ is not np.ndarray or array.dtype is not dtype:
            return False
        if not is_contiguous(array):
            return False
        start = address_of(array)
        ascending = ascending and (start >= high or start + array.nbytes <= low)
    return ascending or are_distinct_owners((*sources, *targets))


def as_single_buffer(arrays: Any, like: Any, count: int) -> Array | None:
    """Return a list of arrays as one array, if MPI can use it without further checks.

    Args:
        arrays: The list that the caller gave, or None.
        like: The shape and dtype that all must have.
        count: The number of arrays that there must be.

    Returns:
        One array of all rows, if the rows are adjacent in memory, all are writable MPI arrays of
        the shape and dtype of ``like``, and ``like`` does not overlap them; else None.
    """
    if arrays.__class__ is not list or not arrays or like.__class__ is not np.ndarray:
        return None
    dtype, shape, nbytes = like.dtype, like.shape, like.nbytes
    if len(arrays) != count or dtype.type not in NATIVE or not dtype.isnative:
        return None
    base = getattr(arrays[0], "base", None)
    if base.__class__ is not np.ndarray:
        return None
    address_of, end = address_function(), -1
    for array in arrays:
        if (
            array.__class__ is not np.ndarray
            or array.base is not base
            or array.dtype is not dtype
            or array.shape != shape
            or not array.flags.carray
        ):
            return None
        place = address_of(array)
        if end not in (place, -1):
            return None
        end = place + nbytes
    start = end - count * nbytes
    if not like.flags.carray or (start < address_of(like) + nbytes and address_of(like) < end):
        return None
    if base.nbytes == end - start and base.dtype is dtype and base.flags.carray:
        return base
    return _joined(arrays, write=True)


def copy_overlapping_inputs(sources: Sequence[Array], targets: Sequence[Array]) -> Sequence[Array]:
    """Return the sources, with copies of the arrays that may overlap a target."""
    if are_distinct_owners((*sources, *targets)):
        return sources
    spans = [
        (*span, number)
        for number, array in enumerate((*sources, *targets))
        for span in _span(array)
    ]
    count = len(sources)
    mixed = {min(pair) for pair in overlaps(spans) if min(pair) < count <= max(pair)}
    if not mixed:
        return sources
    return [array.copy() if n in mixed else array for n, array in enumerate(sources)]


def shares_start(own: Array, row: Array) -> bool:
    """Return whether a contiguous part begins where its row of the output begins."""
    return own.size > 0 and own.flags.c_contiguous and address(own) == address(row)


def are_distinct_owners(arrays: Sequence[Array]) -> bool:
    """Return whether every array is a different owner of memory; addresses are not compared."""
    return len({id(array) for array in arrays if array.base is None}) == len(arrays)


def overlaps(spans: Iterable[tuple[int, int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the numbers of memory ranges that overlap, in pairs, by a sweep over their starts.

    Args:
        spans: Start, end and number of each range.
    """
    reaching: list[tuple[int, int]] = []  # end and number of ranges that have not ended
    for start, end, number in sorted(spans):
        reaching = [(stop, other) for stop, other in reaching if stop > start]
        for _, other in reaching:
            yield other, number
        reaching.append((end, number))


def address(array: Array) -> int:
    """Return the address of a contiguous array."""
    return address_function()(array)


def address_function() -> Callable[[Array], int]:
    """Return a function that returns the address of a contiguous array."""
    mpi = sys.modules.get("mpi4py.MPI")  # ten times as fast as NumPy's own attributes
    return _numpys_address if mpi is None else mpi.Get_address


def _numpys_address(array: Array) -> int:
    return array.ctypes.data


def _span(array: Array) -> list[tuple[int, int]]:
    """Return start and end of an array in a list, which is empty if the array is empty."""
    if not array.size:
        return []
    if array.flags.c_contiguous:
        start = address(array)
        return [(start, start + array.nbytes)]
    return [np.lib.array_utils.byte_bounds(array)]


def _joined(arrays: Sequence[Array], write: bool = False) -> Array | None:
    """Return arrays that are adjacent in memory as one flat array; else None.

    Args:
        arrays: Arrays of one dtype, such as the rows of an array.
        write: Whether all must be writable.
    """
    first = arrays[0]
    base = first.base
    if base is None and len(arrays) > 1:  # memory of another owner is adjacent by chance
        return None
    address_of = address_function()
    start = end = address_of(first) if first.flags.c_contiguous else 0
    writeable = True
    for array in arrays:
        flags = array.flags
        if array.base is not base or not flags.c_contiguous or address_of(array) != end:
            return None
        writeable = writeable and flags.writeable
        end += array.nbytes
    if write and not writeable:
        return None
    if len(arrays) == 1:
        return first.reshape(-1)
    count = (end - start) // first.itemsize
    if base.__class__ is np.ndarray and base.dtype == first.dtype and base.flags.c_contiguous:
        begin, rest = divmod(start - address_of(base), first.itemsize)
        whole = base.reshape(-1)[begin : begin + count]
        if not rest and whole.flags.writeable >= writeable:
            return whole
    return np.lib.stride_tricks.as_strided(  # much slower
        first.reshape(-1), (count,), (first.itemsize,), writeable=writeable
    )
