"""Variables and connections, as a server knows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mpidist import Request, errors
from strategy.checkpoints.cut import Key
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.memory import Place
from strategy.server.owned_shard import OwnedShard
from strategy.shared.inline import MOST_PUSHES
from strategy.shared.parts import Origin, Part
from strategy.shared.shard import Layout
from strategy.shared.staging import STAGED_BYTES, Ring


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
        slots: Of the ring that it wants; 0 if it wants none.
        gpu: On which GPU of the server what optimizers can change is to lie; None for the host.
        ring: The ring, if it has one.
        place: Where the ring lies.
        untold: The same, until the worker is told.
        is_closed: True after the worker has closed the strategy.
        sequence: Of the last push.
        unfinished: Pushes that wait for those of other workers, and those that came after them.
        applied: Sequence of the last push that has been applied.
        sent: What that one said of the worker's pushes to all servers: the sequence of the last.
        answers: To the last pushes, by their sequence: one that is repeated gets the same.
    """

    worker: int
    strategy: int
    mode: pb.Mode
    slots: int
    gpu: int | None = None
    ring: Ring | None = None
    place: Place | None = None
    untold: Place | None = None
    is_closed: bool = False
    sequence: int = 0
    unfinished: deque[Any] = field(default_factory=deque)
    applied: int = 0
    sent: tuple[int, ...] = ()
    answers: dict[int, bytes | BaseException] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Local. The worker, and the number of its strategy."""
        return (self.worker, self.strategy)

    def remember(self, sequence: int, answer: bytes | BaseException) -> None:
        """Local. Keep the answer to a push, and forget one that nobody can ask for any more."""
        self.answers[sequence] = answer
        self.answers.pop(sequence - MOST_PUSHES, None)

    def opened_ring(self) -> Ring:
        """Return the ring; FailedPreconditionError if the connection has none."""
        if self.ring is None:
            raise errors.FailedPreconditionError(
                f"worker {self.worker} streams a push over a connection without a ring: send the "
                "data in the message, or attach with a ring"
            )
        return self.ring

    def lacks_ring(self, layout: Layout) -> bool:
        """Local. Whether changes of a variable would be streamed if there were a ring."""
        return self.ring is None and self.slots > 0 and layout.data_bytes >= STAGED_BYTES

    def tell(self, reply: pb.AttachReply) -> None:
        """Local. Tell the worker where the ring lies, if it does not know."""
        if self.untold is not None and self.untold.segment is not None:
            reply.slots = self.slots
            reply.segment, reply.offset = self.untold.segment, self.untold.offsets[0]
            self.untold = None


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
