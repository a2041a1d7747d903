"""Buffers between a task and the consumers that request its elements."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from dataservice.calls import Awaited
from dataservice.consumption import CROSS_TRAINER, FIRST_COME, mode_of
from dataservice.dataset import tree
from dataservice.errors import pack_error
from dataservice.payload import Parcel, pack_elements
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from mpidist import Request
from mpidist.errors import Error, FailedPreconditionError

# A task evaluates up to so many bytes and elements ahead, and at least two elements.
AHEAD_BYTES = 64 << 20
_AHEAD_ELEMENTS = 4096
# The largest total size of the elements in a reply. A larger element comes alone.
_REPLY_BYTES = 1 << 20
# The number of elements that a task evaluates for each consumer before the first request. The limit
# grows with the number of requested elements. Without the limit, each of many parts would first
# evaluate far ahead, while consumers wait for the first elements of other parts.
_EARLY = 32


@dataclass(eq=False)
class _Pending:
    """A request that waits for an answer.

    Attributes:
        request: The request.
        body: Its message.
        periods: The number of calls of :meth:`ElementBuffer.refresh` since its arrival.
        is_void: Whether its consumer has since requested other elements. The consumer then ignores
            the answer, so the answer must contain no elements.
    """

    request: Request
    body: pb.GetElementRequest
    periods: int = 0
    is_void: bool = False


@dataclass(eq=False)
class _Arrivals:
    """Attributes: a client's next sequence number, and its requests that came too early."""

    next_sequence: int = 0
    early: dict[int, _Pending] = field(default_factory=dict)


# The elements of an answer, and its message without them.
_Answer = tuple[list[Any], pb.GetElementReply]


