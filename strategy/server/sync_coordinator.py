"""Coordination of synchronous steps and of SSP clocks. Only the first ps task gets these calls."""

from __future__ import annotations

from collections.abc import Iterable

from mpidist import LATER, Reply, Request, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.cluster import Host, workers_of
from strategy.protocol.rounds import Clocks, Decision, Rounds
from strategy.server.variable_store import ServedConnection, Training, VariableStore


class SyncCoordinator:
    """Coordinator of the workers that wait for each other.

    Strategies of the same name and mode train together.

    Args:
        store: The connections of the server.
        host: The place of the server's process in the cluster.
    """

    def __init__(self, store: VariableStore, host: Host) -> None:
        self._connections = store.connections
        self._host = host
        self._tasks = workers_of(host.cluster_spec)
        self._rounds: dict[Training, Rounds[Request]] = {}
        self._clocks: dict[Training, Clocks[Request]] = {}
        self._participants: dict[int, ServedConnection] = {}  # by number

    def join(self, number: int) -> int:
        """Add a worker to the participants, again if it has left. Return its first step number."""
        connection = self._participants[number] = self._connections[number]
        if connection.mode.name == "sync":
            return self._rounds_of(connection).join(connection.worker)
        if connection.mode.name == "ssp":
            return self._clocks_of(connection).join(connection.worker)
        return 0

    def enter(self, request: Request) -> Reply:
        """Enter a synchronous step. Reply when the members of the step are decided."""
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
        """Advance the clock of an SSP worker. Reply when the worker may continue."""
        asked = pb.ClockRequest.FromString(request.body)
        connection = self._connections[asked.connection]
        clocks = self._clocks_of(connection)
        for waiting in clocks.advance(connection.worker, asked.clock, request):
            waiting.reply()
        return LATER

    def missing(self, request: Request) -> Reply:
        """Return the workers that others wait for.

        If some of these workers have left the cluster, stop waiting for them and return no
        workers.
        """
        connection = self._connection_of(request)
        waited_for = self._waits_of(connection).missing()
        gone = [worker for worker in waited_for if self._host.has_left(*self._tasks[worker])]
        for worker in gone:
            self._without(connection, worker)
        left = [] if gone else waited_for
        return Reply(pb.MissingReply(workers=left).SerializeToString())

    def leave(self, request: Request) -> None:
        """Remove a worker, which takes no more steps, from the participants."""
        self.forget(pb.AttachReply.FromString(request.body).connection)

    def forget(self, number: int) -> None:
        """Remove the worker of a connection from the participants, unless it has left already."""
        connection = self._participants.pop(number, None)
        if connection is not None and connection.mode.name != "async":
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
            connection.training, Rounds(range(len(self._tasks)), backups)
        )

    def _clocks_of(self, connection: ServedConnection) -> Clocks[Request]:
        bound = connection.mode.staleness
        return self._clocks.setdefault(connection.training, Clocks(range(len(self._tasks)), bound))


def _decide(answers: Iterable[tuple[Request, Decision]]) -> None:
    for request, decision in answers:
        reply = pb.EnterReply(
            step=decision.step, members=decision.members, problem=decision.problem
        )
        request.reply(reply.SerializeToString())
