"""Elements for consumers that say which ones they want."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.outbox.outbox import AHEAD_BYTES, AHEAD_ELEMENTS, Answer, Outbox, how_many
from mpidist.errors import FailedPreconditionError

# Elements for each consumer that are made before the first is asked for; then as many more as have
# been: many parts that all made theirs would keep those waiting who ask for the first of each.
_EARLY = 32


@dataclass
class _Cursor:
    """Attributes: where a client is, and which elements it wants; see GetElementRequest."""

    position: int
    period: int
    offset: int
    until: float
    consumer: int = 0

    def next_wanted(self) -> int | None:
        """Local. The first element from here on that it wants; None if it wants none."""
        if self.period == 0:
            return None
        return self.position + (self.offset - self.position) % self.period


class WindowOutbox(Outbox):
    """Keeps elements until all consumers have used theirs of them.

    Until then it gives them any number of times: a consumer can ask again.

    Args:
        where: The task and its worker in words, for errors.
        start: Index of the first element that is put.
        consumers: How many there will be.
        finished: Called once, when the number of elements is known.
        limit_bytes: As for :class:`Outbox`.
    """

    def __init__(
        self,
        where: str,
        start: int,
        consumers: int,
        finished: Callable[[], None],
        limit_bytes: int = AHEAD_BYTES,
    ) -> None:
        super().__init__(where, start, limit_bytes)
        self._consumers = consumers
        self._finished = finished
        self._base = start
        self._elements: list[Any] = []
        self._sizes: list[int] = []
        self._marks = dict.fromkeys(range(consumers), start)
        self._cursors: dict[int, _Cursor] = {}

    def _oldest_needed(self) -> int:
        return min(self._marks.values())

    def end(self) -> None:
        """Local. See :class:`Outbox`."""
        super().end()
        self._finished()

    def _keep(self, index: int, element: Any, size: int) -> None:
        self._elements.append(element)
        self._sizes.append(size)
        self._bytes += size
        self._drop()

    def _has_room(self) -> bool:
        # What has been given stays until it is used, and takes as much room as consumers give it.
        given, furthest = dict(self._marks), max(self._marks.values())
        for cursor in self._cursors.values():
            given[cursor.consumer] = max(given[cursor.consumer], cursor.position)
            furthest = max(furthest, cursor.next_wanted() or cursor.position)
        ahead = self._produced - max(min(given.values()), self._base)
        early = self._produced - furthest - (furthest - self.start)
        return ahead < 2 * self._consumers or (
            early < _EARLY * self._consumers
            and ahead < AHEAD_ELEMENTS * self._consumers
            and self._bytes < (1 + self._consumers) * self._limit
        )

    def _note(self, body: pb.GetElementRequest) -> None:
        if body.seek:
            for ask in self._asks:
                ask.void |= ask.body.client_id == body.client_id
            self._cursors[body.client_id] = _Cursor(
                body.start,
                body.period,
                body.offset,
                body.until or float("inf"),
                body.consumer_index,
            )
        mark = self._marks[body.consumer_index]
        self._marks[body.consumer_index] = max(mark, body.acknowledged)
        self._drop()

    def _drop(self) -> None:
        """Forget what all consumers have used; it may be still to come, after a worker was lost."""
        unused = min(max(self.needed - self._base, 0), len(self._elements))
        if unused:
            self._bytes -= sum(self._sizes[:unused])
            del self._elements[:unused], self._sizes[:unused]
            self._base += unused

    def _take(self, body: pb.GetElementRequest) -> Answer | None:
        cursor = self._cursors.setdefault(body.client_id, _Cursor(self._base, 1, 0, float("inf")))
        first = cursor.next_wanted()
        if first is not None and first < self._base:
            return Answer(error=self._passed(first))
        stop = int(min(self._produced, cursor.until))
        if first is None or first >= stop:
            return self._progress(cursor, stop)
        places = range(first - self._base, stop - self._base, cursor.period)
        count = how_many((self._sizes[place] for place in places), max(body.max_elements, 1))
        elements = [self._elements[place] for place in places[:count]]
        last = first + (count - 1) * cursor.period
        # What lies behind the last one, and is not wanted, is known to exist as well.
        cursor.position = stop if last + cursor.period >= stop else last + 1
        return Answer(elements, first, cursor.position, self._at_end(cursor))

    def _progress(self, cursor: _Cursor, stop: int) -> Answer | None:
        """The answer where nothing that is wanted has been made."""
        if not self._ended and stop < cursor.until and (cursor.period or stop <= cursor.position):
            return None
        cursor.position = max(cursor.position, stop)
        return Answer(stop=cursor.position, end=self._at_end(cursor))

    def _at_end(self, cursor: _Cursor) -> bool:
        return self._ended and cursor.position >= self._produced

    def _passed(self, index: int) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"element {index} of {self.where} has been used by all consumers of the job and is "
            f"not kept; the first that is kept is {self._base}. A consumer that was restarted "
            "must go on from a state (set_state)"
        )

    def _let_go(self, client_id: int, used: list[int]) -> None:
        self._cursors.pop(client_id, None)

    def _clear(self) -> None:
        self._base += len(self._elements)
        self._elements.clear()
        self._sizes.clear()
        self._bytes = 0
