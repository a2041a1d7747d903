"""Elements in the global order, wherever they come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dataservice.read.order import Order, Plan
from dataservice.read.stream import BUFFER_BYTES, BUFFER_ELEMENTS, Frame, Stream
from dataservice.wire import unpack
from mpidist.errors import FailedPreconditionError


class _Shelf:
    """Frames of one part, in the order of their indices."""

    def __init__(self, fetched: int) -> None:
        self.fetched = fetched
        self.nbytes = 0
        self.count = 0
        self._frames: deque[Frame] = deque()
        self._ready: deque[Any] = deque()
        self._index = 0
        self._period = 1

    def put(self, frame: Frame) -> None:
        """Add a frame."""
        self._frames.append(frame)
        self.nbytes += frame.nbytes
        self.count += frame.count

    def has(self, index: int) -> bool:
        """Whether an element is there; forgets those before it."""
        while True:
            while self._ready and self._index < index:
                self._pop()
            if self._ready or not self._frames:
                return bool(self._ready) and self._index == index
            self._open()

    def take(self) -> Any:
        """The first element."""
        element = self._ready[0]
        self._pop()
        return element

    @property
    def at_end_of_frame(self) -> bool:
        """Whether the frame that was in use is used up."""
        return not self._ready

    def cut(self, stop: int) -> None:
        """Forget what is not before an index: somebody else gets it."""
        frames, self._frames = self._frames, deque()
        while self._ready and self._index + (len(self._ready) - 1) * self._period >= stop:
            self._ready.pop()
            self.count -= 1
        for frame in frames:
            keep = len(
                range(
                    frame.first, min(stop, frame.first + frame.count * frame.period), frame.period
                )
            )
            self.nbytes -= frame.nbytes
            self.count -= frame.count
            if keep == frame.count:
                self.put(frame)
            elif keep:
                self.put(
                    Frame(frame.parcel, keep, frame.nbytes, frame.part, frame.first, frame.period)
                )
        self.fetched = min(self.fetched, stop)

    def _open(self) -> None:
        frame = self._frames.popleft()
        self.nbytes -= frame.nbytes
        elements = unpack(frame.parcel.pickle, frame.parcel.buffers)
        self._ready = deque(elements[: frame.count])
        self._index, self._period = frame.first, frame.period

    def _pop(self) -> None:
        self._ready.popleft()
        self._index += self._period
        self.count -= 1


class OrderedStream(Stream):
    """Elements in the order of a walk; frames of each part come in their own order.

    Args:
        user: As for :class:`Stream`.
        order: The walk.
        width: Elements of a part that make one of the walk; more than 1 under coordinated reads.
        lane: Which of them is this consumer's.
    """

    def __init__(self, user: str, order: Order, width: int = 1, lane: int = 0) -> None:
        super().__init__(user)
        self._order = order
        self._width = width
        self._lane = lane
        self._shelves = [_Shelf(order.mark(part) * width) for part in range(order.parts)]
        self._told = [0] * order.parts

    def put(self, frame: Frame) -> None:
        """Local. See :class:`Stream`."""
        with self._changed:
            if not self.closed:
                self._shelves[frame.part].put(frame)
                self._changed.notify_all()

    def has_room(self, part: int) -> bool:
        """Local. See :class:`Stream`."""
        shelf = self._shelves[part]
        parts = len(self._shelves)
        few = shelf.count < BUFFER_ELEMENTS // parts
        return shelf.count == 0 or (few and shelf.nbytes < BUFFER_BYTES // parts)

    def plan(self, part: int) -> Plan:
        """Local. See :class:`Stream`."""
        with self._changed:
            fetched = self._shelves[part].fetched
            if self._width > 1:
                return Plan(fetched, self._width, self._lane)
            return self._order.plan(part, fetched)

    def note(self, part: int, stop: int, end: bool) -> bool:
        """Local. See :class:`Stream`.

        Raises:
            FailedPreconditionError: An end, where every consumer must get as many elements.
        """
        if end and self._width > 1:
            raise FailedPreconditionError(
                f"coordinated reads (num_consumers) need an infinite dataset, but part {part} "
                f"of this one ended after {stop} elements: call repeat() before distribute()"
            )
        with self._changed:
            shelf = self._shelves[part]
            shelf.fetched = max(shelf.fetched, stop)
            known = (stop - self._lane + self._width - 1) // self._width
            news = self._order.note(part, known, end)
            if news and self._order.consumers > 1:
                for other in self._shelves:
                    other.cut(stop)
            self._changed.notify_all()
            return news and self._order.consumers > 1

    def take_used(self) -> list[tuple[int, int, int]]:
        """Local. See :class:`Stream`."""
        used = []
        for part, mark in self.marks().items():
            if mark > self._told[part]:
                used.append((part, self._told[part], mark))
                self._told[part] = mark
        return used

    def marks(self) -> dict[int, int]:
        """Local. See :class:`Stream`."""
        with self._changed:
            return {part: self._mark(part) for part in range(self._order.parts)}

    def _mark(self, part: int) -> int:
        mark, end = self._order.mark(part), self._order.end(part)
        return (mark if end < 0 else min(mark, end)) * self._width

    @property
    def held(self) -> int:
        """Local. See :class:`Stream`."""
        return sum(shelf.count for shelf in self._shelves)

    @property
    def needed(self) -> int | None:
        """Local. See :class:`Stream`."""
        with self._changed:
            return None if self._is_here() else self._order.part

    @property
    def lacks_elements(self) -> bool:
        """Local. See :class:`Stream`; another consumer of the same index has had them."""
        with self._changed:
            due = self._order.missing() is None and not self._order.over
            return due and not self.closed and not self._is_here()

    def state(self) -> Any:
        """Local. See :meth:`Order.state`, in indices of elements."""
        with self._changed:
            state = self._order.state()
        for part in state.parts:
            part.start *= self._width
        return state

    def next(self, alive: Callable[[], bool]) -> Any:
        """Local. See :class:`Stream`."""
        with self._changed:
            here = self._is_here()
        if not here:
            # This one may be requested even where nothing else may.
            self.on_room()
        with self._changed:
            if not here or (self.over and not self._is_here()):
                self._wait(self._is_here, alive)
            if self._order.over:
                raise StopIteration
            shelf = self._shelves[self._order.part]
            element = shelf.take()
            self._order.step()
        if shelf.at_end_of_frame:
            self.on_room()
        return element

    def _discard(self) -> None:
        for shelf in self._shelves:
            shelf.cut(0)

    def _is_here(self) -> bool:
        """Whether the next element is here, or it is known that there is none."""
        if self._order.missing() is not None:
            return False
        if self._order.over:
            return True
        index = self._order.index * self._width + self._lane
        return self._shelves[self._order.part].has(index)
