"""What a worker pushes, as its server takes it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Request
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.owned_shard import OwnedShard
from strategy.server.served import ServedConnection
from strategy.shared.blocks import Blocks, in_blocks, scattered, widened
from strategy.shared.inline import Disclosed

Array = NDArray[Any]


@dataclass(eq=False)
class Given:
    """What one worker pushes.

    Attributes:
        push: The message.
        connection: Its way.
        requests: Not answered yet: the first, and those that repeat it.
        inline: What is in the message.
        begun: Whether it has been taken up; otherwise it waits for those before it, or for a save.
        arrived: When it came, by ``time.monotonic()``.
    """

    push: pb.PushRequest
    connection: ServedConnection
    requests: list[Request]
    inline: Disclosed
    begun: bool = False
    arrived: float = field(default_factory=time.monotonic)

    def answer(self, answer: bytes | BaseException) -> None:
        """Tell the worker, and whoever repeats the push, what has become of it."""
        self.connection.remember(self.push.sequence, answer)
        requests, self.requests = self.requests, []
        for request in requests:
            if isinstance(answer, BaseException):
                request.fail(answer)
            else:
                request.reply(answer)

    def dense(self, entry: pb.PushEntry, shard: OwnedShard) -> Blocks:
        """The change of a whole shard, block by block, in its dtype."""
        layout = shard.layout
        wire = np.dtype(entry.wire or layout.dtype)
        if entry.places:
            places = self.inline.numbers()
            return scattered(places, self.inline.values(layout.dtype, places.size), layout.size)
        blocks: Blocks
        if entry.staged:
            blocks = self.connection.opened_ring().read(layout.size, wire)
        else:
            blocks = in_blocks(self.inline.values(wire, layout.size))
        return blocks if wire == layout.dtype else widened(blocks, layout.dtype)

    def rows(self, entry: pb.PushEntry, shard: OwnedShard) -> tuple[Array, Array]:
        """Numbers of rows, and what is for them, flat."""
        layout = shard.layout
        ids = self.inline.numbers()
        width = layout.size // max(layout.shape[0], 1) if layout.shape else 0
        rows = self.inline.values(np.dtype(entry.wire or layout.dtype), ids.size * width)
        return ids, rows.astype(layout.dtype, copy=False)
