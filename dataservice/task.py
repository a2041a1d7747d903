"""A task of the job ``data``, which ``mpidist.Server`` runs."""

from __future__ import annotations

from typing import Protocol

from dataservice.dispatch.dispatcher import Dispatcher
from dataservice.options import DispatcherConfig, WorkerConfig
from dataservice.work.worker import DataWorker
from mpidist import Endpoint, Work
from mpidist.errors import CancelledError


class TaskServer(Protocol):
    """The part of a Server that a data task uses."""

    @property
    def endpoint(self) -> Endpoint:
        """An open endpoint; the Server runs its serving loop."""

    def own_index(self, job: str) -> int:
        """Return the index of this process's task of a job."""

    def task_address(self, job: str, index: int) -> str:
        """Return the address of a task's endpoint."""


class DataTask:
    """A data worker, and in task 0 also the dispatcher, at the endpoint of a Server.

    Args:
        server: The Server of this task.
    """

    def __init__(self, server: TaskServer) -> None:
        endpoint = server.endpoint
        self._dispatcher: Dispatcher | None = None
        if server.own_index("data") == 0:
            self._dispatcher = Dispatcher(endpoint, DispatcherConfig())
        dispatcher = server.task_address("data", 0)
        self._worker = DataWorker(
            endpoint, dispatcher, str(endpoint.address), WorkerConfig(dispatcher)
        )
        self._worker.registration.add_done_callback(_raise_on_failure)

    def close(self) -> None:
        """Stop the worker and the dispatcher, before the Server closes the endpoint. Idempotent."""
        # The whole cluster is ending, and the dispatcher's process may already be gone.
        self._worker.close(leave=False)
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None


def _raise_on_failure(registration: Work) -> None:
    # This runs on the worker's thread, where an uncaught error ends the job and names this task.
    if not isinstance(registration.exception(), CancelledError):
        registration.wait()
