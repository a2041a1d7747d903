"""The variables and connections of a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist import LATER, Reply, Request, errors
from strategy.checkpoints.cut import Key
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.cluster import Host
from strategy.protocol.layout import Layout
from strategy.protocol.partition import origin_of
from strategy.server.gpu import Gpu
from strategy.server.gpu_shard import GpuShard
from strategy.server.memory import Memory, Place, on_whole_pages, paged_bytes
from strategy.server.shard import (
    DATA_BYTES,
    VERSIONS_BYTES,
    Bucket,
    Scratch,
    Shard,
    Span,
    is_small,
    wide_dtype,
)
from strategy.server.snapshot import Snapshot

Training = tuple[str, str, int, int]
"""Name, mode, backup workers and staleness bound, shared by strategies that train together."""


@dataclass
class VariableEntry:
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
    shard: Shard
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
        ended: Sequence number of the last push that was applied or has failed.
        sent: Vector clock in that push: sequence numbers of the worker's last pushes to all
            servers.
    """

    worker: int
    strategy: str
    mode: pb.Mode
    gpu: int | None = None
    is_closed: bool = False
    sequence: int = 0
    slices: list[Sequence[np.ndarray]] = field(default_factory=list)
    unfinished: deque[Any] = field(default_factory=deque)
    ended: int = 0
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


