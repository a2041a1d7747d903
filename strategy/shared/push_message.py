"""The message of a push and of its reply: numbers of fixed size, since small pushes are frequent.

A push has a header, the members of its step, the sequences of the worker's last pushes to all
servers, and a table with an entry for each change. All numbers are little-endian. The values of the
changes are arrays beside the message; see :mod:`strategy.shared.push_layout`. The reply has the
versions after the changes, then their staleness.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import errors
from strategy.shared.shard import DTYPES

# Connection, number of slices, sequence, step; number of members, of sequences and of entries.
_HEADER = struct.Struct("<IIQQIII")
_ENTRY = np.dtype(
    [
        ("seen", "<u8"),
        ("rate", "<f8"),
        ("variable", "<u4"),
        ("rule", "<u4"),
        ("kind", "u1"),
        ("wire", "u1"),
    ]
)
_COLUMNS = ("variable", "rule", "seen", "rate", "kind", "wire")
_U8 = np.dtype("<u8")

WHOLE, ROWS, PLACES = 0, 1, 2
"""Kinds of changes: of the whole variable, of rows, or of single elements."""

_WIRES = {dtype: number for number, dtype in enumerate(DTYPES, 1)}

Entry = tuple[int, int, int, float, int, int]
"""Variable, rule, version from which the change was computed, learning rate, kind, and the number
of the dtype of the values, which is 0 for the dtype of the variable."""


def wire_number(dtype: np.dtype[Any] | None) -> int:
    """Return the number of a dtype in entries; 0 for None."""
    return 0 if dtype is None else _WIRES[dtype]


def wire_dtype(number: int, default: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a number in entries."""
    return DTYPES[number - 1] if number else default


@dataclass(slots=True)
class PushMessage:
    """A push without its arrays.

    Attributes:
        connection: Number of the connection.
        sequence: Sequence of the push, ascending in its connection.
        slices: Number of slices that were sent before.
        step: The synchronous step.
        members: The workers whose changes are averaged in the step, ascending. Empty if the push is
            applied alone.
        sent: Sequences of the worker's last pushes to all servers, with this one.
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
        """Return the message as bytes."""
        table = np.empty(len(self.entries), _ENTRY)
        if self.entries:
            for name, column in zip(_COLUMNS, zip(*self.entries, strict=True), strict=True):
                table[name] = column
        members, sent = self.members, self.sent
        header = _HEADER.pack(
            self.connection, self.slices, self.sequence, self.step,
            len(members), len(sent), len(table),
        )  # fmt: skip
        return b"".join(
            (
                header,
                struct.pack(f"<{len(members)}I", *members),
                struct.pack(f"<{len(sent)}Q", *sent),
                table.tobytes(),
            )
        )

    @classmethod
    def unpack(cls, body: bytes) -> PushMessage:
        """Return the message of some bytes.

        Raises:
            InvalidArgumentError: The bytes are not the message of a push.
        """
        try:
            connection, slices, sequence, step, members, sent, entries = _HEADER.unpack_from(body)
            start = _HEADER.size
            member_ranks = struct.unpack_from(f"<{members}I", body, start)
            start += 4 * members
            sequences = struct.unpack_from(f"<{sent}Q", body, start)
            start += 8 * sent
        except struct.error as error:
            raise errors.InvalidArgumentError(f"no message of a push: {error}") from error
        if len(body) != start + entries * _ENTRY.itemsize:
            raise errors.InvalidArgumentError(
                f"the message of a push has {len(body)} bytes for {entries} changes"
            )
        table = np.frombuffer(body, _ENTRY, entries, start)
        columns = [table[name].tolist() for name in _COLUMNS]
        rows = list(zip(*columns, strict=True))
        return cls(connection, sequence, slices, step, member_ranks, sequences, rows)


def pack_reply(versions: Sequence[int], staleness: Sequence[int]) -> bytes:
    """Return the reply to a push as bytes."""
    return np.array([versions, staleness], _U8).tobytes()


def unpack_reply(body: bytes) -> tuple[list[int], list[int]]:
    """Return versions and staleness of a reply."""
    versions, staleness = np.frombuffer(body, _U8).reshape(2, -1).tolist()
    return versions, staleness
