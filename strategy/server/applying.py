"""How pushes change the variables of a server, as fast as their gradients come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from mpidist import errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.given import Given
from strategy.server.joint import Joint, find_joint
from strategy.server.ledger import FoundRule, Ledger
from strategy.server.means import mean_of_blocks
from strategy.server.owned_shard import OwnedShard
from strategy.server.scratch import Scratch
from strategy.shared.blocks import Blocks
from strategy.shared.staging import RingBrokenError

Array = NDArray[Any]


class Applier:
    """Applies what several workers have pushed as one change.

    Args:
        who: The server, for messages.
        ledger: What it notes of changes.
    """

    def __init__(self, who: str, ledger: Ledger) -> None:
        self._who = who
        self._ledger = ledger
        self._sums = Scratch()
        self._scratch = Scratch()

    def apply(
        self,
        batch: Sequence[Given],
        replies: Sequence[pb.PushReply],
        refusal: str = "",
    ) -> Iterator[None]:
        """Local. Apply pushes, or drop them.

        Args:
            batch: Alike but for what is in them.
            replies: Versions and staleness are added to these.
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
        each = list(zip(*(given.push.entries for given in batch), strict=True))
        since = max(given.arrived for given in batch)
        problem: BaseException | None = None
        place = 0
        while place < len(each):
            changed, first = each[place : place + 1], each[place][0]
            yield from self._ledger.until_free(first.variable, since)
            try:
                rule = self._ledger.rule(first)  # called once, since a schedule may fail once
                joint = find_joint(self._ledger, each, place, rule)
            except (Exception, SystemExit) as error:
                problem = problem or error
                yield from self._drop(batch, place, place + 1)
            else:
                try:
                    if joint is None:
                        yield from self._change_one(batch, each[place], replies, rule)
                    else:
                        changed = each[place : place + len(joint.shards)]
                        self._change_joint(batch, joint, changed, replies)
                except RingBrokenError:
                    yield from self._drop(batch, place + 1)
                    raise
                except (Exception, SystemExit) as error:
                    problem = problem or error
            versions = [self._ledger.variable(entries[0]).shard.version for entries in changed]
            for reply in replies:
                reply.versions.extend(versions)
            place += len(changed)
        if problem is not None:
            raise problem

    def _change_joint(
        self,
        batch: Sequence[Given],
        joint: Joint,
        changed: Sequence[Sequence[pb.PushEntry]],
        replies: Sequence[pb.PushReply],
    ) -> None:
        ledger, layout = self._ledger, joint.shards[0].layout
        for own, reply in zip(zip(*changed, strict=True), replies, strict=True):
            ledger.count(own, joint.shards, reply)
        each = [iter((given.inline.values(layout.dtype, joint.size),)) for given in batch]
        for gradient in mean_of_blocks(each, layout, self._sums):
            assert gradient is not None  # they are there
            joint.change(gradient, self._scratch)
        for entries in changed:
            variable = ledger.variable(entries[0])
            if variable.waiting:
                ledger.tell_waiting(variable)

    def _change_one(
        self,
        batch: Sequence[Given],
        entries: Sequence[pb.PushEntry],
        replies: Sequence[pb.PushReply],
        rule: FoundRule,
    ) -> Iterator[None]:
        """Make one change, in the middle of which it may be that no other is made."""
        ledger = self._ledger
        variable = ledger.variable(entries[0])
        shard = variable.shard
        rest: Sequence[Blocks] = ()
        ledger.in_work.add(variable.identity)
        # A bad entry must not leave its blocks in a ring, nor keep the others from applying.
        try:
            change, rest = self._change(batch, entries, shard)
            ledger.count_streamed(entries, shard)
            for entry, reply in zip(entries, replies, strict=True):
                ledger.count([entry], [shard], reply)
            yield from change(*rule)
            ledger.tell_waiting(variable)
        except (Exception, SystemExit):
            yield from _drained(rest)
            raise
        finally:
            ledger.in_work.discard(variable.identity)

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

    def _drop(
        self, batch: Sequence[Given], first: int = 0, end: int | None = None
    ) -> Iterator[None]:
        """Take some changes out of messages and rings, and do nothing with them."""
        for given in batch:
            for entry in given.push.entries[first:end]:
                shard = self._ledger.variable(entry).shard
                if entry.rows:
                    given.rows(entry, shard)
                else:
                    yield from _drained([given.dense(entry, shard)])

    def _change(
        self, batch: Sequence[Given], entries: Sequence[pb.PushEntry], shard: OwnedShard
    ) -> tuple[Callable[..., Iterator[None]], Sequence[Blocks]]:
        """What changes a shard, given a rule, and the blocks that it takes one by one."""
        if entries[0].rows:
            parts = [given.rows(entry, shard) for given, entry in zip(batch, entries, strict=True)]
            return partial(_at_once, partial(shard.apply_mean_of_rows, each=parts)), ()
        each = [given.dense(entry, shard) for given, entry in zip(batch, entries, strict=True)]
        blocks = mean_of_blocks(each, shard.layout, self._sums)
        return partial(shard.applying, blocks=blocks), each


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
