"""What a worker pushes, as its server takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Request
from strategy.blocks import Blocks, in_blocks, scattered, widened
from strategy.owned_shard import OwnedShard
from strategy.proto import parameter_server_pb2 as pb
from strategy.served import ServedConnection

Array = NDArray[Any]


@dataclass(eq=False)
class Given:
    """What one worker pushes.

    Attributes:
        push: The message.
        connection: Its way.
        requests: Not answered yet: the first, and those that repeat it.
        inline: The arrays in the message, as far as they have not been used.
        begun: Whether it has been taken up; otherwise it waits for those before it, or for a save.
    """

    push: pb.PushRequest
    connection: ServedConnection
    requests: list[Request]
    inline: Iterator[Array]
    begun: bool = False

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
            places = self._array(np.dtype(np.int64))
            return scattered(places, self._array(layout.dtype), layout.size)
        blocks: Blocks
        if entry.staged:
            assert self.connection.ring is not None
            blocks = self.connection.ring.read(layout.size, wire)
        else:
            blocks = in_blocks(self._array(wire))
        return blocks if wire == layout.dtype else widened(blocks, layout.dtype)

    def lend(self, turns: int = 1, *, granted: bool) -> Iterator[None]:
        """Give the worker turns, in which it makes changes itself if that is granted."""
        assert self.connection.ring is not None
        return self.connection.ring.lend(turns, granted=granted)

    def rows(self, entry: pb.PushEntry, shard: OwnedShard) -> tuple[Array, Array]:
        """Numbers of rows, and what is for them, flat."""
        dtype = shard.layout.dtype
        ids = self._array(np.dtype(np.int64))
        rows = self._array(np.dtype(entry.wire or dtype))
        return ids, rows.astype(dtype, copy=False)

    def _array(self, dtype: np.dtype[Any]) -> Array:
        """The next one of the message; copied only where compiled rules would not take it."""
        flat = np.asarray(next(self.inline))
        fine = flat.flags.writeable and flat.ctypes.data % dtype.alignment == 0
        return (flat if fine else flat.copy()).view(dtype)
