"""Elements that every trainer gets, as long as they are kept."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.outbox.outbox import Answer, Outbox, how_many
from mpidist.errors import FailedPreconditionError


class CacheOutbox(Outbox):
    """A sliding window: the fastest trainer moves it on, and slower ones find what is left.

    Args:
        where: The task and its worker in words, for errors.
        start: Index of the first element that is put.
        limit_bytes: How much is kept, besides what is made ahead of the fastest trainer.
    """

    def __init__(self, where: str, start: int, limit_bytes: int) -> None:
        super().__init__(where, start, limit_bytes)
        self._base = start
        self._elements: deque[tuple[Any, int]] = deque()
        self._places: dict[str, int] = {}

    def end(self) -> None:
        """Local. See :class:`Outbox`.

        Raises:
            FailedPreconditionError: Always, for trainers that are late would miss the end.
        """
        raise FailedPreconditionError(
            "a cross_trainer_cache needs a dataset without end, and this one ends after "
            f"{self._produced} elements; put .repeat() before distribute"
        )

    def _oldest_needed(self) -> int:
        return self._base

    def _keep(self, index: int, element: Any, size: int) -> None:
        self._elements.append((element, size))
        self._bytes += size
        # What no trainer has had is kept in any case, or it would have been made for nobody.
        fastest = max(self._places.values(), default=0)
        while self._base < fastest and len(self._elements) > 1 and self._bytes > self._limit:
            self._bytes -= self._elements.popleft()[1]
            self._base += 1

    def _has_room(self) -> bool:
        # Kept is as much as fits; made ahead of the fastest trainer is little.
        return self._produced < max(self._places.values(), default=0) + 2

    def _note(self, body: pb.GetElementRequest) -> None:
        self._places.setdefault(body.trainer_id, self._base)

    def _take(self, body: pb.GetElementRequest) -> Answer | None:
        place = max(self._places[body.trainer_id], self._base)
        if place >= self._produced:
            return None
        kept = islice(self._elements, place - self._base, None)
        sizes = (size for _, size in islice(self._elements, place - self._base, None))
        count = how_many(sizes, max(body.max_elements, 1))
        self._places[body.trainer_id] = place + count
        return Answer([element for element, _ in islice(kept, count)], place, place + count)

    def _let_go(self, client_id: int, used: list[int]) -> None:
        """Its trainer goes on where it was if another of its clients comes."""

    def _clear(self) -> None:
        self._base += len(self._elements)
        self._elements.clear()
        self._bytes = 0
