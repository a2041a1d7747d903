"""The server that decides for all when workers may go on: the first one."""

from __future__ import annotations

from collections.abc import Iterable

from mpidist import LATER, Reply, Request, errors
from strategy.catalogue import Catalogue, ServedConnection
from strategy.proto import parameter_server_pb2 as pb
from strategy.rounds import Clocks, Decision, Rounds


class Timekeeper:
    """Answers workers that wait for each other.

    Strategies are told apart by the order in which workers make them; each has steps of its own.

    Args:
        catalogue: The server's connections.
        workers: How many workers there are.
    """

    def __init__(self, catalogue: Catalogue, workers: int) -> None:
        self._connections = catalogue.connections
        self._workers = range(workers)
        self._rounds: dict[int, Rounds[Request]] = {}
        self._clocks: dict[int, Clocks[Request]] = {}

    def enter(self, request: Request) -> Reply:
        """Local. A synchronous worker has come to a step."""
        asked = pb.EnterRequest.FromString(request.body)
        connection = self._connections[asked.connection]
        rounds = self._rounds_of(connection)
        try:
            answers = rounds.enter(connection.worker, asked.step, request, asked.gives)
        except ValueError as error:
            raise errors.InvalidArgumentError(str(error)) from error
        _decide(answers)
        return LATER

    def clock(self, request: Request) -> Reply:
        """Local. A worker on a long leash has made a step."""
        asked = pb.ClockRequest.FromString(request.body)
        connection = self._connections[asked.connection]
        clocks = self._clocks_of(connection)
        for waiting in clocks.advance(connection.worker, asked.clock, request):
            waiting.reply()
        return LATER

    def missing(self, request: Request) -> Reply:
        """Local. For whom others wait."""
        connection = self._connection_of(request)
        synchronous = connection.mode.name == "sync"
        who = self._rounds_of(connection) if synchronous else self._clocks_of(connection)
        return Reply(pb.MissingReply(workers=who.missing()).SerializeToString())

    def leave(self, request: Request) -> None:
        """Local. A worker makes no more steps."""
        connection = self._connection_of(request)
        if connection.mode.name == "sync":
            _decide(self._rounds_of(connection).leave(connection.worker))
        else:
            for waiting in self._clocks_of(connection).leave(connection.worker):
                waiting.reply()

    def _connection_of(self, request: Request) -> ServedConnection:
        return self._connections[pb.AttachReply.FromString(request.body).connection]

    def _rounds_of(self, connection: ServedConnection) -> Rounds[Request]:
        backups = connection.mode.backup_workers
        return self._rounds.setdefault(connection.strategy, Rounds(self._workers, backups))

    def _clocks_of(self, connection: ServedConnection) -> Clocks[Request]:
        bound = connection.mode.staleness
        return self._clocks.setdefault(connection.strategy, Clocks(self._workers, bound))


def _decide(answers: Iterable[tuple[Request, Decision]]) -> None:
    for request, decision in answers:
        reply = pb.EnterReply(step=decision.step, members=decision.members)
        request.reply(reply.SerializeToString())
