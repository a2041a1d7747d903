"""Variables and connections, as a server knows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist import Request
from strategy.checkpoints.cut import Key
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.memory import Place
from strategy.server.owned_shard import OwnedShard
from strategy.shared.parts import Origin, Part


@dataclass
class ServedVariable:
    """A variable, as its server knows it.

    Attributes:
        identity: Its number.
        ordinal: How many variables its creator created before.
        creator: The connection that gives the first value. Several strategies of a worker, in
            threads, have one each.
        creating_worker: Index of its worker.
        shard: Its contents.
        place: Where its versions and its data lie.
        waiting: Requests of workers that wait for its first value.
        abandoned: Whether the next worker to ask has to give it.
    """

    identity: int
    ordinal: int
    creator: int
    creating_worker: int
    shard: OwnedShard
    place: Place
    waiting: list[Request] = field(default_factory=list)
    abandoned: bool = False


@dataclass
class ServedConnection:
    """A worker's connection, as the server knows it.

    Attributes:
        worker: Index of the worker.
        strategy: How many strategies the worker made before.
        mode: How it waits for other workers.
        gpu: Index of the GPU of the server for floating-point variables; None for the host.
        is_closed: True after the worker has closed the strategy.
        sequence: Sequence number of the last push.
        slices: Arrays of each PushSlice message whose push has not arrived yet.
        unfinished: Pushes that have not been applied, in order.
        applied: Sequence number of the last applied push.
        sent: Sequence numbers of the worker's last pushes to all servers, from the last applied
            push.
    """

    worker: int
    strategy: int
    mode: pb.Mode
    gpu: int | None = None
    is_closed: bool = False
    sequence: int = 0
    slices: list[Sequence[np.ndarray]] = field(default_factory=list)
    unfinished: deque[Any] = field(default_factory=deque)
    applied: int = 0
    sent: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        """Local. The worker, and the number of its strategy."""
        return (self.worker, self.strategy)


def mode_in_words(mode: pb.Mode, other: pb.Mode) -> str:
    """Local. How workers wait for each other, and a transport that is not that of others."""
    details = {
        "sync": f" with backup_workers={mode.backup_workers}",
        "ssp": f" with staleness={mode.staleness}",
    }
    compression = f", compression {mode.compression}" if mode.compression else ""
    transport = ""
    if mode.one_sided != other.one_sided:
        transport = ", transport 'rma'" if mode.one_sided else ", a transport other than 'rma'"
    return f"{mode.name!r}{details.get(mode.name, '')}{compression}{transport}"


def gpu_in_words(gpu: int | None) -> str:
    """Local. Where variables are to lie."""
    return "the host" if gpu is None else f"GPU {gpu}"


def origin_of(asked: pb.CreateRequest) -> Origin:
    """Local. What of which variable is created."""
    part = asked.part
    axis = part.axis if part.HasField("axis") else None
    return Origin(part.variable, Part(tuple(part.shape), axis, part.start, part.stop))


def division_of(asked: pb.CreateRequest) -> str:
    """Local. How the variable is divided, in words; nothing if it is not."""
    part = asked.part
    if part.count < 2:
        return ""
    way = f"axis {part.axis}" if part.HasField("axis") else "its flattened elements"
    return f" in {part.count} parts along {way}"