class VariableStore:
    """The variables and connections of a server.

    Args:
        host: The process of the server.
        index: Index of the ps task.

    Attributes:
        variables: The variables by number.
        by_name: The variables by name.
        connections: The connections by number.
        snapshots: The copies of running saves, by the path of the file.
    """

    def __init__(self, host: Host, index: int) -> None:
        self.variables: list[VariableEntry] = []
        self.by_name: dict[str, VariableEntry] = {}
        self.connections: dict[int, ServedConnection] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self._attached = 0
        self._index = index
        self._sync = host.memory.sync
        self._memory = Memory(host.memory)
        self._scratch = Scratch()
        self._gpus: dict[int, Gpu] = {}  # CUDA is loaded when a worker first asks for one
        self._buckets: dict[np.dtype[Any], Bucket] = {}  # the last bucket of each dtype

    def close(self) -> None:
        """Release the memory of GPUs and all variables."""
        for snapshot in self.snapshots.values():
            snapshot.finish()  # a thread reads the variables
        for variable in self.variables:
            variable.shard.close()
        self._gpus.clear()
        self._buckets.clear()

    def attach(self, asked: pb.AttachRequest) -> int:
        """Open the connection of a worker's strategy. Return its number.

        Raises:
            AlreadyExistsError: The worker has an open strategy of this name.
            InvalidArgumentError: Other workers have another mode or GPU, or the GPU does not exist.
            FailedPreconditionError: CuPy cannot be imported, or cannot use a GPU.
            InternalError: CUDA failed.
        """
        gpu = asked.gpu if asked.HasField("gpu") else None
        for other in self.connections.values():
            if other.strategy != asked.strategy:
                continue
            if other.worker == asked.worker and not other.is_closed:
                raise errors.AlreadyExistsError(
                    f"worker {asked.worker} has an open strategy named {asked.strategy!r}: close "
                    "it first, or give the new one another name, the same on all workers "
                    "(name='...')"
                )
            if other.mode != asked.mode:
                raise errors.InvalidArgumentError(
                    f"worker {asked.worker} has mode {mode_in_words(asked.mode)}, but worker "
                    f"{other.worker} has {mode_in_words(other.mode)}: use the same mode on all "
                    "workers. To change the mode, close the strategy on all workers and meet in a "
                    "barrier, or use another name (name='...')"
                )
            if other.gpu != gpu:
                raise errors.InvalidArgumentError(
                    f"worker {asked.worker} has variables of ps {self._index} on "
                    f"{gpu_in_words(gpu)}, and worker {other.worker} on "
                    f"{gpu_in_words(other.gpu)}: all workers must have the same parameter_devices"
                )
        if gpu is not None and gpu not in self._gpus:
            self._gpus[gpu] = Gpu(gpu, f"ps {self._index}")
        if asked.one_sided:
            self._memory.attach()
        number = self._attached
        self._attached += 1
        self.connections[number] = ServedConnection(asked.worker, asked.strategy, asked.mode, gpu)
        return number

    def detach(self, number: int) -> None:
        """Forget a connection that has no pushes in flight."""
        del self.connections[number]
        gone = errors.FailedPreconditionError("the strategy was closed")
        for variable in self.variables:
            for request in list(variable.waiting):
                if pb.CreateRequest.FromString(request.body).connection == number:
                    variable.waiting.remove(request)
                    request.fail(gone)
            if variable.creator == number and variable.shard.version == 0:
                self._pass_on(variable)

    def create(self, request: Request) -> Reply:
        """Create a variable, or find it. Reply when the variable has its initial value.

        The first worker is told at once that it must push the initial value.
        """
        asked = pb.CreateRequest.FromString(request.body)
        layout = Layout(asked.shape, asked.dtype)
        variable = self.by_name.get(asked.name)
        if variable is None:
            variable = self._make(asked, layout)
        else:
            self._check_same(variable, asked, layout)
            if variable.abandoned:
                variable.abandoned = False
                variable.creator, variable.creating_worker = asked.connection, asked.worker
            elif variable.shard.version == 0 and asked.connection != variable.creator:
                variable.waiting.append(request)
                return LATER
        return self._created(variable, must_initialize=variable.shard.version == 0)

    def abandon(self, request: Request) -> None:
        """Let the next worker push the initial value, because this worker cannot."""
        asked = pb.AbandonRequest.FromString(request.body)
        variable = self.variables[asked.variable]
        # If the connection was closed meanwhile, another worker may already have to push the value.
        if variable.creator == asked.connection and variable.shard.version == 0:
            self._pass_on(variable)

    def answer_waiting(self, variable: VariableEntry) -> None:
        """Answer the workers that wait for the initial value of a variable."""
        waiting, variable.waiting = variable.waiting, []
        for request in waiting:
            request.reply(self._created(variable, must_initialize=False).body)

    def _pass_on(self, variable: VariableEntry) -> None:
        """Leave the initial value to the next worker that creates the variable."""
        if not variable.waiting:
            variable.abandoned = True
            return
        following = variable.waiting.pop(0)
        asked = pb.CreateRequest.FromString(following.body)
        variable.creator, variable.creating_worker = asked.connection, asked.worker
        following.reply(self._created(variable, must_initialize=True).body)

    def _created(self, variable: VariableEntry, must_initialize: bool) -> Reply:
        place = variable.place
        versions, data = place.offsets
        reply = pb.CreateReply(
            variable=variable.identity,
            versions_offset=versions,
            data_offset=data,
            must_initialize=must_initialize,
            version=variable.shard.version,
            gpu=variable.shard.gpu,
            segment=place.segment.reference,
            address=self._memory.address_of(place.segment),
        )
        return Reply(reply.SerializeToString())

    def _check_same(self, variable: VariableEntry, asked: pb.CreateRequest, layout: Layout) -> None:
        """Raise InvalidArgumentError if a worker creates a variable differently than the first."""
        known, origin = variable.shard.layout, variable.shard.origin
        if (known.shape, known.dtype, origin) != (layout.shape, layout.dtype, origin_of(asked)):
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates {asked.name!r} on ps {self._index} as "
                f"{layout.dtype}{list(layout.shape)} of variable {asked.variable!r}, but worker "
                f"{variable.creating_worker} created it as {known.dtype}{list(known.shape)} of "
                f"{origin.variable!r}: use the same variables and parameter_devices on all workers"
            )
        gpu = self._gpu_of(asked, layout)
        if gpu != variable.shard.gpu:
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable {asked.name!r} on {gpu_in_words(gpu)} of "
                f"ps {self._index}, but worker {variable.creating_worker} created it on "
                f"{gpu_in_words(variable.shard.gpu)}: use the same parameter_devices on all workers"
            )

    def _gpu_of(self, asked: pb.CreateRequest, layout: Layout) -> int | None:
        """Return the GPU of a new variable; None for the host, where all integers and bools are."""
        return self.connections[asked.connection].gpu if layout.is_floating else None

    def _make(self, asked: pb.CreateRequest, layout: Layout) -> VariableEntry:
        index, values, span = self._gpu_of(asked, layout), None, None
        gpu = None if index is None else self._gpus[index]
        try:
            if gpu is not None:
                # The GPU first: its memory goes back after an error, host memory does not.
                with gpu.working("allocating memory"):
                    owner = f"variable {asked.name!r}"
                    values = gpu.array(layout.size, wide_dtype(layout), owner)
                lengths = layout.version_bytes, paged_bytes(layout.data_bytes)
                place = on_whole_pages(self._memory.carve(*lengths), 1)
            elif is_small(layout):
                span = self._span(layout)
                place = span.place
            else:
                place = self._memory.carve(layout.version_bytes, layout.data_bytes)
        except errors.ResourceExhaustedError as error:
            raise errors.ResourceExhaustedError(
                f"ps {self._index} has no room for variable {asked.name!r} of {layout.data_bytes} "
                f"bytes: {error.message}"
            ) from error
        versions, data = place.offsets
        place.memory[versions : versions + layout.version_bytes] = 0
        location = (place.memory, layout, versions, data)
        given = (asked.name, *location, self._sync, self._scratch, origin_of(asked))
        if gpu is None:
            shard = Shard(*given, span)
        else:
            shard = GpuShard(*given, gpu=gpu, values=values)
        number = len(self.variables)
        variable = VariableEntry(number, asked.connection, asked.worker, shard, place)
        self.variables.append(variable)
        self.by_name[asked.name] = variable
        return variable

    def _span(self, layout: Layout) -> Span:
        """Allocate a span of a bucket for a small variable."""
        bucket = self._buckets.get(layout.dtype)
        if bucket is None or not bucket.has_room(layout):
            place = self._memory.carve(VERSIONS_BYTES, DATA_BYTES)
            bucket = self._buckets[layout.dtype] = Bucket(place, layout.dtype, self._sync)
        return bucket.take(layout)
