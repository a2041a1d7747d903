"""Device names in TensorFlow's format, and policies that choose the ps task of a variable."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import md5

import numpy as np

from strategy.protocol.layout import Layout

_PARTS = {
    "job": re.compile(r"job:([A-Za-z_][\w.]*)"),
    "replica": re.compile(r"replica:(\d+)"),
    "task": re.compile(r"task:(\d+)"),
    "device": re.compile(r"(?:device:)?((?:CPU|GPU)(?::(?:\d+|\*))?)", re.IGNORECASE),
}


@dataclass(frozen=True)
class Device:
    """A device name, which may be partial. None stands for any value.

    Attributes:
        job: Name of the job.
        replica: Index of the replica; has no effect.
        task: Index of the task.
        device: Device of the task, such as ``CPU:0`` or ``GPU:1``.
    """

    job: str | None = None
    replica: str | None = None
    task: str | None = None
    device: str | None = None

    def merged(self, inner: Device) -> Device:
        """Return this name with the parts of an inner scope in place of its own parts."""
        given = {field.name: getattr(inner, field.name) for field in fields(inner)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def __str__(self) -> str:
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "".join(f"/{name}:{value}" for name, value in parts if value is not None)


def parse(name: str) -> Device:
    """Parse a device name.

    Raises:
        ValueError: The name is not valid.
    """
    found: dict[str, str] = {}
    for word in filter(None, name.split("/")):
        for part, pattern in _PARTS.items():
            match = pattern.fullmatch(word)
            if match is not None and part not in found:
                value = match[1].upper() if part == "device" else match[1]
                found[part] = f"{value}:0" if value in ("CPU", "GPU") else value
                break
        else:
            raise ValueError(
                f"{name!r} is no name of a device: expected parts of "
                "'/job:worker/task:0/device:CPU:0'"
            )
    return Device(**found)


Place = Callable[[str, tuple[int, ...], "np.dtype[np.generic]"], int]
"""A function of the name, shape and dtype of a new variable that returns the index of a ps task."""


def _by_bytes(name: str, loads: Sequence[int], count: int) -> int:
    """Return the server with the fewest bytes so far; the first one in a tie."""
    return loads.index(min(loads))


def _in_turn(name: str, loads: Sequence[int], count: int) -> int:
    """Return the next server in round-robin order, as TensorFlow does."""
    return count % len(loads)


def _by_name(name: str, loads: Sequence[int], count: int) -> int:
    """Return a server by a hash of the name, independent of other variables."""
    digest = md5(name.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest, "big") % len(loads)


# Functions of a name, the bytes on each server and the number of variables so far.
_POLICIES = {"bytes": _by_bytes, "round_robin": _in_turn, "hash": _by_name}

PLACEMENTS = tuple(_POLICIES)

# Report an imbalance above both: this multiple of the mean, and this many bytes beyond the mean.
_UNEVEN, _UNEVEN_BYTES = 1.5, 1 << 20


class Placement:
    """A policy that chooses the ps tasks of new variables.

    Args:
        placement: One of :data:`PLACEMENTS`, or a function; see :data:`Place`. None, which
            :func:`replica_device_setter` returns without ps tasks, stands for ``"bytes"``.
        servers: Number of ps tasks.
        alone: Whether this is local mode. There, the last ps task also stands for larger indices.

    Raises:
        TypeError: The placement is neither a name nor a function.
        ValueError: The name is unknown.
    """

    def __init__(self, placement: str | Place | None, servers: int, alone: bool = False) -> None:
        placement = "bytes" if placement is None else placement
        if isinstance(placement, str):
            if placement not in _POLICIES:
                known = ", ".join(map(repr, PLACEMENTS))
                raise ValueError(f"unknown placement {placement!r}; the known ones are {known}")
        elif not callable(placement):
            raise TypeError(f"a placement is one of {PLACEMENTS} or a function, not {placement!r}")
        self._placement = placement
        self._loads = [0] * servers
        self._alone = alone
        self._count = 0

    def imbalance(self) -> str:
        """Return a warning if the variables are spread unevenly, else an empty string.

        Each step waits for the ps task with the most bytes.
        """
        most, mean = max(self._loads), sum(self._loads) / len(self._loads)
        if most <= _UNEVEN * mean or most - mean <= _UNEVEN_BYTES:
            return ""
        shares = ", ".join(f"{load / (1 << 20):,.1f}" for load in self._loads)
        return (
            f"variables are spread unevenly: {shares} MiB on the ps tasks, in their order; every "
            f"step waits for the fullest, which has {most / mean:.1f} times the mean. Divide large "
            "variables by a partitioner, and leave the placement at 'bytes'"
        )

    def choose(self, parts: Sequence[tuple[str, Layout]]) -> list[int]:
        """Return the indices of the ps tasks for the parts of a new variable.

        Args:
            parts: Name and layout of each part.

        Raises:
            TypeError: The user's function does not return an integer.
            ValueError: The user's function returns an index that does not exist.
        """
        servers: list[int] = []
        loads = self._loads.copy()  # with the earlier parts, which may never be created
        for name, layout in parts:
            servers.append(self._choose_one(name, layout, loads, self._count + len(servers)))
            loads[servers[-1]] += _load(layout)
        return servers

    def note(self, server: int, layout: Layout) -> None:
        """Count a variable that was created on a ps task."""
        self._loads[server] += _load(layout)
        self._count += 1

    def _choose_one(self, name: str, layout: Layout, loads: Sequence[int], count: int) -> int:
        if isinstance(self._placement, str):
            return _POLICIES[self._placement](name, loads, count)
        server = self._placement(name, layout.shape, layout.dtype)
        if isinstance(server, bool) or not isinstance(server, int | np.integer):
            raise TypeError(f"the placement of variable {name!r} gives {server!r}, no index")
        if self._alone and server >= len(loads):
            server = len(loads) - 1
        if not 0 <= server < len(loads):
            raise ValueError(
                f"the placement of variable {name!r} gives ps {server}, and there are {len(loads)}"
            )
        return int(server)


def _load(layout: Layout) -> int:
    # A server of many tiny variables is not idle, so count 64 bytes of overhead for each.
    return layout.data_bytes + 64
