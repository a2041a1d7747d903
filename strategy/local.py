"""Local mode: a worker and its parameter server in one process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable, Sequence

from mpidist import ClusterSpec, ProcessGroup, Window, errors, open_endpoint
from strategy.server.parameter_server import ParameterServer
from strategy.shared.host import Bytes, Task

_ARENA_BYTES = 1 << 36  # address space only: pages come with the first write


class LocalMemory:
    """The memory of the one ps task of local mode."""

    def __init__(self) -> None:
        self._windows = [Window.private(_ARENA_BYTES)]
        self.sync = self._windows[0].sync  # which is as good for the others: they are private too

    def part(self, index: int, segment: int = 0) -> Bytes | None:
        """Local. A segment."""
        return self._windows[segment].local

    def own(self, segment: int = 0) -> Bytes:
        """Local. A segment."""
        return self._windows[segment].local

    def window(self, index: int, segment: int) -> tuple[Window, int]:
        """Local. The window of a segment."""
        return self._windows[segment], 0

    def mates(self, index: int, one_sided: bool = False) -> list[Task]:
        """Local. None: there is no other process."""
        return []

    def growth_bytes(self, index: int, needed: int, wanted: int) -> int:
        """Local. All that is wanted: pages come with the first write."""
        return wanted

    def grow(
        self,
        index: int,
        segment: int,
        nbytes: int,
        tasks: Sequence[Task],
        one_sided: bool = False,
    ) -> None:
        """Local. See :class:`HostMemory`."""
        self._windows.append(Window.private(nbytes))

    def warn_unshared(self, reason: str) -> None:
        """Local. Nothing to say: nobody but this process reads what lies here."""

    def free(self) -> None:
        """Give all pages back, also those with a view. Nothing may use them any more."""
        madvise = ctypes.CDLL(None).madvise
        for window in self._windows:
            begin, length = window.local.ctypes.data, window.local.nbytes
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
            window.free()


class LocalHost:
    """A cluster of one ps and one worker inside this process, for local mode.

    The ps serves on a thread until the host is closed, or abandoned.
    """

    def __init__(self) -> None:
        self.memory = LocalMemory()
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
        """Local. Always 0."""
        return 0

    def task_address(self, job: str, index: int) -> str:
        """Local. The one endpoint's address."""
        return str(self.endpoint.address)

    def has_left(self, job: str, index: int) -> bool:
        """Local. False: there is no other process."""
        return False

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Local. Nothing to do: nobody but this process waits for what is under way."""

    def job_group(self, job: str) -> ProcessGroup:
        """Local. FailedPreconditionError: there is no job to group."""
        raise errors.FailedPreconditionError("in local mode there is no process group")

    def close(self) -> None:
        """Local. Serve no more, and give the memory back; a second call does nothing."""
        self.endpoint.close()
        self._thread.join()

    def abandon(self) -> None:
        """Local. Have its thread close it soon.

        Takes no lock and waits for nothing: garbage is collected at any point of any thread.
        """
        self._abandoned = True

    def _serve(self) -> None:
        self.endpoint.serve(lambda: self._abandoned)
        self._service.close()
        self.endpoint.close()
        self.memory.free()
        # It has the slots of optimizers, and refers to itself in many ways.
        del self._service
        gc.collect()


def local_host() -> LocalHost:
    """Local. A cluster of one ps, which serves on a thread, and one worker."""
    return LocalHost()
