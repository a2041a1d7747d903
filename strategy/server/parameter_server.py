"""The service of a ps task: its methods, the directory of variables, pulls, and local mode."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

import numpy as np

from mpidist import (
    ClusterSpec,
    Reply,
    Request,
    TaskMetrics,
    errors,
    open_endpoint,
    task_metrics,
)
from mpidist.ps_memory import PsMemory
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.cluster import Host, Task
from strategy.server.checkpoints import ServedCheckpoints
from strategy.server.pushes import Pushes
from strategy.server.rules import Rules
from strategy.server.sync_coordinator import SyncCoordinator
from strategy.server.variable_store import VariableStore


class Directory:
    """The definition of each variable: its shape and dtype, its parts and their servers.

    The first worker that defines a variable decides about parts and servers. Others receive its
    definition, so workers may create their variables in any order.
    """

    def __init__(self) -> None:
        self._known: dict[str, pb.Definition] = {}
        self._users: dict[str, set[int]] = {}  # connections that have received each definition

    def define(self, request: Request) -> Reply:
        """Return the definition of a variable.

        The first call with a name stores its definition. Later calls return the stored definition.

        Raises:
            InvalidArgumentError: Another worker has defined another shape or dtype.
        """
        asked = pb.Definition.FromString(request.body)
        known = self._known.setdefault(asked.name, asked)
        if (known.dtype, known.shape) != (asked.dtype, asked.shape):
            remedy = "use the same shape and dtype on all workers"
            if known.worker == asked.worker:
                remedy = "strategies share variables by name, so use another name"
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable {asked.name!r} as "
                f"{asked.dtype}{list(asked.shape)}, but worker {known.worker} created it as "
                f"{known.dtype}{list(known.shape)}: {remedy}"
            )
        self._users.setdefault(asked.name, set()).add(asked.connection)
        return Reply(known.SerializeToString())

    def undefine(self, request: Request) -> None:
        """Forget a user of a definition, which could not create any part. The last one removes it.

        A strategy that has created a part stays a user.
        """
        asked = pb.Definition.FromString(request.body)
        users = self._users.get(asked.name, set())
        users.discard(asked.connection)
        if not users and asked.name in self._known:
            del self._known[asked.name], self._users[asked.name]


class Reads:
    """Handlers of pulls. They run between two pushes, so every reply has a single version.

    Args:
        store: The variables of the server.
        metrics: The metrics of the server.
    """

    def __init__(self, store: VariableStore, metrics: TaskMetrics) -> None:
        self._variables = store.variables
        self._metrics = metrics

    def read(self, request: Request) -> Reply:
        """Return a copy of a variable, of some rows, or of a range of the flattened elements."""
        asked = pb.ReadRequest.FromString(request.body)
        shard = self._variables[asked.variable].shard
        with self._metrics.timed("read", "busy_s"):
            if request.buffers:
                ids = np.array(request.buffers[0]).view(np.int64)
                shard.check_rows(ids)
                copy = np.take(shard.data, ids, axis=0)
            else:
                copy = shard.flat[asked.start : asked.stop or None].copy()
        self._metrics.values["out_bytes"] += copy.nbytes
        return Reply(pb.ReadReply(version=shard.version).SerializeToString(), (copy,))

    def read_many(self, request: Request) -> Reply:
        """Return copies of several variables, joined in one array."""
        asked = pb.ReadManyRequest.FromString(request.body)
        shards = [self._variables[number].shard for number in asked.variables]
        copy = np.empty(sum([shard.layout.data_bytes for shard in shards]), np.uint8)
        begin = 0
        for shard in shards:
            end = begin + shard.layout.data_bytes
            copy[begin:end] = shard.flat.view(np.uint8)
            begin = end
        self._metrics.values["out_bytes"] += copy.nbytes
        reply = pb.ReadManyReply(versions=[shard.version for shard in shards])
        return Reply(reply.SerializeToString(), (copy,))


class ParameterServer:
    """The service of a ps task, which a Server creates.

    Handlers run one at a time, so every variable is complete between two handlers.

    Args:
        host: The place of this process in the cluster: a Server, or a LocalHost in local mode.
    """

    def __init__(self, host: Host) -> None:
        index = host.own_index("ps")
        self._store = VariableStore(host, index)
        self._directory = Directory()
        name = f"ps {index}"
        self._metrics = task_metrics("ps", index)
        self._coordinator = SyncCoordinator(self._store, host)
        self._pushes = Pushes(name, self._store, Rules(name), self._metrics, self._forget)
        self._reads = Reads(self._store, self._metrics)
        self._checkpoints = ServedCheckpoints(self._store, self._pushes, self._metrics)
        self._endpoint = host.endpoint
        self._endpoint.register(
            "ps",
            {
                "Attach": self._attach,
                "Detach": self._pushes.detach,
                "Define": self._directory.define,
                "Undefine": self._directory.undefine,
                "CreateVariable": self._store.create,
                "Abandon": self._store.abandon,
                "Configure": self._pushes.configure,
                "PushSlice": self._pushes.take_slice,
                "Push": self._pushes.push,
                "Hold": self._pushes.hold,
                "Await": self._pushes.wait,
                "Fail": self._pushes.fail,
                "Enter": self._coordinator.enter,
                "Clock": self._coordinator.clock,
                "Missing": self._coordinator.missing,
                "Leave": self._coordinator.leave,
                "Read": self._reads.read,
                "ReadMany": self._reads.read_many,
                "Save": self._checkpoints.save,
                "Fetch": self._checkpoints.fetch,
                "Release": self._checkpoints.release,
                "Variables": self._checkpoints.variables,
                "AwaitRestore": self._checkpoints.await_restore,
                "EndRestore": self._checkpoints.end_restore,
                "RestoreArray": self._checkpoints.restore_array,
            },
        )

    def close(self) -> None:
        """Stop serving."""
        self._endpoint.unregister("ps")
        self._store.close()
        self._checkpoints.close()

    def _attach(self, request: Request) -> Reply:
        """Open the connection of a worker's strategy."""
        asked = pb.AttachRequest.FromString(request.body)
        number = self._store.attach(asked)
        step = self._coordinator.join(number)
        restores = self._checkpoints.restores_of(asked.strategy).count(asked.worker)
        reply = pb.AttachReply(connection=number, step=step, restores=restores)
        return Reply(reply.SerializeToString())

    def _forget(self, number: int, strategy: str) -> None:
        """Forget a connection that was closed. It is no longer in the store."""
        self._coordinator.forget(number)
        self._checkpoints.forget_strategy(strategy)


