"""Lists of arrays as one stretch of memory, and what of them overlaps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import (
    NATIVE,
    Array,
    Finish,
    check_usable,
    host_view,
    lies_plainly,
    one_after_the_other,
    to_move,
)
from mpidist.cuda import Mirror, layout_of


def host_views(arrays: Sequence[object], *, read: bool = True) -> list[Array]:
    """Local. The memory of each array; see :func:`mpidist.host_view`."""
    return [a if a.__class__ is np.ndarray else host_view(a, read=read) for a in arrays]


def collect(arrays: Sequence[Array]) -> Array:
    """Local. Arrays of one dtype behind each other, flat; a view where they lie like that."""
    joined = _joined(arrays)
    if joined is not None:
        return joined
    # Without dtype, the bytes of a foreign order would be swapped.
    return np.concatenate([array.reshape(-1) for array in arrays], dtype=arrays[0].dtype)


def spread(arrays: Sequence[Array]) -> tuple[Array, Finish]:
    """Local. Flat memory for what belongs into arrays of one dtype, one behind the other.

    Args:
        arrays: Writable, any strides; no two have memory in common.

    Returns:
        The memory, and what copies it to the arrays (None where it is their own).

    Raises:
        ValueError: An array is read-only, or overlaps another or itself.
    """
    on_devices = [array for array in arrays if isinstance(array, Mirror)]
    joined = None if on_devices else _joined(arrays, write=True)
    if joined is not None:
        return joined, None
    check_outputs(arrays)
    memory = np.empty(sum([array.size for array in arrays]), arrays[0].dtype)

    def finish() -> None:
        hand_out(memory, arrays)
        for array in on_devices:
            array.upload()

    return memory, finish


def parts_to_move(
    sources: Sequence[Array], targets: Sequence[Array]
) -> tuple[list[Array], list[Array], Finish]:
    """Local. Two lists of arrays, each flat, as MPI can read and write them.

    Args:
        sources: What is read; copied where it may lie where is written.
        targets: What is written; not empty, and of one dtype with the sources.

    Returns:
        Both, and what is left to do once MPI is done.

    Raises:
        ValueError: A target is read-only, or overlaps another or itself.
    """
    check_outputs(targets)
    given, _ = flat_parts(apart_lists(sources, targets), write=False)
    taken, finish = flat_parts(targets, write=True)
    return given, taken, finish


def flat_parts(arrays: Sequence[Array], *, write: bool) -> tuple[list[Array], Finish]:
    """Local. Each array flat, as MPI can move it; see :func:`mpidist.arrays.to_move`."""
    parts, steps = [], []
    for array in arrays:
        part, finish = to_move(array, write=write)
        parts.append(part)
        if finish is not None:
            steps.append(finish)
    return flat(parts), one_after_the_other(steps) if steps else None


def flat(arrays: Sequence[Array]) -> list[Array]:
    """Local. Contiguous arrays, each in one dimension."""
    return [array if array.ndim == 1 else array.reshape(-1) for array in arrays]


def hand_out(memory: Array, arrays: Sequence[Array]) -> None:
    """Local. Copy flat memory into the arrays that belong into it, one behind the other."""
    start = 0
    for array in arrays:
        end = start + array.size
        part = memory[start:end]
        array[...] = part if array.ndim == 1 else part.reshape(array.shape)
        start = end


def check_outputs(arrays: Sequence[Array]) -> None:
    """Local. ValueError if an array is read-only, or overlaps another of the list or itself.

    Args:
        arrays: Of one dtype.
    """
    if arrays[0].dtype.hasobject or [array for array in arrays if not _lies_writable(array)]:
        for array in arrays:
            check_usable(array, write=True)
    if own_memory(arrays):
        return
    arrays = [layout_of(array) for array in arrays]
    if _ascending(arrays):
        return
    spans = [(*span, number) for number, array in enumerate(arrays) for span in _span(array)]
    for one, other in overlaps(spans):
        if one != other and np.shares_memory(arrays[one], arrays[other]):
            raise ValueError(
                f"arrays {min(one, other)} and {max(one, other)} of a list that receives have "
                "memory in common: what arrives for one would overwrite the other"
            )


def _lies_writable(array: Array) -> bool:
    return array.__class__ is np.ndarray and array.flags.carray


def _ascending(arrays: Sequence[Array]) -> bool:
    """Whether contiguous arrays lie one behind the other, perhaps with gaps."""
    address_of, end = address_function(), 0
    for array in arrays:
        if not array.flags.c_contiguous:
            return False
        start = address_of(array)
        if start < end:
            return False
        end = start + array.nbytes
    return True


def are_plain_and_apart(sources: Sequence[Any], targets: Sequence[Any]) -> bool:
    """Local. Whether MPI can read and write two lists of arrays as they are, without further looks.

    It says so of most lists in one quick pass: of plain arrays of one dtype that are all on their
    own, or where those that are written lie in ascending order, and none that is read lies between
    them.

    Args:
        sources: What is read.
        targets: What is written; not empty.
    """
    first = targets[0]
    if first.__class__ is not np.ndarray:
        return False
    dtype = first.dtype
    if dtype.char not in NATIVE or not dtype.isnative:
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
        if not lies_plainly(array):
            return False
        start = address_of(array)
        ascending = ascending and (start >= high or start + array.nbytes <= low)
    return ascending or own_memory((*sources, *targets))


def rows_like(arrays: Any, like: Any, count: int) -> Array | None:
    """Local. The memory of a list of arrays, where MPI can use it without further looks.

    Args:
        arrays: The list that the caller gave, or None.
        like: An array that all must be like.
        count: How many there must be.

    Returns:
        One array of all rows, if they lie one behind the other, all are writable, plain arrays of
        the shape and dtype of ``like``, and ``like`` lies elsewhere; else None.
    """
    if arrays.__class__ is not list or not arrays or like.__class__ is not np.ndarray:
        return None
    dtype, shape, nbytes = like.dtype, like.shape, like.nbytes
    if len(arrays) != count or dtype.char not in NATIVE or not dtype.isnative:
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


def apart_lists(sources: Sequence[Array], targets: Sequence[Array]) -> Sequence[Array]:
    """Local. What is read; copies of those arrays that may lie where is written."""
    if own_memory((*sources, *targets)):
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


def lies_at(own: Array, row: Array) -> bool:
    """Local. Whether a part lies in its row, contiguous and as large, of what it is gathered in."""
    return own.size > 0 and own.flags.c_contiguous and address(own) == address(row)


def own_memory(arrays: Sequence[Array]) -> bool:
    """Local. Whether each array is known to have memory of its own, without a look at addresses."""
    return len({id(array) for array in arrays if array.base is None}) == len(arrays)


def overlaps(spans: Iterable[tuple[int, int, int]]) -> Iterable[tuple[int, int]]:
    """Local. Numbers of stretches of memory that overlap, in pairs.

    Args:
        spans: Where each begins, where it ends, and its number.
    """
    reaching: list[tuple[int, int]] = []  # ends and numbers of those that go on
    for start, end, number in sorted(spans):
        reaching = [(stop, other) for stop, other in reaching if stop > start]
        for _, other in reaching:
            yield other, number
        reaching.append((end, number))


def address(array: Array) -> int:
    """Local. Where the memory of a contiguous array begins."""
    return address_function()(array)


def address_function() -> Callable[[Array], int]:
    """Local. What tells where the memory of a contiguous array begins."""
    mpi = sys.modules.get("mpi4py.MPI")  # ten times as quick as NumPy's own attributes
    return _numpys_address if mpi is None else mpi.Get_address


def _numpys_address(array: Array) -> int:
    return array.ctypes.data


def _span(array: Array) -> list[tuple[int, int]]:
    """Where an array begins and ends; nothing if it is empty."""
    if not array.size:
        return []
    if array.flags.c_contiguous:
        start = address(array)
        return [(start, start + array.nbytes)]
    return [np.lib.array_utils.byte_bounds(array)]


def _joined(arrays: Sequence[Array], write: bool = False) -> Array | None:
    """The memory of arrays that lie one behind the other, as those of a list of rows do.

    Args:
        arrays: Of one dtype.
        write: Whether all must be writable.
    """
    first = arrays[0]
    base = first.base
    if base is None and len(arrays) > 1:  # what belongs to another is a neighbour by chance
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
