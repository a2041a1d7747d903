"""The dispatcher: the registry, served at an endpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps

from google.protobuf.message import Message

from dataservice.config import DispatcherConfig, seconds_of
from dataservice.dispatch.answers import Answers
from dataservice.dispatch.endings import decide, lease_s
from dataservice.dispatch.journal import Journal
from dataservice.dispatch.records import Timeouts
from dataservice.dispatch.registry import Registry
from dataservice.dispatch.saves import begin_save, end_save
from dataservice.dispatch.stored import restore
from dataservice.dispatch.told import told_client, told_state, told_status, told_task
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import Array, Parcel
from mpidist import LATER, Address, Endpoint, Reply, Request
from mpidist.errors import DataLossError, InvalidArgumentError, NotFoundError

logger = logging.getLogger(__name__)

# One sequence for all dispatchers of the process: one may start at the address of another, whose
# workers and consumers are still there, and what they hold must mean nothing to it. It begins
# anywhere, for the dispatchers of other processes.
_IDS = itertools.count(1 + secrets.randbits(31))
_TICK_S = 0.25
# How long close() waits for what is being written.
_CLOSE_S = 30.0
# A worker that a consumer cannot reach is lost if it has been silent for so many seconds, too.
_SILENT_S = 2.5
# What the record of a dataset may have beside the dataset.
_FRAMING_BYTES = 1 << 20
# Parts of snapshots that a worker writes at a time, as TensorFlow has it.
_SAVES = 3

Handler = Callable[["Dispatcher", Request], Reply]


def _handler(method: Handler) -> Callable[[Dispatcher, Request], Reply]:
    """A method that changes the registry: the answer leaves when the change is durable."""

    @wraps(method)
    def handle(self: Dispatcher, request: Request) -> Reply:
        with self._lock:
            reply = method(self, request)
            return self._answers.settle(request, reply)

    return handle


class Dispatcher:
    """Serves ``dispatcher/...`` at an endpoint, on the endpoint's serving thread, until it closes.

    Args:
        endpoint: Open; somebody else runs its serving loop.
        config: Its times, and where its journal is.
        failed: Called with the error of a bug that ends the dispatcher, on the dispatcher's thread.

    Raises:
        DataLossError: The journal is damaged, or lacks the last commits.
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
            target=self._live, name="dataservice-dispatcher", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Local. Stop; the endpoint is closed next. Idempotent."""
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
            self._answers.tell(worker.address, "DispatcherStopped", body)

    # Handlers are named as in the .proto file.

    @_handler
    def GetOrRegisterDataset(self, request: Request) -> Reply:
        """Local. Answer with the id of a dataset; 0 if its pickle is needed first."""
        body = pb.RegisterDatasetRequest.FromString(request.body)
        dataset = self._registry.find_dataset(body)
        if dataset is None and body.pickle:
            if self._journal is not None:
                # One that could not be written would keep all that comes after it from being.
                nbytes = body.ByteSize() + sum(buffer.nbytes for buffer in request.buffers)
                self._journal.check_size(body.summary, nbytes + _FRAMING_BYTES)
            dataset = self._registry.register_dataset(body)
            # Over inproc the arrays are the sender's own.
            self._parcels[dataset.id] = Parcel(body.pickle, request.buffers)
        if dataset is None:
            return _reply(pb.RegisterDatasetReply())
        return _reply(pb.RegisterDatasetReply(dataset_id=dataset.id, name=dataset.name))

    def GetDataset(self, request: Request) -> Reply:
        """Local. Answer with a dataset."""
        dataset_id = pb.GetDatasetRequest.FromString(request.body).dataset_id
        parcel = self._parcels.get(dataset_id)
        if parcel is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return _reply(pb.Dataset(pickle=parcel.pickle), parcel.buffers)

    def GetDatasetInfo(self, request: Request) -> Reply:
        """Local. Answer with what is known of a dataset."""
        name = pb.DatasetInfoRequest.FromString(request.body).name
        with self._lock:
            dataset = self._registry.dataset_named(name)
        known = dataset.request
        return _reply(
            pb.DatasetInfo(
                dataset_id=dataset.id,
                summary=known.summary,
                spec=known.spec,
                cardinality=known.cardinality,
                source_length=known.source_length,
            )
        )

    @_handler
    def GetOrCreateIteration(self, request: Request) -> Reply:
        """Local. Make the caller a client of an iteration."""
        body = pb.IterationRequest.FromString(request.body)
        client = self._registry.join(body, secrets.randbits(63), time.monotonic())
        client.peer = request.process
        lease = lease_s(self._registry.timeouts)
        reply = pb.IterationReply(client_id=client.id, state=told_client(client), lease_s=lease)
        if client.iteration.begin is not None:
            reply.begin.CopyFrom(client.iteration.begin)
        return _reply(reply)

    @_handler
    def SaveDataset(self, request: Request) -> Reply:
        """Local. Have workers save a dataset."""
        begin_save(self._registry, pb.SaveRequest.FromString(request.body))
        return Reply()

    @_handler
    def GetState(self, request: Request) -> Reply:
        """Local. Complete the state of a client's iteration."""
        body = pb.StateRequest.FromString(request.body)
        client = self._registry.heartbeat_client(
            pb.ClientRequest(client_id=body.client_id), time.monotonic()
        )
        return _reply(told_state(client.iteration, body.parts))

    def GetStatus(self, request: Request) -> Reply:
        """Local. Answer with what the service is doing."""
        with self._lock:
            return _reply(told_status(self._registry, time.monotonic()))

    @_handler
    def ClientHeartbeat(self, request: Request) -> Reply:
        """Local. Answer with the tasks of a client's iteration, when there is anything new."""
        body = pb.ClientRequest.FromString(request.body)
        now = time.monotonic()
        client = self._registry.heartbeat_client(body, now)
        for task_id in body.unreachable:
            self._registry.report_unreachable(task_id, now, _SILENT_S)
        client.peer = request.process
        news = body.version != client.iteration.version or body.settled
        if not (decide(client) or news):
            self._answers.park(request, client, now)
            return LATER
        return _reply(told_client(client))

    @_handler
    def ReleaseClient(self, request: Request) -> Reply:
        """Local. A client leaves its iteration."""
        body = pb.ClientRequest.FromString(request.body)
        self._registry.release_client(body, time.monotonic())
        return Reply()

    @_handler
    def RegisterWorker(self, request: Request) -> Reply:
        """Local. Add a worker."""
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
        """Answer with the tasks that a worker shall forget, and those that it shall begin."""
        body = pb.WorkerRequest.FromString(request.body)
        forget = self._registry.heartbeat_worker(body, time.monotonic())
        # It may have registered before this dispatcher was started again.
        self._workers_of.setdefault(request.process, set()).add(body.worker_id)
        self._finish(body)
        begin = self._registry.tasks_to_begin(body.worker_id, self._most_saves)
        return _reply(pb.TasksUpdate(forget=forget, begin=begin))

    @_handler
    def UnregisterWorker(self, request: Request) -> Reply:
        """Local. A worker leaves."""
        self._registry.unregister_worker(pb.WorkerRequest.FromString(request.body).worker_id)
        return Reply()

    @_handler
    def GetTask(self, request: Request) -> Reply:
        """Local. A worker begins a task; answer with what it is."""
        task = self._registry.start_task(pb.TaskRequest.FromString(request.body).task_id)
        return _reply(told_task(task))

    @_handler
    def GetSplit(self, request: Request) -> Reply:
        """Local. Answer with source indices; none if the pass has been given out."""
        body = pb.GetSplitRequest.FromString(request.body)
        split = self._registry.next_split(body.task_id, tuple(body.passes), body.number)
        return _reply(pb.Split(start=split.start, stop=split.stop))

    @_handler
    def FinishTask(self, request: Request) -> Reply:
        """Local. A worker knows how many elements a part has."""
        self._finish(pb.WorkerRequest.FromString(request.body))
        return Reply()

    # Inside

    def _lose(self, process: str) -> None:
        """A process is gone; if workers were in it, others get their parts now."""
        with self._lock:
            self._registry.lose_clients(process)
            for worker_id in self._workers_of.pop(process, set()):
                self._registry.lose_worker(worker_id, "its connection broke")
            self._answers.settle(None, LATER)

    def _finish(self, body: pb.WorkerRequest) -> None:
        for progress in body.progress:
            if progress.code:
                self._registry.fail_save(progress.task_id, progress.code, progress.message)
            elif progress.ended:
                self._registry.finish_task(
                    progress.task_id, progress.total, used_up=progress.used_up
                )

    def _live(self) -> None:
        """Look after time, and write the journal. A bug ends the dispatcher."""
        try:
            self._look_after()
        except BaseException as error:
            self._failed(error)
            raise  # in a job, an uncaught error ends all ranks, and says why

    def _look_after(self) -> None:
        while not self._closed:
            self._answers.wait(_TICK_S)
            with self._lock:
                now = time.monotonic()
                self._look_at_time(now)
                saves = self._registry.ended_saves()
            for iteration in saves:
                end_save(iteration)
            with self._lock:
                for iteration in saves:
                    self._registry.end_save(iteration)
                self._answers.settle(None, LATER, now)
            self._answers.write(now)

    def _look_at_time(self, now: float) -> None:
        """Give up on those who are silent, unless it is we who let them wait."""
        if self._answers.holds:
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


def _reply(body: Message, buffers: Sequence[Array] = ()) -> Reply:
    return Reply(body.SerializeToString(), buffers)