class LocalHost:
    """A cluster of one ps task and one worker inside this process, for local mode.

    The ps task serves on a thread until the host is closed or abandoned.
    """

    def __init__(self) -> None:
        self.memory = PsMemory()
        self.endpoint = open_endpoint("inproc")
        self.cluster_spec = ClusterSpec({"ps": ["localhost:0"], "worker": ["localhost:0"]})
        self.job_name = "worker"
        self.task_index = 0
        self._abandoned = False
        self._service = ParameterServer(self)
        self._thread = threading.Thread(
            target=self._serve, name=f"ps of {self.endpoint.address}", daemon=True
        )
        self._thread.start()

    def task_group(self, tasks: Sequence[Task], name: str) -> None:
        """Return None: there is one worker."""

    def own_index(self, job: str) -> int:
        """Return 0: every job has one task."""
        return 0

    def task_address(self, job: str, index: int) -> str:
        """Return the address of the only endpoint."""
        return str(self.endpoint.address)

    def has_left(self, job: str, index: int) -> bool:
        """Return False, because there is no other process."""
        return False

    def on_drain(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Do nothing: no other process waits for pending pushes."""
        return lambda: None

    def close(self) -> None:
        """Stop serving and release the memory; idempotent."""
        self.endpoint.close()
        self._thread.join()

    def abandon(self) -> None:
        """Tell the thread of the ps task to close this host soon.

        This takes no lock and does not wait: the garbage collector may run it on any thread.
        """
        self._abandoned = True

    def _serve(self) -> None:
        self.endpoint.serve(lambda: self._abandoned)
        self._service.close()
        self.endpoint.close()
        self.memory.discard()
        # The service holds the slots of optimizers, and is in reference cycles.
        del self._service
        gc.collect()
