"""MPIStore: a store in the memory of one rank, for all ranks."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
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
from mpidist.mpi import World, waiting_for, world
from mpidist.rpc import LATER, Address, Endpoint, Reply, Request, open_endpoint
from mpidist.rpc.message import Array
from mpidist.store.operations import ADDS, Entries, execute
from mpidist.store.store import DEFAULT_TIMEOUT, Store
from mpidist.work import Work

_SERVICE = "store"

# Endpoint numbers of store servers: every rank can compute them. Servers of a cluster count up from
# 0, and membership inboxes begin at 1 << 31.
_FIRST_NUMBER = 1 << 30

# Longest time that a server needs for an answer, beyond the time that it waits for a key.
_ANSWER_S = 10.0

# The wait for a call registers itself after 0.5 s without a break, and names the serving rank.
# A store knows that another rank must set the key.
_SLICE_S = 0.4
_MOST_KEYS = 4  # named for a wait

_CANCELLED = b"cancelled"  # body of the reply to a request that waited for its keys in vain

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
        self._pending: set[int] = set()  # ids of calls under way
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
        for identity in list(self._pending):  # the server would keep a call that waits for a key
            self._cancel(identity)
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

    def _block(self, work: Work, operation: str, keys: Sequence[str], deadline: float) -> None:
        """Wait for the reply to a call. Register the wait if it lasts."""
        work.block(min(time.monotonic() + _SLICE_S, deadline))
        if work.is_completed() or time.monotonic() >= deadline:
            return
        tasks = [f"rank {self._rank}"]
        awaited = f"the store of {tasks[0]}"
        if operation in ("get", "pop", "wait"):  # the rank that sets the key is not known
            named = ", ".join([repr(key) for key in keys[:_MOST_KEYS]])
            awaited, tasks = f"key {named} of {awaited}", []
        with waiting_for(awaited, tasks, time.time() - _SLICE_S):
            while not work.is_completed() and time.monotonic() < deadline:
                work.block(min(time.monotonic() + _SLICE_S, deadline))

    def _execute(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        self._check_open()
        identity, longest_s = next(_IDS), limit_s + _ANSWER_S
        header = {"operation": operation, "keys": list(keys), "id": identity}
        self._pending.add(identity)
        try:
            work = self._call("Execute", header, longest_s, _as_buffers(values))
            try:
                self._block(work, operation, keys, time.monotonic() + limit_s)
            finally:
                if not work.is_completed():
                    # The server answers the first call in any case, with a value if it had one, so
                    # no value of a queue is lost on the way.
                    self._cancel(identity)
            reply: Reply = work.result()
            return None if reply.body == _CANCELLED else _as_values(reply.buffers)
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
        finally:
            self._pending.discard(identity)

    def _cancel(self, identity: int) -> None:
        self._call("Cancel", {"id": identity}, _ANSWER_S)

    def _call(
        self, method: str, header: dict[str, Any], limit_s: float, buffers: Sequence[Any] = ()
    ) -> Work:
        body = json.dumps(header, ensure_ascii=False).encode()
        return self._endpoint.call(
            self._address, f"{_SERVICE}/{method}", body, buffers, timeout=limit_s
        )


class StoreServer:
    """The entries of this rank's store, which the serving thread of an endpoint accesses.

    A request that must wait for a key is kept. It is answered when the key gets a value, or when
    its caller cancels it or disconnects. The endpoint stays open until the rank leaves, so that
    callers learn at once that the store was closed.

    Args:
        endpoint: The endpoint of the server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._users = 0
        self._entries: Entries | None = Entries()
        # Request, operation and keys, by process and id of the call.
        self._waiting: dict[tuple[str, int], tuple[Request, str, list[str]]] = {}
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
                self._entries = Entries()

    def release(self) -> None:
        """Remove a user. After the last one the entries are dropped, and requests fail."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._entries = None
                for request, _, _ in self._waiting.values():
                    request.fail(self._closed_error())
                self._waiting.clear()

    def _closed_error(self) -> UnavailableError:
        return UnavailableError(f"the store of {self._endpoint.address} was closed")

    # On the serving thread

    def _execute(self, request: Request) -> Reply | None:
        header = json.loads(request.body)
        operation, keys = header["operation"], header["keys"]
        with self._lock:
            if self._entries is None:
                raise self._closed_error()
            result = execute(self._entries, operation, keys, _as_values(request.buffers))
            if result is None:
                self._waiting[request.process, header["id"]] = request, operation, keys
                return LATER
            if operation in ADDS:
                self._answer_waiting(self._entries, set(keys))
            return Reply(buffers=_as_buffers(result))

    def _answer_waiting(self, entries: Entries, keys: set[str]) -> None:
        """Answer the requests that waited for these keys and now succeed, oldest first."""
        for identity, (request, operation, wanted) in list(self._waiting.items()):
            if keys.isdisjoint(wanted):
                continue
            result = execute(entries, operation, wanted, ())
            if result is not None:
                del self._waiting[identity]
                request.reply(buffers=_as_buffers(result))

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
            self._waiting.pop(identity)[0].reply(_CANCELLED)


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


def _as_buffers(values: Sequence[bytes]) -> list[Array]:
    return [np.frombuffer(value, np.uint8) for value in values]


def _as_values(buffers: Sequence[Array]) -> list[bytes]:
    return [buffer.tobytes() for buffer in buffers]
