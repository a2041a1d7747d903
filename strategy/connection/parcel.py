"""One push to a server: its message, and the large gradients that follow through the ring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from strategy.connection.change import Change
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.inline import Enclosed
from strategy.shared.one_sided import OneSidedRing
from strategy.shared.staging import STAGED_BYTES, Ring

# The server does not report overflow either.
_quiet = partial(np.errstate, all="ignore")


class Parcel:
    """The changes of one push.

    Args:
        push: The message; an entry for each change is added.
        changes: The changes, in their order.
        ring: The ring of the connection, for large changes; None if there is none.

    Attributes:
        inline: The arrays of the message.
        nbytes: Bytes that travel.
    """

    def __init__(
        self, push: pb.PushRequest, changes: Sequence[Change], ring: Ring | OneSidedRing | None
    ) -> None:
        self.nbytes = 0
        self._push = push
        self._ring = ring
        self._enclosed = Enclosed()
        self._streamed: list[Change] = []
        for change in changes:
            self._add(change)
        with _quiet():
            self.inline = self._enclosed.arrays()

    def stream(self) -> None:
        """Write large changes to the ring, after the message was sent."""
        if self._ring is None:
            return
        with _quiet():  # an error here leaves half of a push
            for change in self._streamed:
                flat = np.ascontiguousarray(change.data).reshape(-1)
                self._ring.write(flat, change.travels_in, change.scale)

    def _add(self, change: Change) -> None:
        remote, whole = change.remote, change.ids is None and change.places is None
        nbytes = change.data.size * change.travels_in.itemsize
        entry = self._push.entries.add()
        entry.variable, entry.rule, entry.seen = remote.number, change.rule, remote.seen
        if change.scaled:
            entry.scaled = True
        elif change.rate:
            entry.learning_rate = change.rate
        if change.wire is not None:
            entry.wire = change.wire.name
        self.nbytes += nbytes
        if whole and nbytes >= STAGED_BYTES and self._ring is not None:
            entry.staged = True
            self._streamed.append(change)
        else:
            entry.rows, entry.places = change.ids is not None, change.places is not None
            self._enclosed.add(change)
