"""Local mode: a worker and its parameter server in one process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from mpidist import ClusterSpec, ProcessGroup, errors, open_endpoint
from mpidist.ps_memory import PsMemory
from strategy.server.parameter_server import ParameterServer


class LocalHost:
    """A cluster of one ps task and one worker inside this process, for local mode.

    The ps task serves on a thread until the host is closed or abandoned.
    """

    def __init__(self) -> None:
        self.memory = PsMemory()
        self.endpoint = open_endpoint("inproc")
        self.cluster_spec = ClusterSpec({"ps": ["localhost:0"], "worker": ["localhost:0"]})
        self.job_name = "worker"
        self.task_index = 0
        self._abandoned = False
        self._service = ParameterServer(self)
        self._thread = threading.Thread(
            target=self._serve, name=f"ps of {self.endpoint.address}", daemon=True
        )
        self._thread.start()

    def own_index(self, job: str) -> int:
        """Return 0: every job has one task."""
        return 0

    def task_address(self, job: str, index: int) -> str:
        """Return the address of the only endpoint."""
        return str(self.endpoint.address)

    def has_left(self, job: str, index: int) -> bool:
        """Return False, because there is no other process."""
        return False

    def on_drain(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Do nothing: no other process waits for pending pushes."""
        return lambda: None

    def job_group(self, job: str) -> ProcessGroup:
        """Raise FailedPreconditionError, because local mode has no process groups."""
        raise errors.FailedPreconditionError("in local mode there is no process group")

    def close(self) -> None:
        """Stop serving and release the memory; idempotent."""
        self.endpoint.close()
        self._thread.join()

    def abandon(self) -> None:
        """Tell the thread of the ps task to close this host soon.

        This takes no lock and does not wait: the garbage collector may run it on any thread.
        """
        self._abandoned = True

    def _serve(self) -> None:
        self.endpoint.serve(lambda: self._abandoned)
        self._service.close()
        self.endpoint.close()
        self.memory.discard()
        # The service holds the slots of optimizers, and is in reference cycles.
        del self._service
        gc.collect()


def local_host() -> LocalHost:
    """Return a new cluster of one ps task, which serves on a thread, and one worker."""
    return LocalHost()
