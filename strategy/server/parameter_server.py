"""The service of a ps task: owns its variables and is the only one to change them."""

from __future__ import annotations

from mpidist import task_metrics
from strategy.server.catalogue import Catalogue
from strategy.server.known_rules import Rules
from strategy.server.pushes import Pushes
from strategy.server.reads import Reads
from strategy.server.served_checkpoints import ServedCheckpoints
from strategy.server.timekeeper import Timekeeper
from strategy.shared.host import Host, workers_of


class ParameterServer:
    """Local. Serves variables from this process's memory.

    Handlers run one at a time, so that every change and every read by message falls between two
    pushes. A Server makes it for a ps task.

    Args:
        host: The process's place in the cluster: a Server, or a strategy's own in local mode.
    """

    def __init__(self, host: Host) -> None:
        index = host.own_index("ps")
        self._catalogue = Catalogue(host, index)
        name = f"ps {index}"
        self._rules = Rules(name)
        self._metrics = task_metrics("ps", index)
        self._timekeeper = Timekeeper(self._catalogue, host)
        self._pushes = Pushes(
            name,
            self._catalogue,
            self._rules,
            self._metrics,
            lambda connection: self._checkpoints.drop_mirror(connection),  # made below
        )
        self._reads = Reads(self._catalogue, self._metrics)
        workers = len(workers_of(host.cluster_spec))
        self._checkpoints = ServedCheckpoints(self._catalogue, self._pushes, self._metrics, workers)
        self._endpoint = host.endpoint
        self._endpoint.register(
            "ps",
            {
                "Attach": self._catalogue.attach,
                "Detach": self._pushes.detach,
                "Announce": self._catalogue.agreement.announce,
                "Retract": self._catalogue.agreement.retract,
                "CreateVariable": self._catalogue.create,
                "Abandon": self._catalogue.abandon,
                "Grow": self._catalogue.grow,
                "Withdraw": self._catalogue.withdraw,
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
                "CheckRestore": self._checkpoints.check_restore,
                "Carry": self._checkpoints.carry,
                "Restore": self._checkpoints.restore,
                "AwaitRestore": self._checkpoints.await_restore,
            },
        )

    def close(self) -> None:
        """Local. Serve no more."""
        self._endpoint.unregister("ps")
        self._catalogue.close()
        self._checkpoints.close()
