"""What all workers must create alike, as a server compares it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpidist import Request, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.served import ServedConnection, ServedVariable, division_of, gpu_in_words
from strategy.shared.shard import Layout


class Agreement:
    """Local. Compares what workers create.

    Args:
        index: Of the ps task.
        connections: The connections of workers by number; the catalogue adds and removes some.
    """

    def __init__(self, index: int, connections: Mapping[int, ServedConnection]) -> None:
        self._index = index
        self._connections = connections
        self._order: dict[tuple[int, int], tuple[str, list[int]]] = {}  # by strategy and ordinal
        self._divisions: dict[str, tuple[str, int]] = {}  # of variables, and who came first

    def announce(self, request: Request) -> None:
        """Local. A worker tells of a variable, which may be another server's."""
        asked = pb.CreateRequest.FromString(request.body)
        division = division_of(asked)
        what = f"{asked.name!r}, {asked.dtype}{list(asked.shape)}{division}, on ps {asked.server}"
        place = (self._connections[asked.connection].strategy, asked.ordinal)
        first, workers = self._order.setdefault(place, (what, []))
        if first != what:
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable number {asked.ordinal} as {what}, and "
                f"worker {workers[0]} as {first}: all workers must create the same variables in "
                "the same order, and place them alike"
            )
        workers.append(asked.worker)

    def retract(self, request: Request) -> None:
        """Local. A worker has not made a variable that it told of; it may make another one."""
        asked = pb.CreateRequest.FromString(request.body)
        place = (self._connections[asked.connection].strategy, asked.ordinal)
        if place in self._order:
            workers = self._order[place][1]
            workers[:] = [worker for worker in workers if worker != asked.worker]
            if not workers:
                del self._order[place]

    def check_same(self, variable: ServedVariable, asked: pb.CreateRequest, new: Layout) -> None:
        """Local. InvalidArgumentError unless a variable that is there is what a worker creates."""
        known = variable.shard.layout
        here = (known.shape, known.dtype, variable.ordinal)
        there = (new.shape, new.dtype, asked.ordinal)
        first = variable.creating_worker
        if here != there:
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable {asked.name!r} as number {there[2]}, "
                f"{there[1]}{list(there[0])}, and worker {first} as number {here[2]}, "
                f"{here[1]}{list(here[0])}: all workers must create the same variables in the "
                "same order"
            )
        gpu = self._connections[asked.connection].gpu if new.is_floating else None
        if gpu != variable.shard.gpu:
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable {asked.name!r} on {gpu_in_words(gpu)} of "
                f"ps {self._index}, and worker {first} on {gpu_in_words(variable.shard.gpu)}: all "
                "strategies that share it must have the same parameter_devices"
            )

    def check_division(self, asked: pb.CreateRequest) -> None:
        """Local. InvalidArgumentError if another worker divides the variable otherwise."""
        name, own = asked.part.variable, division_of(asked) or " as a whole"
        first, worker = self._divisions.setdefault(name, (own, asked.worker))
        if own != first:
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable {name!r}{own}, and worker {worker}{first}:"
                " all workers must divide a variable alike"
            )

    def forget_division(self, asked: pb.CreateRequest, variables: Iterable[ServedVariable]) -> None:
        """Local. A variable has not been made: it may come divided otherwise.

        Args:
            asked: What a worker has asked for.
            variables: Those that there are.
        """
        name = asked.part.variable
        made = any(variable.shard.origin.variable == name for variable in variables)
        if not made and self._divisions[name][1] == asked.worker:
            del self._divisions[name]
