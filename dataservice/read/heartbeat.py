"""The reports of a consumer to the dispatcher."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from dataservice.calls import RpcClient
from dataservice.consumption import Mode
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.read.buffers import ElementBuffer
from mpidist import Work
from mpidist.errors import UnavailableError

# Period of the heartbeats that are answered at once. The dispatcher holds those without news.
HEARTBEAT_S = 0.25


class Heartbeat:
    """Sends heartbeats, at most one at a time, until the dispatcher has heard every report.

    An unanswered heartbeat may not have arrived. Its reports are sent again with the next one.

    Args:
        dispatcher: Calls the dispatcher.
        buffer: The buffer. Its consumed elements are reported.
        mode: The mode of consumption, which says how consumed elements are reported.

    Attributes:
        client_id: The dispatcher's number of this consumer.
        settled: Lost tasks of which no element is taken any more.
        unreachable: Tasks of workers that do not answer.
        due: When to send the next heartbeat, on the clock of ``time.monotonic()``.
        sent: When the unanswered heartbeat was sent; None if all have been answered.
        at_end: Whether the last heartbeat asks if the iteration has ended.
    """

    def __init__(self, dispatcher: RpcClient, buffer: ElementBuffer, mode: Mode) -> None:
        self._dispatcher = dispatcher
        self._buffer = buffer
        self._by_ranges = mode.is_first_come
        self.client_id = 0
        self.settled: set[int] = set()
        self.unreachable: set[int] = set()
        self.due = 0.0
        self.sent: float | None = None
        self.at_end = False
        self._work: Work | None = None
        self._request = pb.ClientRequest()  # the unanswered one; empty if there is none
        self._count = 0
        self._consumed: dict[int, RangeSet] = defaultdict(RangeSet)
        self._consumed_for_workers: dict[int, RangeSet] = defaultdict(RangeSet)

    def send(self, version: int, *, at_end: bool, on_reply: Callable[[Work], None]) -> None:
        """Send a heartbeat.

        Args:
            version: Version of the known state. The dispatcher answers when it has a newer one, and
                -1 at once.
            at_end: Whether to ask if the iteration has ended.
            on_reply: Called, on any thread, when the reply has come.

        Raises:
            UnavailableError: The dispatcher is not there.
        """
        self.at_end = at_end
        request = self._report(version, at_end=at_end)
        sent = time.monotonic()
        try:
            work = self._dispatcher.start("dispatcher/ClientHeartbeat", request)
        except UnavailableError:
            self.withdraw()
            raise
        self._work, self.sent = work, sent
        work.add_done_callback(on_reply)

    def poll(self) -> pb.IterationState | None:
        """Return the reply to the last heartbeat, once; None if there is none yet.

        Raises:
            Error: The heartbeat failed. Its reports are sent again.
        """
        work, sent = self._work, self.sent
        if work is None or sent is None or not work.is_completed():
            return None
        try:
            reply = self._dispatcher.finish(work)
        except BaseException:
            self.withdraw()
            raise
        self.settled.difference_update(self._request.settled)
        self._request = pb.ClientRequest()
        self._work = self.sent = None
        # One that the dispatcher held is followed by the next one at once.
        self.due = max(sent + HEARTBEAT_S, time.monotonic())
        return pb.IterationState.FromString(reply.body)

    def withdraw(self) -> None:
        """Wait no longer for the last reply. Send the reports of that heartbeat again."""
        for ranges in self._request.used:
            self._consumed[ranges.part].update(RangeSet(ranges.bounds))
        self._request = pb.ClientRequest()
        self._work = self.sent = None

    def leave(self, limit_s: float) -> None:
        """Tell the dispatcher that this consumer leaves, with all that is unreported."""
        self.withdraw()
        request = self._report(-1, at_end=False)
        self._dispatcher.start("dispatcher/ReleaseClient", request).wait(limit_s)

    def take_consumed(self, part: int) -> list[int]:
        """Return the bounds of the elements consumed since the last call, for the part's worker."""
        self._collect()
        return self._consumed_for_workers.pop(part, RangeSet()).bounds

    def _report(self, version: int, *, at_end: bool) -> pb.ClientRequest:
        # The unconsumed elements first: one that is consumed meanwhile is reported twice, and not
        # left out.
        held = self._buffer.unconsumed() if self.settled else {}
        self._collect()
        self._request = pb.ClientRequest(
            client_id=self.client_id,
            version=version,
            at_end=at_end,
            settled=sorted(self.settled),
            unreachable=sorted(self.unreachable),
            used=[pb.Ranges(part=part, bounds=r.bounds) for part, r in self._consumed.items()],
            held=[pb.Ranges(part=part, bounds=bounds) for part, bounds in held.items()],
            work=pb.ClientWork(
                elements=self._count,
                seconds=time.monotonic() - self._buffer.began,
                waited_s=self._buffer.waited_s,
            ),
        )
        self._consumed.clear()
        return self._request

    def _collect(self) -> None:
        for part, start, stop in self._buffer.take_consumed():
            self._count += stop - start
            if self._by_ranges:
                self._consumed[part].add(start, stop)
                self._consumed_for_workers[part].add(start, stop)
            else:
                self._consumed[part].add(0, stop)
