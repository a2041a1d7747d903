"""A variable in the memory of its server: versions and data, and how anybody reads them.

Every block of 1 MiB has a version of its own, odd only while its bytes change (a sequence lock;
Boehm, "Can seqlocks get along with programming language memory models?", 2012). The blocks of a
shard that nobody is changing are all at the same version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist.buffers.copying import copy_array, take_rows
from mpidist.mpi import Backoff

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

BLOCK_BYTES = 1 << 20

# What can be changed and read in place, sent by its name, and saved.
DTYPES = (
    *map(np.dtype, ("bool", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64")),
    *map(np.dtype, (ml_dtypes.bfloat16, "float16", "float32", "float64")),
)


# What optimizers change; the first two in float32.
HALVES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
FLOATING = (*HALVES, np.dtype(np.float32), np.dtype(np.float64))

WIDE = ":float32"
"""The slot for what a variable of half precision is in float32; no user's name has a colon."""


class Layout:
    """Where a shard's parts lie.

    Args:
        shape: Of the variable.
        dtype: Of the variable.

    Attributes:
        shape: Of the variable.
        dtype: Of the variable, in this machine's byte order.
        size: Number of elements.
        data_bytes: Length of the data.
        version_bytes: Length of the versions.
        blocks: Number of blocks.
        is_half: Whether optimizers change it in float32.
        is_floating: Whether optimizers can change it.
    """

    def __init__(self, shape: Iterable[int], dtype: DTypeLike) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.size = math.prod(self.shape)
        self.data_bytes = self.size * self.dtype.itemsize
        self.blocks = max(-(-self.data_bytes // BLOCK_BYTES), 1)
        self.version_bytes = 8 * self.blocks
        self.is_half = self.dtype in HALVES
        self.is_floating = self.dtype in FLOATING


class SharedShard:
    """A shard as anybody sees it who has its server's memory.

    Args:
        memory: The server's arena.
        layout: The shard's.
        versions_offset: Of the versions in the arena, in bytes.
        data_offset: Of the data in the arena, in bytes.
        sync: Orders loads and stores before it against those after it.
    """

    def __init__(
        self,
        memory: Bytes,
        layout: Layout,
        versions_offset: int,
        data_offset: int,
        sync: Callable[[], None],
    ) -> None:
        self.layout = layout
        self._sync = sync
        self.versions = memory[versions_offset : versions_offset + layout.version_bytes].view(
            np.int64
        )
        self._version_of = self.versions.data
        data = memory[data_offset : data_offset + layout.data_bytes].view(layout.dtype)
        self.flat = data
        self.data = data.reshape(layout.shape)

    def try_read(self, out: Array, ids: Array | None = None) -> int | None:
        """Local. Copy the shard, or rows of it, into ``out``.

        Args:
            out: Shape and dtype of the variable; of rows, shape ``(len(ids), *shape[1:])``.
            ids: Which rows; they must be there.

        Returns:
            The version that the copy belongs to, or None: it was changed meanwhile, and ``out``
            holds nothing of use.
        """
        before = self._version_of[0]
        if before & 1:
            return None
        if self.layout.blocks > 1 and not (self.versions == before).all():
            return None
        self._sync()
        if ids is None:
            copy_array(out, self.data)
        else:
            take_rows(self.data, ids, out)
        self._sync()
        if self.layout.blocks > 1:
            unchanged = bool((self.versions == before).all())
        else:
            unchanged = self._version_of[0] == before
        return before >> 1 if unchanged else None

    def read_blocks(self, out: Array) -> None:
        """Local. Copy the shard block by block; blocks may belong to different versions.

        Args:
            out: C-contiguous, shape and dtype of the variable.
        """
        step = BLOCK_BYTES // self.layout.dtype.itemsize
        flat = out.reshape(-1)
        for block in range(self.layout.blocks):
            part = slice(block * step, (block + 1) * step)
            backoff = Backoff()  # whoever changes the block may stand still
            while True:
                before = self._version_of[block]
                self._sync()
                np.copyto(flat[part], self.flat[part])
                self._sync()
                if not before & 1 and self._version_of[block] == before:
                    break
                backoff.pause()
