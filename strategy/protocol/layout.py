"""The layout of a variable in memory, and reads of it from shared memory or by MPI Get."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist.buffers.copying import copy_array, take_rows
from mpidist.mpi import Backoff
from mpidist.ps_memory import PsMemory

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

BLOCK_BYTES = 1 << 20

# Supported dtypes. Each can be updated in shared memory, encoded in messages, and saved to
# safetensors.
DTYPES = (
    *map(np.dtype, ("bool", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64")),
    *map(np.dtype, (ml_dtypes.bfloat16, "float16", "float32", "float64")),
)


# Dtypes that optimizers can change. They change HALVES in float32.
HALVES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
FLOATING = (*HALVES, np.dtype(np.float32), np.dtype(np.float64))

WIDE = ":float32"
"""Name of the slot for the float32 master copy of a half-precision variable.

Slot names of users have no colon.
"""


class Layout:
    """The shape, dtype and sizes of a shard.

    Args:
        shape: Shape of the shard.
        dtype: Dtype of the variable.

    Attributes:
        shape: Shape of the shard.
        dtype: Dtype of the variable, in this machine's byte order.
        size: Number of elements.
        data_bytes: Size of the data in bytes.
        version_bytes: Size of the versions in bytes.
        blocks: Number of blocks, at least 1.
        is_half: Whether the dtype is in HALVES, so optimizers change the shard in float32.
        is_floating: Whether optimizers can change the shard.
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


class ShardView:
    """A shard in mapped memory of its server.

    Args:
        memory: The mapped memory.
        layout: Shape and dtype.
        versions_offset: Offset of the versions in the memory, in bytes.
        data_offset: Offset of the data in the memory, in bytes.
        sync: A memory fence for loads and stores.
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
        """Copy the shard, or some rows, into ``out``, unless the shard changes meanwhile.

        Args:
            out: Array with the shape and dtype of the shard; for rows, of shape
                ``(len(ids), *shape[1:])``.
            ids: Valid row numbers; None for all rows.

        Returns:
            The version of the copy. None if the shard was changed; then the content of ``out`` is
            undefined.
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
        """Copy the shard block by block. The blocks may have different versions.

        Args:
            out: C-contiguous array with the shape and dtype of the shard.
        """
        step = BLOCK_BYTES // self.layout.dtype.itemsize
        flat = out.reshape(-1)
        for block in range(self.layout.blocks):
            part = slice(block * step, (block + 1) * step)
            backoff = Backoff()  # the thread that changes the block may be descheduled
            while True:
                before = self._version_of[block]
                self._sync()
                np.copyto(flat[part], self.flat[part])
                self._sync()
                if not before & 1 and self._version_of[block] == before:
                    break
                backoff.pause()


class RmaShardView:
    """A shard that a worker reads by MPI's Get.

    Args:
        memory: The memory of the ps tasks.
        index: Index of the ps task that holds the shard.
        layout: Shape and dtype.
        versions: Address of the versions at the ps task.
        data: Address of the values at the ps task.
    """

    def __init__(
        self, memory: PsMemory, index: int, layout: Layout, versions: int, data: int
    ) -> None:
        self.layout = layout
        self._memory = memory
        self._index = index
        self._addresses = versions, data

    def try_read(self, out: Array, ids: Array | None = None) -> int | None:
        """See :meth:`strategy.protocol.layout.ShardView.try_read`; always None for rows."""
        if ids is not None:
            return None
        before = self._versions(0, self.layout.blocks)
        if before[0] & 1 or not (before == before[0]).all():
            return None
        self._memory.get(self._index, self._addresses[1], out)
        unchanged = np.array_equal(self._versions(0, self.layout.blocks), before)
        return int(before[0]) >> 1 if unchanged else None

    def read_blocks(self, out: Array) -> None:
        """See :meth:`strategy.protocol.layout.ShardView.read_blocks`."""
        step = BLOCK_BYTES // self.layout.dtype.itemsize
        flat = out.reshape(-1)
        for block in range(self.layout.blocks):
            part = flat[block * step : (block + 1) * step]
            backoff = Backoff()
            while True:
                before = self._versions(block, 1)[0]
                self._memory.get(self._index, self._addresses[1] + block * BLOCK_BYTES, part)
                if not before & 1 and self._versions(block, 1)[0] == before:
                    break
                backoff.pause()

    def _versions(self, first: int, count: int) -> NDArray[np.int64]:
        versions = np.empty(count, np.int64)
        self._memory.get(self._index, self._addresses[0] + 8 * first, versions)
        return versions
