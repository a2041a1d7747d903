"""A variable in the memory of its server: versions, data, slots, and how they change and are read.

Every block of 1 MiB has a version of its own, odd only while its bytes change (a sequence lock;
Boehm, "Can seqlocks get along with programming language memory models?", 2012). The blocks of a
shard that nobody is changing are all at the same version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from strategy.kernels import Piece, Rule

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

BLOCK_BYTES = 1 << 20

# What can be changed and read in place, sent by its name, and saved.
DTYPES = (
    *map(np.dtype, ("bool", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64")),
    *map(np.dtype, (ml_dtypes.bfloat16, "float16", "float32", "float64")),
)


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
    """

    def __init__(self, shape: Iterable[int], dtype: DTypeLike) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.size = math.prod(self.shape)
        self.data_bytes = self.size * self.dtype.itemsize
        self.blocks = max(-(-self.data_bytes // BLOCK_BYTES), 1)
        self.version_bytes = 8 * self.blocks


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

    def try_read(self, out: Array) -> int | None:
        """Local. Copy the shard into ``out``.

        Args:
            out: Shape and dtype of the variable.

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
        np.copyto(out, self.data)
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
            while True:
                before = self._version_of[block]
                self._sync()
                np.copyto(flat[part], self.flat[part])
                self._sync()
                if not before & 1 and self._version_of[block] == before:
                    break


class Scratch:
    """Arrays of a block for what lies between, shared by the shards of a server.

    They are kept, since new memory costs a page fault every 4 KiB.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, list[Array]] = {}

    def take(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Local. So many flat arrays of this dtype, as long as a block; their contents are old."""
        arrays = self._arrays.setdefault(dtype.name, [])
        while len(arrays) < count:
            arrays.append(np.empty(BLOCK_BYTES // dtype.itemsize, dtype))
        return arrays[:count]


class OwnedShard(SharedShard):
    """A shard as its server has it: the only one who writes.

    Args:
        name: Of the variable.
        memory: The server's arena.
        layout: The shard's.
        versions_offset: See :class:`SharedShard`.
        data_offset: See :class:`SharedShard`.
        sync: See :class:`SharedShard`.
        scratch: The server's; by default one of its own.
    """

    def __init__(
        self,
        name: str,
        memory: Bytes,
        layout: Layout,
        versions_offset: int,
        data_offset: int,
        sync: Callable[[], None],
        scratch: Scratch | None = None,
    ) -> None:
        super().__init__(memory, layout, versions_offset, data_offset, sync)
        self.name = name
        self.slots: dict[str, Array] = {}
        self.steps: dict[str, int] = {}
        self._scratch = Scratch() if scratch is None else scratch

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._version_of[0] >> 1

    def slot(self, name: str) -> Array:
        """Local. The slot of this name, flat, shape ``(size,)``; zeros at first."""
        if name not in self.slots:
            self.slots[name] = np.zeros(self.layout.size, self.layout.dtype)
        return self.slots[name]

    def apply(
        self, kind: str, rule: Rule, values: Mapping[str, float], blocks: Iterable[Array]
    ) -> None:
        """Local. Change the whole shard once.

        Args:
            kind: Name under which slots and steps are kept.
            rule: How.
            values: The optimizer's numbers.
            blocks: The gradient, flat, block by block; asked for one by one.
        """
        step = self.steps.get(kind, 0) + 1
        slots = [self.slot(f"{kind}/{slot}") for slot in rule.slots]
        length = rule.piece or BLOCK_BYTES // self.layout.dtype.itemsize
        scratch = self._scratch.take(rule.scratch, self.layout.dtype)
        start = 0
        for block, gradient in enumerate(blocks):
            self._version_of[block] += 1
            self._sync()
            for begin in range(0, gradient.size, length):
                grad = gradient[begin : begin + length]
                here = slice(start + begin, start + begin + grad.size)
                piece = Piece(
                    self.flat[here],
                    grad,
                    [slot[here] for slot in slots],
                    [array[: grad.size] for array in scratch],
                    values,
                    step,
                )
                rule.update(piece)
            self._sync()
            self._version_of[block] += 1
            start += gradient.size
        self.steps[kind] = step
