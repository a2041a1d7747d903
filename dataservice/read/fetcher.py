"""The thread that fetches the elements of one iteration for a user, and its heartbeats."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dataservice.calls import Awaited, RpcClient, missing_dispatcher, task_at, tasks_at
from dataservice.consumption import Mode
from dataservice.errors import unpack_error
from dataservice.options import JobOptions
from dataservice.payload import Array, CodecChoice, Parcel, indexed_checkpoint
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.read.buffers import ElementBuffer, Frame, buffer_for
from dataservice.read.order import Plan
from mpidist import Endpoint, Work
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    DistNetworkError,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from mpidist.mpi import Backoff

logger = logging.getLogger(__name__)

# Period of the heartbeats that are answered at once. The dispatcher holds those without news.
HEARTBEAT_S = 0.25
_REQUESTS_PER_TASK = 2
_ELEMENTS_PER_REPLY = 4096
# Consumers that share elements hold few of them, so that no consumer takes all: at first this
# number for each task, later 1 / _SHARED_PART of the consumed elements.
_FIRST_SHARED = 4
_SHARED_PART = 8
# A worker that is alive answers within some ten seconds, if need be with no elements.
_SILENT_S = 12.0
_REPLY_LIMIT_S = 60.0
# In an MPI job, lost ranks do not return, and no new ranks start.
_WORLD_PATIENCE_S = 2.0
# How soon a worker that does not answer is reported to the dispatcher.
_LOSS_DELAY_S = 0.02
# How long close() waits for the thread, and the leaving thread for the dispatcher.
_CLOSE_S = 5.0
_LEAVE_S = 1.0
# How long get_state() waits for a worker. After that it uses an older checkpoint.
_CHECKPOINT_S = 2.0

_START_ONE = "Start one with WorkerServer(dispatcher_address=...), or a task of the job 'data'"


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


@dataclass(eq=False)
class _Call:
    """A request to a worker.

    Attributes:
        work: Gives the reply.
        sent: Monotonic time at which the request was sent.
        elements: The largest number of elements in the reply.
        plan: The plan of the task when the request was sent.
        codec: The codec of the reply.
    """

    work: Work
    sent: float
    elements: int
    plan: Plan | None
    codec: str


@dataclass(eq=False)
class _Task:
    """A consumer's record of a task, which is the lease of a part by a worker.

    Attributes:
        id: The dispatcher's number of the task.
        worker: Address of the worker.
        part: Number of the part.
        sequence: Number of the next request.
        calls: Unanswered requests, oldest first.
        ended: Whether the worker has reported the end of the part.
        broken: The error that ended the requests to the worker; empty if there is none.
        plan: The plan that the worker follows; None if the next request must send a plan.
    """

    id: int
    worker: str
    part: int
    sequence: int = 0
    calls: deque[_Call] = field(default_factory=deque)
    ended: bool = False
    broken: str = ""
    plan: Plan | None = None


class Fetcher:
    """Joins an iteration, and fetches its elements from all workers into a buffer.

    One thread runs one loop, and never waits for a single peer. The thread ends when the iteration
    has ended, the user has closed the buffer, or a worker or the dispatcher fails.

    Args:
        endpoint: Sends the calls. The fetcher closes the endpoint at the end.
        job: Name of the job, for messages.
        dataset_id: Returns the dispatcher's id of the dataset, within a time limit in seconds.
        terms: The options of the consumer.
        request: The iteration to join, without its dataset.
        indexed: Whether the dataset is known to be indexed, see :class:`Node`.

    Attributes:
        buffer: The elements.
        thread: The thread, to be started by :meth:`start`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        job: str,
        dataset_id: Callable[[RpcClient, float], int],
        terms: JobOptions,
        request: pb.IterationRequest,
        *,
        indexed: bool,
    ) -> None:
        self._endpoint = endpoint
        self._job = job
        self._dataset_id = dataset_id
        self._indexed = indexed
        self._terms = terms
        self._request = request
        begin = request.state if request.HasField("state") else None
        self.buffer = buffer_for(f"consumer {endpoint.address} of {job}", terms, begin)
        self.buffer.on_room = self._wake_up
        self.buffer.waits_for = self._waits_for
        self.buffer.awaited = self._awaited
        self._mode = terms.mode
        self._limit = terms.max_outstanding
        self._trainer_id = terms.trainer_id
        self._leases = terms.mode.leases_elements(terms.job)
        self._dispatcher = RpcClient(
            endpoint, terms.address, "dispatcher", lambda: self.buffer.closed
        )
        self._heartbeat = Heartbeat(self._dispatcher, self.buffer, terms.mode)
        self._codecs = CodecChoice(terms.compression, endpoint)
        self._tasks: dict[int, _Task] = {}
        self._state = pb.IterationState()
        self._lease_s = 0.0
        self._over = False
        self._got_tasks = False
        self._has_explained = False
        # Monotonic times since when workers or the dispatcher are missing. Too long is an error.
        self._served = self._heard = self._next_request = time.monotonic()
        self._failing_since: float | None = None  # time of the first failure since the last element
        self._last_loss = ""
        self._received = 0
        self._empty_replies = 0
        self._pauses = Backoff(spins=0, longest_s=5e-3)
        self._wake = endpoint.work("a reply to a consumer")
        self._is_leaving = False
        self._joined = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dataservice-consumer", daemon=True)
        self.buffer.is_fetched = self.thread.is_alive

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """Give up the iteration. Idempotent."""
        self.buffer.close()
        if self.thread is not threading.current_thread():
            self.thread.join(_CLOSE_S)

    def get_state(self) -> pb.State:
        """Return the state of the iteration, behind the elements that this consumer has consumed.

        Raises:
            Exception: The dispatcher cannot be reached. Or the error that ended the iteration.
        """
        self._joined.wait()
        position = self.buffer.state()
        try:
            state = self._complete(position)
        except Error:
            if self.buffer.over or self._is_leaving:
                # The thread is leaving: the dispatcher may have forgotten this consumer already.
                self.thread.join(_CLOSE_S)
            if self.thread.is_alive():
                raise
        else:
            for name in ("position", "skip", "next_part", "begin_round"):
                setattr(state, name, getattr(position, name))
            return state
        if self.buffer.error is not None:
            raise self.buffer.error
        return pb.State(terms=self._terms.job, repetition=self._request.repetition, over=True)

    def _complete(self, position: pb.State) -> pb.State:
        """Return a position with checkpoints of the workers and splits of the dispatcher."""
        if not self._heartbeat.client_id:
            raise InvalidArgumentError(
                f"this consumer of {self._job} has no part of the dataset, and so no state"
            )
        self._add_checkpoints(position.parts)
        request = pb.StateRequest(client_id=self._heartbeat.client_id, parts=position.parts)
        return self._dispatcher.call_with_retry(
            "dispatcher/GetState", request, pb.State, self._terms.start_timeout_s
        )

    def _add_checkpoints(self, parts: Iterable[pb.PartState]) -> None:
        """Add to each part the checkpoint before its position. Ask all workers at the same time.

        The checkpoints of an indexed dataset are known without the workers. If a worker does not
        answer, the dispatcher adds a checkpoint for its part.
        """
        if self._indexed:
            for part in parts:
                part.checkpoint.CopyFrom(indexed_checkpoint(part.start))
            return
        asked = []
        tasks = {task.part: task for task in list(self._tasks.values())}
        for part in parts:
            task = tasks.get(part.part)
            if task is None:
                continue
            worker = RpcClient(
                self._endpoint, task.worker, "data worker", lambda: self.buffer.closed
            )
            request = pb.CheckpointRequest(task_id=task.id, index=part.start)
            with contextlib.suppress(UnavailableError):
                work = worker.start("data_worker/GetCheckpoint", request, timeout=_CHECKPOINT_S)
                asked.append((part, worker, work))
        for part, worker, work in asked:
            try:
                part.checkpoint.ParseFromString(worker.finish(work).body)
            except Error as error:
                logger.info("a state without the checkpoint of %s: %s", worker.peer, error)

    # The loop

    def _run(self) -> None:
        try:
            with self._endpoint:
                self._fetch(self._join())
        except BaseException as error:
            self.buffer.finish(error)
        else:
            self.buffer.finish()
        finally:
            self._joined.set()

    def _join(self) -> pb.IterationState:
        """Become a client of the iteration. Return its state."""
        limit_s = self._terms.start_timeout_s
        self._request.dataset_id = self._dataset_id(self._dispatcher, limit_s)
        # By the token the dispatcher recognizes this consumer if the call is repeated.
        self._request.token = secrets.randbits(64)
        reply = self._dispatcher.call_with_retry(
            "dispatcher/GetOrCreateIteration", self._request, pb.IterationReply, limit_s
        )
        self._heartbeat.client_id = reply.client_id
        self._lease_s = reply.lease_s
        now = time.monotonic()
        self._served = self._heard = self._next_request = self._heartbeat.due = now
        self._extend_lease(now)
        return reply.state

    def _fetch(self, state: pb.IterationState) -> None:
        try:
            self._update(state)
            self._joined.set()
            while not self.buffer.closed and not (self._over and self.buffer.buffered == 0):
                now = time.monotonic()
                self._send_heartbeat(now)
                if not self._over:
                    self._send_requests(now)
                self._sleep(now)
                self._take_heartbeat()
                self._take_replies()
                self._check_deadlines(now)
                self._check_end()
        except BaseException as error:
            if self._leases:
                self.buffer.discard(error)
            raise
        finally:
            self.buffer.on_room = lambda: None
            self._leave()

    def _sleep(self, now: float) -> None:
        """Sleep until a reply has come, the user has taken elements, or something is due."""
        due = [now + HEARTBEAT_S]
        if self._heartbeat.sent is None:
            due.append(self._heartbeat.due)
        if self._next_request > now:
            due.append(self._next_request)
        with contextlib.suppress(DeadlineExceededError):
            self._wake.wait(max(min(due) - now, 0.0))
        # Renewed before the replies are taken, so that a later reply wakes this thread.
        self._wake = self._endpoint.work("a reply to a consumer")

    def _on_reply(self, _: Work) -> None:
        self._wake.complete()

    def _wake_up(self) -> None:
        # A garbage collection, on any thread, may close a buffer and so call this method. On the
        # fetcher's thread the method must not take the lock of the wake-up, which the thread may
        # hold already.
        if threading.get_ident() != self.thread.ident:
            self._wake.complete()

    def _leave(self) -> None:
        """Tell the dispatcher that this consumer leaves. The dispatcher may be gone already."""
        self._is_leaving = True
        try:
            self._heartbeat.leave(_LEAVE_S)
        except Error as error:
            logger.debug("a consumer could not tell the dispatcher that it leaves: %s", error)

    # The dispatcher

    def _send_heartbeat(self, now: float) -> None:
        beat, leased_until = self._heartbeat, self.buffer.leased_until
        if beat.sent is not None and beat.sent < leased_until < now:
            # Without an answer for so long, the dispatcher may have given this consumer up, and its
            # elements to other consumers. Only the answer to a new heartbeat tells.
            beat.withdraw()
            beat.due = now
        if beat.sent is not None or now < beat.due:
            return
        version = -1 if now > leased_until else self._state.version
        at_end = self._all_ended() and not self._over
        try:
            beat.send(version, at_end=at_end, on_reply=self._on_reply)
        except UnavailableError as error:
            self._miss_dispatcher(error, now)

    def _take_heartbeat(self) -> None:
        beat, now = self._heartbeat, time.monotonic()
        sent = beat.sent
        try:
            state = beat.poll()
        except (DeadlineExceededError, UnavailableError) as error:
            self._miss_dispatcher(error, now)
            return
        except NotFoundError as error:
            self.buffer.discard(error)
            raise
        if state is None or sent is None:
            return
        self._heard = now
        self._extend_lease(sent)
        self._update(state)
        if state.beat_soon:
            beat.due = now
        # A worker may have joined after the others had ended. Only the answer to a heartbeat that
        # was sent after that end shows that no worker has.
        if beat.at_end and self._all_ended():
            self._over = state.over
            if not self._over:
                # Another consumer may have left, so that its elements are at the workers again.
                for task in self._tasks.values():
                    task.ended = False

    def _miss_dispatcher(self, error: Error, now: float) -> None:
        """Wait for a dispatcher that may be restarting. Raise the error after the time limit."""
        self._heartbeat.due = now + HEARTBEAT_S
        limit_s = self._terms.start_timeout_s
        if self._endpoint.address.protocol == "mpi" and isinstance(error, UnavailableError):
            limit_s = 0.0
        if now - self._heard > limit_s:
            raise error

    def _extend_lease(self, sent: float) -> None:
        """Extend the lease on the buffered elements after an answered message."""
        if self._leases:
            self.buffer.extend_lease(sent + self._lease_s)

    def _update(self, state: pb.IterationState) -> None:
        """Process the state of the iteration that the dispatcher has sent."""
        dropped = state.dropped - self._state.dropped
        if dropped > 0:
            logger.warning(
                "%d parts of this iteration are lost with their data workers (delivery="
                "'at_most_once')",
                dropped,
            )
        if self._is_served:  # until now
            self._served = time.monotonic()
        self._state = state
        if self._mode.seeks:
            for part in state.ended:
                if part.total >= 0:
                    self._note_extent(part.part, part.total, end=True)
        for task_id in state.settle:
            # The worker is lost, and another worker will continue the part. Ignore later replies of
            # the lost worker, and report the elements that have come.
            self._tasks.pop(task_id, None)
            self._heartbeat.settled.add(task_id)
            self._heartbeat.due = 0.0
        self._update_tasks(state.tasks)
        self._got_tasks |= bool(self._tasks)
        if state.finished and not self._got_tasks and not self._over:
            self._over = True
            self._explain_missing_elements()

    def _update_tasks(self, addresses: Iterable[pb.TaskAddress]) -> None:
        live = {address.task_id: address for address in addresses}
        for task_id in [task_id for task_id in self._tasks if task_id not in live]:
            task = self._tasks.pop(task_id)
            if not (task.ended or task.broken):
                self._last_loss = f" of the loss of {task.worker} (the dispatcher has given it up)"
        for task_id, address in live.items():
            if task_id not in self._tasks:
                self._tasks[task_id] = _Task(task_id, address.worker, address.part)
        self._heartbeat.unreachable.intersection_update(self._tasks)

    # The workers

    def _send_requests(self, now: float) -> None:
        """Request as many elements from the workers as there is room for."""
        tasks = [task for task in self._tasks.values() if not (task.ended or task.broken)]
        if not tasks or now < self._next_request:
            return
        limit = self._limit
        if limit is None and self._mode.is_first_come:
            consumed = self._received - self.buffer.buffered
            limit = max(_FIRST_SHARED * len(tasks), consumed // _SHARED_PART)
        most, budget, hold = _ELEMENTS_PER_REPLY, float("inf"), True
        if limit is not None:
            needed = self.buffer.needed_part
            for task in tasks:
                if task.part == needed and not task.calls:
                    # Even beyond the limit: all buffered elements may come after this element.
                    self._request_elements(task, now, 1, hold=True)
            most = min(max(limit // (_REQUESTS_PER_TASK * len(tasks)), 1), most)
            requested = sum(call.elements for task in tasks for call in task.calls)
            budget = limit - requested - self.buffer.buffered
            # With fewer requests than workers, a slow worker must not hold a request.
            hold = limit >= len(tasks)
            tasks.sort(key=lambda task: task.sequence)  # in turn
        for outstanding in range(_REQUESTS_PER_TASK):
            for task in tasks:
                if budget <= 0:
                    return
                if len(task.calls) == outstanding and self.buffer.has_room(task.part):
                    elements = int(min(most, budget))
                    if not task.broken and self._request_elements(task, now, elements, hold=hold):
                        budget -= elements

    def _request_elements(self, task: _Task, now: float, elements: int, *, hold: bool) -> bool:
        """Send a request to a worker. Return False if the worker is gone."""
        body = pb.GetElementRequest(
            task_id=task.id,
            client_id=self._heartbeat.client_id,
            sequence=task.sequence,
            max_elements=elements,
            hold=hold,
            consumer_index=self._request.consumer_index,
            trainer_id=self._trainer_id,
            codec=self._codecs.of(task.worker),
        )
        if self._mode.seeks:
            body.acknowledged = self.buffer.watermark(task.part)
            if task.plan is None:
                task.plan = plan = self.buffer.plan(task.part)
                body.seek, body.start = True, plan.start
                body.period, body.offset, body.until = plan.period, plan.offset, max(plan.until, 0)
        elif self._mode.is_first_come:
            body.used.bounds.extend(self._heartbeat.take_consumed(task.part))
        task.sequence += 1
        try:
            # _check_deadlines() applies _REPLY_LIMIT_S in place of the endpoint's timeout.
            work = self._endpoint.call(
                task.worker,
                "data_worker/GetElement",
                body.SerializeToString(),
                timeout=float("inf"),
            )
        except Error as error:
            self._break(task, error)
            return False
        work.add_done_callback(self._on_reply)
        task.calls.append(_Call(work, now, elements, task.plan, body.codec))
        return True

    def _take_replies(self) -> None:
        """Process the replies that have come, for each task in the order of the requests.

        Raises:
            Exception: A worker or a user's function failed.
        """
        for task in list(self._tasks.values()):
            while task.calls and task.calls[0].work.is_completed():
                call = task.calls.popleft()
                try:
                    reply = call.work.result()
                except (
                    CancelledError,
                    DistNetworkError,
                    NotFoundError,
                    UnavailableError,
                    UnimplementedError,  # from a worker that is stopping: its handlers are removed
                ) as error:
                    self._break(task, error)
                    break
                except FailedPreconditionError:
                    raise
                except Error as error:
                    raise UnavailableError(
                        f"data worker {task.worker} failed (task {task.id}): {error}"
                    ) from error
                # Ignore a reply under an earlier plan, or of a lost task: its elements are
                # requested again.
                if call.plan is task.plan and task.id in self._tasks:
                    body = pb.GetElementReply.FromString(reply.body)
                    self._take_reply(task, call, body, reply.buffers)

    def _take_reply(
        self, task: _Task, call: _Call, body: pb.GetElementReply, buffers: Sequence[Array]
    ) -> None:
        if body.count:
            if self._endpoint.address.protocol == "inproc":
                # The arrays belong to the worker, which may send them to other consumers, too.
                buffers = [buffer.copy() for buffer in buffers]
            parcel = Parcel(body.pickle, buffers, body.sizes).expand(call.codec)
            self._codecs.learn(task.worker, parcel.buffers)
            nbytes = len(parcel.pickle) + sum(int(buffer.nbytes) for buffer in parcel.buffers)
            stride = 1 if call.plan is None else call.plan.period
            self.buffer.put(Frame(parcel, body.count, nbytes, task.part, body.first, stride))
            self._received += body.count
            self._failing_since = None
            self._empty_replies = 0
            self._pauses.reset()
        if body.failure:
            raise unpack_error(body.failure)
        if self._mode.seeks:
            self._note_extent(task.part, body.stop, end=body.end)
        if body.end:
            task.ended = True
        elif task.plan is not None and 0 <= task.plan.until <= body.stop:
            task.plan = None
        elif not body.count and not body.stop:
            self._pause_if_all_are_empty()

    def _note_extent(self, part: int, stop: int, *, end: bool) -> None:
        if not self.buffer.note_extent(part, stop, end):
            return
        for task in self._tasks.values():
            task.plan = None
            # This consumer may now need elements of a part that it had finished, perhaps only after
            # another part has ended.
            plan = self.buffer.plan(task.part)
            task.ended &= plan.period == 0 and plan.until < 0

    def _pause_if_all_are_empty(self) -> None:
        self._empty_replies += 1
        if self._empty_replies >= len(self._tasks):
            self._empty_replies = 0
            self._next_request = time.monotonic() + self._pauses.next_sleep()

    def _break(self, task: _Task, error: Error) -> None:
        """Stop the requests to a lost worker. Another worker will get the part."""
        now = time.monotonic()
        task.broken = str(error)
        task.calls.clear()
        if self._failing_since is None:
            self._failing_since = now
        self._last_loss = f" of the loss of {task.worker} ({error})"
        self._heartbeat.unreachable.add(task.id)
        self._heartbeat.due = min(self._heartbeat.due, now + _LOSS_DELAY_S)
        logger.info("data worker %s failed (task %d): %s", task.worker, task.id, error)

    # Ends and errors

    @property
    def _has_worker(self) -> bool:
        return any(not task.broken for task in self._tasks.values())

    @property
    def _is_served(self) -> bool:
        """True if a worker works for this consumer, or no worker needs to."""
        state = self._state
        served = self._has_worker or state.elsewhere or self._over or state.finished
        return bool(served or (state.given_out and not (state.waiting or state.settle)))

    def _all_ended(self) -> bool:
        """Return whether no more elements can come, as far as this consumer knows."""
        state = self._state
        if state.waiting or state.settle or (self._mode.is_first_come and self.buffer.buffered):
            return False
        if not self._tasks:
            # Elements of other consumers, or of workers for other consumers, may still come here.
            return bool(state.finished or state.given_out or state.elsewhere)
        # The unanswered requests may get elements that another consumer gives back.
        return all(
            task.ended and not (self._mode.is_first_come and task.calls)
            for task in self._tasks.values()
        )

    def _check_end(self) -> None:
        beat = self._heartbeat
        if self._over:
            if self.buffer.lacks_elements:
                self._explain_missing_elements()
            self.buffer.finish()
        elif self._all_ended():
            # The next heartbeat asks about the end. Do not wait for a heartbeat that does not ask.
            if beat.sent is not None and not beat.at_end:
                beat.withdraw()
            if beat.sent is None:
                beat.due = 0.0

    def _explain_missing_elements(self) -> None:
        if self._has_explained:
            return
        self._has_explained = True
        number = self._request.repetition
        # A first iteration that is over is probably a mistake. A later one may just be short.
        logger.log(
            logging.INFO if number else logging.WARNING,
            "iteration %d of its job was over before this consumer came, which gets no "
            "elements; apply distribute() once, outside the loop over epochs, and use another "
            "job_name to read all elements again; if other consumers were faster, let all meet at "
            "a barrier before the first epoch",
            number,
        )

    def _check_deadlines(self, now: float) -> None:
        """Raise an error if a worker, or all of them, have been missing for too long."""
        for task in self._tasks.values():
            if not task.calls or now - task.calls[0].sent <= _SILENT_S:
                continue
            self._heartbeat.unreachable.add(task.id)
            if now - task.calls[0].sent > _REPLY_LIMIT_S:
                raise DeadlineExceededError(
                    f"no answer within {_REPLY_LIMIT_S:g} s: {task.calls[0].work.name}; the data "
                    "worker hangs or has ended"
                )
        limit_s = self._terms.start_timeout_s
        if self._last_loss and self._endpoint.address.protocol == "mpi":
            limit_s = min(limit_s, _WORLD_PATIENCE_S)
        if self._is_served:
            self._served = now
        elif now - self._served > limit_s:
            rest = " for the rest of the dataset" if self._state.waiting else ""
            if self._terms.job.num_consumers > 1:
                rest = f" that all {self._terms.job.num_consumers} consumers may read{rest}"
            verb = "is left" if self._last_loss else "has registered"
            raise UnavailableError(
                f"no data worker{rest} {verb} at the dispatcher {self._dispatcher.peer} within "
                f"{limit_s:g} s{self._last_loss}. {_START_ONE}"
            )
        failing_since = self._failing_since
        if self._has_worker and failing_since is not None and now - failing_since > limit_s:
            raise UnavailableError(
                f"no data worker has delivered an element for {limit_s:g} s: they fail "
                f"repeatedly, last{self._last_loss}"
            )

    def _awaited(self) -> Awaited:
        """Describe a wait in a few words. Called on the user's thread, hence the copies."""
        if not self._heartbeat.client_id:
            return self._dispatcher.awaited()
        name = self._request.job_name
        job = f"job {name!r}" if name else "a job of its own"
        if self._heartbeat.at_end and self._heartbeat.sent is not None:
            return f"the last elements of {job}, which other consumers hold", ()
        tasks, needed = list(self._tasks.values()), self.buffer.needed_part
        running = [task for task in tasks if not (task.ended or task.broken)]
        # Under a fixed order, one part has the next element.
        workers = [task.worker for task in running if task.part == needed]
        workers = list(dict.fromkeys(workers or [task.worker for task in running]))
        if not workers:
            dispatcher = self._dispatcher.peer
            return f"a data worker for {job} at the dispatcher {dispatcher}", ()
        names = [task_at(self._endpoint, worker) or worker for worker in workers]
        return f"elements of {job} from {', '.join(names)}", tasks_at(self._endpoint, workers)

    def _waits_for(self) -> str:
        """Describe the cause of a long wait. Called on the user's thread, hence the copies."""
        dispatcher, limit_s = self._dispatcher.peer, self._terms.start_timeout_s
        if not self._heartbeat.client_id:
            return missing_dispatcher(dispatcher, self._endpoint.address.protocol, limit_s)
        tasks = list(self._tasks.values())
        if not tasks and self._state.elsewhere:
            return (
                f"its share of {self._state.elsewhere} parts of the dataset, which data workers "
                "with the tag COLOCATED, or in other processes, have: only the consumers there can "
                "read them; if one leaves, others get the rest"
            )
        now = time.monotonic()
        sent = self._heartbeat.sent
        if self._heartbeat.at_end and sent is not None:
            return (
                f"the end of the epoch: other consumers of the dispatcher {dispatcher} have the "
                "last elements, and have sent no heartbeat lately. The elements of a consumer that "
                "is gone come to this one"
            )
        if not tasks:
            return (
                f"a data worker; none has registered at the dispatcher {dispatcher}. "
                f"{_START_ONE}. This fails after {limit_s:g} s"
            )
        workers = []
        for task in tasks:
            calls = list(task.calls)
            silent = f"unanswered for {now - calls[0].sent:.3g} s" if calls else "not asked"
            state = "lost" if task.broken else "ended" if task.ended else silent
            workers.append(f"{task.worker} (task {task.id}, {state})")
        if sent is not None and now - sent > 2.0:
            dispatcher += f" (unanswered for {now - sent:.3g} s)"
        return (
            f"elements from the data workers {', '.join(workers)} of the dispatcher {dispatcher}. "
            "A worker that has not answered for more than 10 s hangs or is gone; on the other "
            "workers a function of the dataset is slow, or hangs"
        )
