"""Calls that wait for a peer, reports of long waits, and the name by which peers know a process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from dataservice.options import service_of
from dataservice.payload import Array
from mpidist import Endpoint, Reply, Server, TaskMetrics, Work, open_endpoint, task_metrics
from mpidist.config import config
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    DistNetworkError,
    Error,
    UnavailableError,
    UnimplementedError,
)
from mpidist.mpi import Backoff

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

# Distinguishes this process from an earlier one with the same number.
_TOKEN = secrets.token_hex(4)

# Period at which a waiting thread checks that it shall go on.
_STOP_PERIOD_S = 0.1
# Shorter than for ranks that wait for each other: a trainer gives up after a minute without any
# data worker, and the log must say before that why it waits.
_STALL_S = 15.0


def process_name() -> str:
    """Return the name of this process: ``host/pid-token``."""
    return f"{socket.gethostname()}/{os.getpid()}-{_TOKEN}"


def own_metrics() -> TaskMetrics:
    """Return the metrics for ``mpidist top``: of the task in this process, or of the process."""
    server = Server.current()
    task = ("dataset", 0) if server is None else (server.job_name, server.task_index)
    return task_metrics(*task)


def stall_s() -> float:
    """Return the seconds after which a wait is reported: 15, or MPIDIST_STALL_S if shorter."""
    return min(_STALL_S, config.stall_s)


class SlowWait:
    """A wait. After ``stall_s()`` seconds it is reported, once, by a warning.

    Args:
        waiter: Name of the waiting thread's owner.
        cause: Describes the awaited event, and faults that may delay it.
        since: Monotonic time of the beginning; None if the wait begins now.
    """

    def __init__(self, waiter: str, cause: Callable[[], str], since: float | None = None) -> None:
        self._waiter = waiter
        self._cause = cause
        self._since = time.monotonic() if since is None else since
        self._limit_s = stall_s()

    @property
    def due_s(self) -> float:
        """Seconds until the warning; infinite after it."""
        return max(self._since + self._limit_s - time.monotonic(), 0.0)

    def check(self) -> None:
        """Log the warning if it is due. Call this in every round of the wait."""
        if self.due_s > 0:
            return
        self._limit_s = float("inf")
        waited_s = time.monotonic() - self._since
        logger.warning("%s has waited %.3g s for %s", self._waiter, waited_s, self._cause())


def missing_dispatcher(address: str, protocol: str, patience_s: float) -> str:
    """Describe the wait for a dispatcher that does not answer.

    Args:
        address: Address of the dispatcher.
        protocol: Protocol of the calls to the dispatcher.
        patience_s: Time limit of the wait, in seconds.
    """
    return (
        f"the dispatcher at {address}, which does not answer: {_CAUSES.get(protocol, _STARTED)} "
        f"This fails after {patience_s:g} s"
    )


_STARTED = "has it been started, and is that its address?"
_CAUSES = {
    "inproc": "it is looked for in this process alone (inproc); the address of one in another "
    "process begins with tcp:// or mpi://.",
    "tcp": f"{_STARTED} A DispatchServer in a plain Python process needs a port, or "
    "protocol='tcp', to be reached from others. Do both know the same secret (MPIDIST_SECRET)?",
}


class RpcClient:
    """Calls the methods of one peer.

    Args:
        endpoint: Calls go out from here.
        peer: Address of the peer.
        what: Kind of the peer, for errors: ``"dispatcher"``.
        stopped: Asked during waits. When it returns True, calls end with CancelledError.
    """

    def __init__(
        self, endpoint: Endpoint, peer: str, what: str, stopped: Callable[[], bool]
    ) -> None:
        self.endpoint = endpoint
        self.peer = peer
        self.what = what
        self.stopped = stopped

    def start(
        self,
        method: str,
        request: Message,
        buffers: Sequence[Array] = (),
        timeout: float | None = None,
    ) -> Work:
        """Begin a call, and return its Work, which gives a Reply.

        Raises:
            UnavailableError: No endpoint is at the peer's address.
        """
        body = request.SerializeToString()
        try:
            return self.endpoint.call(self.peer, method, body, buffers, timeout=timeout)
        except DistNetworkError as error:
            raise self._gone(error) from error

    def notify(self, method: str, request: Message) -> None:
        """Send a request that has no reply."""
        self.endpoint.notify(self.peer, method, request.SerializeToString())

    def finish(self, work: Work, slow_wait: SlowWait | None = None) -> Reply:
        """Wait for the reply of a call.

        Args:
            work: The Work that ``start`` returned.
            slow_wait: Reports the wait if it takes long.

        Raises:
            CancelledError: ``stopped`` has returned True.
            UnavailableError: The peer is gone.
            Exception: The error of the peer.
        """
        while not work.is_completed():
            if self.stopped():
                raise CancelledError(f"stopped while waiting for {self.what} at {self.peer}")
            if slow_wait is not None:
                slow_wait.check()
            work.block(time.monotonic() + _STOP_PERIOD_S)
        try:
            reply: Reply = work.result()
        except (DistNetworkError, UnavailableError, UnimplementedError) as error:
            raise self._gone(error) from error
        return reply

    def _gone(self, error: Error) -> UnavailableError:
        return UnavailableError(f"the {self.what} at {self.peer} is gone: {error}")

    def call(self, method: str, request: Message, kind: type[M]) -> M:
        """Call, and wait for the reply; raises as :meth:`finish`."""
        return kind.FromString(self.finish(self.start(method, request)).body)

    def call_with_retry(
        self,
        method: str,
        request: Message,
        kind: type[M],
        limit_s: float,
        slow_wait: SlowWait | None = None,
    ) -> M:
        """Call a peer that may not have started yet, again and again until it replies.

        Args:
            method: ``"service/Method"``.
            request: The request.
            kind: Class of the reply.
            limit_s: Time limit of all attempts together, in seconds.
            slow_wait: Reports the wait if it takes long.

        Raises:
            UnavailableError: No attempt had a reply within ``limit_s`` seconds.
        """
        return kind.FromString(self.fetch_with_retry(method, request, limit_s, slow_wait).body)

    def fetch_with_retry(
        self,
        method: str,
        request: Message,
        limit_s: float,
        slow_wait: SlowWait | None = None,
        buffers: Sequence[Array] = (),
    ) -> Reply:
        """Call as :meth:`call_with_retry`, with buffers, and return the whole Reply."""
        last: Error | None = None
        deadline = time.monotonic() + limit_s
        backoff = Backoff(longest_s=_STOP_PERIOD_S)
        while True:
            remaining = max(deadline - time.monotonic(), 0.0)
            try:
                work = self.start(method, request, buffers, timeout=remaining)
                return self.finish(work, slow_wait)
            except (DeadlineExceededError, UnavailableError) as error:
                # The short time of the last attempt says less than the error before it.
                if last is None or isinstance(error, UnavailableError):
                    last = error
                if time.monotonic() >= deadline:
                    raise UnavailableError(
                        f"no {self.what} answers at {self.peer} (tried for {limit_s:g} s): "
                        f"{last.__cause__ or last}"
                    ) from last
            if self.stopped():
                raise CancelledError(f"stopped while waiting for {self.what} at {self.peer}")
            if slow_wait is not None:
                slow_wait.check()
            backoff.pause()


@contextlib.contextmanager
def dispatcher_of(service: str | tuple[str, str]) -> Iterator[RpcClient]:
    """Open an endpoint for calls of a dispatcher.

    Args:
        service: As for :func:`distribute`.

    Raises:
        ValueError: ``service`` is not an address.
    """
    protocol, address = service_of(service)
    with open_endpoint(protocol, peer=address) as endpoint:
        yield RpcClient(endpoint, address, "dispatcher", lambda: False)
