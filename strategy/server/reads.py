"""Pulls by message.

A small variable is copied at once, between two changes. A large one is sent piece by piece, so that
the server's memory does not hold a copy for each reader: until the last piece nobody changes the
variable. That ends two seconds after the reading has begun, or after a push, a save or a restore
has begun to wait, however many readers are in line before it. Then a reader that has asked for a
piece within the last second gets the rest from a copy, which is kept for a minute after its last
piece; another one has to begin again.
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
_KEEP_COPY_S = 60.0

_Key = tuple[int, int]  # of a connection, and of a reading of its


class _Reading:
    """The state of a reader of a variable.

    Args:
        shard: The variable.

    Attributes:
        asked: Pieces that were requested and not sent.
        left: Elements that were not sent.
        last: When a piece was sent last.
        values: The elements, flat: of the variable, or a copy of those that were not sent.
        first: Index of the first one of them.
        version: Version of the variable; None until the reading has begun.
        is_copied: Whether ``values`` is a copy, so that the variable may change.
    """

    def __init__(self, shard: OwnedShard) -> None:
        self.shard = shard
        self.asked: deque[tuple[pb.ReadRequest, Request]] = deque()
        self.left = shard.layout.size
        self.last = time.monotonic()
        self.values = shard.flat
        self.first = 0
        self.version: int | None = None
        self.is_copied = False

    def copy_rest(self) -> None:
        """Copy what was not sent. Pieces are requested in order."""
        self.first = self.shard.layout.size - self.left
        self.values = self.shard.flat[self.first :].copy()
        self.is_copied = True


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
        return self._reply(shard.version, copy)

    def _read_piece(self, asked: pb.ReadRequest, request: Request) -> None:
        key = (asked.connection, asked.reading)
        self._drop_old_copies()
        reading = self._readings.get(key)
        if reading is not None:
            reading.asked.append((asked, request))
            if reading.is_copied:
                self._answer(key, reading)
            else:
                self._pushes.resume(request)
            return
        if asked.start:
            raise self._lost()
        reading = self._readings[key] = _Reading(self._variables[asked.variable].shard)
        reading.asked.append((asked, request))
        work = self._reading(key, reading, asked.variable)
        self._pushes.hold_variable(asked.variable, work)

    def _reading(self, key: _Key, reading: _Reading, variable: int) -> Iterator[None]:
        """Send a reader its pieces while nobody changes the variable; yield to wait for it."""
        reading.version = reading.shard.version
        begin = reading.last = time.monotonic()
        while reading.left:
            now = time.monotonic()
            if reading.asked:
                self._answer(key, reading)
            elif now - min(begin, self._pushes.awaited_since(variable)) < _PATIENCE_S:
                yield
            elif now - reading.last < _PATIENCE_S / 2:
                reading.copy_rest()
                return
            else:
                self._drop(key)
                return

    def _answer(self, key: _Key, reading: _Reading) -> None:
        """Send the pieces that were requested."""
        while reading.asked:
            asked, request = reading.asked.popleft()
            reading.left -= asked.stop - asked.start
            reading.last = time.monotonic()
            try:
                with self._metrics.timed("read", "busy_s"):
                    begin, end = asked.start - reading.first, asked.stop - reading.first
                    piece = reading.values[begin:end].copy()
                reply = self._reply(reading.version, piece)
            except Exception as error:  # memory is short, say
                request.fail(error)
            else:
                request.reply(reply.body, reply.buffers)
        if not reading.left:
            del self._readings[key]

    def _drop(self, key: _Key) -> None:
        for _, request in self._readings.pop(key).asked:
            request.fail(self._lost())

    def _drop_old_copies(self) -> None:
        """Forget copies whose readers have not asked for a long time."""
        oldest = time.monotonic() - _KEEP_COPY_S
        old = [key for key, each in self._readings.items() if each.is_copied and each.last < oldest]
        for key in old:
            self._drop(key)

    def _reply(self, version: int | None, copy: np.ndarray) -> Reply:
        self._metrics.values["out_bytes"] += copy.nbytes
        return Reply(pb.ReadReply(version=version).SerializeToString(), (copy,))

    def _lost(self) -> errors.AbortedError:
        return errors.AbortedError(
            f"{self._who} has waited too long for a reader to ask for the next piece of a "
            "variable, which may have changed since: begin again"
        )
