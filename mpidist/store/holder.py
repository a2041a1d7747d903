"""The rank that has the entries of an MPIStore, and what travels to it and back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.rpc import LATER, Address, Endpoint, Reply, Request, open_endpoint
from mpidist.rpc.message import Array
from mpidist.runtime import World, world
from mpidist.store.operations import ADDS, MemoryEntries, carry_out

SERVICE = "store"

# Of its own, apart from those of Servers, which count up from 0, and of their mailboxes, which are
# twice as high: so every rank knows where the holder is.
_NUMBERS = 1 << 30


def address_of(world: World, rank: int) -> Address:
    """Local. Where a rank answers as a holder."""
    return Address("mpi", world.hosts[rank], _NUMBERS // world.size * world.size + rank)


def pack(values: Sequence[bytes]) -> tuple[list[int], list[Array]]:
    """Local. The lengths of values, and all of them as one buffer; a single one is not copied."""
    data = values[0] if len(values) == 1 else b"".join(values)
    return [len(value) for value in values], [np.frombuffer(data, np.uint8)]


def unpack(lengths: Sequence[int], buffers: Sequence[Array]) -> list[bytes]:
    """Local. The values that :func:`pack` was given."""
    ends = list(accumulate(lengths))
    return [buffers[0][end - n : end].tobytes() for n, end in zip(lengths, ends, strict=True)]


@dataclass(frozen=True)
class _Parked:
    """A request that waits for a key."""

    request: Request
    operation: str
    keys: list[str]
    deadline: float


class Holder:
    """Entries that other ranks work on, one request at a time.

    A request that has to wait is parked. It leaves when a key comes, when its caller gives up or
    is gone, and at the latest some time after its deadline, so that memory stays bounded.

    Args:
        endpoint: Serves them; it is the holder's from now on, until the rank leaves: so callers
            learn at once that the store was closed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._entries: MemoryEntries | None = MemoryEntries()
        self._parked: dict[tuple[str, int], _Parked] = {}
        endpoint.register(SERVICE, {"Do": self._do, "GiveUp": self._give_up})
        endpoint.on_peer_lost(self._lose)
        endpoint.serve_in_thread()

    @property
    def parked(self) -> int:
        """How many requests wait for a key."""
        return len(self._parked)

    def begin(self) -> None:
        """Local. Begin anew after a close, with an empty store."""
        with self._lock:
            self._entries = MemoryEntries()

    def close(self) -> None:
        """Local. Drop the entries; requests that wait, and later ones, fail."""
        with self._lock:
            self._entries = None
            for parked in self._parked.values():
                parked.request.fail(self._closed())
            self._parked.clear()

    def _closed(self) -> UnavailableError:
        return UnavailableError(f"the store of {self._endpoint.address} was closed")

    # On the serving thread

    def _do(self, request: Request) -> Reply | None:
        header = json.loads(request.body)
        operation, keys = header["operation"], header["keys"]
        values = unpack(header["lengths"], request.buffers)
        with self._lock:
            if self._entries is None:
                raise self._closed()
            result = carry_out(self._entries, operation, keys, values)
            if result is None:
                now = time.monotonic()
                self._drop([name for name, one in self._parked.items() if one.deadline < now])
                waiting = _Parked(request, operation, keys, now + header["limit_s"])
                self._parked[request.process, header["id"]] = waiting
                return LATER
            if operation in ADDS:
                self._wake(self._entries, set(keys))
            return _answer(result)

    def _wake(self, entries: MemoryEntries, keys: set[str]) -> None:
        """Answer those that waited for these keys and have them now; who came first is first."""
        for name, parked in list(self._parked.items()):
            if keys.isdisjoint(parked.keys):
                continue
            result = carry_out(entries, parked.operation, parked.keys, ())
            if result is not None:
                del self._parked[name]
                reply = _answer(result)
                parked.request.reply(reply.body, reply.buffers)

    def _give_up(self, request: Request) -> None:
        name = (request.process, json.loads(request.body)["id"])
        with self._lock:
            if name in self._parked:  # otherwise it has just been answered
                self._drop([name])

    def _lose(self, process: str) -> None:
        with self._lock:
            self._drop([name for name in self._parked if name[0] == process])

    def _drop(self, names: list[tuple[str, int]]) -> None:
        for name in names:
            self._parked.pop(name).request.reply(_answer(None).body)


def _answer(values: list[bytes] | None) -> Reply:
    """What :func:`read_answer` reads."""
    if values is None:
        return Reply(b"null")
    lengths, buffers = pack(values)
    return Reply(json.dumps(lengths).encode(), buffers)


def read_answer(reply: Reply) -> list[bytes] | None:
    """Local. What an operation gave; None if the caller gave up first."""
    lengths: Any = json.loads(reply.body)
    return None if lengths is None else unpack(lengths, reply.buffers)


class _Shared:
    """The holder of this process; its entries last as long as one of its stores needs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.holder: Holder | None = None

    def join(self) -> None:
        """Local. Use the holder; the first user begins a new store."""
        with self._lock:
            if self.holder is None:
                here = world()
                endpoint = open_endpoint("mpi", address_of(here, here.rank).port)
                self.holder = Holder(endpoint)
            elif self._users == 0:
                self.holder.begin()
            self._users += 1

    def leave(self) -> None:
        """Local. Use the holder no more; the last user closes it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self.holder is not None:
                self.holder.close()


shared = _Shared()
"""The one of this process: all its stores that rank holds are one."""
