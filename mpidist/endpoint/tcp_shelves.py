"""The shelves of a tcp connection within a host: large buffers need no socket there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpidist.endpoint.frames import BadFrameError, Put
from mpidist.endpoint.lent_memory import Lent, borrow
from mpidist.endpoint.message import Array
from mpidist.endpoint.shelf import Shelf
from mpidist.proto.mpidist_pb2 import Hello, Memory

logger = logging.getLogger(__name__)


class Shelves:
    """One for each direction; each side lends its own to the other, in the hellos.

    They end with the connection: nobody would give back what was lost with it.

    Args:
        nbytes: Of the own shelf.

    Attributes:
        put: Puts buffers on the own shelf; None as long as the other side is not known to have it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lent: Lent | None = None
        self._borrowed: Shelf | None = None
        self.put: Put | None = None

    def offer(self) -> Memory | None:
        """Local. Make the own shelf anew; what the other side must know, None if there is none."""
        self.put = None
        try:
            self._lent = Lent(self._nbytes)
        except (OSError, OverflowError, ValueError) as error:  # absurd sizes, too
            logger.info("no memory can be shared over tcp: %s", error)
            return None
        return self._lent.offer

    def accept(self, offer: Memory) -> bool:
        """Local. Find the other side's shelf; whether that is possible."""
        memory = borrow(offer) if offer.pid else None
        self._borrowed = None if memory is None else Shelf(memory)
        return memory is not None

    def settle(self, said: Hello) -> None:
        """Local. Use the own shelf, or not, as the other side says that it has found it."""
        lent = self._lent
        if lent is None or lent.offer.token != said.offered:  # an answer to an earlier offer
            return
        self._lent = None
        lent.close()
        if said.borrowed:
            self.put = Shelf(lent.memory).put

    def take(self, place: int, sizes: Sequence[int]) -> list[Array]:
        """Local. What lies on the other side's shelf; see :meth:`Shelf.take`."""
        if self._borrowed is None:
            raise BadFrameError("its buffers are said to lie in shared memory, and there is none")
        return self._borrowed.take(place, sizes)

    def close(self) -> None:
        """Local. Share nothing any more; arrays that lie on the other side's shelf stay there."""
        self.put = self._lent = self._borrowed = None
