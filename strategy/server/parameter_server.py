"""The service of a ps task, which owns variables and applies all changes to them."""

from __future__ import annotations

from mpidist import Reply, Request, task_metrics
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.catalogue import Catalogue
from strategy.server.directory import Directory
from strategy.server.pushes import Pushes
from strategy.server.reads import Reads
from strategy.server.rules import Rules
from strategy.server.served_checkpoints import ServedCheckpoints
from strategy.server.timekeeper import Timekeeper
from strategy.shared.host import Host


class ParameterServer:
    """The service of a ps task, which a Server creates.

    Handlers run one at a time, so every variable is complete between two handlers.

    Args:
        host: The place of this process in the cluster: a Server, or a LocalHost in local mode.
    """

    def __init__(self, host: Host) -> None:
        index = host.own_index("ps")
        self._catalogue = Catalogue(host, index)
        self._directory = Directory()
        name = f"ps {index}"
        self._rules = Rules(name)
        self._metrics = task_metrics("ps", index)
        self._timekeeper = Timekeeper(self._catalogue, host)
        self._pushes = Pushes(name, self._catalogue, self._rules, self._metrics, self._forget)
        self._reads = Reads(self._catalogue, self._metrics)
        self._checkpoints = ServedCheckpoints(self._catalogue, self._pushes, self._metrics)
        self._endpoint = host.endpoint
        self._endpoint.register(
            "ps",
            {
                "Attach": self._attach,
                "Detach": self._pushes.detach,
                "Define": self._directory.define,
                "Undefine": self._directory.undefine,
                "CreateVariable": self._catalogue.create,
                "Abandon": self._catalogue.abandon,
                "Configure": self._rules.configure,
                "PushSlice": self._pushes.take_slice,
                "Push": self._pushes.push,
                "Hold": self._pushes.hold,
                "Release": self._pushes.release,
                "Await": self._pushes.wait,
                "Fail": self._pushes.fail,
                "Enter": self._timekeeper.enter,
                "Clock": self._timekeeper.clock,
                "Missing": self._timekeeper.missing,
                "Leave": self._timekeeper.leave,
                "Read": self._reads.read,
                "ReadMany": self._reads.read_many,
                "Save": self._checkpoints.save,
                "Fetch": self._checkpoints.fetch,
                "Forget": self._checkpoints.forget,
                "Variables": self._checkpoints.variables,
                "AwaitRestore": self._checkpoints.await_restore,
                "EndRestore": self._checkpoints.end_restore,
                "RestoreArray": self._checkpoints.restore_array,
            },
        )

    def close(self) -> None:
        """Stop serving."""
        self._endpoint.unregister("ps")
        self._catalogue.close()
        self._checkpoints.close()

    def _attach(self, request: Request) -> Reply:
        """Open the connection of a worker's strategy."""
        asked = pb.AttachRequest.FromString(request.body)
        number = self._catalogue.attach(asked)
        step = self._timekeeper.join(number)
        restores = self._checkpoints.restores_of(asked.strategy).count(asked.worker)
        reply = pb.AttachReply(connection=number, step=step, restores=restores)
        return Reply(reply.SerializeToString())

    def _forget(self, number: int, strategy: str) -> None:
        """Forget a connection that was closed. It is no longer in the catalogue."""
        self._timekeeper.forget(number)
        self._checkpoints.forget_strategy(strategy)
