"""What lies between the thread that fetches elements and the one that uses them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.stall import Stall
from dataservice.wire import Parcel, unpack

# Fetched and unused elements may take this much memory.
_BUFFER_BYTES = 64 << 20
# How often a waiting user looks whether the fetching thread is alive.
_ALIVE_PERIOD_S = 1.0


@dataclass(frozen=True)
class Frame:
    """Attributes: elements of one reply, how many, and the bytes they take."""

    parcel: Parcel
    count: int
    nbytes: int


class Stream:
    """Frames in order, then an end or an error; bounded in bytes.

    Args:
        user: Who takes the elements, in words, for the report of a long wait.

    Attributes:
        on_room: Called when a frame has been used.
        waits_for: Gives in words what the next frame depends on; called on the user's thread.
    """

    def __init__(self, user: str) -> None:
        self._user = user
        self._changed = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._nbytes = 0
        self._in_use = 0
        self._held = 0
        self._over = False
        self._error: BaseException | None = None
        self.closed = False
        self.on_room: Callable[[], None] = lambda: None
        self.waits_for: Callable[[], str] = lambda: "elements"

    # For the fetching thread

    def put(self, frame: Frame) -> None:
        """Local. Add a frame."""
        with self._changed:
            if not self.closed:
                self._frames.append(frame)
                self._nbytes += frame.nbytes
                self._held += frame.count
                self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """Local. Nothing comes after the frames, or this error does; the first call counts."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        """Local. Whether enough has been fetched."""
        return self._nbytes >= _BUFFER_BYTES

    @property
    def held(self) -> int:
        """Local. Elements that have been fetched and not used up."""
        return self._held

    # For the user's thread

    def take(self, alive: Callable[[], bool]) -> deque[Any]:
        """Local. The elements of the next frame; the last frame counts as used up.

        Args:
            alive: Whether the fetching thread runs.

        Raises:
            StopIteration: There are no more.
            Exception: What ended the stream.
        """
        with self._changed:
            self._held -= self._in_use
            self._in_use = 0
            stall = Stall(self._user, lambda: self.waits_for())
            while not self._frames and not self._over and not self.closed:
                limit = min(_ALIVE_PERIOD_S, stall.due_s)
                if not self._changed.wait(limit) and not alive() and not self._over:
                    raise RuntimeError("the thread that fetches elements has died")
                stall.look()
            if self.closed:
                raise StopIteration
            if not self._frames:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            frame = self._frames.popleft()
            self._nbytes -= frame.nbytes
            self._in_use = frame.count
        self.on_room()
        return deque(unpack(frame.parcel.pickle, frame.parcel.buffers))

    def close(self) -> None:
        """Local. Nobody wants more; idempotent."""
        with self._changed:
            self.closed = True
            self._frames.clear()
            self._changed.notify_all()
        self.on_room()
