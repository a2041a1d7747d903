"""The server that decides for all when workers may go on: the first one."""

from __future__ import annotations

from collections.abc import Iterable

from mpidist import LATER, Reply, Request, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.catalogue import Catalogue
from strategy.server.served import ServedConnection
from strategy.shared.host import Host, workers_of
from strategy.shared.rounds import Clocks, Decision, Rounds


class Timekeeper:
    """Answers workers that wait for each other.

    Strategies are told apart by the order in which workers make them; each has steps of its own.

    Args:
        catalogue: The server's connections.
        host: The server's process.
    """

    def __init__(self, catalogue: Catalogue, host: Host) -> None:
        self._connections = catalogue.connections
        self._host = host
        self._tasks = workers_of(host.cluster_spec)
        self._rounds: dict[int, Rounds[Request]] = {}
        self._clocks: dict[int, Clocks[Request]] = {}

    def enter(self, request: Request) -> Reply:
        """Local. A synchronous worker has come to a step."""
        asked = pb.EnterRequest.FromString(request.body)
        connection = self._connections[asked.connection]
        rounds = self._rounds_of(connection)
        try:
            gives = asked.description if asked.gives else None
            answers = rounds.enter(connection.worker, asked.step, request, gives)
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
        """Local. For whom others wait; who has left the cluster is not waited for any more."""
        connection = self._connection_of(request)
        waited_for = self._waits_of(connection).missing()
        gone = [worker for worker in waited_for if self._host.has_left(*self._tasks[worker])]
        for worker in gone:
            self._without(connection, worker)
        left = [] if gone else waited_for
        return Reply(pb.MissingReply(workers=left).SerializeToString())

    def leave(self, request: Request) -> None:
        """Local. A worker makes no more steps."""
        connection = self._connection_of(request)
        self._without(connection, connection.worker)

    def _without(self, connection: ServedConnection, worker: int) -> None:
        if connection.mode.name == "sync":
            _decide(self._rounds_of(connection).leave(worker))
        else:
            for waiting in self._clocks_of(connection).leave(worker):
                waiting.reply()

    def _waits_of(self, connection: ServedConnection) -> Rounds[Request] | Clocks[Request]:
        if connection.mode.name == "sync":
            return self._rounds_of(connection)
        return self._clocks_of(connection)

    def _connection_of(self, request: Request) -> ServedConnection:
        return self._connections[pb.AttachReply.FromString(request.body).connection]

    def _rounds_of(self, connection: ServedConnection) -> Rounds[Request]:
        backups = connection.mode.backup_workers
        return self._rounds.setdefault(
            connection.strategy, Rounds(range(len(self._tasks)), backups)
        )

    def _clocks_of(self, connection: ServedConnection) -> Clocks[Request]:
        bound = connection.mode.staleness
        return self._clocks.setdefault(connection.strategy, Clocks(range(len(self._tasks)), bound))


def _decide(answers: Iterable[tuple[Request, Decision]]) -> None:
    for request, decision in answers:
        reply = pb.EnterReply(
            step=decision.step, members=decision.members, problem=decision.problem
        )
        request.reply(reply.SerializeToString())