class ElementBuffer(ABC):
    """Elements of a task, numbered within its part, and the requests for them.

    The requests of each client are taken in the order of their sequence numbers, so that elements
    reach it in order even if the transport reorders requests.

    Args:
        where: The task and its worker in words, for errors.
        begin: The checkpoint from which the task begins.
        finished: Called when the end must be reported to the dispatcher, see :meth:`report`.
        limit_bytes: How much may be evaluated ahead, besides two elements for each consumer.

    Attributes:
        where: As given. The task adds the dataset later.
        begin: As given.
        produced: Index of the next element.
        waited_s: Time in which :meth:`put` has waited for room, in seconds.
    """

    def __init__(
        self,
        where: str,
        begin: pb.Checkpoint,
        finished: Callable[[], None],
        limit_bytes: int = AHEAD_BYTES,
    ) -> None:
        self.where = where
        self.begin = begin
        self.produced = begin.index
        self.waited_s = 0.0
        self._finished = finished
        self._limit = limit_bytes
        # Reentrant, so that properties can be read with it held.
        self._changed = threading.Condition()
        self._bytes = 0
        self._pending: deque[_Pending] = deque()
        self._arrivals: dict[int, _Arrivals] = {}
        self._ended = False
        self._failure = b""
        self._is_lossy = False  # whether to send the failure in place of the buffered elements
        self._closing_error: BaseException | None = None

    # For the task's thread

    def open(self) -> AbstractContextManager[pb.Checkpoint]:
        """Return a context manager with the checkpoint from which to begin."""
        return nullcontext(self.begin)

    def put(self, element: Any) -> bool:
        """Add an element when there is room. Return False if the buffer is closed or failed."""
        size = tree.nbytes(element)
        with self._changed:
            if not self._has_room():
                began = time.monotonic()
                self._changed.wait_for(lambda: self._has_room() or self._given_up())
                self.waited_s += time.monotonic() - began
            if self._given_up():
                return False
            self._keep(self.produced, element, size)
            self.produced += 1
        self._serve()
        return True

    def end(self) -> None:
        """Record that there are no more elements."""
        with self._changed:
            self._ended = True
        self._serve()

    def fail(self, error: BaseException) -> None:
        """Record an error. Consumers get the error after the last element."""
        data = pack_error(error, self.where)
        with self._changed:
            self._failure = self._failure or data
        self._serve()

    # For the worker

    @property
    def needed(self) -> int:
        """The index of the first element that is still needed.

        Closing or failing the buffer does not change the index. A heartbeat may still report the
        index afterwards, and another worker then continues the part at the index. So the next
        worker evaluates the undelivered elements again.
        """
        with self._changed:
            return self._first_needed()

    @property
    def holders(self) -> list[int]:
        """The ids of clients with unacknowledged elements."""
        return []

    def report(self, progress: pb.TaskProgress) -> None:
        """Fill in the number of elements, if the part has ended."""
        if self._ended:
            progress.ended, progress.total = True, self.produced

    def ask(self, request: Request, body: pb.GetElementRequest) -> None:
        """Answer a consumer's request, now or later."""
        with self._changed:
            error = self._closing_error
            if error is None:
                self._enqueue(_Pending(request, body))
        if error is not None:
            request.fail(error)
        else:
            self._serve()

    def release(self, client_id: int, used: list[int]) -> None:
        """Send a client no more elements.

        Args:
            client_id: The client.
            used: Bounds of the ranges of elements that the client consumed but may not have
                acknowledged.
        """
        with self._changed:
            self._arrivals.pop(client_id, None)
            self._pending = deque(p for p in self._pending if p.body.client_id != client_id)
            self._let_go(client_id, used)
            self._changed.notify_all()
        self._serve()

    def late_consumers(self) -> Awaited | None:
        """Return the wait for consumers that hold up others, with their tasks; None without one."""
        return None

    def refresh(self, periods: int) -> None:
        """Send empty answers to the requests that have waited for ``periods`` calls.

        Consumers treat a worker that does not answer as lost.
        """
        with self._changed:
            for pending in self._pending:
                pending.periods += 1
            stale = [pending for pending in self._pending if pending.periods >= periods]
            self._pending = deque(p for p in self._pending if p.periods < periods)
        for pending in stale:
            pending.request.reply(pb.GetElementReply().SerializeToString())

    def close(self, error: Exception) -> None:
        """Send no more elements, and fail the waiting requests. Idempotent."""
        with self._changed:
            self._closing_error = self._closing_error or error
            pending, self._pending = list(self._pending), deque()
            for arrivals in self._arrivals.values():
                pending += arrivals.early.values()
            self._arrivals.clear()
            self._changed.notify_all()
        for each in pending:
            each.request.fail(error)

    # For subclasses. All are called with the lock held

    @abstractmethod
    def _keep(self, index: int, element: Any, size: int) -> None:
        """Store an element."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Return whether one more element may be evaluated."""

    @abstractmethod
    def _note(self, pending: _Pending) -> None:
        """Process the seek and the acknowledgement of the next request in sequence."""

    @abstractmethod
    def _take(self, body: pb.GetElementRequest) -> _Answer | Error | None:
        """Return the answer to a request; None if the request has to wait."""

    @abstractmethod
    def _let_go(self, client_id: int, used: list[int]) -> None:
        """Forget a client; see :meth:`release`."""

    @abstractmethod
    def _has_news(self) -> bool:
        """Return whether something new about the end must be reported to the dispatcher."""

    @abstractmethod
    def _first_needed(self) -> int:
        """Return the index of the first element that a consumer may still need."""

    # Inside

    def _enqueue(self, pending: _Pending) -> None:
        arrivals = self._arrivals.setdefault(pending.body.client_id, _Arrivals())
        arrivals.early[pending.body.sequence] = pending
        while arrivals.next_sequence in arrivals.early:
            pending = arrivals.early.pop(arrivals.next_sequence)
            self._note(pending)
            self._pending.append(pending)
            arrivals.next_sequence += 1
        self._changed.notify_all()

    def _given_up(self) -> bool:
        return self._closing_error is not None or bool(self._failure)

    def _serve(self) -> None:
        """Answer the requests that can be answered, and report the end to the dispatcher."""
        while True:
            with self._changed:
                found = self._next_answer()
                if found is None:
                    is_news = self._ended and self._has_news()
                    break
                self._changed.notify_all()
            pending, answer = found
            if isinstance(answer, Error):
                pending.request.fail(answer)
            else:
                # Without the lock, because packing takes long.
                self._answer(pending, *answer)
        if is_news:
            self._finished()

    def _next_answer(self) -> tuple[_Pending, _Answer | Error] | None:
        """Return the first request that can be answered. Only each client's oldest counts."""
        seen = set()
        for pending in self._pending:
            if pending.body.client_id in seen:
                continue
            seen.add(pending.body.client_id)
            answer: _Answer | Error | None = None
            if not (pending.is_void or self._is_lossy):
                answer = self._take(pending.body)
            if answer is None:
                failure = b"" if pending.is_void else self._failure
                if pending.body.hold and not (failure or pending.is_void):
                    continue
                answer = [], pb.GetElementReply(failure=failure)
            self._pending.remove(pending)
            return pending, answer
        return None

    def _answer(self, pending: _Pending, elements: list[Any], reply: pb.GetElementReply) -> None:
        parcel = Parcel(b"")
        if elements:
            try:
                parcel = pack_elements(elements)
                if pending.body.codec:
                    parcel = parcel.compress(pending.body.codec)
                reply.count, reply.pickle = len(elements), parcel.pickle
                reply.sizes.extend(parcel.sizes)
            except BaseException as error:
                # The elements are lost, so the part ends here for all consumers. An element's own
                # pickling method can raise any error.
                reply = pb.GetElementReply(failure=pack_error(error, self.where))
                with self._changed:
                    self._failure, self._is_lossy = reply.failure, True
                    self._changed.notify_all()
        pending.request.reply(reply.SerializeToString(), parcel.buffers)


