"""An RPC channel from a worker to a ps task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from mpidist import Reply, Work
from strategy.shared.host import Host

Array = NDArray[Any]

# Calls of these methods have no deadline: they wait for other workers or for a disk of the server,
# for as long as the server is alive.
_PATIENT = (
    *("CreateVariable", "Read", "ReadMany", "PushSlice", "Push", "Await", "Missing"),
    *("Hold", "Save", "CheckRestore", "Restore"),
)

LOOK_S = 1.0
"""Seconds between two checks whether the other processes of a wait are alive."""


class Line:
    """An RPC channel from a worker to one ps task.

    Args:
        host: The place of this process in the cluster.
        index: Index of the ps task.

    Attributes:
        address: Address of the ps task's endpoint.
        index: Index of the ps task.
        number: Number of this connection on the server; 0 until the connection is open.
    """

    number = 0

    def __init__(self, host: Host, index: int) -> None:
        self._host = host
        self.address = host.task_address("ps", index)
        self.index = index

    def call(self, method: str, message: Any) -> Reply:
        """Call a method of the server, and wait for the reply; see :meth:`start`."""
        reply: Reply = self.start(method, message).result()
        return reply

    def start(
        self,
        method: str,
        message: Any,
        buffers: Sequence[Array] = (),
        into: Sequence[Array] | None = None,
        timeout: float | None = None,
        *,
        copy: bool = False,
    ) -> Work:
        """Call a method of the server.

        Args:
            method: Name of the method.
            message: A protobuf message, or its bytes.
            buffers: See :meth:`mpidist.Endpoint.call`.
            into: See :meth:`mpidist.Endpoint.call`.
            timeout: Seconds; by default none for methods that wait for others.
            copy: See :meth:`mpidist.Endpoint.call`.
        """
        body = message if isinstance(message, bytes) else message.SerializeToString()
        if timeout is None and method in _PATIENT:
            timeout = float("inf")
        return self._host.endpoint.call(
            self.address, f"ps/{method}", body, buffers, timeout=timeout, into=into, copy=copy
        )
