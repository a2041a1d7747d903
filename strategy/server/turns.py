"""Changes that a worker makes itself in the memory of its server, as the server has them made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from strategy.proto import parameter_server_pb2 as pb
from strategy.server.given import Given
from strategy.server.ledger import Ledger
from strategy.server.served import ServedVariable


@dataclass(frozen=True)
class Turns:
    """Turns of a worker.

    Attributes:
        reply: Versions after them, and staleness.
        over: Ends when they are over.
        problem: Why a change is refused, if one is; the worker makes the others.
    """

    reply: pb.PushReply
    over: Iterator[None]
    problem: BaseException | None


def can_follow(
    ledger: Ledger, each: Sequence[Sequence[pb.PushEntry]], own: Sequence[pb.PushEntry]
) -> bool:
    """Local. Whether changes can be applied while turns last: at once, and of other variables.

    Args:
        ledger: The server's.
        each: The changes, of one or more workers each.
        own: Those that the worker makes in its turns.
    """
    busy = ledger.in_work.union(entry.variable for entry in own)
    return not any(entry.staged or entry.variable in busy for entries in each for entry in entries)


def all_at_once(ledger: Ledger, given: Given, entries: Sequence[pb.PushEntry]) -> Turns | None:
    """Local. Have a worker make all changes that it makes itself, from now on.

    None if it makes none, or must wait for others.
    """
    numbers = {entry.variable for entry in entries}
    if not entries or len(numbers) < len(entries) or numbers & ledger.in_work:
        return None
    problem: BaseException | None = None
    reply = pb.PushReply()
    variables, ends, granted = [], [], []
    for entry in entries:
        variable = ledger.variable(entry)
        try:
            name, rule, _ = ledger.rule_in_place(entry)
        except (Exception, SystemExit) as error:
            problem = problem or error
            granted.append(False)
            continue
        shard = variable.shard
        ledger.count_streamed([entry], shard)
        ledger.count([entry], [shard], reply)
        reply.versions.append(shard.version + 1)
        variables.append(variable)
        ends.append(shard.lend(name, rule))
        granted.append(True)
    ledger.in_work.update(variable.identity for variable in variables)
    return Turns(reply, _over(ledger, variables, ends, _lent(given, granted)), problem)


def _lent(given: Given, granted: Sequence[bool]) -> Iterator[None]:
    """Lend a worker one turn after the other, of which some are not granted; the first at once."""
    runs = [(one, len(list(same))) for one, same in itertools.groupby(granted)]
    first = given.lend(runs[0][1], granted=runs[0][0])
    others = (given.lend(count, granted=one) for one, count in runs[1:])
    return itertools.chain(first, itertools.chain.from_iterable(others))


def one_by_one(
    ledger: Ledger,
    given: Given,
    entries: Sequence[pb.PushEntry],
    reply: pb.PushReply,
    since: float,
) -> Generator[None, None, BaseException | None]:
    """Local. Have a worker make changes itself, one after the other.

    Args:
        ledger: The server's.
        given: What the worker pushes.
        entries: The changes.
        reply: Versions and staleness are added to it.
        since: When the push arrived, by ``time.monotonic()``.

    Yields:
        None, where a turn lasts, or another push is in the middle of the same variable.

    Returns:
        Why one is refused.
    """
    problem: BaseException | None = None
    for entry in entries:
        yield from ledger.until_free(entry.variable, since)
        turns = all_at_once(ledger, given, [entry])
        assert turns is not None  # it waits for nobody
        problem = problem or turns.problem
        reply.MergeFrom(turns.reply)
        yield from turns.over
    return problem


def _over(
    ledger: Ledger,
    variables: Sequence[ServedVariable],
    ends: Sequence[Callable[[], None]],
    turns: Iterator[None],
) -> Iterator[None]:
    def end_all() -> None:
        for end in ends:
            end()
        ledger.in_work.difference_update(variable.identity for variable in variables)

    try:
        yield from turns
    except GeneratorExit:
        raise  # dropped half-way when the server ended: the memory may be gone
    except BaseException:
        end_all()
        raise
    end_all()
    for variable in variables:
        ledger.tell_waiting(variable)
