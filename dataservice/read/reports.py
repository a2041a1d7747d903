"""What a consumer tells the dispatcher and the workers of what it has used."""

from __future__ import annotations

import time
from collections import defaultdict

from dataservice.metrics import own_metrics
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.read.stream import Queue, Stream


class Reports:
    """Keeps what is used until the dispatcher has confirmed that it knows.

    Args:
        stream: Whose elements are used.
        shared: Whether elements go to whoever asks first.

    Attributes:
        client_id: What the dispatcher calls this consumer.
        settled: Lost tasks from which nothing more is taken.
        unreachable: Tasks whose worker does not answer.
    """

    def __init__(self, stream: Stream, *, shared: bool) -> None:
        self._stream = stream
        self._shared = shared
        self.client_id = 0
        self.settled: set[int] = set()
        self.unreachable: set[int] = set()
        self._news: dict[int, RangeSet] = defaultdict(RangeSet)
        self._used = 0
        self._waited_s = 0.0
        self._under_way: pb.ClientRequest | None = None
        self._for_workers: dict[int, RangeSet] = defaultdict(RangeSet)

    def request(self, version: int, *, at_end: bool = False) -> pb.ClientRequest:
        """Local. A heartbeat; to be followed by :meth:`confirm` or :meth:`retry`.

        Args:
            version: Of what is known; the dispatcher answers when it has a newer one.
            at_end: Whether the dispatcher shall decide about the end.
        """
        held = {}
        if self.settled and isinstance(self._stream, Queue):
            # Before asking what is used: what is used meanwhile is told as both, not as neither.
            held = {part: self._stream.in_hand(part).bounds for part in self._stream.parts}
        self._collect()
        request = pb.ClientRequest(
            client_id=self.client_id,
            version=version,
            at_end=at_end,
            settled=sorted(self.settled),
            unreachable=sorted(self.unreachable),
            used=[pb.Ranges(part=part, bounds=r.bounds) for part, r in self._news.items()],
        )
        request.work.elements = self._used
        request.work.seconds = time.monotonic() - self._stream.began
        request.work.waited_s = self._stream.waited_s
        values = own_metrics().values
        values["data_waited_s"] += self._stream.waited_s - self._waited_s
        self._waited_s = self._stream.waited_s
        for part, bounds in held.items():
            request.held.add(part=part, bounds=bounds)
        self._news.clear()
        self._under_way = request
        return request

    def confirm(self) -> None:
        """Local. The dispatcher has the last heartbeat."""
        if self._under_way is not None:
            self.settled.difference_update(self._under_way.settled)
            self._under_way = None

    def retry(self) -> None:
        """Local. It may not: what it said is said again."""
        if self._under_way is not None:
            for ranges in self._under_way.used:
                self._news[ranges.part].update(RangeSet(ranges.bounds))
            self._under_way = None

    def farewell(self) -> pb.ClientRequest:
        """Local. What to say last."""
        self.retry()
        return self.request(-1)

    def used_since(self, part: int) -> list[int]:
        """Local. Bounds of what has been used of a part since the last call."""
        self._collect()
        ranges = self._for_workers.pop(part, None)
        return ranges.bounds if ranges is not None else []

    def _collect(self) -> None:
        for part, start, stop in self._stream.take_used():
            self._used += stop - start
            if self._shared:
                self._news[part].add(start, stop)
                self._for_workers[part].add(start, stop)
            else:
                self._news[part].add(0, stop)
