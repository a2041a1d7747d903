"""What goes to a server as one push: its message, and what follows that by other ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from strategy.connection.change import Change
from strategy.connection.in_place import own_changes
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.inline import Enclosed
from strategy.shared.one_sided import OneSidedRing
from strategy.shared.staging import STAGED_BYTES, TURN_S, Ring

# As at the server: what becomes infinite is not told here.
_quiet = partial(np.errstate, all="ignore")


class Parcel:
    """Local. Puts changes into a message.

    Args:
        push: The message; its entries are added.
        changes: Of variables of one server.
        ring: The connection's, or None.

    Attributes:
        inline: The arrays of the message.
        order: Places of the changes, in the order of the entries.
        nbytes: How much travels.
        has_turns: Whether the worker makes some of the changes itself.
        is_long: Whether the server has gone on to something else before their end.
    """

    def __init__(
        self, push: pb.PushRequest, changes: Sequence[Change], ring: Ring | OneSidedRing | None
    ) -> None:
        self.nbytes = 0
        self.is_long = False
        self._push = push
        self._ring = ring
        self._enclosed = Enclosed()
        self._later: list[Callable[[], None]] = []
        own = {} if push.members else own_changes(changes, ring)
        self.has_turns = bool(own)
        # What the worker makes itself comes last: the server has done the rest by then.
        self.order = sorted(range(len(changes)), key=own.__contains__)
        for place in self.order:
            self._add(changes[place], own.get(place))
        with _quiet():
            self.inline = self._enclosed.arrays()

    def stream(self) -> None:
        """Local. Once the message has been sent: stream what is not in it, and make changes."""
        begin = time.monotonic()
        with _quiet():  # what raises half-way breaks the push
            for each in self._later:
                each()
        self.is_long = self.has_turns and time.monotonic() - begin > TURN_S

    def _add(self, change: Change, make: Callable[[], None] | None) -> None:
        remote, whole = change.remote, change.ids is None and change.places is None
        nbytes = change.data.size * change.travels_in.itemsize
        ring = self._ring if whole and nbytes >= STAGED_BYTES and make is None else None
        entry = self._push.entries.add()
        entry.variable, entry.rule, entry.seen = remote.number, change.rule, remote.seen
        if change.scaled:
            entry.scaled = True
        elif change.rate:
            entry.learning_rate = change.rate
        if change.wire is not None:
            entry.wire = change.wire.name
        self.nbytes += nbytes
        if make is not None:
            entry.in_place = True
            self._later.append(make)
        elif ring is not None:
            entry.staged = True
            self._later.append(partial(_write, ring, change))
        else:
            entry.rows, entry.places = change.ids is not None, change.places is not None
            self._enclosed.add(change)


def _write(ring: Ring | OneSidedRing, change: Change) -> None:
    flat = np.ascontiguousarray(change.data).reshape(-1)
    ring.write(flat, change.travels_in, change.scale)
