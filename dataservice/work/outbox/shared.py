"""Elements for whichever consumer asks first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.work.outbox.outbox import AHEAD_ELEMENTS, Answer, Outbox, how_many


@dataclass(frozen=True, slots=True)
class _Item:
    """Attributes: an element, its index, and its size in bytes."""

    index: int
    element: Any
    size: int


class SharedOutbox(Outbox):
    """Every element goes to one consumer, and to another one if that leaves without using it.

    What a consumer has not said that it has used is kept for that.

    Args:
        where: The task and its worker in words, for errors.
        start: Index of the first element that is put.
        used: Elements that shall not be given again.
        held: Elements that consumers have, by their ids: not to be given unless they leave.
        keeps: Whether to keep what has been given.
        drained: Called when the end has been reached and all elements have been given out, and
            when all have been used, if it is kept what has been given.
    """

    def __init__(
        self,
        where: str,
        start: int,
        used: RangeSet,
        held: dict[int, RangeSet],
        keeps: bool,
        drained: Callable[[], None],
    ) -> None:
        super().__init__(where, start)
        self._used = used
        self._held = held
        self._keeps = keeps
        self._drained = drained
        self._waiting: deque[_Item] = deque()
        self._given: dict[int, dict[int, _Item]] = {}
        self._told = (False, False)

    def _oldest_needed(self) -> int:
        kept = [min(items) for items in self._given.values() if items]
        return min([*kept, *(item.index for item in self._waiting), self._produced])

    @property
    def used_up(self) -> bool:
        """Local. See :class:`Outbox`."""
        return self._told[1]

    @property
    def holders(self) -> list[int]:
        """Local. See :class:`Outbox`."""
        with self._changed:
            return sorted({*self._held, *(each for each, items in self._given.items() if items)})

    def end(self) -> None:
        """Local. See :class:`Outbox`."""
        super().end()
        self._tell()

    def release(self, client_id: int, used: list[int]) -> None:
        """Local. See :class:`Outbox`."""
        super().release(client_id, used)
        self._tell()

    def ask(self, request: Any, body: pb.GetElementRequest) -> None:
        """Local. See :class:`Outbox`."""
        super().ask(request, body)
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            drained = self._ended and not (self._waiting or self._given_up())
            # First that all has been given out, then that all has been used.
            stage = drained, drained and self._keeps and not any(self._given.values())
            tell = stage > self._told
            self._told = max(stage, self._told)
        if tell:
            self._drained()

    def _keep(self, index: int, element: Any, size: int) -> None:
        if index in self._used:
            return
        item = _Item(index, element, size)
        for client_id, ranges in self._held.items():
            if index in ranges:
                self._given.setdefault(client_id, {})[index] = item
                return
        self._waiting.append(item)
        self._bytes += size

    def _has_room(self) -> bool:
        count = len(self._waiting)
        return count < 2 or (count < AHEAD_ELEMENTS and self._bytes < self._limit)

    def _note(self, body: pb.GetElementRequest) -> None:
        self._acknowledge(body.client_id, list(body.used.bounds))

    def _acknowledge(self, client_id: int, bounds: list[int]) -> None:
        used = RangeSet(bounds)
        if client_id in self._held:
            # Some of it may still have to be made again.
            self._used.update(used)
        items = self._given.get(client_id)
        if not items:
            return
        if len(used) < len(items):
            for start, stop in used.runs():
                for index in range(start, stop):
                    items.pop(index, None)
        else:
            for index in [index for index in items if index in used]:
                del items[index]

    def _take(self, body: pb.GetElementRequest) -> Answer | None:
        waiting = self._waiting
        if not waiting:
            return Answer(end=True) if self._ended else None
        count = how_many((item.size for item in waiting), max(body.max_elements, 1))
        first = waiting[0].index
        # What comes back from a consumer that has left may leave gaps.
        run = enumerate(islice(waiting, count), first)
        count = sum(1 for _ in takewhile(lambda each: each[1].index == each[0], run))
        taken = [waiting.popleft() for _ in range(count)]
        self._bytes -= sum(item.size for item in taken)
        if self._keeps:
            given = self._given.setdefault(body.client_id, {})
            given.update((item.index, item) for item in taken)
        end = self._ended and not waiting
        return Answer([item.element for item in taken], first, first + count, end)

    def _let_go(self, client_id: int, used: list[int]) -> None:
        self._acknowledge(client_id, used)
        self._held.pop(client_id, None)
        back = sorted(self._given.pop(client_id, {}).values(), key=lambda item: item.index)
        self._waiting.extendleft(reversed(back))
        self._bytes += sum(item.size for item in back)

    def _clear(self) -> None:
        self._waiting.clear()
        self._given.clear()
        self._bytes = 0
