"""The messages of pushes: the arrays, and the message with one entry for each changed variable.

The message has numbers of fixed size, little-endian, because small pushes are frequent: a header,
the members of the step, the sequence numbers of the worker's last pushes to all servers, the
versions that the changes were computed from, the learning rates, and the entries. The entries come
last and apart from the numbers that change with each push. Pushes that change the same variables by
the same rules have the same entries, by which a server finds its prepared targets. The reply has
the versions after the changes, then their staleness.

Workers write and servers read the arrays in the order of the changes. Row numbers and element
indices are separate arrays. Values below :data:`JOINED_BYTES` are joined in one array for each
dtype, so a push of many small variables costs little more than a push of one. Larger values are
separate arrays. The values of whole variables are divided into slices of at most
:data:`SLICE_BYTES`, so that each message fits into the shared memory of a node.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from strategy.protocol.layout import BLOCK_BYTES, DTYPES

Array = NDArray[Any]

JOINED_BYTES = 16 << 10
SLICE_BYTES = 16 << 20

_INT64 = np.dtype(np.int64)

ONE: Array = np.ones((), np.int64)
"""The data of a change that adds one to a variable. It is not sent."""


class ArrayReader:
    """Reader of the arrays of a push, in the order of its changes.

    Args:
        arrays: The arrays of the push, flat uint8.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays: Iterator[Array] = iter(arrays)
        self._joined: dict[np.dtype[Any], Array] = {}  # the joined values that were not read yet

    def numbers(self) -> NDArray[np.int64]:
        """Return the next array of row numbers or element indices."""
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
        left = self._joined.get(dtype)
        if left is None:
            left = self._next(dtype)
        self._joined[dtype] = left[size:]
        return _checked(left[:size], size)

    def check_end(self) -> None:
        """Raise InvalidArgumentError if values are left."""
        for array in (*self._arrays, *self._joined.values()):
            if array.nbytes:
                raise errors.InvalidArgumentError("a push has more values than its changes need")

    def _next(self, dtype: np.dtype[Any]) -> Array:
        array = next(self._arrays, None)
        if array is None or array.nbytes % dtype.itemsize:
            nbytes = 0 if array is None else array.nbytes
            raise errors.InvalidArgumentError(
                f"a push has {nbytes} bytes where an array of {dtype} is needed"
            )
        return typed(array, dtype)


