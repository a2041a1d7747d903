"""How a server answers those who pull by message.

What is small is copied at once, between two changes. What is large goes piece by piece, lest every
reader's copy lie in the server's memory: from the first piece to the last nobody changes the
variable, and a reader that stands still in between loses it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.catalogue import Catalogue
from strategy.server.owned_shard import OwnedShard
from strategy.server.pushes import Pushes

_PATIENCE_S = 2.0

_Key = tuple[int, int]  # of a connection, and of a reading of its


class _Reading:
    """A reader's way through a variable.

    Args:
        shard: The variable.

    Attributes:
        asked: Pieces that it has asked for and not got.
        left: Elements that it has not asked for.
    """

    def __init__(self, shard: OwnedShard) -> None:
        self.shard = shard
        self.asked: deque[tuple[pb.ReadRequest, Request]] = deque()
        self.left = shard.layout.size


class Reads:
    """Local. Answers pulls.

    Args:
        who: The server, for messages.
        catalogue: Its variables.
        pushes: What changes them.
        metrics: What the server has done so far.
    """

    def __init__(
        self, who: str, catalogue: Catalogue, pushes: Pushes, metrics: TaskMetrics
    ) -> None:
        self._who = who
        self._variables = catalogue.variables
        self._pushes = pushes
        self._metrics = metrics
        self._readings: dict[_Key, _Reading] = {}

    def read(self, request: Request) -> Reply:
        """Local. A worker wants a variable, rows of it, or a piece."""
        asked = pb.ReadRequest.FromString(request.body)
        if asked.stop:
            self._read_piece(asked, request)
            return LATER

        def answer() -> None:
            try:
                reply = self._copied(asked, request)
            except Exception as error:
                request.fail(error)
            else:
                request.reply(reply.body, reply.buffers)

        self._pushes.when_free(asked.variable, answer)
        return LATER

    def read_many(self, request: Request) -> Reply:
        """Local. A worker wants several variables, each of which is copied when it is whole."""
        self._pushes.attend(self._reading_many(request))
        return LATER

    def _reading_many(self, request: Request) -> Iterator[None]:
        try:
            asked = pb.ReadManyRequest.FromString(request.body)
            shards = [self._variables[number].shard for number in asked.variables]
            copy = np.empty(sum([shard.layout.data_bytes for shard in shards]), np.uint8)
            reply, begin = pb.ReadManyReply(), 0
            for number, shard in zip(asked.variables, shards, strict=True):
                while self._pushes.is_busy(number):
                    yield
                end = begin + shard.layout.data_bytes
                copy[begin:end] = shard.flat.view(np.uint8)
                reply.versions.append(shard.version)
                begin = end
        except Exception as error:
            request.fail(error)
        else:
            self._metrics.values["out_bytes"] += copy.nbytes
            request.reply(reply.SerializeToString(), (copy,))

    def _copied(self, asked: pb.ReadRequest, request: Request) -> Reply:
        shard = self._variables[asked.variable].shard
        with self._metrics.timed("read", "busy_s"):
            if request.buffers:
                ids = np.array(request.buffers[0]).view(np.int64)
                shard.check_rows(ids)
                copy = np.take(shard.data, ids, axis=0)
            else:
                copy = shard.flat.copy()
        return self._reply(shard, copy)

    def _read_piece(self, asked: pb.ReadRequest, request: Request) -> None:
        key = (asked.connection, asked.reading)
        if key in self._readings:
            self._readings[key].asked.append((asked, request))
            self._pushes.resume(request)
            return
        if asked.start:
            raise self._lost()
        reading = self._readings[key] = _Reading(self._variables[asked.variable].shard)
        reading.asked.append((asked, request))
        self._pushes.hold_variable(asked.variable, self._reading(key, reading))

    def _reading(self, key: _Key, reading: _Reading) -> Iterator[None]:
        """Give a reader its pieces, as it asks for them; yields where it has to ask."""
        last = time.monotonic()
        while reading.left and time.monotonic() - last < _PATIENCE_S:
            if not reading.asked:
                yield
                continue
            asked, request = reading.asked.popleft()
            reading.left -= asked.stop - asked.start
            last = time.monotonic()
            try:
                with self._metrics.timed("read", "busy_s"):
                    piece = reading.shard.flat[asked.start : asked.stop].copy()
                reply = self._reply(reading.shard, piece)
            except Exception as error:  # memory is short, say
                request.fail(error)
            else:
                request.reply(reply.body, reply.buffers)
        del self._readings[key]
        for _, request in reading.asked:
            request.fail(self._lost())

    def _reply(self, shard: OwnedShard, copy: np.ndarray) -> Reply:
        self._metrics.values["out_bytes"] += copy.nbytes
        return Reply(pb.ReadReply(version=shard.version).SerializeToString(), (copy,))

    def _lost(self) -> errors.AbortedError:
        return errors.AbortedError(
            f"{self._who} has waited for more than {_PATIENCE_S:g} s for a reader to ask for the "
            "next piece of a variable, which may have changed since: begin again"
        )
