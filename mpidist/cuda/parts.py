"""Strided arrays in parts that lie behind each other once they are packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.cuda.failures import is_out_of_memory
from mpidist.cuda.library import errors_of_cuda

_PART_BYTES = 32 << 20  # packed at a time, in memory of the device
_LEAST_BYTES = 64 << 10  # where a device has no memory for so little, nothing helps


def in_parts(array: Any, place: int, carry: Callable[[Any, int], None]) -> None:
    """Local. Carry an array part by part, in smaller ones where the device is short of memory.

    Args:
        array: Of CuPy, any strides.
        place: The address on the host where it lies packed.
        carry: Called with a view of the array and its address on the host; what it takes of memory
            must be free when it returns. Where it is short of memory it must have done nothing.

    Raises:
        CUDARuntimeError: What ``carry`` raises, after smaller parts where memory is short.
        MemoryError: Likewise.
    """
    limit = _PART_BYTES
    waiting = [(array, place)]
    while waiting:
        part, there = waiting.pop()
        if part.nbytes <= limit:
            try:
                carry(part, there)
                continue
            except errors_of_cuda() as error:
                if not is_out_of_memory(error) or part.nbytes <= _LEAST_BYTES:
                    raise
            limit = part.nbytes // 2
        waiting += reversed(_cut(part, there, limit))


def _cut(array: Any, place: int, limit: int) -> list[tuple[Any, int]]:
    """Parts of at most so many bytes where rows allow, the first first."""
    while len(array) == 1:
        array = array[0]
    row = array.nbytes // len(array)
    step = max(1, limit // row)
    starts = range(0, len(array), step)
    return [(array[start : start + step], place + start * row) for start in starts]
