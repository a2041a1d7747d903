"""MPIStore: a store in the memory of one rank, for all ranks."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Any

import numpy as np

from mpidist.errors import (
    DeadlineExceededError,
    DistStoreError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
)
from mpidist.mpi import World, world
from mpidist.rpc import LATER, Address, Endpoint, Reply, Request, open_endpoint
from mpidist.rpc.message import Array
from mpidist.store.operations import ADDS, MemoryEntries, execute
from mpidist.store.store import DEFAULT_TIMEOUT, Store
from mpidist.work import Work

_SERVICE = "store"

# Endpoint numbers of store servers: every rank can compute them. Servers of a cluster count up from
# 0, and membership inboxes begin at 1 << 31.
_FIRST_NUMBER = 1 << 30

# Longest time that a server needs for an answer, beyond the time that it waits for a key.
_ANSWER_S = 10.0

_IDS = itertools.count(1)


class MPIStore(Store):
    """A store in the memory of one rank, which all ranks access by messages.

    Each rank creates its MPIStore whenever it likes; creation is collective only if it starts MPI.
    A thread of the serving rank answers the others. All MPIStores of one rank are views of one
    store, so parts of a program should use a PrefixStore each.

    The store lasts until the serving rank has closed all its MPIStores. Later calls fail. To begin
    a new store, the serving rank must create an MPIStore before others call.

    Args:
        timeout: Time limit for waiting for a key, in seconds or as a timedelta.
        rank: The serving rank; the same on all ranks.

    Raises:
        ValueError: The rank does not exist, or the limit is negative.
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT, rank: int = 0) -> None:
        super().__init__(timeout)
        here = world()
        self._rank = index(rank)
        if not 0 <= self._rank < here.size:
            raise ValueError(f"rank {rank} cannot hold a store: ranks are 0 to {here.size - 1}")
        self._closed = False
        self._address = _server_address(here, self._rank)
        self._endpoint = open_endpoint("mpi")
        self._server = store_server() if self._rank == here.rank else None
        if self._server is not None:
            self._server.acquire()

    @property
    def rank(self) -> int:
        """The serving rank."""
        return self._rank

    def clone(self) -> MPIStore:
        """Return another store with the same entries and a time limit of its own; close it too.

        Raises:
            DistStoreError: This store is closed.
        """
        self._check_open()
        return MPIStore(self._timeout, self._rank)

    def close(self) -> None:
        """Close the store; idempotent. The last close of the serving rank drops the entries.

        Calls of other ranks then fail with DistStoreError, also calls that wait for a key.
        """
        if self._closed:
            return
        self._closed = True
        self._endpoint.close()
        if self._server is not None:
            self._server.release()

    def __enter__(self) -> MPIStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MPIStore(rank={self._rank})"

    # Internals

    def _check_open(self) -> None:
        if self._closed:
            raise DistStoreError(f"{self._here()} is closed")

    def _execute(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        self._check_open()
        lengths, buffers = _pack(values)
        identity, longest_s = next(_IDS), limit_s + _ANSWER_S
        header = {
            "operation": operation,
            "keys": list(keys),
            "lengths": lengths,
            "id": identity,
            "limit_s": longest_s,
        }
        try:
            work = self._call("Execute", header, longest_s, buffers)
            try:
                work.block(time.monotonic() + limit_s)
            finally:
                if not work.is_completed():
                    # The server answers the first call in any case, with a value if it had one, so
                    # no value of a queue is lost on the way.
                    self._call("Cancel", {"id": identity}, _ANSWER_S)
            return _unpack_reply(work.result())
        except InvalidArgumentError:
            raise
        except DeadlineExceededError as error:
            raise DistStoreError(
                f"{self._here()}: no answer to {operation} from rank {self._rank} within "
                f"{longest_s:g} s; it must make its MPIStore too, and be alive"
            ) from error
        except OpError as error:
            raise DistStoreError(
                f"{self._here()}: {operation} failed ({error}); the store lasts until rank "
                f"{self._rank} closes it, or ends: have all ranks finish before"
            ) from error

    def _call(
        self, method: str, header: dict[str, Any], limit_s: float, buffers: Sequence[Any] = ()
    ) -> Work:
        body = json.dumps(header, ensure_ascii=False).encode()
        return self._endpoint.call(
            self._address, f"{_SERVICE}/{method}", body, buffers, timeout=limit_s
        )


@dataclass(frozen=True)
class _WaitingRequest:
    """A request that waits for a key."""

    request: Request
    operation: str
    keys: list[str]
    deadline: float


class StoreServer:
    """The entries of this rank's store, which the serving thread of an endpoint accesses.

    A request that must wait for a key is kept. It is answered when the key gets a value, or when
    its caller cancels it or disconnects. After its deadline it is dropped, so that memory stays
    bounded. The endpoint stays open until the rank leaves, so that callers learn at once that the
    store was closed.

    Args:
        endpoint: The endpoint of the server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._users = 0
        self._entries: MemoryEntries | None = MemoryEntries()
        self._waiting: dict[tuple[str, int], _WaitingRequest] = {}
        endpoint.register(_SERVICE, {"Execute": self._execute, "Cancel": self._cancel})
        endpoint.on_peer_lost(self._on_peer_lost)
        endpoint.serve_in_thread()

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a key."""
        return len(self._waiting)

    def acquire(self) -> None:
        """Add a user. The first user after a close gets an empty store."""
        with self._lock:
            self._users += 1
            if self._entries is None:
                self._entries = MemoryEntries()

    def release(self) -> None:
        """Remove a user. After the last one the entries are dropped, and requests fail."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._entries = None
                for waiting in self._waiting.values():
                    waiting.request.fail(self._closed_error())
                self._waiting.clear()

    def _closed_error(self) -> UnavailableError:
        return UnavailableError(f"the store of {self._endpoint.address} was closed")

    # On the serving thread

    def _execute(self, request: Request) -> Reply | None:
        header = json.loads(request.body)
        operation, keys = header["operation"], header["keys"]
        values = _unpack(header["lengths"], request.buffers)
        with self._lock:
            if self._entries is None:
                raise self._closed_error()
            result = execute(self._entries, operation, keys, values)
            if result is None:
                now = time.monotonic()
                self._drop([key for key, one in self._waiting.items() if one.deadline < now])
                waiting = _WaitingRequest(request, operation, keys, now + header["limit_s"])
                self._waiting[request.process, header["id"]] = waiting
                return LATER
            if operation in ADDS:
                self._answer_waiting(self._entries, set(keys))
            return _pack_reply(result)

    def _answer_waiting(self, entries: MemoryEntries, keys: set[str]) -> None:
        """Answer the requests that waited for these keys and now succeed, oldest first."""
        for identity, waiting in list(self._waiting.items()):
            if keys.isdisjoint(waiting.keys):
                continue
            result = execute(entries, waiting.operation, waiting.keys, ())
            if result is not None:
                del self._waiting[identity]
                reply = _pack_reply(result)
                waiting.request.reply(reply.body, reply.buffers)

    def _cancel(self, request: Request) -> None:
        identity = (request.process, json.loads(request.body)["id"])
        with self._lock:
            if identity in self._waiting:  # otherwise its answer is on the way
                self._drop([identity])

    def _on_peer_lost(self, process: str) -> None:
        with self._lock:
            self._drop([identity for identity in self._waiting if identity[0] == process])

    def _drop(self, identities: list[tuple[str, int]]) -> None:
        for identity in identities:
            self._waiting.pop(identity).request.reply(_pack_reply(None).body)


_server: StoreServer | None = None
_server_lock = threading.Lock()


def store_server() -> StoreServer:
    """Return the store server of this rank. The first call creates it."""
    global _server
    with _server_lock:
        if _server is None:
            here = world()
            _server = StoreServer(open_endpoint("mpi", _server_address(here, here.rank).port))
        return _server


def _server_address(world: World, rank: int) -> Address:
    return Address("mpi", world.hosts[rank], _FIRST_NUMBER // world.size * world.size + rank)


def _pack(values: Sequence[bytes]) -> tuple[list[int], list[Array]]:
    """Return the lengths of values, and one buffer with all of them. One value is not copied."""
    data = values[0] if len(values) == 1 else b"".join(values)
    return [len(value) for value in values], [np.frombuffer(data, np.uint8)]


def _unpack(lengths: Sequence[int], buffers: Sequence[Array]) -> list[bytes]:
    ends = list(itertools.accumulate(lengths))
    return [buffers[0][end - n : end].tobytes() for n, end in zip(lengths, ends, strict=True)]


def _pack_reply(values: list[bytes] | None) -> Reply:
    """Return the reply with the results of an operation; None stands for a cancelled operation."""
    if values is None:
        return Reply(b"null")
    lengths, buffers = _pack(values)
    return Reply(json.dumps(lengths).encode(), buffers)


def _unpack_reply(reply: Reply) -> list[bytes] | None:
    lengths: Any = json.loads(reply.body)
    return None if lengths is None else _unpack(lengths, reply.buffers)
