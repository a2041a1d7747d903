"""Calls that wait for a peer, from threads that other threads may stop."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from dataservice.monitoring import SlowWait
from dataservice.wire import Array
from mpidist import Endpoint, Reply, Work
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    DistNetworkError,
    Error,
    UnavailableError,
    UnimplementedError,
)
from mpidist.mpi import Backoff

M = TypeVar("M", bound=Message)

# Distinguishes this process from an earlier one with the same number.
_TOKEN = secrets.token_hex(4)

# Period at which a waiting thread checks that it shall go on.
_STOP_PERIOD_S = 0.1


def process_name() -> str:
    """Return the name of this process: ``host/pid-token``."""
    return f"{socket.gethostname()}/{os.getpid()}-{_TOKEN}"


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

    def call(
        self, method: str, request: Message, kind: type[M], buffers: Sequence[Array] = ()
    ) -> M:
        """Call, and wait for the reply; raises as :meth:`finish`."""
        return kind.FromString(self.finish(self.start(method, request, buffers)).body)

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
