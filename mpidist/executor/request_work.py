"""The Work of what MPI carries out."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpidist.errors import DistBackendError
from mpidist.op import Op
from mpidist.runtime import Backoff, Waits
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI


class RequestWork(Work):
    """A Work that MPI carries out.

    Args:
        op: The operation.
        requests: MPI's requests for it.
        waits: Where a blocked thread says what it waits for.
        begun: Where the group keeps its works by ``id``, until they end.
    """

    def __init__(
        self,
        op: Op,
        requests: list[MPI.Request],
        waits: Waits,
        begun: dict[int, RequestWork],
    ) -> None:
        from mpi4py import MPI

        super().__init__(op.name, self._drive_requests)
        self._op = op
        self._requests = requests
        self._status = MPI.Status()
        self._waits = waits
        self._begun = begun
        self._mpi_error = MPI.Exception
        self._testing = threading.Lock()
        self._failure: Exception | None = None

    def is_completed(self) -> bool:
        """Local. True once the operation has ended; looks, and never blocks."""
        if not self._done and self._testing.acquire(blocking=False):
            try:
                self._look(wait=False)
            finally:
                self._testing.release()
        return self._done

    def _drive_requests(self, work: Work, deadline: float) -> None:
        op = self._op
        key = id(op) ^ threading.get_ident() << 64  # several threads may wait for one operation
        self._waits.current[key] = op
        del op  # an error that is kept keeps this frame
        try:
            if deadline == float("inf"):
                with self._testing:
                    if not self._done:
                        self._look(wait=True)
            else:
                backoff = Backoff(spins=5000)
                while not self.is_completed() and time.monotonic() < deadline:
                    backoff.pause()
        finally:
            self._waits.current.pop(key, None)

    def _look(self, *, wait: bool) -> None:
        while self._requests:
            try:
                if wait:
                    self._requests[-1].Wait(self._status)
                elif not self._requests[-1].Test(self._status):
                    return
            except self._mpi_error as error:  # the others may be under way: MPI uses their arrays
                self._failure = self._failure or error
            self._requests.pop()
        if self._failure is not None:
            self._end(error=backend_error(self._op, self._failure))
            return
        try:
            if self._op.finish is not None:
                self._op.finish()
        except Exception as error:  # the arrays have become read-only, or memory is short
            traceback.clear_frames(error.__traceback__)  # who keeps this keeps no arrays
            self._end(error=error)
            return
        except BaseException as error:  # to begin again would divide a mean twice
            self._end(error=backend_error(self._op, error))
            raise
        if self._op.outputs is not None:
            self._end(self._op.outputs)
            return
        group = self._op.group
        source = self._status.source if self._op.name == "recv" else -1
        self._end(group.ranks[source] if source >= 0 else None)

    def _end(
        self, value: Sequence[Any] | int | None = None, error: BaseException | None = None
    ) -> None:
        self._begun.pop(id(self), None)
        # Its handle may be kept, and memory that the operation has made may be large.
        self._op = Op(self._op.name, self._op.group)
        self.complete(value, error)


def backend_error(op: Op, error: BaseException) -> DistBackendError:
    """Local. What MPI said of an Op, with where and what."""
    what = str(error) or repr(error)
    return DistBackendError(
        f"{op.describe()} failed on group rank {op.group.rank()} of {op.group.size()}: {what}"
    )