@dataclass
class _Cursor:
    """Attributes: a consumer's position, and its wanted elements; see GetElementRequest."""

    position: int
    period: int = 1
    offset: int = 0
    until: float = float("inf")
    consumer: int = 0

    def next_wanted(self) -> int | None:
        """Return the first wanted element from the position on; None if none is wanted."""
        if self.period == 0:
            return None
        return self.position + (self.offset - self.position) % self.period


class RetainingBuffer(ElementBuffer):
    """Retains each element until all consumers have acknowledged it.

    Consumers request elements by index, and may request the same element again.

    The other arguments are described at :class:`ElementBuffer`.

    Args:
        finished: Called once, when the number of elements is known.
        consumers: The number of consumers.
    """

    def __init__(
        self,
        where: str,
        begin: pb.Checkpoint,
        finished: Callable[[], None],
        consumers: int,
        limit_bytes: int = AHEAD_BYTES,
    ) -> None:
        super().__init__(where, begin, finished, limit_bytes)
        self._consumers = consumers
        self._base = self.produced  # index of the first element that is retained
        self._elements: dict[int, tuple[Any, int]] = {}  # with their sizes in bytes
        # By consumer index. Elements before the watermark are acknowledged.
        self._watermarks = dict.fromkeys(range(consumers), self.produced)
        self._cursors: dict[int | str, _Cursor] = {}
        self._processes: dict[int, str] = {}  # by consumer index
        self._has_reported = False

    def _keep(self, index: int, element: Any, size: int) -> None:
        self._elements[index] = element, size
        self._bytes += size
        self._drop()

    def _has_room(self) -> bool:
        # Sent elements stay until they are acknowledged, with room for all consumers' buffers.
        given, furthest = self._given(), max(self._watermarks.values())
        for cursor in self._cursors.values():
            furthest = max(furthest, cursor.next_wanted() or cursor.position)
        ahead = self.produced - max(min(given.values()), self._base)
        early = self.produced - furthest - (furthest - self.begin.index)
        return ahead < 2 * self._consumers or (
            early < _EARLY * self._consumers
            and ahead < _AHEAD_ELEMENTS * self._consumers
            and self._bytes < (1 + self._consumers) * self._limit
        )

    def _given(self) -> dict[int, int]:
        """Return the index before which each consumer has all its elements, or needs none."""
        given = dict(self._watermarks)
        for cursor in self._cursors.values():
            given[cursor.consumer] = max(given[cursor.consumer], cursor.position)
        return given

    def late_consumers(self) -> Awaited | None:
        """See :meth:`ElementBuffer.late_consumers`."""
        with self._changed:
            if self._consumers == 1 or self._ended or not self._pending or self._has_room():
                return None
            given = self._given()
            first = min(given.values())
            late = [one for one, index in given.items() if index == first]
            processes = [self._processes.get(one, "") for one in late]
        names = ", ".join(f"consumer {one}" for one in late)
        tasks = [process for process in processes if process.startswith("rank ")]
        return f"{names} of {self._consumers} to take element {first}", tasks

    def _note(self, pending: _Pending) -> None:
        body = pending.body
        if body.seek:
            self._processes[body.consumer_index] = pending.request.process
            for other in self._pending:
                other.is_void |= other.body.client_id == body.client_id
            self._cursors[body.client_id] = _Cursor(
                body.start,
                body.period,
                body.offset,
                body.until or float("inf"),
                body.consumer_index,
            )
        mark = self._watermarks[body.consumer_index]
        self._watermarks[body.consumer_index] = max(mark, body.acknowledged)
        self._drop()

    def _drop(self) -> None:
        """Drop the elements that all consumers have acknowledged.

        After the loss of a worker, acknowledged elements may have to be evaluated again first.
        """
        needed = self._first_needed()
        while self._elements and self._base < needed:
            self._drop_first()

    def _drop_first(self) -> None:
        self._bytes -= self._elements.pop(self._base)[1]
        self._base += 1

    def _take(self, body: pb.GetElementRequest) -> _Answer | Error | None:
        cursor = self._cursor(body)
        first = cursor.next_wanted()
        if first is not None and first < self._base:
            return self._dropped(first)
        stop = int(min(self.produced, cursor.until))
        if first is None or first >= stop:
            return self._progress(cursor, stop)
        wanted = range(first, stop, cursor.period)
        sizes = (self._elements[index][1] for index in wanted)
        wanted = wanted[: _fitting(sizes, body.max_elements)]
        # The position also passes the unwanted elements behind the last wanted one.
        last = wanted[-1]
        cursor.position = stop if last + cursor.period >= stop else last + 1
        elements = [self._elements[index][0] for index in wanted]
        return elements, self._reply(cursor, first)

    def _cursor(self, body: pb.GetElementRequest) -> _Cursor:
        return self._cursors.setdefault(body.client_id, _Cursor(self._base))

    def _progress(self, cursor: _Cursor, stop: int) -> _Answer | None:
        """Return the answer to a request of which no wanted element has been evaluated."""
        if not self._ended and stop < cursor.until and (cursor.period or stop <= cursor.position):
            return None
        cursor.position = max(cursor.position, stop)
        return [], self._reply(cursor)

    def _reply(self, cursor: _Cursor, first: int = 0) -> pb.GetElementReply:
        end = self._ended and cursor.position >= self.produced
        return pb.GetElementReply(first=first, stop=cursor.position, end=end)

    def _dropped(self, index: int) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"element {index} of {self.where} has been used by all consumers of the job and is "
            f"not kept; the first that is kept is {self._base}. A consumer that was restarted "
            "must go on from a state (set_state)"
        )

    def _let_go(self, client_id: int, used: list[int]) -> None:
        self._cursors.pop(client_id, None)

    def _has_news(self) -> bool:
        had_reported, self._has_reported = self._has_reported, True
        return not had_reported

    def _first_needed(self) -> int:
        return min(self._watermarks.values())


