"""A consumer of one iteration: keeps requests with all workers, and never waits for one of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataservice.calls import Caller
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.codecs import Codecs
from dataservice.read.order import Plan
from dataservice.read.reports import Reports
from dataservice.read.stream import Frame, Stream
from dataservice.wire import Array, Parcel, expand, unpack
from mpidist import Backoff, Endpoint, Work
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

# A heartbeat that has been answered is sent again after so long; the dispatcher holds those that
# bring no news.
_HEARTBEAT_S = 0.25
_REQUESTS_PER_TASK = 2
_ELEMENTS_PER_REPLY = 4096
# A worker that is alive answers within some ten seconds, if only with nothing.
_SILENT_S = 12.0
_REPLY_LIMIT_S = 60.0
# Ranks do not come back, nor do new ones come.
_WORLD_PATIENCE_S = 2.0

_START_ONE = "Start one with WorkerServer(dispatcher_address=...), or a task of the job 'data'"


@dataclass(frozen=True)
class Terms:
    """What ``distribute`` was told.

    Attributes:
        start_timeout_s: How long the dispatcher, and all workers, may be missing.
        max_outstanding: Elements requested or held at a time; None for no bound but memory's.
        job: What all consumers of the job must agree on.
        compression: As given to ``distribute``.
        consumer_index: Which of them this is, where they are told apart.
        trainer_id: Whose window on a cache this reads.
    """

    start_timeout_s: float
    max_outstanding: int | None
    job: pb.Terms
    compression: str | None = None
    consumer_index: int = 0
    trainer_id: str = ""


@dataclass(eq=False)
class _Call:
    """Attributes: a call, when it was made, its elements, and under which plan it was made."""

    work: Work
    sent: float
    elements: int
    seeks: int = 0
    period: int = 1
    codec: str = ""


@dataclass(eq=False)
class _Task:
    """A task as this consumer sees it.

    Attributes:
        id: Its id.
        worker: Address of its worker.
        part: Number of its part.
        sequence: Number of the next request.
        calls: Requests without an answer, oldest first.
        ended: Whether it has no more elements.
        asked_again: Whether it has been asked once more after that.
        broken: Why nothing more is asked of it; empty if it is.
        plan: What its worker was told to give; None if it is to be told anew.
        seeks: How often it was told.
    """

    id: int
    worker: str
    part: int
    sequence: int = 0
    calls: deque[_Call] = field(default_factory=deque)
    ended: bool = False
    asked_again: bool = False
    broken: str = ""
    plan: Plan | None = None
    seeks: int = 0


class Consumer:
    """Fetches the elements of an iteration into a stream; ``run`` is the body of a thread.

    Args:
        endpoint: Its calls go out from here.
        dispatcher: Calls the dispatcher.
        stream: Where elements go.
        terms: Bounds, and how the job is read.
    """

    def __init__(
        self, endpoint: Endpoint, dispatcher: Caller, stream: Stream, terms: Terms
    ) -> None:
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._stream = stream
        self._terms = terms
        self._seeks = terms.job.reading not in (pb.SHARED, pb.CACHED)
        self._reports = Reports(stream, shared=terms.job.reading == pb.SHARED)
        self._codecs = Codecs(terms.compression, endpoint)
        self._tasks: dict[int, _Task] = {}
        self._state = pb.IterationState()
        self._over = False
        self._came_late = True
        self._last_loss = ""
        self._breaks_since = 0.0
        now = time.monotonic()
        self._starved_since = self._heard = now
        self._beat: _Call | None = None
        self._beat_is_last = False
        self._next_beat = now
        self._next_request = now
        self._empty_replies = 0
        self._pauses = Backoff(spins=0, longest_s=5e-3)
        self._wake = endpoint.work("a reply to a consumer")

    @property
    def tasks(self) -> dict[int, tuple[int, str]]:
        """Local. Task and worker of every part that has one; for other threads."""
        return {task.part: (task.id, task.worker) for task in list(self._tasks.values())}

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
            self._update(iteration.state)
            while not self._stream.closed and not (self._over and self._stream.held == 0):
                now = time.monotonic()
                self._send_heartbeat(now)
                if not self._over:
                    self._send_requests(now)
                self._wait(now)
                self._take_heartbeat()
                for task in list(self._tasks.values()):
                    self._take_replies(task)
                self._check_deadlines(now)
                self._look_for_end()
        finally:
            self._stream.on_room = lambda: None
            self._leave()

    # Waiting

    def _ring(self, _: object = None) -> None:
        self._wake.complete()

    def _wait(self, now: float) -> None:
        """Sleep until a reply has come, the user has taken elements, or something is due."""
        due = [_HEARTBEAT_S]
        if self._beat is None:
            due.append(self._next_beat - now)
        if self._next_request > now:
            due.append(self._next_request - now)
        with contextlib.suppress(DeadlineExceededError):
            self._wake.wait(max(min(due), 0.0))
        # Made before looking at what has come, so that nothing which comes meanwhile is missed.
        self._wake = self._endpoint.work("a reply to a consumer")

    def _check_deadlines(self, now: float) -> None:
        for task in list(self._tasks.values()):
            if not task.calls:
                continue
            call = task.calls[0]
            if now - call.sent > 1.0:
                # Does not wait: whoever drives a call hears that the script there has ended.
                call.work.block(now)
            if now - call.sent > _SILENT_S:
                self._reports.unreachable.add(task.id)
            if now - call.sent > _REPLY_LIMIT_S:
                raise DeadlineExceededError(
                    f"no answer within {_REPLY_LIMIT_S:g} s: {call.work.name}; it is stuck or gone"
                )
        if self._beat is not None and now - self._beat.sent > 1.0:
            self._beat.work.block(now)
        limit = self._terms.start_timeout_s
        if self._last_loss and self._endpoint.address.protocol == "mpi":
            limit = min(limit, _WORLD_PATIENCE_S)
        working = any(not task.broken for task in self._tasks.values())
        if working or self._over or self._state.finished:
            self._starved_since = now
        elif now - self._starved_since > limit:
            rest = " for the rest of the dataset" if self._state.waiting else ""
            raise UnavailableError(
                f"no data worker{rest} {'is left' if self._last_loss else 'has registered'} at the "
                f"dispatcher {self._dispatcher.peer} within {limit:g} s{self._last_loss}. "
                f"{_START_ONE}"
            )
        if working and self._breaks_since and now - self._breaks_since > limit:
            raise UnavailableError(
                f"no data worker has given anything for {limit:g} s: they fail again and again, "
                f"last{self._last_loss}"
            )

    def _waits_for(self) -> str:
        """What the user waits for, in words; called on the user's thread, hence the copies."""
        dispatcher = self._dispatcher.peer
        tasks = list(self._tasks.values())
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
        beat = self._beat
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
        self._beat_is_last = self._all_ended()
        # An answer is wanted at once where it decides about the end.
        version = -1 if self._beat_is_last and not self._over else self._state.version
        request = self._reports.request(version)
        try:
            work = self._dispatcher.start("dispatcher/ClientHeartbeat", request)
        except UnavailableError as error:
            self._dispatcher_is_away(error, now)
            return
        work.add_done_callback(self._ring)
        self._beat = _Call(work, now, 0)

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
        self._heard = now
        self._next_beat = now + _HEARTBEAT_S
        self._reports.confirm()
        self._update(pb.IterationState.FromString(reply.body))
        # A worker may have come after the others had ended; only an answer given since can tell.
        if self._beat_is_last and self._all_ended():
            again = [task for task in self._tasks.values() if not task.asked_again]
            self._over = not (again and self._terms.job.reading == pb.SHARED)
            for task in again if not self._over else ():
                # Another consumer may have left without using what it had.
                task.ended, task.asked_again = False, True

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
        self._state = state
        for part in state.ended if self._seeks else ():
            if part.total >= 0:
                self._note(part.part, part.total, end=True)
        live = {task.task_id: task for task in state.tasks}
        for task_id in state.settle:
            # From now on nothing of it is taken any more, whatever comes.
            self._tasks.pop(task_id, None)
            self._reports.settled.add(task_id)
            self._next_beat = 0.0
        for task_id in [task_id for task_id in self._tasks if task_id not in live]:
            task = self._tasks.pop(task_id)
            if not (task.ended or task.broken):
                self._last_loss = f" of the loss of {task.worker}"
        for task_id, told in live.items():
            if task_id not in self._tasks:
                self._tasks[task_id] = _Task(task_id, told.worker, told.part)
        self._reports.unreachable.intersection_update(self._tasks)
        self._came_late &= not self._tasks
        if self._came_late and state.finished and not self._over:
            self._over = True
            logger.info(
                "this iteration was over before its consumer came, which gets no elements; a "
                "loop over epochs must not apply distribute() anew each time"
            )

    def _all_ended(self) -> bool:
        if self._state.waiting or self._state.settle:
            return False
        if not self._tasks:
            return self._state.finished
        # Another consumer may give back what the requests that are out then get.
        shared = self._terms.job.reading == pb.SHARED
        return all(task.ended and not (shared and task.calls) for task in self._tasks.values())

    def _look_for_end(self) -> None:
        if self._over:
            self._stream.finish()
        elif self._all_ended() and not self._beat_is_last and self._beat is not None:
            # The dispatcher holds a heartbeat that was sent before; the next one decides.
            self._beat.work.add_done_callback(lambda _: None)
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
            logger.debug("a consumer left without a word: %s", error)

    # The workers

    def _send_requests(self, now: float) -> None:
        open_tasks = [task for task in self._tasks.values() if not (task.ended or task.broken)]
        if not open_tasks or now < self._next_request:
            return
        limit = self._terms.max_outstanding
        if limit is None:
            for task in open_tasks:
                while len(task.calls) < _REQUESTS_PER_TASK and self._stream.has_room(task.part):
                    if not self._request(task, now, _ELEMENTS_PER_REPLY, hold=True):
                        break
            return
        needed = self._stream.needed
        for task in open_tasks:
            if task.part == needed and not task.calls:
                # Even beyond the limit: all that is held may be for after it.
                self._request(task, now, 1, hold=True)
        asked = sum(call.elements for task in open_tasks for call in task.calls)
        share = max(limit // (_REQUESTS_PER_TASK * len(open_tasks)), 1)
        # With fewer requests than workers, one may not be left with a worker that is slow.
        hold = limit >= len(open_tasks)
        budget = limit - asked - self._stream.held
        while budget > 0:
            task = min(open_tasks, key=lambda task: (len(task.calls), task.sequence))
            if len(task.calls) == _REQUESTS_PER_TASK:
                break
            if not self._request(task, now, min(share, budget), hold):
                break
            budget -= share

    def _request(self, task: _Task, now: float, elements: int, hold: bool) -> bool:
        body = pb.GetElementRequest(
            task_id=task.id,
            client_id=self._reports.client_id,
            sequence=task.sequence,
            max_elements=elements,
            hold=hold,
            consumer_index=self._terms.consumer_index,
            trainer_id=self._terms.trainer_id,
            codec=self._codecs.of(task.worker),
        )
        if self._seeks:
            self._seek(task, body)
        elif self._terms.job.reading == pb.SHARED:
            body.used.bounds.extend(self._reports.used_since(task.part))
        task.sequence += 1
        try:
            # Its time is limited by _REPLY_LIMIT_S, however long calls may take otherwise.
            work = self._endpoint.call(
                task.worker,
                "data_worker/GetElement",
                body.SerializeToString(),
                timeout=float("inf"),
            )
        except Error as error:
            self._break(task, error)
            return False
        work.add_done_callback(self._ring)
        period = 1 if task.plan is None else task.plan.period
        task.calls.append(_Call(work, now, elements, task.seeks, period, body.codec))
        return True

    def _seek(self, task: _Task, body: pb.GetElementRequest) -> None:
        """Say what is wanted, if the worker does not know."""
        body.acknowledged = self._stream.marks().get(task.part, 0)
        if task.plan is None:
            task.plan = plan = self._stream.plan(task.part)
            task.seeks += 1
            body.seek, body.start = True, plan.start
            body.period, body.offset, body.until = plan.period, plan.offset, max(plan.until, 0)

    def _break(self, task: _Task, error: Error) -> None:
        """A worker is gone, or has been told to forget the task: another one will get the part."""
        task.broken = str(error)
        self._breaks_since = self._breaks_since or time.monotonic()
        self._last_loss = f" of the loss of {task.worker} ({error})"
        task.calls.clear()
        self._reports.unreachable.add(task.id)
        self._next_beat = min(self._next_beat, time.monotonic() + 0.02)
        logger.info("data worker %s failed (task %d): %s", task.worker, task.id, error)

    def _take_replies(self, task: _Task) -> None:
        while task.calls and task.calls[0].work.is_completed():
            call = task.calls.popleft()
            try:
                reply = call.work.result()
            except (CancelledError, NotFoundError, UnavailableError) as error:
                self._break(task, error)
                return
            except FailedPreconditionError:
                raise
            except Error as error:
                raise UnavailableError(
                    f"data worker {task.worker} failed (task {task.id}): {error}"
                ) from error
            # What answers an earlier plan, or one that is to be made anew, is asked for again.
            planned = call.seeks == task.seeks and (task.plan is not None or not self._seeks)
            if planned and task.id in self._tasks:
                self._take_reply(
                    task, call, pb.GetElementReply.FromString(reply.body), reply.buffers
                )

    def _take_reply(
        self, task: _Task, call: _Call, body: pb.GetElementReply, buffers: Sequence[Array]
    ) -> None:
        if body.count:
            parcel = expand(Parcel(body.pickle, buffers), call.codec, body.sizes)
            self._codecs.learn(task.worker, parcel.buffers)
            size = len(parcel.pickle) + sum(int(buffer.nbytes) for buffer in parcel.buffers)
            period = max(call.period, 1)
            self._stream.put(Frame(parcel, body.count, size, task.part, body.first, period))
            self._breaks_since = 0.0
            self._empty_replies = 0
            self._pauses.reset()
        if body.failure:
            raise unpack(body.failure, ())
        if self._seeks:
            self._note(task.part, body.stop, end=body.end)
        if body.end:
            task.ended = True
        elif task.plan is not None and 0 <= task.plan.until <= body.stop:
            task.plan = None
        elif not body.count and not body.stop:
            self._pause_after_empty_reply()

    def _note(self, part: int, stop: int, *, end: bool) -> None:
        if self._stream.note(part, stop, end):
            for other in self._tasks.values():
                other.plan = None
                # What it has given may have become another consumer's, and other elements ours,
                # perhaps only after the next end of a part.
                plan = self._stream.plan(other.part)
                other.ended &= plan.period == 0 and plan.until < 0

    def _pause_after_empty_reply(self) -> None:
        self._empty_replies += 1
        if self._empty_replies >= len(self._tasks):
            self._empty_replies = 0
            self._next_request = time.monotonic() + self._pauses.next_sleep()
