"""What a pass over a dataset depends on besides its description."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dataservice.dataset.node import Stages

Passes = tuple[int, ...]


class Splits(Protocol):
    """The source indices that this process shall evaluate in one pass, in numbered parts."""

    def split(self, number: int) -> range:
        """Local. A part of them, the same whenever it is asked for; empty if there is none."""

    def mark(self, number: int) -> None:
        """Local. The state that is being taken needs no part before this one."""


Feed = Callable[[Passes], Splits]


def _received_some(passes: Passes) -> bool:
    return True


class Closable(Protocol):
    """Something that waits, and that any thread can end."""

    def close(self) -> None:
        """Local. End it; idempotent."""


class Scope:
    """What may wait inside a pass that one thread makes and another one can give up.

    Attributes:
        closed: Whether the pass has been given up; what waits in it then sees its end.
    """

    def __init__(self) -> None:
        self.closed = False
        # Reentrant, because garbage may be collected anywhere, and close what it holds.
        self._lock = threading.RLock()
        self._waiting: weakref.WeakSet[Closable] = weakref.WeakSet()

    def add(self, waiting: Closable) -> None:
        """Local. Close something with the scope, at once if that is closed."""
        with self._lock:
            self._waiting.add(waiting)
        if self.closed:
            waiting.close()

    def close(self) -> None:
        """Local. Close everything; idempotent."""
        self.closed = True
        with self._lock:
            waiting = list(self._waiting)
        for each in waiting:
            each.close()


@dataclass(frozen=True)
class Context:
    """What one pass depends on besides the description.

    Attributes:
        seed: Randomness of the nodes that have no seed of their own; the same for all processes
            that evaluate parts of the pass.
        passes: The numbers of the passes around this one, outermost first: of the iteration, then
            one for each ``repeat`` that is open.
        feed: Gives the source indices that this process shall evaluate in the pass of the given
            number; None evaluates all of them.
        scope: Takes what waits for others in the pass; None if nobody else can give it up.
        stages: Measures the nodes; None if nobody wants to know.
        part: Tells the randomness of this process from that of others, where orders need not agree.
        chosen: Whether a node above chooses the indices that the feed gives.
        numbered: Whether elements go by their numbers, since another process may have to go on
            with the pass: their order must not be that in which they happen to be ready.
        received: Tells whether this process was given any source index in a pass. Another process
            may have been given all of them.
    """

    seed: tuple[int, ...]
    passes: Passes = (0,)
    feed: Feed | None = None
    scope: Scope | None = None
    stages: Stages | None = None
    part: tuple[int, ...] = ()
    chosen: bool = False
    numbered: bool = False
    received: Callable[[Passes], bool] = _received_some

    def enter(self, number: int) -> Context:
        """Local. The context of a pass inside this one."""
        return dataclasses.replace(self, passes=(*self.passes, number))

    def branch(self, number: int) -> Context:
        """Local. The context of one of several passes beside each other, with its randomness."""
        return dataclasses.replace(self, seed=(*self.seed, number))