class CrossTrainerBuffer(RetainingBuffer):
    """Retains a sliding window of elements. Every trainer reads the window at its own pace.

    The fastest trainer moves the window. Slower trainers skip the elements that have left the
    window. All clients of a trainer, at the same time or later, share one position.

    The other arguments are described at :class:`ElementBuffer`.

    Args:
        window_bytes: Size of the window, without the elements ahead of the fastest trainer.
    """

    def __init__(self, where: str, begin: pb.Checkpoint, window_bytes: int) -> None:
        super().__init__(where, begin, lambda: None, 1, window_bytes)

    def end(self) -> None:
        """Refuse the end.

        Raises:
            FailedPreconditionError: Always, because late trainers would miss the end.
        """
        raise FailedPreconditionError(
            "a cross_trainer_cache needs an infinite dataset, but this one ended after "
            f"{self.produced} elements: call repeat() before distribute()"
        )

    @property
    def _fastest(self) -> int:
        return max((each.position for each in self._cursors.values()), default=self.begin.index)

    def _has_room(self) -> bool:
        return self.produced < self._fastest + 2

    def _note(self, pending: _Pending) -> None:
        self._cursors.setdefault(pending.body.trainer_id, _Cursor(self._base))

    def _cursor(self, body: pb.GetElementRequest) -> _Cursor:
        cursor = self._cursors[body.trainer_id]
        cursor.position = max(cursor.position, self._base)
        return cursor

    def _drop(self) -> None:
        # Elements that no trainer has read are always retained: no trainer would get them.
        fastest = self._fastest
        while self._base < fastest and len(self._elements) > 1 and self._bytes > self._limit:
            self._drop_first()

    def _first_needed(self) -> int:
        return self._base


