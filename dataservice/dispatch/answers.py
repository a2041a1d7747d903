"""When the dispatcher answers: not before what it says is durable, nor without need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from dataservice.dispatch.endings import decide, is_asked_for
from dataservice.dispatch.journal import Journal
from dataservice.dispatch.records import Client, Key, Outcome
from dataservice.dispatch.registry import Registry
from dataservice.dispatch.stored import record_of
from dataservice.dispatch.told import told_client
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import Parcel
from mpidist import LATER, Endpoint, Reply, Request
from mpidist.errors import DistNetworkError, ResourceExhaustedError

logger = logging.getLogger(__name__)

# A consumer that knows everything is answered after so long, if nothing happens before, but often
# enough to be heard of in the time after which a silent one counts as gone.
_LONGEST_HOLD_S = 1.0
_HOLDS_PER_TIMEOUT = 4
# A disk that is full often has room again soon, when something has been cleaned up. Nobody is told
# before so long: less than the minute for which consumers and workers wait for a dispatcher that
# is gone, and than the 12 s after which consumers doubt a worker that waits for an answer.
_PATIENCE_S = 10.0
_RETRY_S = 0.2


@dataclass(frozen=True)
class _Parked:
    """Attributes: a heartbeat, whose it is, the version that it knows, and when it came."""

    request: Request
    client_id: int
    version: int
    since: float


class Answers:
    """Answers leave at once, or with the journal's next transaction, if there is a journal.

    Args:
        endpoint: Workers are told from here.
        registry: What is answered from.
        parcels: The datasets themselves, by id; those that are forgotten are taken out.
        journal: Where changes are written; None for nowhere.
        lock: Held by whoever calls :meth:`settle` or :meth:`park`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        registry: Registry,
        parcels: dict[int, Parcel],
        journal: Journal | None,
        lock: threading.RLock,
    ) -> None:
        self._endpoint = endpoint
        self._registry = registry
        self._parcels = parcels
        self._journal = journal
        self._lock = lock
        self._parked: list[_Parked] = []
        self._unwritten: list[tuple[Request, Reply]] = []
        self._writing = False
        self._outcome = Outcome()
        self._news = threading.Event()
        self._full_since: float | None = None
        self._next_try = float("-inf")
        self._holds = False

    @property
    def holds(self) -> bool:
        """Local. Whether all answers wait for room on the disk; for the thread that writes."""
        return self._holds

    def wait(self, limit_s: float) -> None:
        """Local. Wait until there is something to write, or for so many seconds."""
        self._news.wait(limit_s)
        self._news.clear()

    def wake(self) -> None:
        """Local. End a wait."""
        self._news.set()

    def park(self, request: Request, client: Client, now: float) -> None:
        """Local. Answer a heartbeat when there is something new for its client."""
        self._parked.append(_Parked(request, client.id, client.iteration.version, now))

    def settle(self, request: Request | None, reply: Reply, now: float | None = None) -> Reply:
        """Local. Take note of what has changed.

        Args:
            request: What brought it; None for time.
            reply: The answer.
            now: The time; None if it brings nothing.

        Returns:
            The answer, or LATER if it leaves with the journal's next transaction.
        """
        outcome = self._registry.take_outcome()
        for (kind, key), value in outcome.changed.items():
            if kind == "dataset" and value is None:
                self._parcels.pop(key, None)
        self._outcome.changed.update(outcome.changed)
        self._outcome.removals += outcome.removals
        self._outcome.leased += outcome.leased
        self._outcome.departures += outcome.departures
        self._outcome.losses += outcome.losses
        self._answer_parked(now)
        if self._journal is None:
            self._outcome.changed.clear()
            self._carry_out()
            return reply
        if request is None:  # who looks after time writes next
            return reply
        self._news.set()
        # What it says may rest on what is just being written, or could not be.
        if reply is LATER or not (self._outcome.changed or self._unwritten or self._writing):
            return reply
        self._unwritten.append((request, reply))
        return LATER

    def write(self, now: float) -> None:
        """Local. Make all that has changed durable, in one transaction, then answer.

        While the disk is full, nothing is done but to try again in a later call.

        Args:
            now: The time.
        """
        if self._journal is None or now < self._next_try:
            return
        changed: dict[Key, Any] = {}
        unwritten: list[tuple[Request, Reply]] = []
        try:
            with self._lock:
                self._writing = True
                changed, self._outcome.changed = self._outcome.changed, {}
                unwritten, self._unwritten = self._unwritten, []
                records: Mapping[Key, bytes | None] = {
                    key: None if value is None else record_of(value, self._parcels)
                    for key, value in changed.items()
                }
            if records:
                self._journal.commit(records)
        except Exception as error:
            self._holds = self._waits_for_room(error, now)
            with self._lock:
                self._writing = False
                self._outcome.changed = changed | self._outcome.changed
                if self._holds:
                    self._unwritten = unwritten + self._unwritten
                    return
            # Whatever it is, those who wait for their answers are told.
            logger.exception("the dispatcher's journal cannot be written")
            for request, _ in unwritten:
                request.fail(error)
            return
        self._full_since, self._holds = None, False
        for request, reply in unwritten:
            request.reply(reply.body, reply.buffers)
        with self._lock:
            self._writing = False
            self._carry_out()

    def tell(self, worker: str, method: str, body: Message) -> None:
        """Local. Tell a worker something, if it is there."""
        try:
            self._endpoint.notify(worker, f"data_worker/{method}", body.SerializeToString())
        except DistNetworkError:
            logger.debug("worker %s is gone, and so are its tasks", worker)

    # Inside

    def _waits_for_room(self, error: Exception, now: float) -> bool:
        """Whether to try again before anybody is told of an error."""
        if not isinstance(error, ResourceExhaustedError):
            return False
        self._next_try = now + _RETRY_S
        if self._full_since is None:
            self._full_since = now
            logger.warning(
                "the dispatcher answers no requests for up to %g s, until its journal has room: %s",
                _PATIENCE_S,
                error,
            )
        return now - self._full_since < _PATIENCE_S

    @property
    def _longest_hold_s(self) -> float:
        return min(_LONGEST_HOLD_S, self._registry.timeouts.client_s / _HOLDS_PER_TIMEOUT)

    def _answer_parked(self, now: float | None) -> None:
        """Answer heartbeats of consumers for which there is something new, or that wait long."""
        parked, self._parked = self._parked, []
        for entry in parked:
            client = self._registry.clients.get(entry.client_id)
            if client is None:
                entry.request.fail(self._registry.unknown_client(entry.client_id))
                continue
            waited_long = now is not None and now - entry.since >= self._longest_hold_s
            news = client.iteration.version != entry.version or waited_long
            if not (decide(client) or news or is_asked_for(client)):
                self._parked.append(entry)
                continue
            reply = Reply(told_client(client).SerializeToString())
            if self._journal is None:
                entry.request.reply(reply.body)
            else:
                self._unwritten.append((entry.request, reply))

    def _carry_out(self) -> None:
        """Tell workers the tasks that they shall begin and forget; log what is lost."""
        losses, self._outcome.losses = self._outcome.losses, []
        for loss in losses:
            logger.warning("%s", loss)
        removals, self._outcome.removals = self._outcome.removals, []
        departures, self._outcome.departures = self._outcome.departures, []
        leased, self._outcome.leased = self._outcome.leased, []
        updates: dict[str, pb.TasksUpdate] = {}
        for removal in removals:
            updates.setdefault(removal.worker, pb.TasksUpdate()).forget.append(removal.task_id)
        for task in leased:
            # Of saves, heartbeats tell some at a time.
            if task.part.iteration.job.terms.reading != pb.SAVED:
                updates.setdefault(task.worker.address, pb.TasksUpdate()).begin.append(task.id)
        for worker, update in updates.items():
            self.tell(worker, "UpdateTasks", update)
        for departure in departures:
            left = pb.ReleaseClientRequest(
                client_id=departure.client_id, task_id=departure.task_id, used=departure.used
            )
            self.tell(departure.worker, "ReleaseClient", left)
