"""Calls that wait for a peer, reports of long waits, and the name by which peers know a process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    FailedPreconditionError,
    UnavailableError,
    UnimplementedError,
)
from mpidist.mpi import Backoff, started_world, waiting_for

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

# Distinguishes this process from an earlier one with the same number.
_TOKEN = secrets.token_hex(4)

# Period at which a waiting thread checks that it shall go on.
_STOP_PERIOD_S = 0.1
# Seconds after which a wait is registered. ``mpidist doctor --hang`` shows no shorter waits.
_REGISTERED_S = 1.0
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


Awaited = tuple[str, Sequence[str]]
"""An awaited event in a few words, and its tasks; see :func:`mpidist.mpi.waiting_for`."""


def task_at(endpoint: Endpoint, address: str) -> str | None:
    """Return the task of an address as in ``"data 0"`` or ``"rank 3"``; None outside MPI.

    Args:
        endpoint: The endpoint that calls the address.
        address: The address, with or without its protocol.
    """
    world = started_world()
    if endpoint.address.protocol != "mpi" or world is None:
        return None
    # Over mpi, the remainder of an endpoint number is its rank.
    rank = int(address.rpartition(":")[2]) % world.size
    server = Server.current()
    if server is None:
        return f"rank {rank}"
    with contextlib.suppress(FailedPreconditionError):  # another thread starts or stops the Server
        for job, index in server.cluster_spec.tasks():
            if job == "data" and server.task_address(job, index).endswith(f":{rank}"):
                return f"{job} {index}"
    return f"rank {rank}"


def tasks_at(endpoint: Endpoint, addresses: Iterable[str]) -> list[str]:
    """Return the known tasks of some addresses; see :func:`task_at`."""
    return [task for address in addresses if (task := task_at(endpoint, address)) is not None]


class SlowWait:
    """A wait, which :func:`mpidist.mpi.waiting_for` registers after a second.

    After ``stall_s()`` seconds it is reported, once, by a warning.

    Args:
        waiter: Name of the waiting thread's owner.
        cause: Describes the awaited event, and faults that may delay it; None for no warning.
        awaited: Describes the awaited event for the registration; None for no registration.
        since: Monotonic time of the beginning; None if the wait begins now.
    """

    def __init__(
        self,
        waiter: str,
        cause: Callable[[], str] | None,
        awaited: Callable[[], Awaited] | None = None,
        since: float | None = None,
    ) -> None:
        self._waiter = waiter
        self._cause = cause
        self._awaited = awaited
        self._since = time.monotonic() if since is None else since
        self._limit_s = float("inf") if cause is None else stall_s()
        self._registered_s = float("inf") if awaited is None else min(_REGISTERED_S, self._limit_s)
        self._registered: tuple[Awaited, AbstractContextManager[None]] | None = None

    @property
    def due_s(self) -> float:
        """Seconds until the next check that has an effect; infinite after the warning."""
        if self._registered is not None:  # the awaited event may change
            return _REGISTERED_S
        return max(self._since + min(self._registered_s, self._limit_s) - time.monotonic(), 0.0)

    def check(self) -> None:
        """Log the warning if it is due, and register the wait. Call this in every round of it."""
        waited_s = time.monotonic() - self._since
        if waited_s >= self._registered_s:
            self._register(waited_s)
        if waited_s >= self._limit_s and self._cause is not None:
            self._limit_s = float("inf")
            logger.warning("%s has waited %.3g s for %s", self._waiter, waited_s, self._cause())

    def close(self) -> None:
        """End the registration. Call this after the wait."""
        if self._registered is not None:
            self._registered[1].__exit__(None, None, None)
            self._registered = None

    def _register(self, waited_s: float) -> None:
        """Register the wait, or change the registration if the awaited event is another one."""
        assert self._awaited is not None
        awaited = self._awaited()
        if self._registered is None or self._registered[0] != awaited:
            self.close()
            context = waiting_for(*awaited, time.time() - waited_s)
            context.__enter__()
            self._registered = awaited, context


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
            slow_wait: Reports the wait if it takes long. The caller closes it.

        Raises:
            CancelledError: ``stopped`` has returned True.
            UnavailableError: The peer is gone.
            Exception: The error of the peer.
        """
        if not work.is_completed():
            with self._slow_wait(slow_wait) as wait:
                while not work.is_completed():
                    if self.stopped():
                        raise CancelledError(
                            f"stopped while waiting for {self.what} at {self.peer}"
                        )
                    wait.check()
                    work.block(time.monotonic() + _STOP_PERIOD_S)
        try:
            reply: Reply = work.result()
        except (DistNetworkError, UnavailableError, UnimplementedError) as error:
            raise self._gone(error) from error
        return reply

    def awaited(self) -> Awaited:
        """Return the wait for an answer of the peer, and its task."""
        return f"an answer of the {self.what} at {self.peer}", tasks_at(self.endpoint, [self.peer])

    @contextlib.contextmanager
    def _slow_wait(self, given: SlowWait | None) -> Iterator[SlowWait]:
        """Return the wait of the caller, or a wait without a warning for the ``with`` block."""
        if given is not None:
            yield given
            return
        own = SlowWait(f"a call of the {self.what}", None, self.awaited)
        try:
            yield own
        finally:
            own.close()

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
            slow_wait: Reports the wait if it takes long. The caller closes it.

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
        with self._slow_wait(slow_wait) as wait:
            return self._fetch_with_retry(method, request, limit_s, wait, buffers)

    def _fetch_with_retry(
        self,
        method: str,
        request: Message,
        limit_s: float,
        slow_wait: SlowWait,
        buffers: Sequence[Array],
    ) -> Reply:
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
