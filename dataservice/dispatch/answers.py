"""When the dispatcher answers: after its changes are durable, and heartbeats when needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from dataservice.dispatch.end_of_epoch import dismiss_if_done, is_asked_for
from dataservice.dispatch.journal import Journal
from dataservice.dispatch.messages import iteration_response, record_of
from dataservice.dispatch.records import Client, Key, Outcome, Record
from dataservice.dispatch.registry import Registry
from dataservice.payload import Parcel
from dataservice.proto import dataservice_pb2 as pb
from mpidist import LATER, Endpoint, Reply, Request
from mpidist.errors import DistNetworkError, ResourceExhaustedError

logger = logging.getLogger(__name__)

# The longest time for which a heartbeat is held without news. It must stay well below the time
# after which a silent consumer counts as gone.
_LONGEST_HOLD_S = 1.0
_HOLDS_PER_TIMEOUT = 4
# A full disk often has room again soon, when something has been cleaned up, so requests fail only
# after this time. It is less than the minute for which consumers and workers wait for a dispatcher
# that is gone, and than the 12 s after which consumers doubt a worker that waits for an answer.
_PATIENCE_S = 10.0
_RETRY_S = 0.2


@dataclass(frozen=True)
class _Parked:
    """A heartbeat that waits for news.

    Attributes:
        request: The heartbeat.
        client_id: Its sender.
        version: The version of the iteration that the sender knows.
        since: The time at which it came.
    """

    request: Request
    client_id: int
    version: int
    since: float


class Answers:
    """Sends answers at once, or with the journal's next commit if there is a journal.

    Args:
        endpoint: Sends notices to workers.
        registry: The dispatcher's state.
        parcels: The pickled datasets, by id. Forgotten datasets are removed.
        journal: Takes the changes; None keeps none.
        lock: Held by the callers of :meth:`release` and :meth:`park`.
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
        self._disk_is_full = False

    @property
    def waits_for_disk(self) -> bool:
        """True if all answers wait for room on the disk; for the thread that writes."""
        return self._disk_is_full

    def wait(self, limit_s: float) -> None:
        """Wait until there are changes to write, for at most ``limit_s``."""
        self._news.wait(limit_s)
        self._news.clear()

    def wake(self) -> None:
        """End a wait."""
        self._news.set()

    def park(self, request: Request, client: Client, now: float) -> None:
        """Keep a heartbeat until there is something new for its client."""
        self._parked.append(_Parked(request, client.id, client.iteration.version, now))

    def release(self, request: Request | None, reply: Reply, now: float | None = None) -> Reply:
        """Take the registry's changes, and say when the answer to a request may leave.

        Args:
            request: The request that has made the changes; None if time has.
            reply: The answer.
            now: The time; None if no time has passed.

        Returns:
            The answer, or LATER if it leaves with the journal's next commit.
        """
        outcome = self._registry.take_outcome()
        for (kind, key), value in outcome.changed.items():
            if kind == "dataset" and value is None:
                self._parcels.pop(key, None)
        self._outcome.add(outcome)
        self._answer_parked(now)
        if self._journal is None:
            self._outcome.changed.clear()
            self._carry_out()
            return reply
        if request is None:  # the thread that checks timeouts writes next
            return reply
        self._news.set()
        # The answer may rest on changes that are being written, or could not be.
        if reply is LATER or not (self._outcome.changed or self._unwritten or self._writing):
            return reply
        self._unwritten.append((request, reply))
        return LATER

    def write(self, now: float) -> None:
        """Make all changes durable, in one commit, then answer.

        If the disk is full, a later call tries again.

        Args:
            now: The time.
        """
        if self._journal is None or now < self._next_try:
            return
        changed: dict[Key, Record | None] = {}
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
            self._disk_is_full = self._waits_for_room(error, now)
            with self._lock:
                self._writing = False
                self._outcome.changed = changed | self._outcome.changed
                if self._disk_is_full:
                    self._unwritten = unwritten + self._unwritten
                    return
            logger.exception("the dispatcher's journal cannot be written")
            for request, _ in unwritten:
                request.fail(error)
            return
        self._full_since, self._disk_is_full = None, False
        for request, reply in unwritten:
            request.reply(reply.body, reply.buffers)
        with self._lock:
            self._writing = False
            self._carry_out()

    def notify(self, worker: str, method: str, body: Message) -> None:
        """Send a notice to a worker, if it is there."""
        try:
            self._endpoint.notify(worker, f"data_worker/{method}", body.SerializeToString())
        except DistNetworkError:
            logger.debug("worker %s is gone, and so are its tasks", worker)

    # Inside

    def _waits_for_room(self, error: Exception, now: float) -> bool:
        """Return whether to try again before requests fail with an error."""
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
        """Answer heartbeats for which there is something new, or that wait long."""
        parked, self._parked = self._parked, []
        for entry in parked:
            client = self._registry.clients.get(entry.client_id)
            if client is None:
                entry.request.fail(self._registry.unknown_client(entry.client_id))
                continue
            waited_long = now is not None and now - entry.since >= self._longest_hold_s
            news = client.iteration.version != entry.version or waited_long
            if not (dismiss_if_done(client) or news or is_asked_for(client)):
                self._parked.append(entry)
                continue
            reply = Reply(iteration_response(client).SerializeToString())
            if self._journal is None:
                entry.request.reply(reply.body)
            else:
                self._unwritten.append((entry.request, reply))

    def _carry_out(self) -> None:
        """Send workers the tasks to begin and the tasks and clients to forget. Log losses.

        The answers to heartbeats name the tasks of saves, some at a time.
        """
        outcome = self._outcome.take()
        # Changes that came during the commit are for the next one.
        self._outcome.changed = outcome.changed
        for loss in outcome.losses:
            logger.warning("%s", loss)
        updates: dict[str, pb.TasksUpdate] = {}
        for removal in outcome.removals:
            updates.setdefault(removal.worker, pb.TasksUpdate()).forget.append(removal.task_id)
        for task in outcome.leased:
            if not task.part.iteration.job.mode.writes_snapshot:
                updates.setdefault(task.worker.address, pb.TasksUpdate()).begin.append(task.id)
        for departure in outcome.departures:
            updates.setdefault(departure.worker, pb.TasksUpdate()).departures.add(
                client_id=departure.client_id, task_id=departure.task_id, used=departure.used
            )
        for worker, update in updates.items():
            self.notify(worker, "UpdateTasks", update)
