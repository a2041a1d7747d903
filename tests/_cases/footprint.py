"""The resource use of a process, to detect leaks."""

from __future__ import annotations

import gc
import json
import os
import threading
import tracemalloc
from dataclasses import dataclass


def memory_growth(run, rounds):
    """Return the bytes that Python keeps after ``run(1)`` to ``run(rounds)``, beyond ``run(0)``."""

    def kept():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(0)
        before = kept()
        for number in range(1, rounds + 1):
            run(number)
        return kept() - before
    finally:
        tracemalloc.stop()


@dataclass(frozen=True)
class Footprint:
    """The resource use of a process and of an endpoint in it.

    Attributes:
        memory: Resident memory in bytes.
        descriptors: Number of open files.
        threads: Number of Python threads.
        shared: Number of mappings of files in /dev/shm.
        pending: Number of entries in each table of the endpoint and its transport, by name.
    """

    memory: int
    descriptors: int
    threads: int
    shared: int
    pending: dict[str, int]

    @classmethod
    def of(cls, endpoint) -> Footprint:
        gc.collect()
        places = {
            "calls": endpoint._client._pending,
            "flows": endpoint._client._flow_control._flows,
            "requests": endpoint._inbox,
            "later": endpoint._deferred,
        }
        for name in ("_outgoing", "_unclaimed"):  # of the mpi transport
            places[name] = getattr(endpoint._transport, name, ())
        for name in ("_incoming", "_expecting"):
            places[name] = getattr(getattr(endpoint._transport, "_inbox", None), name, ())
        return cls(
            resident(),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            _shared_mappings(),
            {name: len(place) for name, place in places.items()},
        )

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpack(cls, text) -> Footprint:
        return cls(**json.loads(text))

    def growth(self, before: Footprint, memory: int = 16 << 20) -> dict[str, tuple[int, int]]:
        """Return the resources that have grown, by name, as pairs of before and now.

        Memory has grown if it exceeds the earlier value by more than ``memory`` bytes.
        """
        pairs = {name: (count, self.pending[name]) for name, count in before.pending.items()}
        for name in ("descriptors", "threads", "shared"):
            pairs[name] = getattr(before, name), getattr(self, name)
        pairs["memory"] = before.memory + memory, self.memory
        return {name: (then, now) for name, (then, now) in pairs.items() if now > then}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _shared_mappings():
    with open("/proc/self/maps") as file:
        return sum("/dev/shm/" in line for line in file)
