"""What a process holds, to see whether it grows."""

from __future__ import annotations

import gc
import json
import os
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """What a process and an endpoint in it hold.

    Attributes:
        memory: Resident bytes.
        descriptors: Open files.
        threads: Of Python.
        shared: Mappings of files in /dev/shm.
        pending: What the endpoint and its transport keep for later, by name.
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
        for name in ("_outgoing", "_unclaimed"):  # of mpi
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
        """What is more than before, of memory by more than given: by its name, before and now."""
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
