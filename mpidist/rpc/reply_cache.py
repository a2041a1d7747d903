"""The reply cache, which makes a repeated request harmless (at-most-once execution)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from mpidist.rpc.message import Message

# Acknowledged requests to remember. Older ones are known by their lower ids: on an ordered
# connection no request can be overtaken by that many others of its client.
_MAX_REMEMBERED = 16384


class _Acknowledged:
    """The entry of a request whose reply the client has."""


_ACKNOWLEDGED: Final = _Acknowledged()


class ReplyCache:
    """The requests of one client and their replies.

    Ids grow, but can arrive slightly out of order, because several threads send.
    """

    def __init__(self) -> None:
        self._replies: dict[int, Message | _Acknowledged | None] = {}
        self._floor = 0

    def admit(self, request_id: int) -> bool:
        """Record a request. Return True if it is new, False if it must not be executed again."""
        if request_id <= self._floor or request_id in self._replies:
            return False
        self._replies[request_id] = None
        return True

    def store(self, request_id: int, reply: Message) -> None:
        """Keep the reply to a request, unless the client has it already."""
        if self._replies.get(request_id, _ACKNOWLEDGED) is None:
            self._replies[request_id] = reply

    def get(self, request_id: int) -> Message | None:
        """Return the reply to send again; None if there is none, or the client has it."""
        reply = self._replies.get(request_id)
        return reply if isinstance(reply, Message) else None

    def ack(self, request_ids: Iterable[int]) -> None:
        """Drop the replies that the client has received."""
        for request_id in request_ids:
            if request_id in self._replies:
                self._replies[request_id] = _ACKNOWLEDGED
        surplus = len(self._replies) - _MAX_REMEMBERED
        if surplus <= 0:
            return
        # The few requests without an acknowledged reply stay, however old they are.
        oldest = (one for one, reply in self._replies.items() if reply is _ACKNOWLEDGED)
        for request_id in list(itertools.islice(oldest, surplus)):
            del self._replies[request_id]
            self._floor = max(self._floor, request_id)
