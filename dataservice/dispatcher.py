"""The dispatcher: the registry, served at an endpoint."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Sequence

from google.protobuf.message import Message

from dataservice.config import DispatcherConfig, ShardingPolicy, seconds_of
from dataservice.proto import dataservice_pb2 as pb
from dataservice.records import Iteration, Removal, TaskState, Timeouts
from dataservice.registry import Registry
from dataservice.wire import Array, Parcel
from mpidist import Endpoint, Reply, Request
from mpidist.errors import DistNetworkError

logger = logging.getLogger(__name__)

# One sequence for all dispatchers of the process: one may start at the address of another, whose
# workers and consumers are still there, and what they hold must mean nothing to it. It begins
# anywhere, for the dispatchers of other processes.
_IDS = itertools.count(1 + secrets.randbits(31))


class Dispatcher:
    """Serves ``dispatcher/...`` at an endpoint, on the endpoint's serving thread, until it closes.

    Args:
        endpoint: Open; somebody else runs its serving loop.
        config: Its times.
    """

    def __init__(self, endpoint: Endpoint, config: DispatcherConfig) -> None:
        self._endpoint = endpoint
        self._registry = Registry(
            Timeouts(
                worker_s=seconds_of(config.worker_timeout_ms, 60.0),
                client_s=seconds_of(config.client_timeout_ms, 300.0),
                iteration_s=seconds_of(config.job_gc_timeout_ms, 300.0),
            ),
            _IDS,
        )
        self._check_period_s = seconds_of(config.job_gc_check_interval_ms, 1.0)
        self._next_check = time.monotonic() + self._check_period_s
        self._datasets: dict[int, Parcel] = {}
        handlers = (
            self.GetOrRegisterDataset,
            self.GetDataset,
            self.GetOrCreateIteration,
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

    def close(self) -> None:
        """Local. Tell the workers that nobody will coordinate them; the endpoint is closed next."""
        for worker in self._registry.workers:
            body = pb.WorkerRequest(worker_id=worker.id)
            self._tell(worker.address, "DispatcherStopped", body)

    # Handlers are named as in the .proto file.

    def GetOrRegisterDataset(self, request: Request) -> Reply:
        """Local. Answer with the id of a dataset; 0 if its pickle is needed first."""
        body = pb.RegisterDatasetRequest.FromString(request.body)
        dataset_id = self._registry.dataset_id(body.digest)
        if body.pickle and not dataset_id:
            dataset_id = self._registry.register_dataset(
                body.digest, body.summary, body.source_length
            )
            self._datasets[dataset_id] = Parcel(body.pickle, request.buffers)
        return _reply(pb.RegisterDatasetReply(dataset_id=dataset_id))

    def GetDataset(self, request: Request) -> Reply:
        """Local. Answer with a dataset."""
        parcel = self._datasets[pb.GetDatasetRequest.FromString(request.body).dataset_id]
        return _reply(pb.Dataset(pickle=parcel.pickle), parcel.buffers)

    def GetOrCreateIteration(self, request: Request) -> Reply:
        """Local. Make the caller a client of an iteration."""
        body = pb.IterationRequest.FromString(request.body)
        now = time.monotonic()
        client_id = self._registry.join_iteration(
            body.dataset_id,
            ShardingPolicy(body.policy),
            body.job_name or None,
            body.repetition,
            secrets.randbits(63),
            now,
        )
        state = _state(self._registry.heartbeat_client(client_id, now))
        return _reply(pb.IterationReply(client_id=client_id, state=state))

    def ClientHeartbeat(self, request: Request) -> Reply:
        """Local. Answer with the tasks of a client's iteration."""
        now = self._tick()
        client_id = pb.ClientRequest.FromString(request.body).client_id
        return _reply(_state(self._registry.heartbeat_client(client_id, now)))

    def ReleaseClient(self, request: Request) -> Reply:
        """Local. A client leaves its iteration."""
        client_id = pb.ClientRequest.FromString(request.body).client_id
        self._remove(self._registry.release_client(client_id, time.monotonic()))
        return Reply()

    def RegisterWorker(self, request: Request) -> Reply:
        """Local. Add a worker."""
        address = pb.RegisterWorkerRequest.FromString(request.body).address
        worker_id = self._registry.register_worker(address, time.monotonic())
        logger.info("worker %s registered", address)
        return _reply(pb.RegisterWorkerReply(worker_id=worker_id))

    def WorkerHeartbeat(self, request: Request) -> Reply:
        """Local. Answer with the tasks that a worker shall forget."""
        now = self._tick()
        body = pb.WorkerRequest.FromString(request.body)
        forget = self._registry.heartbeat_worker(body.worker_id, list(body.task_ids), now)
        return _reply(pb.RemoveTasksRequest(task_ids=forget))

    def UnregisterWorker(self, request: Request) -> Reply:
        """Local. A worker leaves."""
        self._registry.unregister_worker(pb.WorkerRequest.FromString(request.body).worker_id)
        return Reply()

    def GetTask(self, request: Request) -> Reply:
        """Local. A worker begins a task; answer with what it is."""
        task = self._registry.start_task(pb.TaskRequest.FromString(request.body).task_id)
        iteration = task.iteration
        return _reply(
            pb.Task(
                dataset_id=iteration.job.dataset.id,
                policy=pb.ShardingPolicy.Name(iteration.job.policy.value),
                repetition=iteration.repetition,
                seed=iteration.seed,
                worker_number=task.number,
            )
        )

    def GetSplit(self, request: Request) -> Reply:
        """Local. Answer with source indices; none if the pass has been given out."""
        body = pb.GetSplitRequest.FromString(request.body)
        split = self._registry.next_split(body.task_id, tuple(body.passes))
        return _reply(pb.Split(start=split.start, stop=split.stop))

    def FinishTask(self, request: Request) -> Reply:
        """Local. A worker has given all elements of a task to consumers."""
        task_id = pb.TaskRequest.FromString(request.body).task_id
        self._remove(self._registry.finish_task(task_id))
        return Reply()

    # Inside

    def _tick(self) -> float:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + self._check_period_s
            self._remove(self._registry.expire(now))
        return now

    def _remove(self, removals: Sequence[Removal]) -> None:
        for removal in removals:
            body = pb.RemoveTasksRequest(task_ids=[removal.task_id])
            self._tell(removal.worker_address, "RemoveTasks", body)

    def _tell(self, worker: str, method: str, body: Message) -> None:
        try:
            self._endpoint.notify(worker, f"data_worker/{method}", body.SerializeToString())
        except DistNetworkError:
            logger.debug("worker %s is gone, and its tasks with it", worker)


def _reply(body: Message, buffers: Sequence[Array] = ()) -> Reply:
    return Reply(body.SerializeToString(), buffers)


def _state(iteration: Iteration) -> pb.IterationState:
    lost = [task for task in iteration.tasks.values() if task.state is TaskState.LOST]
    open_tasks = [
        task
        for task in iteration.tasks.values()
        if task.state in (TaskState.ASSIGNED, TaskState.RUNNING)
    ]
    return pb.IterationState(
        tasks=[pb.TaskAddress(task_id=t.id, worker=t.worker.address) for t in open_tasks],
        lost=[pb.TaskAddress(task_id=t.id, worker=t.worker.address) for t in lost],
        finished=iteration.finished,
    )
