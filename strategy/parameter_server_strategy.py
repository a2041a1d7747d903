"""ParameterServerStrategy: variables on ps tasks, shared by all workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from weakref import finalize

import numpy as np
from numpy.typing import DTypeLike

from mpidist import ClusterSpec, Server, Work, launched
from mpidist.cluster_resolver import ClusterResolver, SimpleClusterResolver
from strategy.checkpoints.lock import checkpoint_lock_of
from strategy.connection.connection import Connection
from strategy.connection.pace import checked_mode, pace_of
from strategy.connection.reach import TRANSPORTS
from strategy.durable import Durable
from strategy.extended import StrategyExtended
from strategy.gpus import chosen_gpus
from strategy.gradients import Compressor, GradientPusher, NanPolicy, parse
from strategy.local import LocalHost, local_host
from strategy.membership import Member
from strategy.optimizers import Optimizer
from strategy.placement import Place, Placement
from strategy.proto import parameter_server_pb2 as pb
from strategy.replicated import Strategy, current_strategy
from strategy.shared.host import (
    Host,
    check_alone,
    check_task,
    chosen_servers,
    given_spec,
    local_gpu,
    needs_no_server,
    workers_of,
)
from strategy.shared.numbers import whole_number
from strategy.shared.parts import Partitioner
from strategy.variable import Variable
from strategy.variables import Use, Variables


class ParameterServerStrategy(Strategy, Member, Durable):
    """Data-parallel training by workers that share variables on ps tasks.

    Every worker creates its own strategy. Workers may create variables in any order. The first
    worker that creates a variable decides the parts and the ps tasks of the variable, and pushes
    the initial value. Several strategies of a worker share variables by name, as several workers
    do. In local mode each strategy has variables of its own.

    A strategy waits only for its own pushes. In modes ``"sync"`` and ``"ssp"``, ``apply_gradients``
    also waits for other workers.

    Pulls and pushes are never collective. Workers on the node of a ps task pull from its memory.
    Workers on other nodes pull by messages. If a ps task cannot share its memory, it logs a
    warning, and workers on its node pull by messages, too.

    In *local mode* the variables live in this process. A strategy uses local mode in each of these
    cases:

    - there is neither a cluster nor a started Server,
    - the task is an evaluator,
    - the given cluster has no jobs, or
    - no cluster is given, and the Server's cluster has only this task.

    If no Server has been started, a cluster with ps tasks in TF_CONFIG or of ``mpidist run`` counts
    as given. In local mode, options that need other tasks have no effect: there are no backup
    workers, and every placement is on the only ps task.

    :meth:`close`, or the end of a ``with`` block, releases the strategy.

    Args:
        cluster_resolver: A ClusterResolver, a ClusterSpec, or a dict. The default is the cluster of
            the started Server.
        cluster_spec: The cluster, in place of ``cluster_resolver``.
        task_type: Job of this task, checked against the Server if given.
        task_id: Index of this task, checked against the Server if given.
        server: The started Server. The default is the Server of this process.
        variable_partitioner: Partitioner of variables that are created without one; see
            :mod:`strategy.partitioners`. Each part is placed separately.
        placement: The ps task of a new variable: ``"bytes"`` (the task with the fewest bytes),
            ``"round_robin"`` (as in TensorFlow), ``"hash"`` (by the name), or a function of name,
            shape and dtype that returns the index of a ps task, such as the result of
            :func:`replica_device_setter`. The first worker that creates a variable decides.
        transport: How pulls read variables. ``"auto"`` reads mapped memory on the same node, and
            uses messages between nodes. ``"shared"`` raises an error if the memory cannot be
            mapped. ``"rma"`` uses MPI's one-sided Get between nodes, for networks with RDMA.
            ``"p2p"`` always uses messages. Pushes are messages.
        mode: Synchronization of the workers. ``"async"``: workers do not wait for each other.
            ``"sync"`` (BSP): every ``apply_gradients`` is a step of all workers, which applies the
            mean of their gradients, added in the order of the workers. All workers must push
            gradients of the same variables. ``"ssp"``: a worker begins a step only if it is at most
            ``staleness`` steps ahead of the slowest worker. Assignments belong to no step, but wait
            for earlier pushes of the same worker. All workers must use the same mode.
        staleness: Bound of mode ``"ssp"`` in steps.
        backup_workers: Number of workers for which a step in mode ``"sync"`` does not wait. The
            step applies the earliest gradients, and drops late gradients.
        compression: Compression of the gradients of float32 and float64 variables: ``"fp16"``,
            ``"bf16"``, or ``("topk", share)``, which sends only the largest elements and adds the
            others to the next gradient (error feedback); see
            :mod:`strategy.gradients`.
        nan: Policy for gradients with NaN or infinite elements: ``"error"``, ``"skip"`` (do not
            push the gradients) or ``"pass"`` (do not check, which saves a pass over the gradients).
        num_replicas_per_worker: Replicas of the step in each worker, on threads. The default is the
            number of GPUs, at least 1. The gradients of the replicas are averaged before the push.
        num_gpus_per_worker: GPUs of each worker, assigned to its replicas in turn. A GPU becomes
            and stays the current device of CuPy and torch on the thread of its replica. A single
            replica runs on the thread that calls :meth:`run`. The values that a replica pulls, and
            its batches of distributed datasets, are CuPy arrays on its GPU. If each worker of a
            host sees all GPUs, the workers take the GPUs in turn.
        parameter_devices: Names of the ps tasks that hold variables: ``"/job:ps/task:0"``. The
            default is all ps tasks. ``"/job:ps/task:0/device:GPU:0"`` holds floating-point
            variables and their slots on that GPU of the task, as CuPy counts there. Integers and
            bools stay on the host of the task. In local mode ``"/device:GPU:0"`` selects a GPU, and
            names of ps tasks have no effect. All workers must use the same devices.
        name: Name of the strategy. Strategies with the same name train together, one of each
            worker. The open strategies of a worker need different names. :meth:`close` frees the
            name. In local mode each strategy has variables of its own, and names may repeat.

    Attributes:
        name: The name of the strategy.
        global_step: Variable that counts the calls of ``apply_gradients`` of all workers; in mode
            ``"sync"``, the steps. Skipped or late gradients do not advance the global step.
        pace: The synchronization mode of pushes.
        nan: The policy for gradients that are not finite. ``nan.skipped`` counts skipped pushes.
        compressor: The compression of gradients.
        extended: The interface for libraries.
        gpus: GPU index of each replica; empty on the CPU.

    Raises:
        AlreadyExistsError: This worker has an open strategy of this name.
        FailedPreconditionError: A cluster is given, or described by TF_CONFIG, but no Server has
            been started. Or GPUs are requested, but CuPy can use none.
        InvalidArgumentError: A ps task has no GPU of the requested index, or workers have different
            arguments.
        ValueError: The cluster has no ps task or differs from the Server's, or an argument is not
            valid.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | ClusterSpec | Mapping[str, Any] | None = None,
        *,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
        server: Host | None = None,
        variable_partitioner: Partitioner | None = None,
        placement: str | Place | None = "bytes",
        transport: str = "auto",
        mode: str = "async",
        staleness: int | None = None,
        backup_workers: int = 0,
        compression: str | tuple[str, float] | None = None,
        nan: str = "error",
        num_replicas_per_worker: int | None = None,
        num_gpus_per_worker: int = 0,
        parameter_devices: Sequence[str] | None = None,
        name: str = "default",
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; the known ones are {TRANSPORTS}")
        gpus = whole_number(num_gpus_per_worker=num_gpus_per_worker)
        replicas = whole_number(
            num_replicas_per_worker=max(1, gpus)
            if num_replicas_per_worker is None
            else num_replicas_per_worker
        )
        if replicas < 1:
            raise ValueError(f"a worker needs at least one replica, not {replicas}")
        if gpus < 0:
            raise ValueError(f"num_gpus_per_worker cannot be negative: {gpus}")
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                f"variable_partitioner is {variable_partitioner!r}, not a function of shape and "
                "dtype; see strategy.partitioners"
            )
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string that is not empty, not {name!r}")
        super().__init__(replicas)
        self.name = name
        self._transport = transport
        self._has_pushed = False
        self._mode = (mode, backup_workers, staleness)
        self._placement = placement
        self._partitioner = variable_partitioner
        self._devices = parameter_devices
        self._gpus_per_worker = gpus
        self._nan = nan
        self._compression = parse(compression)
        self._resolver: ClusterResolver | None = None
        if isinstance(cluster_resolver, ClusterResolver):
            self._resolver = cluster_resolver
        spec = given_spec(cluster_resolver, cluster_spec)
        host = server or Server.current()
        if host is None and task_type is None:
            task_type = getattr(cluster_resolver, "task_type", None)
        self._connect(host, spec, task_type, task_id)

    def _connect(
        self,
        host: Host | None,
        spec: ClusterSpec | None,
        task_type: str | None,
        task_id: int | None,
    ) -> None:
        """Become a worker of a cluster, or of local mode."""
        if host is not None and needs_no_server(host, spec):
            host = None
        elif host is None:
            check_alone(spec, task_type)
        else:
            check_task(host, spec, task_type, task_id)
        job = spec if host is None else host.cluster_spec
        own_host = None
        # An evaluator is a cluster of its own: it reads checkpoints, and no task waits for it.
        if host is None or host.job_name == "evaluator":
            host = own_host = local_host()
            finalize(self, host.abandon).atexit = False
        self._host = host
        given = self._resolver
        if spec is not None and given is not None and given.cluster_spec() != spec:
            self._resolver = None  # configure() has joined another cluster
        alone = isinstance(host, LocalHost)
        servers = chosen_servers(host.cluster_spec, None if alone else self._devices)
        if alone:
            servers = dict.fromkeys(servers, local_gpu(job, self._devices))
        mode = self._become_worker(host, alone)
        placement = Placement(self._placement, len(servers), alone)
        self._checkpoint_lock = checkpoint_lock_of(host)
        self._connections = self._connections_to(servers, host, mode)
        self._restores = self._connections[0].restores
        self.pace = pace_of(mode, self._connections, self._worker)
        self._variables = Variables(self, self._connections, placement, self._partitioner)
        task = None if alone else (host.job_name, host.task_index)
        kind, count = ("GPU", self._gpus_per_worker) if self.gpus else ("CPU", self._replicas)
        devices = [f"device:{kind}:{number % count}" for number in range(self._replicas)]
        self.extended = StrategyExtended(self, devices, task, servers)
        self._own_host = own_host
        try:
            self.global_step = self.create_variable(
                "global_step", (), np.int64, "zeros", False, aggregation="only_first_replica"
            )
        except BaseException:
            _detach(self._connections)
            raise
        self._stop_draining = host.on_drain(self.finish)
        self._gradients = GradientPusher(
            self, self.global_step, self.nan, self.compressor, self.pace
        )

    def _become_worker(self, host: Host, alone: bool) -> pb.Mode:
        """Set the index, GPUs and policies of this worker. Return the synchronization mode."""
        workers = workers_of(host.cluster_spec)
        me = (host.job_name, host.task_index)
        if me not in workers:
            raise ValueError(f"{me[0]} {me[1]} does not train: only workers make a strategy")
        self._worker, self._workers = workers.index(me), len(workers)
        wanted = self._gpus_per_worker
        self.gpus = chosen_gpus(wanted, self._replicas, host.cluster_spec, workers, me)
        self.compressor = Compressor(self._compression)
        self.nan = NanPolicy(self._nan, self._worker)
        name, backups, bound = self._mode
        # If the script of a cluster runs as one process, its only worker cannot be a backup worker.
        count = None if alone or (self._workers == 1 and not launched()) else self._workers
        return checked_mode(name, count, backups, bound, str(self._compression))

    def _connections_to(
        self, servers: Mapping[int, int | None], host: Host, mode: pb.Mode
    ) -> list[Connection]:
        me = (self._worker, self._transport, mode)
        connections: list[Connection] = []
        try:
            for index, gpu in servers.items():
                connections.append(Connection(host, index, *me, self.name, gpu))
        except BaseException:
            _detach(connections)
            raise
        lock = threading.RLock()
        for connection in connections:
            connection.siblings, connection.pushing_to_all = connections, lock
        return connections

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The given resolver, or a resolver of the cluster and the task of this process."""
        if self._resolver is None:
            self._resolver = SimpleClusterResolver(
                self._host.cluster_spec,
                task_type=self._host.job_name,
                task_id=self._host.task_index,
            )
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """True if this worker is the first, which should save and report."""
        return self._worker == 0

    @property
    def worker_index(self) -> int:
        """Index of this worker among the workers."""
        return self._worker

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._workers

    @contextlib.contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Make :func:`get_variable` create variables of this strategy in the ``with`` block."""
        self._check_open()
        token = current_strategy.set(self)
        try:
            yield self
        finally:
            current_strategy.reset(token)

    def create_variable(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        initializer: Any,
        trainable: bool = True,
        partitioner: Partitioner | None = None,
        aggregation: Any = None,
        synchronization: Any = None,
    ) -> Variable:
        """Create a variable on ps tasks; see :func:`get_variable`."""
        use = Use.of(trainable, aggregation, synchronization)
        return self._variables.create(name, shape, dtype, initializer, use, partitioner)

    def find_variable(self, name: str) -> Variable | None:
        """Return the variable that this strategy has created under a name, or None."""
        return self._variables.by_name.get(name)

    def push_gradients(self, optimizer: Optimizer, pairs: Sequence[tuple[Any, Variable]]) -> Work:
        """Push gradients; see :meth:`Optimizer.apply_gradients`, which calls this method."""
        if not self._has_pushed:
            self._has_pushed = True
            self._variables.warn_if_uneven()
        return self._gradients.push(optimizer, pairs)

    def placing_with(self, variable: Variable) -> AbstractContextManager[None]:
        """Create the variables of the block, undivided, on the ps task of a given variable."""
        return self._variables.placing_with(variable)

    def __copy__(self) -> ParameterServerStrategy:
        raise RuntimeError("a strategy cannot be copied: its variables live on the ps tasks")

    def __deepcopy__(self, memo: Any) -> ParameterServerStrategy:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a strategy and its variables cannot be pickled: they belong to this process, and the "
            "values live on the ps tasks; send numpy() of a variable"
        )


def _detach(connections: Sequence[Connection]) -> None:
    """Close the connections of a strategy that could not be created, which frees its name."""
    for connection in connections:
        connection.detach()
