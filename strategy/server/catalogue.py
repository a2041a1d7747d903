"""The variables of a server and the connections to it: how they come to be, and where they lie."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mpidist import LATER, Reply, Request, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.agreement import Agreement
from strategy.server.bucket import DATA_BYTES, VERSIONS_BYTES, Bucket, Span, is_small
from strategy.server.growth import Creation, Growth
from strategy.server.memory import Memory, Place, check_room, needed_bytes
from strategy.server.on_gpus import Gpus
from strategy.server.owned_shard import OwnedShard
from strategy.server.scratch import Scratch
from strategy.server.served import (
    ServedConnection,
    ServedVariable,
    mode_in_words,
    origin_of,
)
from strategy.shared.host import Host, Task, workers_of
from strategy.shared.shard import Layout

# Each segment takes all workers to make.
_LEAST_SEGMENT_BYTES = 16 << 20


class Catalogue:
    """Creates variables and connections, and makes room for them.

    Where there is no room, a further segment is made together with all workers that share this
    node; where none can be had, a variable lies in memory of the server alone.

    Args:
        host: The server's process.
        index: Of the ps task.

    Attributes:
        variables: By their numbers.
        by_name: By their names.
        connections: By their numbers.
        agreement: What workers must create alike.
    """

    def __init__(self, host: Host, index: int) -> None:
        self.variables: list[ServedVariable] = []
        self.by_name: dict[str, ServedVariable] = {}
        self.connections: dict[int, ServedConnection] = {}
        self._attached = 0
        self._host = host
        self._index = index
        self._memory = Memory(host)
        self._scratch = Scratch()
        self._gpus = Gpus(f"ps {index}")
        self.agreement = Agreement(index, self.connections)
        workers = workers_of(host.cluster_spec)
        # By whether segments are one-sided: who takes part in making them, and who has promised to.
        self._mates: dict[bool, dict[int, Task]] = {}
        self._growth: dict[bool, Growth[Request]] = {}
        for kind in (False, True):
            mates = set(host.memory.mates(index, kind))
            self._mates[kind] = {n: task for n, task in enumerate(workers) if task in mates}
            self._growth[kind] = Growth(self._mates[kind])
        self._grown_for: set[str] = set()
        self._buckets: dict[tuple[np.dtype[Any], bool], Bucket] = {}  # with room, by dtype and kind

    def close(self) -> None:
        """Local. Answer those who wait for more memory: there will be none. Give GPUs back."""
        gone = errors.UnavailableError(f"ps {self._index} was closed before it made room")
        for growth in self._growth.values():
            for request in itertools.chain(*growth.finish()):
                request.fail(gone)
        self._gpus.close()
        for variable in self.variables:
            variable.shard.close()
        self._buckets.clear()

    def attach(self, request: Request) -> Reply:
        """Local. A worker opens a connection."""
        asked = pb.AttachRequest.FromString(request.body)
        for other in self.connections.values():
            if other.strategy == asked.strategy and other.mode != asked.mode:
                mine, its = asked.mode, other.mode
                raise errors.InvalidArgumentError(
                    f"worker {asked.worker} has mode {mode_in_words(mine, its)}, and worker "
                    f"{other.worker} {mode_in_words(its, mine)}: all workers must have the same"
                )
        gpu = self._gpus.wanted(asked, self.connections.values())
        reply = pb.AttachReply(connection=self._attached)
        connection = ServedConnection(asked.worker, asked.strategy, asked.mode, gpu)
        self.connections[self._attached] = connection
        self._attached += 1
        return Reply(reply.SerializeToString())

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
        """Local. A worker creates a variable: the first one makes it, the others find it."""
        asked = pb.CreateRequest.FromString(request.body)
        layout = Layout(asked.shape, asked.dtype)
        self.agreement.check_division(asked)
        variable = self.by_name.get(asked.name)
        if variable is None:
            self._growth[self._kind(asked)].check(asked.worker, self._creation(asked))
            values, span = None, self._span_of(asked, layout)
            place = None if span is None else span.place
            if place is None:
                values, place = self._place_of(asked, layout)
            if place is None:
                return Reply(pb.CreateReply(grow=self._memory.count).SerializeToString())
            variable = self._make(asked, layout, place, values, span)
        else:
            self.agreement.check_same(variable, asked, layout)
            if asked.only_shared and not variable.place.is_reached(one_sided=False):
                raise errors.ResourceExhaustedError(
                    f"variable {asked.name!r} of ps {self._index} does not lie in shared memory, "
                    "for which there was no room, or was made with transport 'rma': transport "
                    "'shared' cannot reach it; use 'auto'"
                )
            if variable.abandoned:
                variable.abandoned = False
                variable.creator, variable.creating_worker = asked.connection, asked.worker
            elif variable.shard.version == 0 and asked.connection != variable.creator:
                variable.waiting.append(request)
                return LATER
        return self.created(variable, request, must_initialize=variable.shard.version == 0)

    def abandon(self, request: Request) -> None:
        """Local. A worker could not compute a first value; the next one is to try."""
        self._pass_on(self.variables[pb.ReadRequest.FromString(request.body).variable])

    def _pass_on(self, variable: ServedVariable) -> None:
        """Leave the first value of a variable to the next worker that creates it."""
        if not variable.waiting:
            variable.abandoned = True
            return
        following = variable.waiting.pop(0)
        asked = pb.CreateRequest.FromString(following.body)
        variable.creator, variable.creating_worker = asked.connection, asked.worker
        following.reply(self.created(variable, following, must_initialize=True).body)

    def created(self, variable: ServedVariable, request: Request, must_initialize: bool) -> Reply:
        """Local. What a worker is told of a variable."""
        asked = pb.CreateRequest.FromString(request.body)
        place = variable.place
        versions, data = place.offsets
        reply = pb.CreateReply(
            variable=variable.identity,
            versions_offset=versions,
            data_offset=data,
            must_initialize=must_initialize,
            segment=place.segment or 0,
            private=not place.is_reached(self._kind(asked)),
            version=variable.shard.version,
            gpu=variable.shard.gpu,
        )
        return Reply(reply.SerializeToString())

    def answer_waiting(self, variable: ServedVariable) -> None:
        """Answer the workers that wait for the initial value of a variable."""
        waiting, variable.waiting = variable.waiting, []
        for request in waiting:
            request.reply(self.created(variable, request, must_initialize=False).body)

    def grow(self, request: Request) -> Reply:
        """Local. A worker promises to take part in making a segment."""
        asked = pb.GrowRequest.FromString(request.body)
        name = asked.create.name
        stale = asked.segment != self._memory.count or name in self._grown_for
        if stale or name in self.by_name:
            return Reply(pb.GrowReply().SerializeToString())  # ask again: it has changed meanwhile
        growth = self._growth[self._kind(asked.create)]
        if growth.promise(asked.create.worker, self._creation(asked.create), request):
            self._go(asked.create)
        return LATER

    def withdraw(self, request: Request) -> None:
        """Local. A worker has waited too long for others to promise."""
        asked = pb.GrowRequest.FromString(request.body).create
        creation = self._creation(asked)
        growth = self._growth[self._kind(asked)]
        missing = growth.missing(asked.name)
        for promise in growth.withdraw(asked.worker, creation):
            promise.fail(
                errors.DeadlineExceededError(
                    f"ps {self._index} has no room for {creation} yet, and can make some only "
                    f"together with all workers that share it: worker {asked.worker} waits, and "
                    f"worker {', '.join(map(str, missing))} did not create it in time, or has "
                    "left; all workers must create the same variables in the same order "
                    "(MPIDIST_CALL_TIMEOUT_S sets the limit)"
                )
            )

    # Inside

    def _kind(self, asked: pb.CreateRequest) -> bool:
        """Whether who creates reaches variables by one-sided operations."""
        return self.connections[asked.connection].mode.one_sided

    def _creation(self, asked: pb.CreateRequest) -> Creation:
        strategy = self.connections[asked.connection].strategy
        return Creation(asked.name, tuple(asked.shape), asked.dtype, asked.ordinal, strategy)

    def _lengths(self, asked: pb.CreateRequest, layout: Layout) -> tuple[int, int]:
        """What the versions of a variable and its data take of a segment."""
        data_bytes = layout.data_bytes
        if self._gpu_of(asked) is not None:
            data_bytes = self._gpus.data_bytes(layout)
        return layout.version_bytes, data_bytes

    def _gpu_of(self, asked: pb.CreateRequest) -> int | None:
        return self.connections[asked.connection].gpu

    def _span_of(self, asked: pb.CreateRequest, layout: Layout) -> Span | None:
        """Allocate a small variable in a bucket. Return None if the variable must lie elsewhere."""
        kind = self._kind(asked)
        is_on_gpu = self._gpu_of(asked) is not None and layout.is_floating
        if is_on_gpu or not is_small(layout):
            return None
        bucket = self._buckets.get((layout.dtype, kind))
        if bucket is None or not bucket.has_room(layout):
            lengths = VERSIONS_BYTES, DATA_BYTES
            try:
                check_room(sum(lengths))
                place = self._memory.carve(*lengths, one_sided=kind)
            except errors.ResourceExhaustedError:
                return None
            bucket = Bucket(place, layout.dtype, self._host.memory.sync)
            self._buckets[layout.dtype, kind] = bucket
        return bucket.take(layout)

    def _place_of(self, asked: pb.CreateRequest, layout: Layout) -> tuple[Any, Place | None]:
        """Its values on a GPU, if they lie there, and its place; see :meth:`_find_place`.

        Errors name the variable.
        """
        try:
            values = self._gpus.values_for(self._gpu_of(asked), asked.name, layout)
            if not self._kind(asked):  # segments are sparse: a page is taken when it is written
                check_room(layout.version_bytes + layout.data_bytes)
            return values, self._find_place(asked, layout)
        except errors.ResourceExhaustedError as error:
            self.agreement.forget_division(asked, self.variables)
            raise errors.ResourceExhaustedError(
                f"ps {self._index} has no room for variable {asked.name!r} of {layout.data_bytes} "
                f"bytes: {error.message}"
            ) from error

    def _find_place(self, asked: pb.CreateRequest, layout: Layout) -> Place | None:
        """Where a new variable can lie, or None: after growth it will be known."""
        lengths, kind = self._lengths(asked, layout), self._kind(asked)
        try:
            return self._memory.carve(*lengths, one_sided=kind)
        except errors.ResourceExhaustedError as error:
            problem = error
        if kind:
            check_room(sum(lengths))
        if asked.name not in self._grown_for and self._growth_bytes(asked):
            if self._mates[kind]:
                return None
            self._go(asked)
            return self._find_place(asked, layout)
        if asked.only_shared:
            raise problem
        place = self._carve_private(*lengths)
        self._host.memory.warn_unshared(problem.message)
        return place

    def _carve_private(self, *lengths: int) -> Place:
        try:
            return self._memory.carve_private(*lengths)
        except OSError as error:  # of a limit to the addresses of a process
            raise errors.ResourceExhaustedError(
                f"its process cannot have {sum(lengths)} bytes more ({error}): divide the variable "
                "by a partitioner, over more ps tasks"
            ) from error

    def _make(
        self,
        asked: pb.CreateRequest,
        layout: Layout,
        place: Place,
        values: Any,
        span: Span | None,
    ) -> ServedVariable:
        if values is not None:
            place = self._gpus.aligned(place, layout)
        versions, data = place.offsets
        place.memory[versions : versions + layout.version_bytes] = 0
        lies = (place.memory, layout, versions, data)
        given = (asked.name, *lies, self._host.memory.sync, self._scratch, origin_of(asked))
        if values is None:
            shard = OwnedShard(*given, span)
        else:
            shard = self._gpus.shard(self._gpu_of(asked), given, values)
        number = len(self.variables)
        creator = (asked.connection, asked.worker)
        variable = ServedVariable(number, asked.ordinal, *creator, shard, place)
        self.variables.append(variable)
        self.by_name[asked.name] = variable
        # There was no room for it when they promised, and none can be made by now, or need be.
        for growth in self._growth.values():
            for promise in growth.forget(asked.name):
                promise.reply(pb.GrowReply().SerializeToString())
        return variable

    def _growth_bytes(self, asked: pb.CreateRequest) -> int:
        """How long a segment to make for a variable; 0 if there cannot be one."""
        layout, kind = Layout(asked.shape, asked.dtype), self._kind(asked)
        needed = needed_bytes(*self._lengths(asked, layout))
        wanted = max(2 * needed, self._memory.nbytes(kind), _LEAST_SEGMENT_BYTES)
        return self._host.memory.growth_bytes(self._index, needed, wanted)

    def _go(self, asked: pb.CreateRequest) -> None:
        """All have promised: have them enter, and enter too."""
        nbytes, segment, kind = self._growth_bytes(asked), self._memory.count, self._kind(asked)
        entering, others = self._growth[kind].finish()
        self._grown_for.add(asked.name)
        reply = pb.GrowReply(enter=nbytes > 0, nbytes=nbytes, segment=segment)
        for request in entering:
            request.reply(reply.SerializeToString())
        if nbytes:
            tasks = list(self._mates[kind].values())
            try:
                self._host.memory.grow(self._index, segment, nbytes, tasks, kind)
            except errors.ResourceExhaustedError as error:  # on all: they ask again, and are told
                self._host.memory.warn_unshared(error.message)
            except OSError:
                if tasks:
                    raise
                # Memory of the server alone: the variable by itself takes less, and may find it.
            else:
                self._memory.add(self._host.memory.own(segment), kind)
        for request in others:
            request.reply(pb.GrowReply().SerializeToString())
