"""Pickled objects as bytes on their way: small ones in blocks of one size, with their length. Pure.

What has room in a block travels in one step, whatever its length; of what has not, the block tells
how long it is, and it follows by itself.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from mpidist.arrays import Array
from mpidist.group.restricted import load_data

_SIZE = struct.Struct("<Q")
BLOCK_BYTES = 512
ROOM_BYTES = BLOCK_BYTES - _SIZE.size
"""Of a pickle; longer ones do not fit."""
BYTE = np.dtype(np.uint8)


def dump(obj: Any) -> bytes:
    """Local. An object's pickle."""
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)


def loader(weights_only: bool) -> Callable[[memoryview | bytes], Any]:
    """Local. What builds an object from its pickle; it does not mind what follows its end.

    Args:
        weights_only: Build data only, and nothing that could run code.
    """
    return load_data if weights_only else pickle.loads


def as_array(data: bytes) -> Array:
    """Local. Bytes as a read-only uint8 array."""
    return np.frombuffer(data, BYTE)


def padded(data: bytes) -> bytes:
    """Local. The length of data, and as much of them as has room behind it: one block."""
    return (_SIZE.pack(len(data)) + data[:ROOM_BYTES]).ljust(BLOCK_BYTES)


def block_of(data: bytes) -> Array:
    """Local. The same as an array."""
    return np.frombuffer(padded(data), BYTE)


def cut_blocks(blocks: Array, count: int) -> tuple[tuple[int, ...], list[memoryview]]:
    """Local. The lengths of the data that blocks are of, and what they hold, with the padding."""
    sizes, places = _layout_of_blocks(count)
    memory = blocks.data
    return sizes.unpack_from(memory), [memory[place] for place in places]


def cut(memory: Array, counts: Sequence[int]) -> list[memoryview]:
    """Local. Flat memory in parts of these lengths, one behind the other."""
    ends = itertools.accumulate(counts)
    return [memory.data[end - count : end] for end, count in zip(ends, counts, strict=True)]


@cache
def _layout_of_blocks(count: int) -> tuple[struct.Struct, list[slice]]:
    """What reads the lengths at the beginning of so many blocks, and where their data are."""
    ends = range(BLOCK_BYTES, (count + 1) * BLOCK_BYTES, BLOCK_BYTES)
    return (
        struct.Struct("<" + f"Q{ROOM_BYTES}x" * count),
        [slice(end - ROOM_BYTES, end) for end in ends],
    )
