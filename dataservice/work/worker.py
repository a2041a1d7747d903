"""The data worker: runs tasks, and sends their elements to consumers."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import ExitStack

import numpy as np

from dataservice.auto_shard import auto_shard
from dataservice.calls import RpcClient, SlowWait, missing_dispatcher, own_metrics, process_name
from dataservice.dataset.base import Node
from dataservice.options import ShardingPolicy, WorkerConfig, seconds_of
from dataservice.payload import PROBE_BYTES, unpack_dataset
from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.task import Task
from mpidist import LATER, Endpoint, Reply, Request, Work
from mpidist.errors import AbortedError, CancelledError, Error, NotFoundError, UnavailableError
from mpidist.mpi import waiting_for

logger = logging.getLogger(__name__)

# A waiting request is answered without elements after so many rounds of at most so long, however
# long the heartbeat interval is: consumers take a worker that is silent for 12 s for a lost one.
_HOLD_ROUNDS = 10
_LONGEST_ROUND_S = 1.0
_GIVEN_UP = "the task was given up, or given to another data worker"
# Default size of the window that trainers share.
_CACHE_BYTES = 1 << 30
# How long close() waits for users' functions.
_CLOSE_S = 5.0
# How long a closed worker waits for the answers of a connected dispatcher. A stuck dispatcher must
# not use up the time of users' functions, and handles the request later, without the worker.
_LEAVE_S = 2.0
# Datasets that are kept for the next iteration.
_DATASETS = 8
# How often a waiting thread looks whether its task is closed, in seconds.
_STOP_PERIOD_S = 0.1


class Datasets:
    """Fetches datasets, and gives all tasks of one the same object, which may have a ``cache()``.

    Args:
        where: The worker in words, for the log.
        patience_s: How long to try to reach the dispatcher, in seconds.
    """

    def __init__(self, where: str, patience_s: float) -> None:
        self._where = where
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, ...], Future[Node]] = OrderedDict()

    def get(self, lease: pb.Task, dispatcher: RpcClient) -> Node:
        """Return the dataset of a task.

        Args:
            lease: The task.
            dispatcher: Calls the dispatcher, until the task is closed.

        Raises:
            CancelledError: The task is closed.
            NotFoundError: The dispatcher does not know the dataset.
            UnavailableError: The dispatcher cannot be reached.
        """
        policy = ShardingPolicy(lease.policy)
        is_sharded = policy not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
        key: tuple[int, ...] = (lease.dataset_id,)
        if is_sharded:
            key += lease.policy, lease.num_parts, lease.part
        while True:
            with self._lock:
                made = self._kept.get(key)
                if made is None:
                    mine = self._kept[key] = Future()
                    break
                self._kept.move_to_end(key)
            while not wait([made], _STOP_PERIOD_S).done:
                if dispatcher.stopped():
                    raise CancelledError("stopped while another task fetches the dataset")
            if made.exception() is None:
                return made.result()
            # The other task was closed, or has failed. This one tries it, for an error of its own.
        try:
            dataset = self._fetch(lease.dataset_id, dispatcher)
            if is_sharded:
                dataset = auto_shard(dataset, policy, lease.num_parts, lease.part)
            mine.set_result(dataset)
        except BaseException as error:
            with self._lock:
                self._kept.pop(key, None)
            mine.set_exception(error)
            raise
        self._evict()
        return dataset

    def _fetch(self, dataset_id: int, dispatcher: RpcClient) -> Node:
        request = pb.GetDatasetRequest(dataset_id=dataset_id)
        reply = dispatcher.fetch_with_retry("dispatcher/GetDataset", request, self._patience_s)
        return unpack_dataset(pb.Dataset.FromString(reply.body).pickle, reply.buffers)

    def _evict(self) -> None:
        with self._lock:
            done = [key for key, made in self._kept.items() if made.done()]
            evicted = done[: max(len(self._kept) - _DATASETS, 0)]
            for key in evicted:
                del self._kept[key]
        if evicted:
            logger.info(
                "%s keeps %d datasets and has dropped the dataset used longest ago; if another "
                "epoch of it comes, its cache() is filled again",
                self._where,
                _DATASETS,
            )
            # Functions that were pickled by value refer to themselves, and their objects may be
            # large, though it is few objects: by itself, garbage is collected late.
            gc.collect()


class DataWorker:
    """Serves ``data_worker/...`` at an endpoint, on the thread that serves the endpoint.

    Args:
        endpoint: An open endpoint; the caller runs its serving loop.
        dispatcher: Address of the dispatcher.
        address: The address under which consumers and the dispatcher call this worker.
        config: Its times, tags and cache size.
        failed: Called with the error of a bug that ends the worker, on the worker's thread.

    Attributes:
        address: As given.
        registration: Completes when the dispatcher knows this worker, or cannot be reached.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dispatcher: str,
        address: str,
        config: WorkerConfig,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.address = address
        self._name = f"data worker {address}"
        self._failed = failed
        self._endpoint = endpoint
        self._period_s = seconds_of(config.heartbeat_interval_ms, 1.0)
        self._patience_s = seconds_of(config.dispatcher_timeout_ms, 60.0)
        self._tags = config.worker_tags
        self._cache_bytes = config.cross_trainer_cache_size_bytes or _CACHE_BYTES
        self._closed = threading.Event()
        self._closed_at = float("inf")
        self._dispatcher = RpcClient(endpoint, dispatcher, "dispatcher", self._closed.is_set)
        # For calls after which the dispatcher knows that this worker is here, or has left.
        self._membership = RpcClient(endpoint, dispatcher, "dispatcher", self._gives_up)
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._datasets = Datasets(self._name, self._patience_s)
        self._counted: dict[int, pb.TaskWork] = {}
        self._worker_id = 0
        self._leaves = True
        self._orphaned = False
        self.registration = Work(f"registration of data worker {address} at {dispatcher}")
        handlers = (
            self.GetElement,
            self.GetCheckpoint,
            self.Probe,
            self.UpdateTasks,
            self.DispatcherStopped,
        )
        endpoint.register("data_worker", {handler.__name__: handler for handler in handlers})
        self._thread = threading.Thread(
            target=self._live, name=f"dataservice-worker-{address}", daemon=True
        )
        self._thread.start()

    def close(self, *, leave: bool = True) -> None:
        """Stop all tasks and refuse requests. Idempotent.

        Args:
            leave: Whether to tell the dispatcher.
        """
        if self._closed.is_set():
            return
        self._leaves = leave
        self._closed_at = time.monotonic()
        self._closed.set()
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            task.close(self._stopped())
        deadline = self._closed_at + _CLOSE_S
        for thread in (self._thread, *(task.thread for task in tasks)):
            if thread is threading.current_thread() or not thread.is_alive():
                continue
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.warning(
                    "data worker %s was closed %g s ago, and %s is still running: %s",
                    self.address,
                    _CLOSE_S,
                    thread.name,
                    "it registers, or sends a heartbeat"
                    if thread is self._thread
                    else "a function, a source or a write of its dataset has not returned",
                )

    # Handlers are named as in the .proto file.

    def GetElement(self, request: Request) -> Reply:
        """Answer with elements of a task, now or later."""
        body = pb.GetElementRequest.FromString(request.body)
        with self._lock:
            if self._closed.is_set():
                raise self._stopped()
            if self._orphaned:
                raise self._orphan()
            # The consumer may have heard of the task before this worker.
            task = self._task(body.task_id)
        task.ask(request, body)
        return LATER

    def GetCheckpoint(self, request: Request) -> Reply:
        """Answer with the newest checkpoint of a task that is not after an element."""
        body = pb.CheckpointRequest.FromString(request.body)
        with self._lock:
            task = self._tasks.get(body.task_id)
        if task is None:
            raise NotFoundError(f"{self._name} has no task {body.task_id} any more")
        return Reply(task.checkpoint(body.index).SerializeToString())

    def Probe(self, request: Request) -> Reply:
        """Answer with a buffer, so that the consumer can measure the transfer rate."""
        nbytes = min(pb.ProbeRequest.FromString(request.body).nbytes, PROBE_BYTES)
        return Reply(b"", [np.zeros(nbytes, np.uint8)])

    def UpdateTasks(self, request: Request) -> Reply:
        """Begin and forget tasks, and forget clients."""
        self._update(pb.TasksUpdate.FromString(request.body))
        return Reply()

    def DispatcherStopped(self, request: Request) -> Reply:
        """Fail all tasks, because their iterations cannot end without their dispatcher."""
        body = pb.WorkerRequest.FromString(request.body)
        with self._lock:
            # A notice with another id is from an earlier dispatcher at the same address.
            self._orphaned |= body.worker_id == self._worker_id
        if self._orphaned:
            self._forget(list(self._tasks), self._orphan())
        return Reply()

    # Inside

    def _stopped(self) -> Error:
        """Return the error that makes consumers look for another worker."""
        return CancelledError(f"data worker {self.address} was stopped")

    def _orphan(self) -> Error:
        """Return the error that makes consumers give up."""
        return AbortedError(f"the dispatcher at {self._dispatcher.peer} is gone: it was stopped")

    def _task(self, task_id: int) -> Task:
        """Return a task, which holds requests until it begins. Called with the lock held."""
        task = self._tasks.get(task_id)
        if task is None:
            task = self._tasks[task_id] = Task(
                task_id,
                self._dispatcher,
                self._patience_s,
                self._datasets.get,
                self._name,
                self._cache_bytes,
            )
        return task

    def _update(self, update: pb.TasksUpdate) -> None:
        """Forget and begin tasks and forget clients, as the dispatcher decides."""
        self._forget(update.forget, CancelledError(_GIVEN_UP))
        for departure in update.departures:
            with self._lock:
                task = self._tasks.get(departure.task_id)
            if task is not None:
                task.release(departure.client_id, list(departure.used))
        for task_id in update.begin:
            try:
                with self._lock:
                    if not self._closed.is_set():
                        self._task(task_id).start()
            except RuntimeError as error:  # the process can have no more threads
                logger.warning("%s cannot begin task %d: %s", self._name, task_id, error)
                # Heartbeats name the task again, so that this worker tries it again.
                self._forget([task_id], UnavailableError(f"{self._name}: {error}"))

    def _forget(self, task_ids: Iterable[int], error: Error) -> None:
        with self._lock:
            tasks = [self._tasks.pop(task_id, None) for task_id in task_ids]
        for task in tasks:
            if task is not None:
                task.close(error)

    def _live(self) -> None:
        """Register, then send heartbeats."""
        try:
            self._begin()
        except Exception as error:
            self.registration.complete(error=error)
            return
        self.registration.complete()
        try:
            self._send_heartbeats()
        except BaseException as error:
            self._failed(error)
            raise  # in a job, an uncaught error ends all ranks, and says why

    def _send_heartbeats(self) -> None:
        """Send heartbeats and refresh waiting requests until the worker is closed, then leave."""
        reachable = True
        rounds = math.ceil(self._period_s / _LONGEST_ROUND_S)
        waits = ExitStack()
        with waits:
            for number in itertools.count(1):
                if self._closed.wait(self._period_s / rounds):
                    break
                with self._lock:
                    tasks = list(self._tasks.values())
                found = [found for task in tasks if (found := task.find_wait()) is not None]
                waits.close()
                for wait_of_task in found:
                    waits.enter_context(waiting_for(*wait_of_task))
                for task in tasks:
                    task.refresh(_HOLD_ROUNDS)
                if number % rounds == 0:
                    reachable = self._beat(reachable)
        if reachable:
            self._leave()

    def _begin(self) -> None:
        """Register; raise CancelledError if the worker is closed meanwhile."""
        self._register()
        if self._closed.is_set():  # the dispatcher may have given this worker parts already
            self._leave()
            raise self._stopped()

    def _register(self) -> None:
        request = pb.RegisterWorkerRequest(
            address=self.address, process=process_name(), tags=self._tags
        )
        slow_wait = SlowWait(
            f"data worker {self.address}", self._waits_for, self._membership.awaited
        )
        try:
            reply = self._membership.call_with_retry(
                "dispatcher/RegisterWorker",
                request,
                pb.RegisterWorkerReply,
                self._patience_s,
                slow_wait,
            )
        finally:
            slow_wait.close()
        self._worker_id = reply.worker_id

    def _waits_for(self) -> str:
        protocol = self._endpoint.address.protocol
        return missing_dispatcher(self._dispatcher.peer, protocol, self._patience_s)

    def _beat(self, reachable: bool) -> bool:
        """Send a heartbeat; return whether the dispatcher is reachable."""
        with self._lock:
            tasks = dict(self._tasks)
        work = [done for task in tasks.values() if (done := task.work()) is not None]
        self._count(work)
        request = pb.WorkerRequest(
            worker_id=self._worker_id,
            task_ids=list(tasks),
            progress=[each for task in tasks.values() if (each := task.progress()) is not None],
            work=work,
            holders=[held for task in tasks.values() if (held := task.holders()) is not None],
        )
        try:
            reply = self._dispatcher.call("dispatcher/WorkerHeartbeat", request, pb.TasksUpdate)
            self._update(reply)
        except NotFoundError:
            return self._register_again()
        except CancelledError:
            return reachable
        except Error as error:
            # Tasks that have begun need no dispatcher. The whole service may also be stopping.
            if reachable:
                logger.warning("data worker %s: %s", self.address, error)
            return False
        return True

    def _count(self, work: list[pb.TaskWork]) -> None:
        """Add the work since the last heartbeat to the metrics of this process."""
        values = own_metrics().values
        for each in work:
            last = self._counted.get(each.task_id, pb.TaskWork())
            values["steps"] += each.elements - last.elements
            values["waited_s"] += each.waited_s - last.waited_s
            values["busy_s"] += (each.seconds - each.waited_s) - (last.seconds - last.waited_s)
        self._counted = {each.task_id: each for each in work}

    def _register_again(self) -> bool:
        """Register with a dispatcher that does not know this worker, without the old tasks."""
        logger.warning("data worker %s was given up as lost; it registers again", self.address)
        with self._lock:
            # Without an id, a late notice that the last dispatcher has stopped matches nothing.
            self._worker_id, self._orphaned = 0, False
        lost = "its data worker was given up as lost by the dispatcher"
        self._forget(list(self._tasks), CancelledError(lost))
        try:
            self._register()
        except Error as error:
            if not self._closed.is_set():
                logger.warning("data worker %s cannot register again: %s", self.address, error)
            return False
        return True

    def _leave(self) -> None:
        """Unregister, so that other workers get the parts at once. Do nothing if told not to."""
        if not self._leaves or self._orphaned or self._gives_up():
            return
        request = pb.WorkerRequest(worker_id=self._worker_id)
        try:
            call = self._membership.start("dispatcher/UnregisterWorker", request)
            self._membership.finish(call)
        except Error as error:
            logger.info("data worker %s left without the dispatcher: %s", self.address, error)

    def _gives_up(self) -> bool:
        """Return whether this worker is closed, and no longer waits for the dispatcher."""
        if not self._closed.is_set():
            return False
        if time.monotonic() - self._closed_at > _LEAVE_S:
            return True
        # A dispatcher that refuses or has lost the connection is gone: it keeps no registration.
        return not self._endpoint.is_connected(self._dispatcher.peer)
