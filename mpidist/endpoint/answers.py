"""What makes a request that is sent again harmless: the answers given so far. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from mpidist.endpoint.message import Message

# Settled requests that are remembered. Older ones are known by their ids being lower; a client
# cannot have so many requests overtake one of its own on an ordered connection.
_REMEMBERED = 16384


class _Settled:
    """The client has the answer, and asks no more."""


_SETTLED: Final = _Settled()


class Answers:
    """The requests of one process, and how they were answered.

    Ids grow, but may arrive a little out of order: several threads send.
    """

    def __init__(self) -> None:
        self._answers: dict[int, Message | _Settled | None] = {}
        self._floor = 0

    def admit(self, identity: int) -> bool:
        """Local. Take note of a request.

        Args:
            identity: Its id.

        Returns:
            Whether it is new: otherwise it must not be carried out again.
        """
        if identity <= self._floor or identity in self._answers:
            return False
        self._answers[identity] = None
        return True

    def store(self, identity: int, answer: Message) -> None:
        """Local. Keep the answer to a request, unless the client has it already."""
        if self._answers.get(identity, _SETTLED) is None:
            self._answers[identity] = answer

    def get(self, identity: int) -> Message | None:
        """Local. The answer to send again; None if there is none yet, or no need of it."""
        answer = self._answers.get(identity)
        return answer if isinstance(answer, Message) else None

    def settle(self, identities: Iterable[int]) -> None:
        """Local. Forget answers that have arrived."""
        for identity in identities:
            if identity in self._answers:
                self._answers[identity] = _SETTLED
        surplus = len(self._answers) - _REMEMBERED
        if surplus <= 0:
            return
        # The oldest; those that wait for an answer, of which there are few, stay.
        settled = (identity for identity, answer in self._answers.items() if answer is _SETTLED)
        for identity in list(itertools.islice(settled, surplus)):
            del self._answers[identity]
            self._floor = max(self._floor, identity)