@dataclass(frozen=True, slots=True)
class _Item:
    """Attributes: an element, its index, and its size in bytes."""

    index: int
    element: Any
    size: int


class FirstComeBuffer(ElementBuffer):
    """Sends each element to the client that requests it first.

    If a client leaves, its unacknowledged elements go to other clients.

    The other arguments are described at :class:`ElementBuffer`.

    Args:
        finished: Called when the part has ended and all elements have been sent. If sent elements
            are retained, called once more when all elements are acknowledged.
        used: Consumed elements, which are not sent again.
        held: Elements that clients hold from an earlier worker, by client id. They go to other
            clients only if their client leaves.
        retains: Whether sent elements are retained until they are acknowledged.
    """

    def __init__(
        self,
        where: str,
        begin: pb.Checkpoint,
        finished: Callable[[], None],
        used: RangeSet,
        held: dict[int, RangeSet],
        retains: bool,
    ) -> None:
        super().__init__(where, begin, finished)
        self._used = used
        self._held = held
        self._retains = retains
        self._waiting: deque[_Item] = deque()
        self._sent: dict[int, dict[int, _Item]] = {}  # by client id and index
        # As last reported: whether all elements are sent, and whether all are acknowledged.
        self._reported = (False, False)

    @property
    def holders(self) -> list[int]:
        """The ids of clients with unacknowledged elements."""
        with self._changed:
            return sorted({*self._held, *(each for each, items in self._sent.items() if items)})

    def report(self, progress: pb.TaskProgress) -> None:
        """Fill in the number of elements at the end, and whether all are acknowledged."""
        super().report(progress)
        progress.used_up = self._reported[1]

    def _keep(self, index: int, element: Any, size: int) -> None:
        if index in self._used:
            return
        item = _Item(index, element, size)
        for client_id, ranges in self._held.items():
            if index in ranges:
                self._sent.setdefault(client_id, {})[index] = item
                return
        self._waiting.append(item)
        self._bytes += size

    def _has_room(self) -> bool:
        count = len(self._waiting)
        return count < 2 or (count < _AHEAD_ELEMENTS and self._bytes < self._limit)

    def _note(self, pending: _Pending) -> None:
        body = pending.body
        self._acknowledge(body.client_id, list(body.used.bounds))

    def _acknowledge(self, client_id: int, bounds: list[int]) -> None:
        used = RangeSet(bounds)
        if client_id in self._held:
            # Some of these elements may not have been evaluated again yet.
            self._used.update(used)
        items = self._sent.get(client_id)
        if not items:
            return
        # The acknowledged ranges may be far longer than the list of retained elements, or shorter.
        if len(used) < len(items):
            for start, stop in used.runs():
                for index in range(start, stop):
                    items.pop(index, None)
        else:
            for index in [index for index in items if index in used]:
                del items[index]

    def _take(self, body: pb.GetElementRequest) -> _Answer | None:
        waiting = self._waiting
        if not waiting:
            return ([], pb.GetElementReply(end=True)) if self._ended else None
        count = _fitting((item.size for item in waiting), body.max_elements)
        first = waiting[0].index
        # There are gaps between the indices if elements of a client that left have returned.
        run = enumerate(islice(waiting, count), first)
        count = sum(1 for _ in takewhile(lambda each: each[1].index == each[0], run))
        taken = [waiting.popleft() for _ in range(count)]
        self._bytes -= sum(item.size for item in taken)
        if self._retains:
            sent = self._sent.setdefault(body.client_id, {})
            sent.update((item.index, item) for item in taken)
        end = self._ended and not waiting
        reply = pb.GetElementReply(first=first, stop=first + count, end=end)
        return [item.element for item in taken], reply

    def _let_go(self, client_id: int, used: list[int]) -> None:
        self._acknowledge(client_id, used)
        self._held.pop(client_id, None)
        back = sorted(self._sent.pop(client_id, {}).values(), key=lambda item: item.index)
        self._waiting.extendleft(reversed(back))
        self._bytes += sum(item.size for item in back)

    def _has_news(self) -> bool:
        is_sent = not (self._waiting or self._given_up())
        stage = is_sent, is_sent and self._retains and not any(self._sent.values())
        is_news = stage > self._reported
        self._reported = max(stage, self._reported)
        return is_news

    def _first_needed(self) -> int:
        sent = [min(items) for items in self._sent.values() if items]
        return min([*sent, *(item.index for item in self._waiting), self.produced])


