"""The buffers of a consumer: the fetcher's thread fills them, the user's thread empties them.

There are two buffers. Each returns the fetched elements, then the end or an error.
:class:`FirstComeBuffer` keeps the order of arrival. :class:`OrderedBuffer` has the global order of
:mod:`dataservice.read.order`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dataservice.calls import Awaited, SlowWait, own_metrics
from dataservice.consumption import COORDINATED, DETERMINISTIC
from dataservice.options import JobOptions
from dataservice.payload import Parcel, unpack
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.read.order import Order, Plan
from mpidist.errors import FailedPreconditionError

# Limits of the elements that are fetched and not consumed. Without the second limit, workers would
# compute small elements far ahead of their use, in place of the elements that are needed now.
BUFFER_BYTES = 64 << 20
BUFFER_ELEMENTS = 1 << 17
# Period at which a waiting user checks that the fetcher's thread is alive.
_ALIVE_PERIOD_S = 1.0


@dataclass(frozen=True)
class Frame:
    """The elements of one reply.

    Attributes:
        parcel: The pickled elements.
        count: Number of elements.
        nbytes: Size of the elements, in bytes.
        part: Number of their part.
        first: Index of the first element in the part.
        stride: Distance between successive indices.
    """

    parcel: Parcel
    count: int
    nbytes: int
    part: int = 0
    first: int = 0
    stride: int = 1

    def unpack(self) -> deque[Any]:
        """Return the elements."""
        elements = unpack(self.parcel.pickle, self.parcel.buffers)
        return deque(elements[: self.count])


class ElementBuffer(ABC):
    """Fetched elements of one consumer, then an end or an error.

    Args:
        user: Name of the consumer, for the report of a long wait.

    Attributes:
        closed: Whether the user wants no more elements.
        over: Whether :meth:`finish` was called.
        error: The error at the end; None if there is none.
        began: Time at which the buffer was made, on the clock of ``time.monotonic()``.
        waited_s: Seconds for which the user has waited for elements.
        on_room: Called when there is room for more elements.
        waits_for: Describes the cause of a long wait. Called on the user's thread.
        awaited: Describes the wait in a few words, with its tasks. Called on the user's thread.
        is_fetched: Returns whether the fetcher's thread runs. Called on the user's thread.
        leased_until: Monotonic time until which the buffered elements belong to this consumer.
            After that time another consumer may have got them.
    """

    def __init__(self, user: str) -> None:
        self._user = user
        self._metrics = own_metrics()
        self._changed = threading.Condition()
        self._user_waits = False
        self.closed = False
        self.over = False
        self.error: BaseException | None = None
        self.began = time.monotonic()
        self.waited_s = 0.0
        self.on_room: Callable[[], None] = lambda: None
        self.waits_for: Callable[[], str] = lambda: "elements"
        self.awaited: Callable[[], Awaited] = lambda: ("elements", ())
        self.is_fetched: Callable[[], bool] = lambda: True
        self.leased_until = float("inf")

    # For the fetcher's thread

    @abstractmethod
    def put(self, frame: Frame) -> None:
        """Add a frame, unless the buffer is closed."""

    @abstractmethod
    def has_room(self, part: int) -> bool:
        """Return whether more elements of a part may be fetched."""

    @abstractmethod
    def plan(self, part: int) -> Plan:
        """Return the plan for the next requests of a part: the indices to be fetched."""

    def note_extent(self, part: int, stop: int, end: bool) -> bool:
        """Record that a part has elements up to an index.

        Args:
            part: Number of the part.
            stop: Elements before this index exist. They have come, or are not needed here.
            end: Whether the part ends there.

        Returns:
            True if the plans of all parts have changed.
        """
        return False

    @abstractmethod
    def take_consumed(self) -> list[tuple[int, int, int]]:
        """Return the ranges consumed since the last call, each as part, start and stop."""

    @abstractmethod
    def watermark(self, part: int) -> int:
        """Return the index before which all elements of a part have been consumed."""

    @abstractmethod
    def state(self) -> pb.State:
        """Return the position of the user in every part."""

    def unconsumed(self) -> dict[int, list[int]]:
        """Return the bounds of the buffered, unconsumed elements of each part.

        Empty under the global order, because workers retain the elements until they are consumed.
        """
        return {}

    @property
    @abstractmethod
    def buffered(self) -> int:
        """The number of buffered elements. A partly consumed frame counts in full."""

    @property
    def needed_part(self) -> int | None:
        """The part of the next element, if the buffer waits for that part; None otherwise."""
        return None

    @property
    def lacks_elements(self) -> bool:
        """True if an element of this consumer is missing. Read at the end of the iteration."""
        return False

    def finish(self, error: BaseException | None = None) -> None:
        """End the buffer after its elements, with the error if given. Ignore later calls."""
        with self._changed:
            if not self.over:
                self.over, self.error = True, error
            self._changed.notify_all()

    def discard(self, error: BaseException) -> None:
        """Drop the elements, because other consumers may have got them. End with an error."""
        with self._changed:
            self._drop_elements()
            self.finish(error)

    def extend_lease(self, until: float) -> None:
        """Extend the lease on the buffered elements until a monotonic time."""
        self.leased_until = until
        if self._user_waits:
            with self._changed:
                self._changed.notify_all()

    # For the user's thread

    @abstractmethod
    def next(self) -> Any:
        """Return the next element. Wait for the element if it has not come.

        Raises:
            StopIteration: There are no more elements.
            Exception: The error at the end.
        """

    def close(self) -> None:
        """Refuse more elements. Idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self.on_room()

    # For subclasses

    @abstractmethod
    def _drop_elements(self) -> None:
        """Drop the buffered elements. Called with the lock held."""

    def _wait(self, is_here: Callable[[], bool]) -> None:
        """Wait, with the lock held, for a condition. If the buffer ends, raise as :meth:`next`."""
        began = time.monotonic()
        try:
            found = self._wait_until(is_here)
        finally:
            waited_s = time.monotonic() - began
            self.waited_s += waited_s
            self._metrics.values["data_waited_s"] += waited_s
        if self.closed:
            raise StopIteration
        if not found:
            raise StopIteration if self.error is None else self.error

    def _wait_until(self, holds: Callable[[], bool]) -> bool:
        """Wait, with the lock held, for a condition. Return False if the buffer ends first."""
        began, waits = time.monotonic(), 0
        slow_wait: SlowWait | None = None
        limit_s = _ALIVE_PERIOD_S
        self._user_waits = True
        try:
            while not holds():
                if self.over or self.closed:
                    return False
                if waits:  # most waits end at the first notification
                    if slow_wait is None:
                        slow_wait = SlowWait(self._user, self.waits_for, self.awaited, began)
                    slow_wait.check()
                    limit_s = min(_ALIVE_PERIOD_S, slow_wait.due_s)
                waits += 1
                if not self._changed.wait(limit_s) and not self.is_fetched() and not self.over:
                    raise RuntimeError("the thread that fetches elements has died")
            return True
        finally:
            self._user_waits = False
            if slow_wait is not None:
                slow_wait.close()


