"""The data worker: runs tasks, and gives their elements to consumers."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from dataservice.calls import Caller
from dataservice.config import WorkerConfig, seconds_of
from dataservice.dataset.node import Node
from dataservice.proto import dataservice_pb2 as pb
from dataservice.runner import Runner
from dataservice.stall import Stall, missing_dispatcher
from dataservice.wire import unpack
from mpidist import LATER, Endpoint, Reply, Request, Work
from mpidist.errors import CancelledError, Error, NotFoundError, UnavailableError

logger = logging.getLogger(__name__)

# Datasets that are kept for the next iteration.
_DATASETS = 8
# A request without an answer is answered with nothing after so many rounds of at most so long:
# within consumers' patience, however rarely the dispatcher is to hear of us.
_HOLD_ROUNDS = 10
_LONGEST_ROUND_S = 1.0
_GIVEN_UP = "the iteration was given up by its consumers"
# How long close() waits for the dispatcher, and for users' functions.
_CLOSE_S = 5.0


class DataWorker:
    """Serves ``data_worker/...`` at an endpoint, on the thread that serves the endpoint.

    Args:
        endpoint: Open; somebody else runs its serving loop.
        dispatcher: Address of the dispatcher.
        address: What others shall call this worker.
        config: Its times.

    Attributes:
        address: As given.
        registration: Ends when the dispatcher knows this worker, or cannot be reached.
    """

    def __init__(
        self, endpoint: Endpoint, dispatcher: str, address: str, config: WorkerConfig
    ) -> None:
        self.address = address
        self._endpoint = endpoint
        self._period_s = seconds_of(config.heartbeat_interval_ms, 1.0)
        self._patience_s = seconds_of(config.dispatcher_timeout_ms, 60.0)
        self._closed = threading.Event()
        self._dispatcher = Caller(endpoint, dispatcher, "dispatcher", self._closed.is_set)
        self._lock = threading.Lock()
        self._runners: dict[int, Runner] = {}
        self._datasets: OrderedDict[int, Node] = OrderedDict()
        self._worker_id = 0
        self._leaves = True
        self._orphaned = False
        self.registration = Work(f"registration of data worker {address} at {dispatcher}")
        handlers = (self.GetElement, self.RemoveTasks, self.ReleaseClient, self.DispatcherStopped)
        endpoint.register("data_worker", {handler.__name__: handler for handler in handlers})
        self._thread = threading.Thread(
            target=self._live, name=f"dataservice-worker-{address}", daemon=True
        )
        self._thread.start()

    def close(self, *, leave: bool = True) -> None:
        """Local. Stop all tasks and refuse requests; idempotent.

        Args:
            leave: Whether to tell the dispatcher.
        """
        if self._closed.is_set():
            return
        self._leaves = leave
        self._closed.set()
        with self._lock:
            runners = list(self._runners.values())
        for runner in runners:
            runner.close(f"data worker {self.address} was stopped")
        deadline = time.monotonic() + _CLOSE_S
        for thread in (self._thread, *(runner.thread for runner in runners)):
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.warning("%s is still busy %g s after close()", thread.name, _CLOSE_S)

    # Handlers are named as in the .proto file.

    def GetElement(self, request: Request) -> Reply:
        """Local. Answer with elements of a task, now or later."""
        body = pb.GetElementRequest.FromString(request.body)
        with self._lock:
            runner = self._runners.get(body.task_id)
            if self._closed.is_set():
                raise CancelledError(f"data worker {self.address} was stopped")
            if self._orphaned:
                raise UnavailableError(self._orphan_reason())
            if runner is None:
                runner = self._start(body.task_id)
        runner.outbox.ask(request, body)
        return LATER

    def RemoveTasks(self, request: Request) -> Reply:
        """Local. Forget tasks."""
        self._forget(pb.RemoveTasksRequest.FromString(request.body).task_ids, _GIVEN_UP)
        return Reply()

    def ReleaseClient(self, request: Request) -> Reply:
        """Local. Give a consumer nothing more."""
        body = pb.ReleaseClientRequest.FromString(request.body)
        with self._lock:
            runners = [self._runners[t] for t in body.task_ids if t in self._runners]
        for runner in runners:
            runner.outbox.release(body.client_id)
        return Reply()

    def DispatcherStopped(self, request: Request) -> Reply:
        """Local. No consumer can come to an end with what has begun: fail, so that they know."""
        body = pb.WorkerRequest.FromString(request.body)
        with self._lock:
            # Another id was given by an earlier dispatcher at the same address.
            self._orphaned |= body.worker_id == self._worker_id
        if self._orphaned:
            self._forget(list(self._runners), self._orphan_reason())
        return Reply()

    # Inside

    def _orphan_reason(self) -> str:
        return f"the dispatcher at {self._dispatcher.peer} is gone: it was stopped"

    def _start(self, task_id: int) -> Runner:
        runner = Runner(task_id, self._dispatcher, self._dataset, f"data worker {self.address}")
        runner.thread.start()
        self._runners[task_id] = runner
        return runner

    def _forget(self, task_ids: Iterable[int], reason: str) -> None:
        with self._lock:
            runners = [self._runners.pop(t) for t in task_ids if t in self._runners]
        for runner in runners:
            runner.close(reason)

    def _dataset(self, dataset_id: int) -> Node:
        with self._lock:
            if dataset_id in self._datasets:
                self._datasets.move_to_end(dataset_id)
                return self._datasets[dataset_id]
        request = pb.GetDatasetRequest(dataset_id=dataset_id)
        reply = self._dispatcher.finish(self._dispatcher.start("dispatcher/GetDataset", request))
        node: Node = unpack(pb.Dataset.FromString(reply.body).pickle, reply.buffers)
        with self._lock:
            self._datasets[dataset_id] = node
            while len(self._datasets) > _DATASETS:
                self._datasets.popitem(last=False)
        return node

    def _live(self) -> None:
        """Register, then tell the dispatcher from time to time that we are here."""
        try:
            self._register()
        except Exception as error:
            self.registration.complete(error=error)
            return
        self.registration.complete()
        reachable = True
        rounds = math.ceil(self._period_s / _LONGEST_ROUND_S)
        for number in itertools.count(1):
            if self._closed.wait(self._period_s / rounds):
                break
            with self._lock:
                runners = list(self._runners.values())
            for runner in runners:
                runner.outbox.refresh(_HOLD_ROUNDS)
            if number % rounds == 0:
                reachable = self._beat(reachable)
        if reachable and self._leaves and not self._orphaned:
            self._leave()

    def _register(self) -> None:
        request = pb.RegisterWorkerRequest(address=self.address)
        stall = Stall(f"data worker {self.address}", self._waits_for)
        reply = self._dispatcher.ask_patiently(
            "dispatcher/RegisterWorker", request, pb.RegisterWorkerReply, self._patience_s, stall
        )
        self._worker_id = reply.worker_id

    def _waits_for(self) -> str:
        return missing_dispatcher(self._dispatcher.peer, self._patience_s)

    def _beat(self, reachable: bool) -> bool:
        request = pb.WorkerRequest(worker_id=self._worker_id, task_ids=list(self._runners))
        try:
            reply = self._dispatcher.ask(
                "dispatcher/WorkerHeartbeat", request, pb.RemoveTasksRequest
            )
            self._forget(reply.task_ids, _GIVEN_UP)
        except NotFoundError:
            return self._register_again()
        except CancelledError:
            return reachable
        except Error as error:
            # Tasks that have begun can be served without it; it may also have been stopped first.
            if reachable:
                logger.warning("data worker %s: %s", self.address, error)
            return False
        return True

    def _register_again(self) -> bool:
        """The dispatcher has given us up, or is another one: it will not hear of our tasks."""
        logger.warning("data worker %s was given up as lost; it registers again", self.address)
        with self._lock:
            # Without an id, so that word of the last dispatcher's stop, if it comes late, is not
            # taken for the next one's.
            self._worker_id, self._orphaned = 0, False
        self._forget(list(self._runners), "its data worker was given up as lost by the dispatcher")
        try:
            self._register()
        except Error as error:
            if not self._closed.is_set():
                logger.warning("data worker %s cannot register again: %s", self.address, error)
            return False
        return True

    def _leave(self) -> None:
        request = pb.WorkerRequest(worker_id=self._worker_id)
        try:
            self._dispatcher.start("dispatcher/UnregisterWorker", request).wait(_CLOSE_S)
        except Error as error:
            logger.info("data worker %s left without the dispatcher: %s", self.address, error)