def typed(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return bytes as values that compiled rules accept: aligned and writable."""
    flat = array.view(dtype)
    return flat if flat.flags.aligned and flat.flags.writeable else flat.copy()


def _checked(values: Array, size: int) -> Array:
    if values.size != size:
        raise errors.InvalidArgumentError(
            f"a push has {values.size} values of {values.dtype} where {size} are needed"
        )
    return values


# Connection, number of slices, sequence number, step, and the lengths of members, sent and entries.
_HEADER = struct.Struct("<IIQQIII")
_ENTRY = struct.Struct("<IIBB")

WHOLE, ROWS, ELEMENTS, INCREMENT = 0, 1, 2, 3
"""Kinds of changes: of a whole variable, of some rows, of some elements, or by one."""

_WIRES = {dtype: number for number, dtype in enumerate(DTYPES, 1)}

Entry = tuple[int, int, int, int]
"""Number of a variable, rule, kind, and number of the dtype in which the values are sent (0: the
dtype of the variable)."""


def pack_entries(entries: Sequence[Entry]) -> bytes:
    """Encode entries as bytes."""
    return b"".join([_ENTRY.pack(*entry) for entry in entries])


def unpack_entries(packed: bytes) -> list[Entry]:
    """Decode entries."""
    return list(_ENTRY.iter_unpack(packed))


def wire_number(dtype: np.dtype[Any] | None) -> int:
    """Return the number that entries use for a dtype; 0 for None."""
    return 0 if dtype is None else _WIRES[dtype]


def wire_dtype(number: int, default: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for a number in an entry.

    Raises:
        InvalidArgumentError: There is no such dtype.
    """
    if number > len(DTYPES):
        raise errors.InvalidArgumentError(f"a push has values of dtype number {number}")
    return DTYPES[number - 1] if number else default


@dataclass(slots=True)
class PushMessage:
    """A push without its arrays.

    Attributes:
        connection: Number of the connection.
        sequence: Sequence number of the push. It increases within the connection.
        slices: Number of PushSlice messages that the worker sent before this message.
        step: The synchronous step.
        members: The workers whose changes are averaged in the step, ascending. Empty if the push is
            applied alone.
        sent: Sequence numbers of the worker's last pushes to all servers, this push included.
        entries: The changed variables, in order; see :func:`pack_entries`.
        seen: For each entry, the version that the variable has if no other worker has pushed since
            the pull.
        rates: For each entry, the learning rate.
    """

    connection: int
    sequence: int = 0
    slices: int = 0
    step: int = 0
    members: Sequence[int] = ()
    sent: Sequence[int] = ()
    entries: bytes = b""
    seen: Sequence[int] = ()
    rates: Sequence[float] = ()

    def pack(self) -> bytes:
        """Encode the message as bytes."""
        members, sent, seen = self.members, self.sent, self.seen
        count = len(seen)
        header = _HEADER.pack(
            self.connection, self.slices, self.sequence, self.step, len(members), len(sent), count
        )
        numbers = struct.pack(
            f"<{len(members)}I{len(sent)}Q{count}Q{count}d", *members, *sent, *seen, *self.rates
        )
        return b"".join((header, numbers, self.entries))

    @classmethod
    def unpack(cls, body: bytes) -> PushMessage:
        """Decode a message.

        Raises:
            InvalidArgumentError: The bytes are not the message of a push.
        """
        try:
            connection, slices, sequence, step, members, sent, count = _HEADER.unpack_from(body)
            end = _HEADER.size + 4 * members + 8 * sent + 16 * count
            if len(body) == end + count * _ENTRY.size:
                numbers = struct.unpack_from(
                    f"<{members}I{sent}Q{count}Q{count}d", body, _HEADER.size
                )
                first = members + sent  # index of the first version
                lists = numbers[:members], numbers[members:first]
                versions = numbers[first : first + count], numbers[first + count :]
                return cls(connection, sequence, slices, step, *lists, body[end:], *versions)
        except struct.error as error:
            raise errors.InvalidArgumentError(
                f"the message of a push is not valid: {error}"
            ) from error
        raise errors.InvalidArgumentError(
            f"the message of a push has {len(body)} bytes for {count} changes"
        )


def pack_reply(versions: Sequence[int], staleness: Sequence[int]) -> bytes:
    """Encode the reply to a push as bytes."""
    return struct.pack(f"<{2 * len(versions)}Q", *versions, *staleness)


def unpack_reply(body: bytes) -> tuple[Sequence[int], Sequence[int]]:
    """Return the versions and the staleness in a reply."""
    numbers = struct.unpack(f"<{len(body) // 8}Q", body)
    count = len(numbers) // 2
    return numbers[:count], numbers[count:]


Blocks = Iterator[Array]


def in_blocks(slices: Sequence[Array], dtype: np.dtype[Any]) -> Blocks:
    """Yield values block by block. An empty variable has one block, because it has a version.

    Args:
        slices: The values, flat. All slices but the last consist of whole blocks.
        dtype: The dtype of the variable. Narrower values are converted.

    Yields:
        Flat arrays of ``dtype``. The next block may overwrite the last one.
    """
    step = BLOCK_BYTES // dtype.itemsize
    memory: Array | None = None
    for flat in slices:
        for start in range(0, max(flat.size, 1), step):
            block = flat[start : start + step]
            if block.dtype != dtype:
                if memory is None:
                    memory = np.empty(step, dtype)
                np.copyto(memory[: block.size], block)
                block = memory[: block.size]
            yield block


def scattered(element_ids: Array, values: Array, size: int) -> Blocks:
    """Yield an array of zeros with some elements set, block by block.

    Args:
        element_ids: Indices of the elements, ascending.
        values: The elements.
        size: Size of the array.

    Yields:
        Flat arrays. Each block overwrites the last one.
    """
    memory = np.empty(BLOCK_BYTES // values.itemsize, values.dtype)
    for start in range(0, max(size, 1), memory.size):
        block = memory[: min(memory.size, size - start)]
        first, last = np.searchsorted(element_ids, (start, start + block.size))
        block[...] = 0
        block[element_ids[first:last] - start] = values[first:last]
        yield block
