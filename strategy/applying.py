"""How pushes change the variables of a server, as fast as their gradients come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Request, TaskMetrics, errors
from strategy.blocks import Blocks, in_blocks, scattered, widened
from strategy.catalogue import Catalogue
from strategy.known_rules import Rules
from strategy.means import mean_of_blocks, mean_of_rows
from strategy.owned_shard import OwnedShard, Scratch
from strategy.proto import parameter_server_pb2 as pb
from strategy.served import ServedConnection, ServedVariable
from strategy.staging import RingBrokenError

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

    def turn(self, *, granted: bool) -> Iterator[None]:
        """The worker's, from now on, in which it makes a change itself if that is granted."""
        assert self.connection.ring is not None
        return self.connection.ring.lend(granted=granted)

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


@dataclass(frozen=True)
class _Ahead:
    """A turn that a worker has before the rest of its push is done.

    Attributes:
        reply: Version and staleness; empty if the worker was refused.
        turn: Ends when it is over.
    """

    reply: pb.PushReply
    turn: Iterator[None]


class Applier:
    """Applies what several workers have pushed as one change.

    Args:
        who: The server, for messages.
        catalogue: Its variables and connections.
        rules: Its rules.
        metrics: What the server has done so far.

    Attributes:
        in_work: Numbers of the variables of which a change has begun and not ended.
    """

    def __init__(self, who: str, catalogue: Catalogue, rules: Rules, metrics: TaskMetrics) -> None:
        self._who = who
        self._catalogue = catalogue
        self._rules = rules
        self._metrics = metrics
        self._scratch = Scratch()
        self.in_work: set[int] = set()

    def apply(
        self,
        batch: Sequence[Given],
        replies: Sequence[pb.PushReply],
        answer: Callable[[], None],
        refusal: str = "",
    ) -> Iterator[None]:
        """Local. Apply pushes, or drop them.

        Args:
            batch: Alike but for what is in them.
            replies: Versions and staleness are added to these.
            answer: Called when the replies are whole, and nothing is left but what the worker
                itself does in its turn: it knows when that is done, and nobody sees it half done.
            refusal: Why they are dropped, if they are.

        Yields:
            None, where what a worker streams is late, or another push, of which this is so, is in
            the middle of the same variable. While it waits for that it holds no variable.

        Raises:
            AbortedError: They are dropped, or a worker will not stream the rest.
            Exception: What a rule has raised; the other changes have been applied.
        """
        if refusal:
            yield from self._drop(batch)
            raise errors.AbortedError(refusal)
        yield from self._check_alike(batch)
        problem: BaseException | None = None
        each = list(zip(*(given.push.entries for given in batch), strict=True))
        ahead = self._ahead(batch)
        if ahead is not None:
            each.pop()
        for number, entries in enumerate(each, 1):
            variable = self._catalogue.variables[entries[0].variable]
            shard = variable.shard
            rest: Sequence[Blocks] = ()
            while variable.identity in self.in_work:
                yield
            self.in_work.add(variable.identity)
            # A bad entry must not leave its blocks in a ring, nor keep the others from applying.
            try:
                if entries[0].in_place:
                    yield from self._turn(batch[0], entries[0], replies[0], shard)
                else:
                    change, rest = self._change(batch, entries, shard)
                    self._count(entries, replies, shard)
                    yield from change(*self._rules.find(entries[0], shard))
                self._tell_waiting(variable)
            except RingBrokenError:
                yield from _drained(rest)
                yield from self._drop(batch, number)
                raise
            except (Exception, SystemExit) as error:
                problem = problem or error
                yield from _drained(rest)
            finally:
                self.in_work.discard(variable.identity)
            for reply in replies:
                if len(reply.versions) < number:
                    reply.versions.append(shard.version)
        if ahead is not None:
            if problem is None and ahead.reply.versions:
                replies[0].MergeFrom(ahead.reply)
                answer()
            yield from ahead.turn
        if problem is not None:
            raise problem

    def _ahead(self, batch: Sequence[Given]) -> _Ahead | None:
        """Give a worker its turn before the rest of its push is done, which then waits for none."""
        given, entries = batch[0], batch[0].push.entries
        if not entries or not entries[-1].in_place:
            return None
        if any(entry.staged or entry.in_place for entry in entries[:-1]):
            return None
        *others, last = [self._catalogue.variables[entry.variable] for entry in entries]
        busy = self.in_work.union(one.identity for one in others)
        if last.identity in busy or any(one.identity in self.in_work for one in others):
            return None
        reply = pb.PushReply()
        self.in_work.add(last.identity)
        turn = self._turn(given, entries[-1], reply, last.shard)
        return _Ahead(reply, self._holding(last, turn))

    def _holding(self, variable: ServedVariable, turn: Iterator[None]) -> Iterator[None]:
        try:
            yield from turn
            self._tell_waiting(variable)
        finally:
            self.in_work.discard(variable.identity)

    def _turn(
        self, given: Given, entry: pb.PushEntry, reply: pb.PushReply, shard: OwnedShard
    ) -> Iterator[None]:
        """Have a worker make a change itself, from now on; what is returned ends when it has."""
        try:
            name, rule, _ = self._rules.find(entry, shard)
        except Exception as error:
            return _failing(given.turn(granted=False), error)
        self._count([entry], [reply], shard)
        reply.versions.append(shard.version + 1)
        return shard.lend(name, rule, partial(given.turn, granted=True))

    def _count(
        self, entries: Sequence[pb.PushEntry], replies: Sequence[pb.PushReply], shard: OwnedShard
    ) -> None:
        values = self._metrics.values
        values["in_bytes"] += (
            sum([entry.staged or entry.in_place for entry in entries]) * shard.layout.data_bytes
        )
        for entry, reply in zip(entries, replies, strict=True):
            reply.staleness.append(shard.version - min(entry.seen, shard.version))
            if entry.rule >= pb.FIRST_OPTIMIZER:
                values["changes"] += 1
                values["staleness"] += reply.staleness[-1]

    def _check_alike(self, batch: Sequence[Given]) -> Iterator[None]:
        """InternalError unless all push the same: they were compared before they might."""
        if len(batch) == 1:
            return
        kinds = [
            (given.push.step, [(entry.variable, entry.rows) for entry in given.push.entries])
            for given in batch
        ]
        if any(kind != kinds[0] for kind in kinds):
            yield from self._drop(batch)
            raise errors.InternalError(f"{self._who} got pushes that make no step: {kinds}")

    def _drop(self, batch: Sequence[Given], first: int = 0) -> Iterator[None]:
        """Take what workers stream out of their rings, and do nothing with it."""
        variables = self._catalogue.variables
        for given in batch:
            for entry in given.push.entries[first:]:
                if entry.staged:
                    yield from _drained([given.dense(entry, variables[entry.variable].shard)])
                elif entry.in_place:
                    yield from _drained([given.turn(granted=False)])

    def _change(
        self, batch: Sequence[Given], entries: Sequence[pb.PushEntry], shard: OwnedShard
    ) -> tuple[Callable[..., Iterator[None]], Sequence[Blocks]]:
        """What changes a shard, given a rule, and the blocks that it takes one by one."""
        if entries[0].rows:
            parts = [given.rows(entry, shard) for given, entry in zip(batch, entries, strict=True)]
            ids, rows = mean_of_rows(parts, shard.layout)
            return partial(_at_once, partial(shard.apply_rows, ids=ids, rows=rows)), ()
        each = [given.dense(entry, shard) for given, entry in zip(batch, entries, strict=True)]
        blocks = mean_of_blocks(each, shard.layout, self._scratch)
        return partial(shard.applying, blocks=blocks), each

    def _tell_waiting(self, variable: ServedVariable) -> None:
        """Answer those who wait for a variable's first value."""
        for request in variable.waiting:
            reply = self._catalogue.created(variable, request, must_initialize=False)
            request.reply(reply.body)
        variable.waiting.clear()


def _failing(turn: Iterator[None], error: Exception) -> Iterator[None]:
    yield from turn
    raise error


def _at_once(change: Callable[..., None], *rule: Any) -> Iterator[None]:
    change(*rule)
    yield from ()


def _drained(each: Sequence[Blocks]) -> Iterator[None]:
    """Take the rest of some blocks, as far as there is a rest."""
    for blocks in each:
        try:
            for block in blocks:
                if block is None:
                    yield
        except RingBrokenError:
            continue