class FirstComeBuffer(ElementBuffer):
    """Elements in the order of their arrival.

    An element counts as consumed when :meth:`next` has returned it. ``next`` takes the elements of
    the current frame without a lock, so the number consumed follows from the number left.

    Args:
        user: As for :class:`ElementBuffer`.
        begin: For some parts, the index at which the iteration begins there.
    """

    def __init__(self, user: str, begin: dict[int, int]) -> None:
        super().__init__(user)
        self._frames: deque[Frame] = deque()
        self._nbytes = 0  # size of the frames, in bytes
        self._count = 0  # number of elements in the frames
        self._current: Frame | None = None
        self._left: deque[Any] = deque()  # elements of the current frame
        self._noted = 0  # elements of the current frame before this index have been recorded
        self._consumed: list[tuple[int, int, int]] = []
        self._watermarks = dict(begin)
        self._fetched = dict(begin)

    def put(self, frame: Frame) -> None:
        with self._changed:
            if not self.closed:
                self._frames.append(frame)
                self._nbytes += frame.nbytes
                self._count += frame.count
                self._fetched[frame.part] = frame.first + frame.count
                self._changed.notify_all()

    def has_room(self, part: int) -> bool:
        return self._nbytes < BUFFER_BYTES and self._count < BUFFER_ELEMENTS

    def plan(self, part: int) -> Plan:
        return Plan(self._fetched.get(part, 0), 1, 0)

    def take_consumed(self) -> list[tuple[int, int, int]]:
        with self._changed:
            self._note_consumed()
            consumed, self._consumed = self._consumed, []
            return consumed

    def watermark(self, part: int) -> int:
        with self._changed:
            self._note_consumed()
            return self._watermarks.get(part, 0)

    def state(self) -> pb.State:
        with self._changed:
            self._note_consumed()
            marks = sorted(self._watermarks.items())
        return pb.State(
            parts=[pb.PartState(part=part, start=mark, total=-1) for part, mark in marks]
        )

    def unconsumed(self) -> dict[int, list[int]]:
        ranges = {part: RangeSet() for part in list(self._fetched)}
        with self._changed:
            for frame in self._frames:
                ranges[frame.part].add(frame.first, frame.first + frame.count)
            current = self._current
            if current is not None:
                stop = current.first + current.count
                ranges[current.part].add(stop - len(self._left), stop)
        return {part: each.bounds for part, each in ranges.items()}

    @property
    def buffered(self) -> int:
        current = self._current  # read once: the user's thread may change it
        return self._count + (0 if current is None else current.count)

    def next(self) -> Any:
        if self.closed:
            raise StopIteration
        if time.monotonic() > self.leased_until:
            self._wait_for_lease()
        try:
            return self._left.popleft()
        except IndexError:  # the current frame is consumed
            pass
        with self._changed:
            self._note_consumed()
            self._current = None
        if not self._frames:
            # If few elements may be buffered, there is room for the next element only now.
            self.on_room()
        with self._changed:
            # The process may have been suspended during the wait for longer than its lease.
            self._wait(lambda: bool(self._frames) and self._has_lease())
            frame = self._frames.popleft()
            self._nbytes -= frame.nbytes
            self._count -= frame.count
            self._left = frame.unpack()
            self._current, self._noted = frame, frame.first
            element = self._left.popleft()
        self.on_room()
        return element

    def close(self) -> None:
        with self._changed:
            self._frames.clear()
        super().close()

    def _drop_elements(self) -> None:
        self._note_consumed()
        self._current = None
        self._frames.clear()
        self._left.clear()
        self._nbytes = self._count = 0

    def _has_lease(self) -> bool:
        return time.monotonic() <= self.leased_until

    def _wait_for_lease(self) -> None:
        """Wait until the fetcher has extended the lease, or dropped the elements."""
        with self._changed:
            if not self._wait_until(self._has_lease):
                self._drop_elements()  # the fetcher has ended without an extension

    def _note_consumed(self) -> None:
        """Record the elements of the current frame that have been consumed since the last call."""
        frame = self._current
        if frame is None:
            return
        start, stop = self._noted, frame.first + frame.count - len(self._left)
        if stop > start:
            self._consumed.append((frame.part, start, stop))
            self._watermarks[frame.part] = self._noted = stop


