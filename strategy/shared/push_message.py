"""The binary messages of a push and of its reply.

Small pushes are frequent, so all numbers have a fixed size. They are little-endian. A push consists
of a header, the members of its step, the sequence numbers of the worker's last pushes to all
servers, and an entry for each change. The values of the changes are arrays beside the message; see
:mod:`strategy.shared.push_layout`. The reply consists of the versions after the changes, then the
staleness of the changes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import errors
from strategy.shared.shard import DTYPES

# Connection, number of slices, sequence number, step, and the lengths of members, sent and entries.
_HEADER = struct.Struct("<IIQQIII")
_ENTRY = struct.Struct("<IIQdBB")

WHOLE, ROWS, PLACES = 0, 1, 2
"""Kinds of changes: the whole variable, some rows, or some elements."""

_WIRES = {dtype: number for number, dtype in enumerate(DTYPES, 1)}

Entry = tuple[int, int, int, float, int, int]
"""Variable, rule, version from which the change was computed, learning rate, kind, and the number
of the dtype in which the values are sent (0: the dtype of the variable)."""


def wire_number(dtype: np.dtype[Any] | None) -> int:
    """Return the number that entries use for a dtype; 0 for None."""
    return 0 if dtype is None else _WIRES[dtype]


def wire_dtype(number: int, default: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for a number in an entry."""
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
        entries: The changes, in order.
    """

    connection: int
    sequence: int = 0
    slices: int = 0
    step: int = 0
    members: Sequence[int] = ()
    sent: Sequence[int] = ()
    entries: Sequence[Entry] = ()

    def pack(self) -> bytes:
        """Encode the message as bytes."""
        members, sent, entries = self.members, self.sent, self.entries
        header = _HEADER.pack(
            self.connection, self.slices, self.sequence, self.step,
            len(members), len(sent), len(entries),
        )  # fmt: skip
        lists = struct.pack(f"<{len(members)}I{len(sent)}Q", *members, *sent)
        return b"".join((header, lists, *[_ENTRY.pack(*entry) for entry in entries]))

    @classmethod
    def unpack(cls, body: bytes) -> PushMessage:
        """Decode a message.

        Raises:
            InvalidArgumentError: The bytes are not the message of a push.
        """
        try:
            connection, slices, sequence, step, members, sent, entries = _HEADER.unpack_from(body)
            start = _HEADER.size + 4 * members + 8 * sent
            if len(body) == start + entries * _ENTRY.size:
                numbers = struct.unpack_from(f"<{members}I{sent}Q", body, _HEADER.size)
                rows = list(_ENTRY.iter_unpack(body[start:]))
                lists = numbers[:members], numbers[members:]
                return cls(connection, sequence, slices, step, *lists, rows)
        except struct.error as error:
            raise errors.InvalidArgumentError(
                f"the message of a push is not valid: {error}"
            ) from error
        raise errors.InvalidArgumentError(
            f"the message of a push has {len(body)} bytes for {entries} changes"
        )


def pack_reply(versions: Sequence[int], staleness: Sequence[int]) -> bytes:
    """Encode the reply to a push as bytes."""
    return struct.pack(f"<{2 * len(versions)}Q", *versions, *staleness)


def unpack_reply(body: bytes) -> tuple[Sequence[int], Sequence[int]]:
    """Return the versions and the staleness in a reply."""
    numbers = struct.unpack(f"<{len(body) // 8}Q", body)
    count = len(numbers) // 2
    return numbers[:count], numbers[count:]
