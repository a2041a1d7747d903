"""What lies between the thread that fetches elements and the one that uses them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.ranges import RangeSet
from dataservice.read.order import Plan
from dataservice.stall import Stall
from dataservice.wire import Parcel, unpack

# Fetched and unused elements may take this much memory.
BUFFER_BYTES = 64 << 20
# And be so many: what workers make ahead of need, they make in place of what is needed.
BUFFER_ELEMENTS = 1 << 17
# How often a waiting user looks whether the fetching thread is alive.
_ALIVE_PERIOD_S = 1.0


@dataclass(frozen=True)
class Frame:
    """Elements of one reply.

    Attributes:
        parcel: The elements.
        count: How many.
        nbytes: The bytes they take.
        part: The part that they are of.
        first: Index of the first one there.
        period: Distance of their indices.
    """

    parcel: Parcel
    count: int
    nbytes: int
    part: int = 0
    first: int = 0
    period: int = 1


class Stream(ABC):
    """Elements for one user, then an end or an error; bounded in bytes.

    Args:
        user: Who takes the elements, in words, for the report of a long wait.

    Attributes:
        closed: Whether nobody wants more.
        began: When it was made, on the clock of ``time.monotonic()``.
        waited_s: How long the user has waited for elements, in seconds.
        on_room: Called when there is room for more.
        waits_for: Gives in words what the next element depends on; called on the user's thread.
        trusted_until: When what is here may have become another consumer's, unless :meth:`trust` is
            called before.
    """

    def __init__(self, user: str) -> None:
        self._user = user
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self.closed = False
        self.began = time.monotonic()
        self.waited_s = 0.0
        self.on_room: Callable[[], None] = lambda: None
        self.waits_for: Callable[[], str] = lambda: "elements"
        self.trusted_until = float("inf")
        self._waits = False

    # For the fetching thread

    @abstractmethod
    def put(self, frame: Frame) -> None:
        """Local. Add a frame."""

    @abstractmethod
    def has_room(self, part: int) -> bool:
        """Local. Whether more of a part may be fetched."""

    @abstractmethod
    def plan(self, part: int) -> Plan:
        """Local. What is to be fetched of a part next, by a worker that knows nothing of it."""

    def note(self, part: int, stop: int, end: bool) -> bool:
        """Local. Elements of a part before ``stop`` have come or are not wanted.

        Returns:
            Whether other elements are wanted than before.
        """
        return False

    @abstractmethod
    def take_used(self) -> list[tuple[int, int, int]]:
        """Local. Part, start and stop of what has been used since the last call."""

    @abstractmethod
    def marks(self) -> dict[int, int]:
        """Local. For every part: elements before it have been used."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Local. Elements that have been fetched and not used up."""

    @property
    def needed(self) -> int | None:
        """Local. The part without which nothing can be used; None if any will do."""
        return None

    @property
    def lacks_elements(self) -> bool:
        """Local. Whether elements should come that are not there, where nothing comes any more."""
        return False

    def finish(self, error: BaseException | None = None) -> None:
        """Local. Nothing comes after the frames, or this error does; the first call counts."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
            self._changed.notify_all()

    def trust(self, until: float) -> None:
        """Local. What is here is this consumer's, until a time on the monotonic clock."""
        self.trusted_until = until
        if self._waits:
            with self._changed:
                self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Local. This error comes next: what is here is not this consumer's any more."""
        with self._changed:
            self._discard()
            self.finish(error)

    @property
    def over(self) -> bool:
        """Local. Whether :meth:`finish` was called: nothing new comes."""
        return self._over

    @property
    def error(self) -> BaseException | None:
        """Local. What ended the stream, if that was an error."""
        return self._error

    def check(self) -> None:
        """Local. Raise what ended the stream, if that was an error."""
        if self._error is not None:
            raise self._error

    # For the user's thread

    @abstractmethod
    def next(self, alive: Callable[[], bool]) -> Any:
        """Local. The next element.

        Args:
            alive: Whether the fetching thread runs.

        Raises:
            StopIteration: There are no more.
            Exception: What ended the stream.
        """

    def close(self) -> None:
        """Local. Nobody wants more; idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self.on_room()

    # For subclasses

    @abstractmethod
    def _discard(self) -> None:
        """Forget what is here; called with the lock held."""

    def _wait_for_trust(self, alive: Callable[[], bool]) -> None:
        """Wait until the fetching thread has found out whether others have got what is here."""
        with self._changed:
            if not self._comes(self._is_trusted, alive):
                self._discard()  # it has come to its end without finding out

    def _is_trusted(self) -> bool:
        return time.monotonic() <= self.trusted_until

    def _wait(self, here: Callable[[], bool], alive: Callable[[], bool]) -> None:
        """Wait, with the lock held, until there is something, an end or an error; then raise it."""
        began = time.monotonic()
        try:
            comes = self._comes(here, alive)
        finally:
            self.waited_s += time.monotonic() - began
        if self.closed:
            raise StopIteration
        if not comes:
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _comes(self, here: Callable[[], bool], alive: Callable[[], bool]) -> bool:
        """Wait, with the lock held, until something holds, which may pass; or it never will."""
        stall = Stall(self._user, lambda: self.waits_for())
        self._waits = True
        try:
            while not here():
                if self._over or self.closed:
                    return False
                limit = min(_ALIVE_PERIOD_S, stall.due_s)
                if not self._changed.wait(limit) and not alive() and not self._over:
                    raise RuntimeError("the thread that fetches elements has died")
                stall.look()
            return True
        finally:
            self._waits = False


class Queue(Stream):
    """Frames in the order in which they come."""

    def __init__(self, user: str, begin: dict[int, int]) -> None:
        super().__init__(user)
        self._frames: deque[Frame] = deque()
        self._nbytes = 0
        self._held = 0
        self._ready: deque[Any] = deque()
        self._current: Frame | None = None
        self._told = 0  # elements of the current frame that take_used() has given
        self._used: list[tuple[int, int, int]] = []
        self._marks = dict(begin)
        self._fetched = dict(begin)

    def put(self, frame: Frame) -> None:
        """Local. See :class:`Stream`."""
        with self._changed:
            if not self.closed:
                self._frames.append(frame)
                self._nbytes += frame.nbytes
                self._held += frame.count
                self._fetched[frame.part] = frame.first + frame.count
                self._changed.notify_all()

    def has_room(self, part: int) -> bool:
        """Local. See :class:`Stream`."""
        return self._nbytes < BUFFER_BYTES and self._held < BUFFER_ELEMENTS

    def plan(self, part: int) -> Plan:
        """Local. See :class:`Stream`."""
        return Plan(self._fetched.get(part, 0), 1, 0)

    def take_used(self) -> list[tuple[int, int, int]]:
        """Local. See :class:`Stream`."""
        with self._changed:
            used, self._used = self._used, []
            if self._current is not None:
                self._tell(used, self._current, self._current.count - len(self._ready))
            return used

    def marks(self) -> dict[int, int]:
        """Local. See :class:`Stream`."""
        with self._changed:
            marks = dict(self._marks)
            frame = self._current
            if frame is not None:
                marks[frame.part] = frame.first + frame.count - len(self._ready)
            return marks

    @property
    def parts(self) -> list[int]:
        """Local. The parts of which something has come."""
        return list(self._fetched)

    def in_hand(self, part: int) -> RangeSet:
        """Local. Elements of a part that have come, and are not used."""
        ranges = RangeSet()
        with self._changed:
            for frame in self._frames:
                if frame.part == part:
                    ranges.add(frame.first, frame.first + frame.count)
            frame_in_use = self._current
            if frame_in_use is not None and frame_in_use.part == part:
                stop = frame_in_use.first + frame_in_use.count
                ranges.add(stop - len(self._ready), stop)
        return ranges

    @property
    def held(self) -> int:
        """Local. See :class:`Stream`."""
        current = self._current  # which the user's thread may change
        return self._held + (0 if current is None else current.count)

    def next(self, alive: Callable[[], bool]) -> Any:
        """Local. See :class:`Stream`."""
        if time.monotonic() > self.trusted_until:
            self._wait_for_trust(alive)
        try:
            return self._ready.popleft()
        except IndexError:  # it is used up
            pass
        with self._changed:
            self._put_away()
        if not self._frames:
            # Where few elements may be held at a time, there is room for the next one only now.
            self.on_room()
        with self._changed:
            # While it waited, this process may have stood still.
            self._wait(lambda: bool(self._frames) and self._is_trusted(), alive)
            frame = self._frames.popleft()
            self._nbytes -= frame.nbytes
            self._held -= frame.count
            self._ready = deque(unpack(frame.parcel.pickle, frame.parcel.buffers))
            self._current, self._told = frame, 0
            element = self._ready.popleft()
        self.on_room()
        return element

    def close(self) -> None:
        """Local. See :class:`Stream`."""
        with self._changed:
            self._frames.clear()
        super().close()

    def _discard(self) -> None:
        if self._current is not None:
            self._tell(self._used, self._current, self._current.count - len(self._ready))
        self._current = None
        self._frames.clear()
        self._ready.clear()
        self._nbytes = self._held = 0

    def _put_away(self) -> None:
        """The current frame is used up."""
        frame = self._current
        if frame is not None:
            self._tell(self._used, frame, frame.count)
            self._marks[frame.part] = frame.first + frame.count
            self._current = None

    def _tell(self, used: list[tuple[int, int, int]], frame: Frame, count: int) -> None:
        if count > self._told:
            used.append((frame.part, frame.first + self._told, frame.first + count))
            self._told = count
