"""Pushes as a server receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mpidist import Request, errors
from strategy.server.served import ServedConnection, ServedVariable
from strategy.shared.blocks import Blocks, in_blocks, scattered
from strategy.shared.push_layout import ArrayReader
from strategy.shared.push_message import PLACES, ROWS, WHOLE, Entry, PushMessage, wire_dtype

Array = NDArray[Any]


@dataclass(slots=True)
class ReceivedChange:
    """A change of one variable, or of adjacent small variables of a bucket.

    Attributes:
        variables: The variable or variables.
        rule: Number of the rule; see ``Rule`` in ``parameter_server.proto``.
        rate: The learning rate of an optimizer without a schedule.
        seen: Versions from which the change was computed, one for each variable.
        values: The flat values in the dtype in which they were sent. Large values have several
            slices.
        ids: Unique row numbers, int64. None if the change is not of rows.
        places: Element indices, ascending, int64. None if the change has all elements.
    """

    variables: Sequence[ServedVariable]
    rule: int
    rate: float
    seen: Sequence[int]
    values: Sequence[Array]
    ids: Array | None = None
    places: Array | None = None

    @property
    def kind(self) -> tuple[list[int], bool]:
        """The variables, and True for rows. Both must be equal for all members of a step."""
        return [variable.identity for variable in self.variables], self.ids is not None

    def blocks(self) -> Blocks:
        """Return the values of a whole variable, block by block."""
        layout = self.variables[0].shard.layout
        if self.places is not None:
            return scattered(self.places, self.values[0], layout.size)
        return in_blocks(self.values, layout.dtype)

    def rows(self) -> tuple[Array, Array]:
        """Return the row numbers and the flat values of the rows."""
        assert self.ids is not None
        dtype = self.variables[0].shard.layout.dtype
        return self.ids, self.values[0].astype(dtype, copy=False)

    def divided(self) -> list[ReceivedChange]:
        """Return one change for each variable."""
        changes, start = [], 0
        for variable, seen in zip(self.variables, self.seen, strict=True):
            end = start + variable.shard.layout.size
            values = (self.values[0][start:end],)
            changes.append(ReceivedChange((variable,), self.rule, self.rate, (seen,), values))
            start = end
        return changes


@dataclass(slots=True, eq=False)
class ReceivedPush:
    """A push with its changes.

    Attributes:
        message: The message.
        connection: The connection of the worker.
        request: The request. The server replies when the push has been applied.
        changes: The changes, in order.
        problem: The error if the arrays do not fit the message.
        begun: True once the push is being applied or waits for the other members of its step.
    """

    message: PushMessage
    connection: ServedConnection
    request: Request
    changes: Sequence[ReceivedChange] = ()
    problem: errors.InvalidArgumentError | None = None
    begun: bool = False


def read_changes(
    entries: Sequence[Entry], arrays: Sequence[Array], variables: Sequence[ServedVariable]
) -> list[ReceivedChange]:
    """Return the changes of a push. Adjacent small variables share one change.

    Args:
        entries: The entries of the message.
        arrays: The arrays of all PushSlice messages, then of the push message.
        variables: The variables of the server, by number.

    Raises:
        InvalidArgumentError: The arrays do not fit the message.
    """
    reader = ArrayReader(arrays)
    changes: list[ReceivedChange] = []
    begin = 0
    while begin < len(entries):
        first = entries[begin]
        variable, end = variables[first[0]], begin + 1
        span = variable.shard.span
        if span is None or first[4] != WHOLE or first[5]:
            changes.append(_single(first, variable, reader))
            begin = end
            continue
        adjacent, size = [variable], span.size
        while end < len(entries) and _is_alike(entries[end], first):
            variable = variables[entries[end][0]]
            following = variable.shard.span
            if following is None or not following.comes_after(span):
                break
            span = following
            adjacent.append(variable)
            size += span.size
            end += 1
        values = reader.joined_values(adjacent[0].shard.layout.dtype, size)
        seen = [entry[2] for entry in entries[begin:end]]
        changes.append(ReceivedChange(adjacent, first[1], first[3], seen, (values,)))
        begin = end
    return changes


def _is_alike(entry: Entry, first: Entry) -> bool:
    """Return whether two entries have the same rule, learning rate, kind and dtype."""
    return entry[1] == first[1] and entry[3:] == first[3:]


def _single(entry: Entry, variable: ServedVariable, reader: ArrayReader) -> ReceivedChange:
    _, rule, seen, rate, kind, wire = entry
    layout = variable.shard.layout
    dtype = wire_dtype(wire, layout.dtype)
    change = ReceivedChange((variable,), rule, rate, (seen,), ())
    if kind == ROWS:
        change.ids = reader.numbers()
        width = layout.size // max(layout.shape[0], 1) if layout.shape else 0
        change.values = (reader.values(dtype, change.ids.size * width),)
    elif kind == PLACES:
        change.places = reader.numbers()
        change.values = (reader.values(dtype, change.places.size),)
    else:
        change.values = reader.slices(dtype, layout.size)
    return change
