"""A consumer's requests to the workers of one iteration."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dataservice.options import JobOptions
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.codecs import Codecs
from dataservice.read.order import Plan
from dataservice.read.reports import Reports
from dataservice.read.stream import Frame, Stream
from dataservice.wire import Array, Parcel, expand, unpack
from mpidist import Endpoint, Work
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    DistNetworkError,
    Error,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from mpidist.mpi import Backoff

logger = logging.getLogger(__name__)

_REQUESTS_PER_TASK = 2
_ELEMENTS_PER_REPLY = 4096
# Consumers that share elements hold few, lest one take them all: at first so many for each task,
# then as many more as this part of what they have used.
_FIRST_SHARED = 4
_SHARED_PART = 8
# A worker that is alive answers within some ten seconds, if only with nothing.
_SILENT_S = 12.0
_REPLY_LIMIT_S = 60.0


@dataclass(eq=False)
class Call:
    """Attributes: a call, when it was made, its elements, and under which plan it was made."""

    work: Work
    sent: float
    elements: int
    seeks: int = 0
    period: int = 1
    codec: str = ""


@dataclass(eq=False)
class Task:
    """A task as this consumer sees it.

    Attributes:
        id: Its id.
        worker: Address of its worker.
        part: Number of its part.
        sequence: Number of the next request.
        calls: Requests without an answer, oldest first.
        ended: Whether it has no more elements.
        broken: Why nothing more is asked of it; empty if it is.
        plan: What its worker was told to give; None if it is to be told anew.
        seeks: How often it was told.
    """

    id: int
    worker: str
    part: int
    sequence: int = 0
    calls: deque[Call] = field(default_factory=deque)
    ended: bool = False
    broken: str = ""
    plan: Plan | None = None
    seeks: int = 0


class Requests:
    """Keeps requests with all workers, and puts what they give into a stream.

    Args:
        endpoint: Calls go out from here.
        stream: Where elements go.
        terms: Bounds, and how the job is read.
        reports: What has been used.
        came: Called, on any thread, when an answer has come.
        lost: Called when a task is broken: the dispatcher should hear of it soon.

    Attributes:
        tasks: By id.
        due: When to send the next ones, on the clock of ``time.monotonic()``.
        last_loss: Whom we have lost last, in words; empty for nobody.
        breaks_since: Since when tasks have broken without anything given in between; 0: they do
            not.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stream: Stream,
        terms: JobOptions,
        reports: Reports,
        came: Callable[[object], None],
        lost: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._terms = terms
        self._reports = reports
        self._came = came
        self._lost = lost
        self._seeks = terms.job.reading not in (pb.SHARED, pb.CACHED)
        self._codecs = Codecs(terms.compression, endpoint)
        self.tasks: dict[int, Task] = {}
        self.due = time.monotonic()
        self.last_loss = ""
        self.breaks_since = 0.0
        self._came_in = 0
        self._empty_replies = 0
        self._pauses = Backoff(spins=0, longest_s=5e-3)

    def update(self, live: Iterable[pb.TaskAddress]) -> None:
        """Local. Take note of the tasks that there are."""
        told = {task.task_id: task for task in live}
        for task_id in [task_id for task_id in self.tasks if task_id not in told]:
            task = self.tasks.pop(task_id)
            if not (task.ended or task.broken):
                self.last_loss = f" of the loss of {task.worker} (the dispatcher has given it up)"
        for task_id, address in told.items():
            if task_id not in self.tasks:
                self.tasks[task_id] = Task(task_id, address.worker, address.part)

    def take(self) -> None:
        """Local. Take the answers that are here.

        Raises:
            Exception: A worker failed, or a user's function.
        """
        for task in list(self.tasks.values()):
            self._take_replies(task)

    def check(self, now: float) -> None:
        """Local. Look for workers that do not answer.

        Raises:
            DeadlineExceededError: One has not for a minute.
        """
        for task in list(self.tasks.values()):
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
                    f"no answer within {_REPLY_LIMIT_S:g} s: {call.work.name}; the data worker "
                    "hangs or has ended"
                )

    def ask_again(self) -> None:
        """Local. Ask all tasks once more, though they had come to their end."""
        for task in self.tasks.values():
            task.ended = False

    @property
    def working(self) -> bool:
        """Local. Whether there is a task that may give something."""
        return any(not task.broken for task in self.tasks.values())

    def send(self, now: float) -> None:
        """Local. Ask all workers for as much as there is room for."""
        open_tasks = [task for task in self.tasks.values() if not (task.ended or task.broken)]
        if not open_tasks or now < self.due:
            return
        shares = self._terms.max_outstanding is None and self._terms.job.reading == pb.SHARED
        limit = self._share(len(open_tasks)) if shares else self._terms.max_outstanding
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
        share = min(share, _ELEMENTS_PER_REPLY)
        # With fewer requests than workers, one may not be left with a worker that is slow.
        hold = limit >= len(open_tasks)
        budget = limit - asked - self._stream.held
        while budget > 0 and not (shares and not self._stream.has_room(0)):
            task = min(open_tasks, key=lambda task: (len(task.calls), task.sequence))
            if len(task.calls) == _REQUESTS_PER_TASK:
                break
            if not self._request(task, now, min(share, budget), hold):
                break
            budget -= share

    def _share(self, tasks: int) -> int:
        """How many elements may be requested or held where others want theirs."""
        used = self._came_in - self._stream.held
        return max(_FIRST_SHARED * tasks, used // _SHARED_PART)

    def _request(self, task: Task, now: float, elements: int, hold: bool) -> bool:
        body = pb.GetElementRequest(
            task_id=task.id,
            client_id=self._reports.client_id,
            sequence=task.sequence,
            max_elements=elements,
            hold=hold,
            consumer_index=self._terms.consumer_index or 0,
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
        work.add_done_callback(self._came)
        period = 1 if task.plan is None else task.plan.period
        task.calls.append(Call(work, now, elements, task.seeks, period, body.codec))
        return True

    def _seek(self, task: Task, body: pb.GetElementRequest) -> None:
        """Say what is wanted, if the worker does not know."""
        body.acknowledged = self._stream.marks().get(task.part, 0)
        if task.plan is None:
            task.plan = plan = self._stream.plan(task.part)
            task.seeks += 1
            body.seek, body.start = True, plan.start
            body.period, body.offset, body.until = plan.period, plan.offset, max(plan.until, 0)

    def _break(self, task: Task, error: Error) -> None:
        """A worker is gone, or has been told to forget the task: another one will get the part."""
        task.broken = str(error)
        self.breaks_since = self.breaks_since or time.monotonic()
        self.last_loss = f" of the loss of {task.worker} ({error})"
        task.calls.clear()
        self._reports.unreachable.add(task.id)
        self._lost()
        logger.info("data worker %s failed (task %d): %s", task.worker, task.id, error)

    def _take_replies(self, task: Task) -> None:
        while task.calls and task.calls[0].work.is_completed():
            call = task.calls.popleft()
            try:
                reply = call.work.result()
            except (
                CancelledError,
                DistNetworkError,
                NotFoundError,
                UnavailableError,
                UnimplementedError,
            ) as error:
                # The last of one that is being stopped: nothing is served there any more.
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
            if planned and task.id in self.tasks:
                self._take_reply(
                    task, call, pb.GetElementReply.FromString(reply.body), reply.buffers
                )

    def _take_reply(
        self, task: Task, call: Call, body: pb.GetElementReply, buffers: Sequence[Array]
    ) -> None:
        if body.count:
            self._came_in += body.count
            if self._endpoint.address.protocol == "inproc":
                # They are the worker's, which may give them to others, too.
                buffers = [buffer.copy() for buffer in buffers]
            parcel = expand(Parcel(body.pickle, buffers), call.codec, body.sizes)
            self._codecs.learn(task.worker, parcel.buffers)
            size = len(parcel.pickle) + sum(int(buffer.nbytes) for buffer in parcel.buffers)
            period = max(call.period, 1)
            self._stream.put(Frame(parcel, body.count, size, task.part, body.first, period))
            self.breaks_since = 0.0
            self._empty_replies = 0
            self._pauses.reset()
        if body.failure:
            raise unpack(body.failure, ())
        if self._seeks:
            self.note(task.part, body.stop, end=body.end)
        if body.end:
            task.ended = True
        elif task.plan is not None and 0 <= task.plan.until <= body.stop:
            task.plan = None
        elif not body.count and not body.stop:
            self._pause_after_empty_reply()

    def note(self, part: int, stop: int, *, end: bool) -> None:
        """Local. See :meth:`Stream.note`; asks anew for what is wanted then."""
        if self._stream.note(part, stop, end):
            for other in self.tasks.values():
                other.plan = None
                # What it has given may have become another consumer's, and other elements ours,
                # perhaps only after the next end of a part.
                plan = self._stream.plan(other.part)
                other.ended &= plan.period == 0 and plan.until < 0

    def _pause_after_empty_reply(self) -> None:
        self._empty_replies += 1
        if self._empty_replies >= len(self.tasks):
            self._empty_replies = 0
            self.due = time.monotonic() + self._pauses.next_sleep()