def buffer_for(
    lease: pb.Task, where: str, finished: Callable[[], None], cache_bytes: int
) -> ElementBuffer:
    """Return an empty buffer for the mode of consumption.

    Args:
        lease: The part, its checkpoint, and the elements that consumers hold.
        where: As for :class:`ElementBuffer`.
        finished: See the buffer of the mode.
        cache_bytes: Size of the window that trainers share.
    """
    mode, begin = mode_of(lease), lease.checkpoint
    if mode is CROSS_TRAINER:
        return CrossTrainerBuffer(where, begin, cache_bytes)
    if mode is FIRST_COME:
        used = RangeSet([0, lease.start])
        used.update(RangeSet(lease.used.bounds))
        held = {each.client_id: RangeSet(each.ranges.bounds) for each in lease.held}
        retains = lease.delivery != pb.AT_MOST_ONCE
        return FirstComeBuffer(where, begin, finished, used, held, retains)
    limit = AHEAD_BYTES // max(lease.num_parts, 1)
    return RetainingBuffer(where, begin, finished, max(lease.num_consumers, 1), limit)


def _fitting(sizes: Iterable[int], most: int) -> int:
    """Return how many elements of these sizes, in bytes, fit into one reply; ``most`` limits it."""
    total = count = 0
    for size in sizes:
        total += size
        if count == max(most, 1) or (count and total > _REPLY_BYTES):
            break
        count += 1
    return count
