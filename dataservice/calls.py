"""Calls from threads that may wait, and that somebody may want to stop."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from dataservice.stall import Stall
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

# Tells a process from an earlier one with the same number.
_TOKEN = secrets.token_hex(4)

# How often a waiting thread looks whether it shall stop.
_STOP_PERIOD_S = 0.1


def process_name() -> str:
    """Local. What this process is called: ``host/pid-token``."""
    return f"{socket.gethostname()}/{os.getpid()}-{_TOKEN}"


class Caller:
    """Calls one peer from an endpoint.

    Args:
        endpoint: Ours.
        peer: Whom to call.
        what: The peer in words, for errors.
        stopped: Asked while waiting; when it gives True, calls end with CancelledError.
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
        """Local. Begin a call; its Work gives a Reply.

        Raises:
            UnavailableError: There is nobody at the peer's address.
        """
        body = request.SerializeToString()
        try:
            return self.endpoint.call(self.peer, method, body, buffers, timeout=timeout)
        except DistNetworkError as error:
            raise self._gone(error) from error

    def notify(self, method: str, request: Message) -> None:
        """Local. Tell the peer something, without an answer."""
        self.endpoint.notify(self.peer, method, request.SerializeToString())

    def finish(self, work: Work, stall: Stall | None = None) -> Reply:
        """Local. Wait for a call.

        Args:
            work: What ``start`` gave.
            stall: What to report if it takes long.

        Raises:
            CancelledError: Somebody wants the thread to stop.
            UnavailableError: The peer is gone.
            Exception: What the call failed with.
        """
        while not work.is_completed():
            if self.stopped():
                raise CancelledError(f"stopped while waiting for {self.what} at {self.peer}")
            if stall is not None:
                stall.look()
            work.block(time.monotonic() + _STOP_PERIOD_S)
        try:
            reply: Reply = work.result()
        except (DistNetworkError, UnavailableError, UnimplementedError) as error:
            raise self._gone(error) from error
        return reply

    def _gone(self, error: Error) -> UnavailableError:
        return UnavailableError(f"the {self.what} at {self.peer} is gone: {error}")

    def ask(self, method: str, request: Message, kind: type[M], buffers: Sequence[Array] = ()) -> M:
        """Local. Call and wait; raises as :meth:`finish`."""
        return kind.FromString(self.finish(self.start(method, request, buffers)).body)

    def ask_patiently(
        self,
        method: str,
        request: Message,
        kind: type[M],
        limit_s: float,
        stall: Stall | None = None,
    ) -> M:
        """Local. As :meth:`ask`, but for a peer that may not have started yet.

        Args:
            method: ``"service/Method"``.
            request: Its message.
            kind: The class of the answer.
            limit_s: For how long to try, in seconds.
            stall: What to report if it takes long.

        Raises:
            UnavailableError: It has not within ``limit_s`` seconds.
        """
        return kind.FromString(self.get_patiently(method, request, limit_s, stall).body)

    def get_patiently(
        self,
        method: str,
        request: Message,
        limit_s: float,
        stall: Stall | None = None,
        buffers: Sequence[Array] = (),
    ) -> Reply:
        """Local. As :meth:`ask_patiently`, but sends buffers, and gives the whole Reply."""
        told: Error | None = None
        deadline = time.monotonic() + limit_s
        backoff = Backoff(longest_s=_STOP_PERIOD_S)
        while True:
            remaining = max(deadline - time.monotonic(), 0.0)
            try:
                work = self.start(method, request, buffers, timeout=remaining)
                return self.finish(work, stall)
            except (DeadlineExceededError, UnavailableError) as error:
                # That time was short at the end says less than what was wrong before.
                if told is None or isinstance(error, UnavailableError):
                    told = error
                if time.monotonic() >= deadline:
                    raise UnavailableError(
                        f"no {self.what} answers at {self.peer} (tried for {limit_s:g} s): "
                        f"{told.__cause__ or told}"
                    ) from told
            if self.stopped():
                raise CancelledError(f"stopped while waiting for {self.what} at {self.peer}")
            if stall is not None:
                stall.look()
            backoff.pause()
