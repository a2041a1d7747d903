"""The state of variables and connections on a server."""

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
from strategy.server.shard import OwnedShard

Training = tuple[str, str, int, int]
"""Name, mode, backup workers and staleness bound, shared by strategies that train together."""


@dataclass
class ServedVariable:
    """A variable of a server.

    Attributes:
        identity: Number of the variable.
        creator: Number of the connection that must push the initial value.
        creating_worker: Index of the worker of that connection.
        shard: Values, versions and optimizer slots.
        place: Location of the versions and the values.
        waiting: Requests of workers that wait for the initial value.
        abandoned: True if the next worker that creates the variable must push the initial value.
    """

    identity: int
    creator: int
    creating_worker: int
    shard: OwnedShard
    place: Place
    waiting: list[Request] = field(default_factory=list)
    abandoned: bool = False


@dataclass
class ServedConnection:
    """The connection of a worker's strategy.

    Attributes:
        worker: Index of the worker.
        strategy: Name of the strategy.
        mode: The synchronization mode.
        gpu: Index of the GPU of the server for floating-point variables; None for the host.
        is_closed: True after the worker has closed the strategy.
        sequence: Sequence number of the last push.
        slices: Arrays of each PushSlice message whose push has not arrived yet.
        unfinished: Pushes that have not been applied, in order.
        applied: Sequence number of the last applied push.
        sent: Vector clock in the last applied push: sequence numbers of the worker's last pushes to
            all servers.
    """

    worker: int
    strategy: str
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
        """Index of the worker, and name of the strategy."""
        return (self.worker, self.strategy)

    @property
    def training(self) -> Training:
        """The properties shared by strategies that train together."""
        return self.strategy, self.mode.name, self.mode.backup_workers, self.mode.staleness


def mode_in_words(mode: pb.Mode) -> str:
    """Return the text for a mode, with its options and the compression, for messages."""
    details = {
        "sync": f" with backup_workers={mode.backup_workers}",
        "ssp": f" with staleness={mode.staleness}",
    }
    compression = f", compression {mode.compression}" if mode.compression else ""
    return f"{mode.name!r}{details.get(mode.name, '')}{compression}"


def gpu_in_words(gpu: int | None) -> str:
    """Return the text for a GPU, or for the host, for messages."""
    return "the host" if gpu is None else f"GPU {gpu}"
