"""How pushes change the variables of a server, as fast as their gradients come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from mpidist import TaskMetrics, errors
from strategy.blocks import Blocks
from strategy.catalogue import Catalogue
from strategy.given import Given
from strategy.known_rules import Rules
from strategy.means import mean_of_blocks, mean_of_rows
from strategy.owned_shard import OwnedShard, Scratch
from strategy.proto import parameter_server_pb2 as pb
from strategy.served import ServedVariable
from strategy.staging import RingBrokenError

Array = NDArray[Any]


@dataclass(frozen=True)
class _Turns:
    """Turns of a worker.

    Attributes:
        reply: Versions after them, and staleness.
        over: Ends when they are over.
    """

    reply: pb.PushReply
    over: Iterator[None]


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
            the middle of the same variable. While it waits for another it holds none.

        Raises:
            AbortedError: They are dropped, or a worker will not stream the rest.
            Exception: What a rule has raised; the other changes have been applied.
        """
        if refusal:
            yield from self._drop(batch)
            raise errors.AbortedError(refusal)
        yield from self._check_alike(batch)
        given, problem = batch[0], None
        each = list(zip(*(given.push.entries for given in batch), strict=True))
        own = [entries[0] for entries in each if entries[0].in_place]  # they are the last
        others = each[: len(each) - len(own)]
        turns = self._turns(given, own) if self._can_follow(others, own) else None
        for number, entries in enumerate(others, 1):
            variable = self._catalogue.variables[entries[0].variable]
            shard = variable.shard
            rest: Sequence[Blocks] = ()
            while variable.identity in self.in_work:
                yield
            self.in_work.add(variable.identity)
            # A bad entry must not leave its blocks in a ring, nor keep the others from applying.
            try:
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
                reply.versions.append(shard.version)
        turns = turns or self._turns(given, own)
        if turns is None:
            problem = (yield from self._one_by_one(given, own, replies[0])) or problem
        else:
            replies[0].MergeFrom(turns.reply)
            if problem is None:
                answer()
            yield from turns.over
        if problem is not None:
            raise problem

    def _can_follow(
        self, each: Sequence[Sequence[pb.PushEntry]], own: Sequence[pb.PushEntry]
    ) -> bool:
        """Whether changes can be applied while the turns last: at once, and of other variables."""
        variables = self._catalogue.variables
        busy = self.in_work.union(variables[entry.variable].identity for entry in own)
        return not any(
            entry.staged or variables[entry.variable].identity in busy
            for entries in each
            for entry in entries
        )

    def _turns(self, given: Given, entries: Sequence[pb.PushEntry]) -> _Turns | None:
        """Have a worker make all changes that it makes itself, from now on.

        None if it makes none, must wait for others, or is to be refused one.
        """
        variables = [self._catalogue.variables[entry.variable] for entry in entries]
        identities = {variable.identity for variable in variables}
        if not entries or len(identities) < len(entries) or identities & self.in_work:
            return None
        try:
            rules = [
                self._rules.find(entry, variable.shard)
                for entry, variable in zip(entries, variables, strict=True)
            ]
        except Exception:
            return None  # it is told of it when the one comes that is refused
        reply = pb.PushReply()
        ends = []
        for entry, variable, (name, rule, _) in zip(entries, variables, rules, strict=True):
            self._count([entry], [reply], variable.shard)
            reply.versions.append(variable.shard.version + 1)
            ends.append(variable.shard.lend(name, rule))
        self.in_work |= identities
        return _Turns(reply, self._over(variables, ends, given.lend(len(entries), granted=True)))

    def _over(
        self,
        variables: Sequence[ServedVariable],
        ends: Sequence[Callable[[], None]],
        turns: Iterator[None],
    ) -> Iterator[None]:
        def end_all() -> None:
            for end in ends:
                end()
            self.in_work.difference_update(variable.identity for variable in variables)

        try:
            yield from turns
        except GeneratorExit:
            raise  # dropped half-way when the server ended: the memory may be gone
        except BaseException:
            end_all()
            raise
        end_all()
        for variable in variables:
            self._tell_waiting(variable)

    def _one_by_one(
        self, given: Given, entries: Sequence[pb.PushEntry], reply: pb.PushReply
    ) -> Generator[None, None, Exception | None]:
        """Have a worker make changes itself, one after the other; returns why one is refused."""
        problem: Exception | None = None
        for entry in entries:
            variable = self._catalogue.variables[entry.variable]
            while variable.identity in self.in_work:
                yield
            turns = self._turns(given, [entry])
            if turns is not None:
                reply.MergeFrom(turns.reply)
                yield from turns.over
                continue
            try:
                self._rules.find(entry, variable.shard)
            except Exception as error:
                problem = problem or error
            yield from given.lend(granted=False)
        return problem

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
                    yield from _drained([given.lend(granted=False)])

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
