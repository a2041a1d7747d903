"""What jobs agree on, and how their iterations begin. Pure."""

from __future__ import annotations

from dataservice.dispatch.records import Iteration
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import AlreadyExistsError, InvalidArgumentError

# What is worth a word where two jobs differ.
_SPECIAL = (pb.ORDERED, pb.ROUNDS, pb.CACHED)


def told(terms: pb.Terms) -> str:
    """Local. Terms in words: those that are not the default."""
    words = [pb.ShardingPolicy.Name(terms.policy)]
    if terms.reading in _SPECIAL:
        words.append(f"reading {pb.Reading.Name(terms.reading)}")
    for name, kind in (("delivery", pb.Delivery), ("target", pb.Target)):
        if getattr(terms, name):
            words.append(f"{name} {kind.Name(getattr(terms, name))}")
    numbers = ("num_shards", "num_consumers")
    words += [f"{name} {getattr(terms, name)}" for name in numbers if getattr(terms, name)]
    return ", ".join(words)


def other_kind(begin: pb.State, summary: str, terms: pb.Terms) -> bool:
    """Local. Whether a state cannot be where an iteration with such terms begins."""
    theirs = begin.terms
    if (begin.summary, theirs.reading) != (summary, terms.reading):
        return True
    if terms.reading == pb.ROUNDS and theirs.num_consumers != terms.num_consumers:
        return True
    return told_apart(terms) and theirs.num_shards != terms.num_shards


def read_as(terms: pb.Terms) -> str:
    """Local. How elements come to consumers, in words."""
    name = pb.Reading.Name(terms.reading)
    if told_apart(terms):
        name += f" by {terms.num_consumers} consumers from {terms.num_shards} parts"
    return name


def told_apart(terms: pb.Terms) -> bool:
    """Local. Whether consumers are told apart by their indices."""
    return terms.reading in (pb.ORDERED, pb.ROUNDS)


def differ_in_consumers(terms: pb.Terms, other: pb.Terms) -> bool:
    """Local. Whether two terms are of one order, for different numbers of consumers."""
    same = pb.Terms()
    same.CopyFrom(terms)
    same.num_consumers = other.num_consumers
    return terms.reading == pb.ORDERED and terms != other and same == other


def is_behind(iteration: Iteration, request: pb.IterationRequest) -> bool:
    """Local. Whether a request that brings a state means another run of an iteration."""
    begin = iteration.begin
    if begin is None or begin.position != request.state.position:
        return True
    return told_apart(iteration.job.terms) and request.consumer_index in iteration.joined


def check_index_is_free(iteration: Iteration, request: pb.IterationRequest) -> None:
    """Local. AlreadyExistsError if another consumer reads as the one that asks."""
    for other in iteration.clients.values():
        if other.index == request.consumer_index:
            raise AlreadyExistsError(
                f"consumer {request.consumer_index} of the job {iteration.job.name!r} is "
                f"already reading, in {other.process}"
            )


def check_same_begin(iteration: Iteration, begin: pb.State | None) -> None:
    """Local. InvalidArgumentError if only some consumers go on from a state."""
    if (iteration.begin is None) != (begin is None):
        raise InvalidArgumentError(
            f"some consumers of the job {iteration.job.name!r} resume from a state and others "
            "do not: set the same state in all of them before they read"
        )
