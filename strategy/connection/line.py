"""A line to a ps task, on which a worker asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from mpidist import Reply, Work
from strategy.shared.host import Host

Array = NDArray[Any]

# Who asks for these waits for other workers, or for a disk that the server writes to: as long as it
# is there.
_PATIENT = (
    *("CreateVariable", "Read", "ReadMany", "PushSlice", "Push", "Await", "Missing"),
    *("Hold", "Save", "CheckRestore", "Restore"),
)

LOOK_S = 1.0
"""How often who waits for others looks whether they are still there, in seconds."""


class Line:
    """Local. How a worker asks one ps task.

    Args:
        host: The process's place in the cluster.
        index: Of the ps task.

    Attributes:
        address: Of the ps task's endpoint.
        index: Of the ps task.
        number: The server's for this connection, once it has been made.
    """

    number = 0

    def __init__(self, host: Host, index: int) -> None:
        self._host = host
        self.address = host.task_address("ps", index)
        self.index = index

    def call(self, method: str, message: Any) -> Reply:
        """Local. Ask the server, and wait for its answer."""
        reply: Reply = self.start(method, message).result()
        return reply

    def start(
        self,
        method: str,
        message: Any,
        buffers: Sequence[Array] = (),
        into: Sequence[Array] | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Call a method of the server with a protobuf message; see :meth:`start_raw`."""
        return self.start_raw(method, message.SerializeToString(), buffers, into, timeout)

    def start_raw(
        self,
        method: str,
        body: bytes,
        buffers: Sequence[Array] = (),
        into: Sequence[Array] | None = None,
        timeout: float | None = None,
        *,
        copy: bool = False,
    ) -> Work:
        """Call a method of the server; see :meth:`mpidist.Endpoint.call`."""
        if timeout is None and method in _PATIENT:
            timeout = float("inf")
        return self._host.endpoint.call(
            self.address, f"ps/{method}", body, buffers, timeout=timeout, into=into, copy=copy
        )
