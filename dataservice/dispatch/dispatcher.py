"""The dispatcher: the registry, served at an endpoint.

An answer leaves after its changes are durable, and a heartbeat's when there is news.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps

from google.protobuf.message import Message

from dataservice.dispatch.journal import Journal
from dataservice.dispatch.messages import (
    iteration_response,
    record_of,
    restore,
    state_response,
    status_response,
    task_response,
)
from dataservice.dispatch.records import Client, Iteration, Key, Outcome, Record, Timeouts
from dataservice.dispatch.registry import Registry
from dataservice.options import DispatcherConfig, seconds_of
from dataservice.payload import Array, Parcel
from dataservice.proto import dataservice_pb2 as pb
from dataservice.snapshot import metadata
from mpidist import LATER, Address, Endpoint, Reply, Request
from mpidist.errors import (
    DataLossError,
    DistNetworkError,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    from_code,
)

logger = logging.getLogger(__name__)

# One sequence for all dispatchers of the process. A dispatcher may start at the address of another,
# and must not know the ids of the workers and consumers that are still there. The sequence begins
# at a random number, because those may be of another process.
_IDS = itertools.count(1 + secrets.randbits(31))
_TICK_S = 0.25
# How long close() waits for a commit.
_CLOSE_S = 30.0
# A worker that a consumer cannot reach is lost if it has been silent for these seconds, too.
_SILENT_S = 2.5
# Room in the record of a dataset for more than the dataset.
_FRAMING_BYTES = 1 << 20
# Parts of snapshots that a worker writes at a time, as in TensorFlow.
_SAVES = 3
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

    Attributes:
        waits_for_disk: Whether all answers wait for room on the disk; for the thread that writes.
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
        self.waits_for_disk = False

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
            self.waits_for_disk = self._waits_for_room(error, now)
            with self._lock:
                self._writing = False
                self._outcome.changed = changed | self._outcome.changed
                if self.waits_for_disk:
                    self._unwritten = unwritten + self._unwritten
                    return
            logger.exception("the dispatcher's journal cannot be written")
            for request, _ in unwritten:
                request.fail(error)
            return
        self._full_since, self.waits_for_disk = None, False
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
            if not (client.dismiss_if_done() or news or client.is_asked_for):
                self._parked.append(entry)
                continue
            reply = Reply(iteration_response(client).SerializeToString())
            if self._journal is None:
                entry.request.reply(reply.body)
            else:
                self._unwritten.append((entry.request, reply))

    def _carry_out(self) -> None:
        """Send workers the tasks to begin and the tasks and clients to forget. Log losses."""
        outcome = self._outcome.take()
        # Changes that came during the commit are for the next one.
        self._outcome.changed = outcome.changed
        for loss in outcome.losses:
            logger.warning("%s", loss)
        for worker, update in outcome.updates.items():
            self.notify(worker, "UpdateTasks", update)


Handler = Callable[["Dispatcher", Request], Reply]


def _handler(method: Handler) -> Callable[[Dispatcher, Request], Reply]:
    """Wrap a method that changes the registry: its answer leaves when the change is durable."""

    @wraps(method)
    def handle(self: Dispatcher, request: Request) -> Reply:
        with self._lock:
            reply = method(self, request)
            return self._answers.release(request, reply)

    return handle


class Dispatcher:
    """Serves ``dispatcher/...`` at an endpoint, on the endpoint's serving thread, until it closes.

    Args:
        endpoint: An open endpoint. The caller runs its serving loop.
        config: Its timeouts, and the folder of its journal.
        failed: Called with the error of a bug that ends the dispatcher, on the dispatcher's thread.

    Raises:
        DataLossError: The journal is damaged.
        FailedPreconditionError: Another dispatcher uses it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: DispatcherConfig,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._endpoint = endpoint
        self._failed = failed
        restored: set[int] = set()  # ids in the journal, which must not be given again
        self._registry = Registry(
            Timeouts(
                worker_s=seconds_of(config.worker_timeout_ms, 60.0),
                client_s=seconds_of(config.client_timeout_ms, 300.0),
                iteration_s=seconds_of(config.job_gc_timeout_ms, 300.0),
            ),
            itertools.filterfalse(restored.__contains__, _IDS),
            config.worker_addresses or (),
        )
        self._check_period_s = seconds_of(config.job_gc_check_interval_ms, 1.0)
        self._next_check = time.monotonic() + self._check_period_s
        self._most_saves = config.worker_max_concurrent_snapshots or _SAVES
        self._parcels: dict[int, Parcel] = {}
        self._journal: Journal | None = None
        if config.work_dir is not None and config.fault_tolerant_mode:
            self._journal, self._parcels = _take_up(config.work_dir, self._registry, restored)
        self._lock = threading.RLock()
        self._answers = Answers(endpoint, self._registry, self._parcels, self._journal, self._lock)
        self._closed = False
        handlers = (
            self.GetOrRegisterDataset,
            self.GetDataset,
            self.GetDatasetInfo,
            self.GetOrCreateIteration,
            self.SaveDataset,
            self.GetState,
            self.GetStatus,
            self.ClientHeartbeat,
            self.ReleaseClient,
            self.RegisterWorker,
            self.WorkerHeartbeat,
            self.UnregisterWorker,
            self.GetTask,
            self.GetSplit,
            self.FinishTask,
        )
        endpoint.register("dispatcher", {handler.__name__: handler for handler in handlers})
        self._workers_of: dict[str, set[int]] = {}  # by the process that speaks for them
        endpoint.on_peer_lost(self._lose)
        self._thread = threading.Thread(
            target=self._run, name="dataservice-dispatcher", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop; the endpoint is closed next. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._answers.wake()
        failing = self._thread is threading.current_thread()
        if not failing:
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive() and not failing:
            logger.warning("the dispatcher is still busy %g s after close()", _CLOSE_S)
        elif self._journal is not None:
            # Workers go on: the next dispatcher of this journal knows them.
            self._journal.close()
        if self._journal is not None:
            return
        with self._lock:  # workers may be leaving
            workers = list(self._registry.workers.values())
        for worker in workers:
            body = pb.WorkerRequest(worker_id=worker.id)
            self._answers.notify(worker.address, "DispatcherStopped", body)

    # Handlers are named as in the .proto file.

    @_handler
    def GetOrRegisterDataset(self, request: Request) -> Reply:
        """Answer with the id of a dataset; 0 if its pickle is needed first."""
        body = pb.RegisterDatasetRequest.FromString(request.body)
        dataset = self._registry.datasets.find(body)
        if dataset is None and body.pickle:
            if self._journal is not None:
                # A record that cannot be written would block all later commits.
                nbytes = body.ByteSize() + sum(buffer.nbytes for buffer in request.buffers)
                self._journal.check_size(body.summary, nbytes + _FRAMING_BYTES)
            dataset = self._registry.datasets.register(body)
            # Over inproc the arrays are the sender's own.
            self._parcels[dataset.id] = Parcel(body.pickle, request.buffers)
        if dataset is None:
            return _reply(pb.RegisterDatasetReply())
        return _reply(pb.RegisterDatasetReply(dataset_id=dataset.id, name=dataset.name))

    def GetDataset(self, request: Request) -> Reply:
        """Answer with a dataset."""
        dataset_id = pb.GetDatasetRequest.FromString(request.body).dataset_id
        parcel = self._parcels.get(dataset_id)
        if parcel is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return _reply(pb.Dataset(pickle=parcel.pickle), parcel.buffers)

    def GetDatasetInfo(self, request: Request) -> Reply:
        """Answer with the description of a dataset."""
        name = pb.DatasetInfoRequest.FromString(request.body).name
        with self._lock:
            dataset = self._registry.datasets.named(name)
        known = dataset.request
        return _reply(
            pb.DatasetInfo(
                dataset_id=dataset.id,
                summary=known.summary,
                spec=known.spec,
                cardinality=known.cardinality,
                source_length=known.source_length,
                identity=known.identity,
            )
        )

    @_handler
    def GetOrCreateIteration(self, request: Request) -> Reply:
        """Make the caller a client of an iteration."""
        body = pb.IterationRequest.FromString(request.body)
        client = self._registry.join(body, secrets.randbits(63), time.monotonic())
        client.peer = request.process
        lease = self._registry.timeouts.lease_s
        reply = pb.IterationReply(
            client_id=client.id, state=iteration_response(client), lease_s=lease
        )
        if client.iteration.begin is not None:
            reply.begin.CopyFrom(client.iteration.begin)
        return _reply(reply)

    @_handler
    def SaveDataset(self, request: Request) -> Reply:
        """Have workers save a dataset."""
        body = pb.SaveRequest.FromString(request.body)
        dataset = self._registry.datasets.get(body.dataset_id).request
        streams = len(self._registry.workers)
        if not streams:
            raise FailedPreconditionError(
                "no data worker has registered at this dispatcher, and each worker writes a "
                "stream: start the workers before distributed_save()"
            )
        if dataset.source_length < 0:
            streams = 1  # its parts depend on each other
        metadata.create(body.path, streams, dataset.summary, body.spec, body.compression or None)
        self._registry.save(body.dataset_id, body.path, streams, secrets.randbits(63))
        return Reply()

    @_handler
    def GetState(self, request: Request) -> Reply:
        """Complete the state of a client's iteration."""
        body = pb.StateRequest.FromString(request.body)
        client = self._registry.heartbeat_client(
            pb.ClientRequest(client_id=body.client_id), time.monotonic()
        )
        return _reply(state_response(client.iteration, body.parts))

    def GetStatus(self, request: Request) -> Reply:
        """Answer with the status of the service."""
        with self._lock:
            return _reply(status_response(self._registry, time.monotonic()))

    @_handler
    def ClientHeartbeat(self, request: Request) -> Reply:
        """Answer with the tasks of a client's iteration, when there is anything new."""
        body = pb.ClientRequest.FromString(request.body)
        now = time.monotonic()
        client = self._registry.heartbeat_client(body, now)
        for task_id in body.unreachable:
            self._registry.report_unreachable(task_id, now, _SILENT_S)
        client.peer = request.process
        news = body.version != client.iteration.version or body.settled
        if not (client.dismiss_if_done() or news):
            self._answers.park(request, client, now)
            return LATER
        return _reply(iteration_response(client))

    @_handler
    def ReleaseClient(self, request: Request) -> Reply:
        """Remove a client from its iteration."""
        body = pb.ClientRequest.FromString(request.body)
        self._registry.release_client(body, time.monotonic())
        return Reply()

    @_handler
    def RegisterWorker(self, request: Request) -> Reply:
        """Add a worker."""
        body = pb.RegisterWorkerRequest.FromString(request.body)
        try:
            Address.of(body.address)  # consumers are told it as it is
        except ValueError as error:
            raise InvalidArgumentError(f"a data worker gave an invalid address: {error}") from error
        worker = self._registry.register_worker(
            body.address, body.process, list(body.tags), time.monotonic()
        )
        self._workers_of.setdefault(request.process, set()).add(worker.id)
        logger.info("worker %s registered", body.address)
        return _reply(pb.RegisterWorkerReply(worker_id=worker.id))

    @_handler
    def WorkerHeartbeat(self, request: Request) -> Reply:
        """Answer with the tasks that a worker shall forget, and the tasks that it shall begin."""
        body = pb.WorkerRequest.FromString(request.body)
        forget = self._registry.heartbeat_worker(body, time.monotonic())
        # It may have registered before this dispatcher was started again.
        self._workers_of.setdefault(request.process, set()).add(body.worker_id)
        self._finish(body)
        begin = self._registry.tasks_to_begin(body.worker_id, self._most_saves)
        return _reply(pb.TasksUpdate(forget=forget, begin=begin))

    @_handler
    def UnregisterWorker(self, request: Request) -> Reply:
        """Remove a worker."""
        self._registry.unregister_worker(pb.WorkerRequest.FromString(request.body).worker_id)
        return Reply()

    @_handler
    def GetTask(self, request: Request) -> Reply:
        """Start a task for a worker; answer with its description."""
        task = self._registry.start_task(pb.TaskRequest.FromString(request.body).task_id)
        return _reply(task_response(task))

    @_handler
    def GetSplit(self, request: Request) -> Reply:
        """Answer with source indices; none if the pass has been given out."""
        body = pb.GetSplitRequest.FromString(request.body)
        split = self._registry.next_split(body.task_id, body.position)
        return _reply(pb.Split(start=split.start, stop=split.stop))

    @_handler
    def FinishTask(self, request: Request) -> Reply:
        """Take the number of elements of a part."""
        self._finish(pb.WorkerRequest.FromString(request.body))
        return Reply()

    # Inside

    def _lose(self, process: str) -> None:
        """Lease the parts of the workers of a process that is gone to others."""
        with self._lock:
            self._registry.lose_clients(process)
            for worker_id in self._workers_of.pop(process, set()):
                self._registry.lose_worker(worker_id, "its connection broke")
            self._answers.release(None, LATER)

    def _finish(self, body: pb.WorkerRequest) -> None:
        for progress in body.progress:
            if progress.code:
                self._registry.fail_save(progress.task_id, progress.code, progress.message)
            elif progress.ended:
                self._registry.finish_task(
                    progress.task_id, progress.total, used_up=progress.used_up
                )

    def _run(self) -> None:
        """Check timeouts and write the journal until close(). A bug ends the dispatcher."""
        try:
            self._run_until_closed()
        except BaseException as error:
            self._failed(error)
            raise  # in a job, an uncaught error ends all ranks, and says why

    def _run_until_closed(self) -> None:
        while not self._closed:
            self._answers.wait(_TICK_S)
            with self._lock:
                now = time.monotonic()
                self._check_timeouts(now)
                saves = self._registry.ended_saves()
            for iteration in saves:
                _write_end(iteration)
            with self._lock:
                for iteration in saves:
                    self._registry.end_save(iteration)
                self._answers.release(None, LATER, now)
            self._answers.write(now)

    def _check_timeouts(self, now: float) -> None:
        """Give up silent workers and clients, unless this dispatcher lets them wait."""
        if self._answers.waits_for_disk:
            self._registry.hear_all(now)
        elif now >= self._next_check:
            self._next_check = now + self._check_period_s
            self._registry.expire(now)


def _take_up(
    directory: str, registry: Registry, ids: set[int]
) -> tuple[Journal, dict[int, Parcel]]:
    """Open a journal, and restore a registry from it.

    Args:
        directory: The directory of the journal.
        registry: An empty registry.
        ids: Takes the ids of the records.

    Returns:
        The journal, and the datasets by id.
    """
    with contextlib.ExitStack() as undo:
        journal = undo.enter_context(contextlib.closing(Journal(directory)))
        tables = journal.load()
        ids.update(*tables.values())
        try:
            parcels = restore(registry, tables, time.monotonic())
        except DataLossError as error:
            raise journal.damaged(str(error)) from error
        undo.pop_all()
    return journal, parcels


def _write_end(save: Iteration) -> None:
    """Write the end of a save into its snapshot. If this process dies, the next one does it."""
    path, (code, message) = save.job.terms.path, save.failure
    try:
        if code:
            metadata.fail(path, from_code(code, message))
        else:
            metadata.finish(path)
    except (Error, OSError) as error:
        logger.exception("the snapshot %s cannot be completed", path)
        # If not even that can be written, consumers that wait for it report that they do.
        with contextlib.suppress(Error, OSError):
            metadata.fail(path, error)


def _reply(body: Message, buffers: Sequence[Array] = ()) -> Reply:
    return Reply(body.SerializeToString(), buffers)
