"""A consumer of one iteration: keeps requests with all workers, and never waits for one of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from dataservice.calls import Caller
from dataservice.proto import dataservice_pb2 as pb
from dataservice.stream import Frame, Stream
from dataservice.wire import Parcel, unpack
from mpidist import Backoff, Endpoint, Work
from mpidist.errors import (
    DeadlineExceededError,
    Error,
    UnavailableError,
)

logger = logging.getLogger(__name__)

# How often to hear of new and lost workers; more often until there is one.
_HEARTBEAT_S = 1.0
_FIRST_WORKER_S = 0.05
_REQUESTS_PER_TASK = 2
_ELEMENTS_PER_REPLY = 4096
# A worker that is alive answers within some ten seconds, if only with nothing.
_REPLY_LIMIT_S = 60.0

_START_ONE = "Start one with WorkerServer(dispatcher_address=...), or a task of the job 'data'"


@dataclass(frozen=True)
class Terms:
    """What ``distribute`` was told.

    Attributes:
        start_timeout_s: How long the dispatcher, and then the first worker, may be missing.
        max_outstanding: Elements requested or held at a time; None for no bound but memory's.
    """

    start_timeout_s: float
    max_outstanding: int | None


@dataclass(eq=False)
class _Call:
    """Attributes: a call, when it was made, and the elements that it may bring."""

    work: Work
    sent: float
    elements: int


@dataclass(eq=False)
class _Task:
    """A task as this consumer sees it.

    Attributes:
        id: Its id.
        worker: Address of its worker.
        sequence: Number of the next request.
        calls: Requests without an answer, oldest first.
        ended: Whether it has no more elements.
    """

    id: int
    worker: str
    sequence: int = 0
    calls: deque[_Call] = field(default_factory=deque)
    ended: bool = False


class Consumer:
    """Fetches the elements of an iteration into a stream; ``run`` is the body of a thread.

    Args:
        endpoint: Its calls go out from here.
        dispatcher: Calls the dispatcher.
        stream: Where elements go.
        terms: Bounds.
    """

    def __init__(
        self, endpoint: Endpoint, dispatcher: Caller, stream: Stream, terms: Terms
    ) -> None:
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._stream = stream
        self._terms = terms
        self._tasks: dict[int, _Task] = {}
        self._client_id = 0
        self._over = False
        self._started = time.monotonic()
        self._beat: _Call | None = None
        self._beat_is_last = False
        self._next_beat = self._started
        self._next_request = self._started
        self._empty_replies = 0
        self._pauses = Backoff(spins=0, longest_s=5e-3)
        self._wake = endpoint.work("a reply to a consumer")

    def run(self, iteration: pb.IterationReply) -> None:
        """Local. Fetch until the end of the iteration, or until the stream is closed.

        Args:
            iteration: What the dispatcher said when this consumer joined.

        Raises:
            Exception: A worker or the dispatcher failed, or a user's function.
        """
        self._client_id = iteration.client_id
        own = threading.get_ident()
        # Not on this thread: garbage may be collected anywhere, and what it closes must not wait
        # for a lock that is held here.
        self._stream.on_room = lambda: None if threading.get_ident() == own else self._ring()
        self._stream.waits_for = self._waits_for
        try:
            self._update(iteration.state)
            while not self._over and not self._stream.closed:
                now = time.monotonic()
                self._send_heartbeat(now)
                self._send_requests(now)
                self._wait(now)
                self._take_heartbeat()
                for task in self._tasks.values():
                    self._take_replies(task)
                self._check_deadlines(now)
        finally:
            self._stream.on_room = lambda: None
            self._leave()

    # Waiting

    def _ring(self, _: object = None) -> None:
        self._wake.complete()

    def _wait(self, now: float) -> None:
        """Sleep until a reply has come, the user has taken elements, or something is due."""
        due = self._next_beat if self._next_request <= now else self._next_request
        limit = max(min(due, self._next_beat) - now, 0.0)
        with contextlib.suppress(DeadlineExceededError):
            self._wake.wait(limit)
        # Made before looking at what has come, so that nothing which comes meanwhile is missed.
        self._wake = self._endpoint.work("a reply to a consumer")

    def _check_deadlines(self, now: float) -> None:
        oldest = [task.calls[0] for task in self._tasks.values() if task.calls]
        for call in oldest if self._beat is None else [*oldest, self._beat]:
            if now - call.sent > _HEARTBEAT_S:
                # Does not wait: whoever drives a call hears that the script there has ended.
                call.work.block(now)
            if now - call.sent > _REPLY_LIMIT_S:
                raise DeadlineExceededError(
                    f"no answer within {_REPLY_LIMIT_S:g} s: {call.work.name}; it is stuck or gone"
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
            workers.append(f"{task.worker} (task {task.id}, {'ended' if task.ended else silent})")
        beat = self._beat
        if beat is not None and now - beat.sent > _HEARTBEAT_S:
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
        request = pb.ClientRequest(client_id=self._client_id)
        work = self._dispatcher.start("dispatcher/ClientHeartbeat", request)
        work.add_done_callback(self._ring)
        self._beat = _Call(work, now, 0)
        self._beat_is_last = self._all_ended()
        self._next_beat = now + (_HEARTBEAT_S if self._tasks else _FIRST_WORKER_S)

    def _take_heartbeat(self) -> None:
        beat = self._beat
        if beat is None or not beat.work.is_completed():
            return
        self._beat = None
        reply = self._dispatcher.finish(beat.work)
        self._update(pb.IterationState.FromString(reply.body))
        # A worker may have come after the others had ended; only an answer given since can tell.
        self._over |= self._beat_is_last and self._all_ended()

    def _update(self, state: pb.IterationState) -> None:
        for lost in state.lost:
            if lost.task_id not in self._tasks or not self._tasks[lost.task_id].ended:
                raise UnavailableError(
                    f"data worker {lost.worker} is gone before the end of its part (task "
                    f"{lost.task_id}); its elements are missing from this iteration"
                )
        for task in state.tasks:
            self._tasks.setdefault(task.task_id, _Task(task.task_id, task.worker))
        if not self._tasks:
            self._over = state.finished
            self._check_for_workers()
            if self._over:
                logger.info(
                    "this iteration was over before its consumer came, which gets no elements; a "
                    "loop over epochs must not apply distribute() anew each time"
                )

    def _check_for_workers(self) -> None:
        if not self._over and time.monotonic() - self._started > self._terms.start_timeout_s:
            raise UnavailableError(
                f"no data worker has registered at the dispatcher {self._dispatcher.peer} within "
                f"{self._terms.start_timeout_s:g} s. {_START_ONE}"
            )

    def _all_ended(self) -> bool:
        return bool(self._tasks) and all(task.ended for task in self._tasks.values())

    def _leave(self) -> None:
        """Tell those who hold something for this consumer; they may be gone already."""
        request = pb.ClientRequest(client_id=self._client_id)
        try:
            for task in self._tasks.values():
                if not task.ended:
                    self._release(task)
            self._dispatcher.notify("dispatcher/ReleaseClient", request)
        except Error as error:
            logger.debug("consumer %d left without a word: %s", self._client_id, error)

    def _release(self, task: _Task) -> None:
        body = pb.ReleaseClientRequest(client_id=self._client_id, task_ids=[task.id])
        self._endpoint.notify(task.worker, "data_worker/ReleaseClient", body.SerializeToString())

    # The workers

    def _send_requests(self, now: float) -> None:
        open_tasks = [task for task in self._tasks.values() if not task.ended]
        if not open_tasks or now < self._next_request:
            return
        limit = self._terms.max_outstanding
        if limit is None:
            for task in open_tasks:
                while len(task.calls) < _REQUESTS_PER_TASK and not self._stream.full:
                    self._request(task, now, _ELEMENTS_PER_REPLY, hold=True)
            return
        asked = sum(call.elements for task in open_tasks for call in task.calls)
        share = max(limit // (_REQUESTS_PER_TASK * len(open_tasks)), 1)
        # With fewer requests than workers, one may not be left with a worker that is slow.
        hold = limit >= len(open_tasks)
        budget = limit - asked - self._stream.held
        while budget > 0:
            task = min(open_tasks, key=lambda task: (len(task.calls), task.sequence))
            if len(task.calls) == _REQUESTS_PER_TASK:
                break
            self._request(task, now, min(share, budget), hold)
            budget -= share

    def _request(self, task: _Task, now: float, elements: int, hold: bool) -> None:
        body = pb.GetElementRequest(
            task_id=task.id,
            client_id=self._client_id,
            sequence=task.sequence,
            max_elements=elements,
            hold=hold,
        )
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
            raise _failed(task, error) from error
        work.add_done_callback(self._ring)
        task.calls.append(_Call(work, now, elements))

    def _take_replies(self, task: _Task) -> None:
        while task.calls and task.calls[0].work.is_completed():
            work = task.calls.popleft().work
            try:
                reply = work.result()
            except Error as error:
                raise _failed(task, error) from error
            body = pb.GetElementReply.FromString(reply.body)
            if body.count:
                size = len(body.pickle) + sum(int(buffer.nbytes) for buffer in reply.buffers)
                self._stream.put(Frame(Parcel(body.pickle, reply.buffers), body.count, size))
                self._empty_replies = 0
                self._pauses.reset()
            if body.failure:
                raise unpack(body.failure, ())
            if body.end:
                task.ended = True
                task.calls.clear()
                if self._all_ended():
                    self._next_beat = 0.0
            elif not body.count:
                self._pause_after_empty_reply()

    def _pause_after_empty_reply(self) -> None:
        self._empty_replies += 1
        if self._empty_replies >= len(self._tasks):
            self._empty_replies = 0
            self._next_request = time.monotonic() + self._pauses.next_sleep()


def _failed(task: _Task, error: Error) -> UnavailableError:
    return UnavailableError(f"data worker {task.worker} failed (task {task.id}): {error}")