class OrderedBuffer(ElementBuffer):
    """Elements in the global order. The frames of a part come in the order of their indices.

    Args:
        user: As for :class:`ElementBuffer`.
        order: The global order: the next part, and the position in each part.
        group_size: The number of consecutive elements of a part in one step of the order: the
            number of consumers under coordinated reads, otherwise 1.
        slot: Index of this consumer's element in the group.
    """

    def __init__(self, user: str, order: Order, group_size: int = 1, slot: int = 0) -> None:
        super().__init__(user)
        self._order = order
        self._group_size = group_size
        self._slot = slot
        self._parts = [_PartFrames(order.mark(part) * group_size) for part in range(order.parts)]
        self._reported = [0] * order.parts

    def put(self, frame: Frame) -> None:
        with self._changed:
            if not self.closed:
                self._parts[frame.part].put(frame)
                self._changed.notify_all()

    def has_room(self, part: int) -> bool:
        frames = self._parts[part]
        share = len(self._parts)
        few = frames.count < BUFFER_ELEMENTS // share
        return frames.count == 0 or (few and frames.nbytes < BUFFER_BYTES // share)

    def plan(self, part: int) -> Plan:
        with self._changed:
            fetched = self._parts[part].fetched
            if self._group_size > 1:
                return Plan(fetched, self._group_size, self._slot)
            return self._order.plan(part, fetched)

    def note_extent(self, part: int, stop: int, end: bool) -> bool:
        """Record the extent of a part; see :class:`ElementBuffer`.

        Raises:
            FailedPreconditionError: A part ends, but every consumer must get as many elements.
        """
        if end and self._group_size > 1:
            raise FailedPreconditionError(
                f"coordinated reads (num_consumers) need an infinite dataset, but part {part} "
                f"of this one ended after {stop} elements: call repeat() before distribute()"
            )
        with self._changed:
            frames = self._parts[part]
            frames.fetched = max(frames.fetched, stop)
            # The number of groups in which the element of this consumer's slot exists.
            known = (stop - self._slot + self._group_size - 1) // self._group_size
            ended = self._order.note(part, known, end)
            changed = ended and self._order.consumers > 1
            if changed:
                # From this round on, the elements of the remaining parts go to other consumers.
                for other in self._parts:
                    other.cut(stop)
            self._changed.notify_all()
            return changed

    def take_consumed(self) -> list[tuple[int, int, int]]:
        consumed = []
        for part, reported in enumerate(self._reported):
            mark = self.watermark(part)
            if mark > reported:
                consumed.append((part, reported, mark))
                self._reported[part] = mark
        return consumed

    def watermark(self, part: int) -> int:
        with self._changed:
            mark, end = self._order.mark(part), self._order.end(part)
        return (mark if end < 0 else min(mark, end)) * self._group_size

    def state(self) -> pb.State:
        with self._changed:
            state = self._order.state()
        for part in state.parts:
            part.start *= self._group_size
        return state

    @property
    def buffered(self) -> int:
        return sum(frames.count for frames in self._parts)

    @property
    def needed_part(self) -> int | None:
        with self._changed:
            return None if self._is_here() else self._order.part

    @property
    def lacks_elements(self) -> bool:
        # True if another consumer with the same index has got the elements.
        with self._changed:
            due = self._order.missing() is None and not self._order.over
            return due and not self.closed and not self._is_here()

    def next(self) -> Any:
        with self._changed:
            if self.closed:
                raise StopIteration
            here = self._is_here()
        if not here:
            # The needed element may be requested even if the limit of requests is reached.
            self.on_room()
        with self._changed:
            if not here or (self.over and not self._is_here()):
                self._wait(self._is_here)
            if self._order.over:
                raise StopIteration
            frames = self._parts[self._order.part]
            element = frames.pop()
            self._order.step()
        if frames.at_end_of_frame:
            self.on_room()
        return element

    def _drop_elements(self) -> None:
        for frames in self._parts:
            frames.cut(0)

    def _is_here(self) -> bool:
        """Return whether the next element has come, or the order is over."""
        if self._order.missing() is not None:
            return False
        if self._order.over:
            return True
        index = self._order.index * self._group_size + self._slot
        return self._parts[self._order.part].has(index)


class _PartFrames:
    """The frames of one part, in the order of their indices.

    Attributes:
        fetched: Elements before this index have come, or are not needed here.
        nbytes: Size of the frames that have not been unpacked, in bytes.
        count: Number of elements.
    """

    def __init__(self, fetched: int) -> None:
        self.fetched = fetched
        self.nbytes = 0
        self.count = 0
        self._frames: deque[Frame] = deque()
        self._left: deque[Any] = deque()  # elements of the frame that has been unpacked
        self._index = 0  # index of the first element in _left
        self._stride = 1

    def put(self, frame: Frame) -> None:
        """Add a frame."""
        self._frames.append(frame)
        self.nbytes += frame.nbytes
        self.count += frame.count

    def has(self, index: int) -> bool:
        """Return whether an element has come. Drop the elements before that element."""
        while True:
            while self._left and self._index < index:
                self.pop()
            if self._left or not self._frames:
                return bool(self._left) and self._index == index
            frame = self._frames.popleft()
            self.nbytes -= frame.nbytes
            self._left = frame.unpack()
            self._index, self._stride = frame.first, frame.stride

    def pop(self) -> Any:
        """Remove and return the first element of the unpacked frame."""
        self._index += self._stride
        self.count -= 1
        return self._left.popleft()

    @property
    def at_end_of_frame(self) -> bool:
        """True if all elements of the unpacked frame have been removed."""
        return not self._left

    def cut(self, stop: int) -> None:
        """Drop the elements from an index on. They may belong to another consumer."""
        while self._left and self._index + (len(self._left) - 1) * self._stride >= stop:
            self._left.pop()
            self.count -= 1
        frames, self._frames = self._frames, deque()
        for frame in frames:
            end = min(stop, frame.first + frame.count * frame.stride)
            kept = len(range(frame.first, end, frame.stride))
            self.nbytes -= frame.nbytes
            self.count -= frame.count
            if kept:
                self.put(replace(frame, count=kept))
        self.fetched = min(self.fetched, stop)


def buffer_for(user: str, terms: JobOptions, begin: pb.State | None) -> ElementBuffer:
    """Return an empty buffer for the mode of consumption.

    Args:
        user: Name of the consumer, for the report of a long wait.
        terms: How the job is read.
        begin: The state at which the iteration begins; None for the beginning of the epoch.
    """
    job, index = terms.job, terms.own_index
    if terms.mode is DETERMINISTIC:
        return OrderedBuffer(user, Order(job.num_shards, job.num_consumers, index, begin))
    if terms.mode is COORDINATED:
        groups = None if begin is None else _in_groups(begin, job.num_consumers)
        return OrderedBuffer(user, Order(job.num_shards, 1, 0, groups), job.num_consumers, index)
    parts = () if begin is None else begin.parts
    return FirstComeBuffer(user, {part.part: part.start for part in parts})


def _in_groups(begin: pb.State, group_size: int) -> pb.State:
    """Return a state of coordinated reads with indices of groups in place of elements."""
    state = pb.State()
    state.CopyFrom(begin)
    for part in state.parts:
        part.start //= group_size
    return state
