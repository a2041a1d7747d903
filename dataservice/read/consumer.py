"""A consumer of one iteration: keeps requests with all workers, and never waits for one of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from dataservice.calls import Caller
from dataservice.options import JobOptions
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.reports import Reports
from dataservice.read.requests import Call, Requests
from dataservice.read.stream import Stream
from mpidist import Endpoint
from mpidist.errors import DeadlineExceededError, Error, NotFoundError, UnavailableError

logger = logging.getLogger(__name__)

# A heartbeat that has been answered is sent again after so long; the dispatcher holds those that
# bring no news.
_HEARTBEAT_S = 0.25
# Ranks do not come back, nor do new ones come.
_WORLD_PATIENCE_S = 2.0

_START_ONE = "Start one with WorkerServer(dispatcher_address=...), or a task of the job 'data'"


class Consumer:
    """Fetches the elements of an iteration into a stream; ``run`` is the body of a thread.

    Args:
        endpoint: Its calls go out from here.
        dispatcher: Calls the dispatcher.
        stream: Where elements go.
        terms: Bounds, and how the job is read.
        repetition: Number of the iteration within its job.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dispatcher: Caller,
        stream: Stream,
        terms: JobOptions,
        repetition: int = 0,
    ) -> None:
        self._repetition = repetition
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._stream = stream
        self._terms = terms
        self._seeks = terms.job.reading not in (pb.SHARED, pb.CACHED)
        self._shares = terms.job.reading == pb.SHARED
        # Others may get what is here, and must not get it, too.
        self._shares_once = self._shares and terms.job.delivery == pb.EXACTLY_ONCE
        self._reports = Reports(stream, shared=self._shares)
        self._requests = Requests(
            endpoint, stream, terms, self._reports, self._ring, self._look_soon
        )
        self._state = pb.IterationState()
        self._over = False
        self._came_late = True
        self._said_why = False
        now = time.monotonic()
        self._starved_since = self._heard = now
        self._lease_s = 0.0
        self._beat: Call | None = None
        self._beat_is_last = False
        self._next_beat = now
        self._wake = endpoint.work("a reply to a consumer")

    @property
    def tasks(self) -> dict[int, tuple[int, str]]:
        """Local. Task and worker of every part that has one; for other threads."""
        return {task.part: (task.id, task.worker) for task in list(self._requests.tasks.values())}

    def run(self, iteration: pb.IterationReply) -> None:
        """Local. Fetch until the end of the iteration, or until the stream is closed.

        Args:
            iteration: What the dispatcher said when this consumer joined.

        Raises:
            Exception: A worker or the dispatcher failed, or a user's function.
        """
        self._reports.client_id = iteration.client_id
        own = threading.get_ident()
        # Not on this thread: garbage may be collected anywhere, and what it closes must not wait
        # for a lock that is held here.
        self._stream.on_room = lambda: None if threading.get_ident() == own else self._ring()
        self._stream.waits_for = self._waits_for
        try:
            self._lease_s = iteration.lease_s
            self._trust(time.monotonic())
            self._update(iteration.state)
            while not self._stream.closed and not (self._over and self._stream.held == 0):
                now = time.monotonic()
                self._look_for_doubt(now)
                self._send_heartbeat(now)
                if not self._over:
                    self._requests.send(now)
                self._wait(now)
                self._take_heartbeat()
                self._requests.take()
                self._check_deadlines(now)
                self._look_for_end()
        except BaseException as error:
            if self._shares_once:
                self._stream.stop(error)  # others get what is here
            raise
        finally:
            self._stream.on_room = lambda: None
            self._leave()

    def _trust(self, sent: float) -> None:
        """The dispatcher has heard of us, in what was sent then."""
        if self._shares_once:
            self._stream.trust(sent + self._lease_s)

    # Waiting

    def _look_for_doubt(self, now: float) -> None:
        """Once we may have been given up, and others have what is here, none of it is used.

        Then only an answer helps to a heartbeat that is sent from now on.
        """
        beat = self._beat
        if beat is not None and beat.sent < self._stream.trusted_until < now:
            self._beat = None
            self._reports.retry()
            self._next_beat = now

    def _ring(self, _: object = None) -> None:
        self._wake.complete()

    def _look_soon(self) -> None:
        self._next_beat = min(self._next_beat, time.monotonic() + 0.02)

    def _wait(self, now: float) -> None:
        """Sleep until a reply has come, the user has taken elements, or something is due."""
        due = [_HEARTBEAT_S]
        if self._beat is None:
            due.append(self._next_beat - now)
        if self._requests.due > now:
            due.append(self._requests.due - now)
        with contextlib.suppress(DeadlineExceededError):
            self._wake.wait(max(min(due), 0.0))
        # Made before looking at what has come, so that nothing which comes meanwhile is missed.
        self._wake = self._endpoint.work("a reply to a consumer")

    def _check_deadlines(self, now: float) -> None:
        self._requests.check(now)
        if self._beat is not None and now - self._beat.sent > 1.0:
            self._beat.work.block(now)
        limit = self._terms.start_timeout_s
        if self._requests.last_loss and self._endpoint.address.protocol == "mpi":
            limit = min(limit, _WORLD_PATIENCE_S)
        if self._is_served:
            self._starved_since = now
        elif now - self._starved_since > limit:
            rest = " for the rest of the dataset" if self._state.waiting else ""
            loss = self._requests.last_loss
            if self._terms.job.num_consumers > 1:
                rest = f" that all {self._terms.job.num_consumers} consumers may read{rest}"
            raise UnavailableError(
                f"no data worker{rest} {'is left' if loss else 'has registered'} at the "
                f"dispatcher {self._dispatcher.peer} within {limit:g} s{loss}. {_START_ONE}"
            )
        breaks_since = self._requests.breaks_since
        if self._requests.working and breaks_since and now - breaks_since > limit:
            raise UnavailableError(
                f"no data worker has delivered an element for {limit:g} s: they fail "
                f"repeatedly, last{self._requests.last_loss}"
            )

    @property
    def _is_served(self) -> bool:
        """Whether somebody works for this consumer, or nobody needs to."""
        state = self._state
        served = self._requests.working or state.elsewhere or self._over or state.finished
        return bool(served or (state.given_out and not (state.waiting or state.settle)))

    def _waits_for(self) -> str:
        """What the user waits for, in words; called on the user's thread, hence the copies."""
        dispatcher = self._dispatcher.peer
        tasks = list(self._requests.tasks.values())
        if not tasks and self._state.elsewhere:
            return (
                f"its share of {self._state.elsewhere} parts of the dataset, which data workers "
                "with the tag COLOCATED, or in other processes, have: only the consumers there can "
                "read them; if one leaves, others get the rest"
            )
        beat = self._beat
        if self._beat_is_last and beat is not None:
            return (
                f"the end of the epoch: other consumers of the dispatcher {dispatcher} have the "
                "last elements, and none has been heard of lately. What one that is gone had comes "
                "to this one"
            )
        if not tasks:
            return (
                f"a data worker; none has registered at the dispatcher {dispatcher}. "
                f"{_START_ONE}. This fails after {self._terms.start_timeout_s:g} s"
            )
        now = time.monotonic()
        workers = []
        for task in tasks:
            calls = list(task.calls)
            silent = f"unanswered for {now - calls[0].sent:.3g} s" if calls else "not asked"
            state = "lost" if task.broken else "ended" if task.ended else silent
            workers.append(f"{task.worker} (task {task.id}, {state})")
        if beat is not None and now - beat.sent > 2.0:
            dispatcher += f" (unanswered for {now - beat.sent:.3g} s)"
        return (
            f"elements from the data workers {', '.join(workers)} of the dispatcher {dispatcher}. "
            "Who has not answered for more than 10 s is stuck or gone; on the other workers a "
            "function of the dataset is slow, or hangs"
        )

    # The dispatcher

    def _send_heartbeat(self, now: float) -> None:
        if self._beat is not None or now < self._next_beat:
            return
        self._beat_is_last = self._all_ended() and not self._over
        doubtful = now > self._stream.trusted_until
        version = -1 if doubtful else self._state.version  # -1 is answered at once
        request = self._reports.request(version, at_end=self._beat_is_last)
        try:
            work = self._dispatcher.start("dispatcher/ClientHeartbeat", request)
        except UnavailableError as error:
            self._dispatcher_is_away(error, now)
            return
        work.add_done_callback(self._ring)
        self._beat = Call(work, now, 0)

    def _take_heartbeat(self) -> None:
        beat = self._beat
        if beat is None or not beat.work.is_completed():
            return
        self._beat = None
        now = time.monotonic()
        try:
            reply = self._dispatcher.finish(beat.work)
        except (DeadlineExceededError, UnavailableError) as error:
            self._dispatcher_is_away(error, now)
            return
        except NotFoundError as error:
            self._stream.stop(error)
            raise
        self._heard = now
        self._trust(beat.sent)
        # The dispatcher holds what brings no news: then it has the next one at once.
        self._next_beat = max(beat.sent + _HEARTBEAT_S, now)
        self._reports.confirm()
        self._update(pb.IterationState.FromString(reply.body))
        if self._state.beat_soon:
            self._next_beat = now
        # A worker may have come after the others had ended; only an answer given since can tell.
        if self._beat_is_last and self._all_ended():
            self._over = self._state.over
            if not self._over:
                # Another consumer may have left without using what it had.
                self._requests.ask_again()

    def _dispatcher_is_away(self, error: Error, now: float) -> None:
        """It may be starting again, and workers go on meanwhile."""
        self._reports.retry()
        self._next_beat = now + _HEARTBEAT_S
        patience_s = self._terms.start_timeout_s
        if self._endpoint.address.protocol == "mpi" and isinstance(error, UnavailableError):
            patience_s = 0.0
        if now - self._heard > patience_s:
            raise error

    def _update(self, state: pb.IterationState) -> None:
        if state.dropped > self._state.dropped:
            logger.warning(
                "%d parts of this iteration are lost with their data workers (delivery="
                "'at_most_once')",
                state.dropped - self._state.dropped,
            )
        if self._is_served:  # until now
            self._starved_since = time.monotonic()
        self._state = state
        for part in state.ended if self._seeks else ():
            if part.total >= 0:
                self._requests.note(part.part, part.total, end=True)
        for task_id in state.settle:
            # From now on nothing of it is taken any more, whatever comes.
            self._requests.tasks.pop(task_id, None)
            self._reports.settled.add(task_id)
            self._next_beat = 0.0
        self._requests.update(state.tasks)
        self._reports.unreachable.intersection_update(self._requests.tasks)
        self._came_late &= not self._requests.tasks
        if self._came_late and state.finished and not self._over:
            self._over = True
            self._say_why_nothing_comes()

    def _say_why_nothing_comes(self) -> None:
        if self._said_why:
            return
        self._said_why = True
        # A first iteration that is over was rarely meant: later ones may just be short.
        logger.log(
            logging.INFO if self._repetition else logging.WARNING,
            "iteration %d of its job was over before this consumer came, which gets no "
            "elements; a loop over epochs must not apply distribute() anew each time, and a "
            "run that shall read all again needs another job_name",
            self._repetition,
        )

    def _all_ended(self) -> bool:
        if self._state.waiting or self._state.settle or (self._shares and self._stream.held):
            return False
        if not self._requests.tasks:
            # What others have, or read where this one cannot, may come to this one.
            return bool(self._state.finished or self._state.given_out or self._state.elsewhere)
        # Another consumer may give back what the requests that are out then get.
        return all(
            task.ended and not (self._shares and task.calls)
            for task in self._requests.tasks.values()
        )

    def _look_for_end(self) -> None:
        if self._over:
            if self._stream.lacks_elements:
                self._say_why_nothing_comes()
            self._stream.finish()
        elif self._all_ended() and not self._beat_is_last and self._beat is not None:
            # The dispatcher holds a heartbeat that was sent before; the next one decides.
            self._beat = None
            self._reports.retry()
            self._next_beat = 0.0
        elif self._all_ended() and self._beat is None:
            self._next_beat = 0.0

    def _leave(self) -> None:
        """Tell those who hold something for this consumer; they may be gone already."""
        try:
            self._dispatcher.start("dispatcher/ReleaseClient", self._reports.farewell()).wait(1.0)
        except Error as error:
            logger.debug("a consumer could not tell the dispatcher that it leaves: %s", error)
