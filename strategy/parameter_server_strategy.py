"""ParameterServerStrategy: variables on ps tasks, shared by all workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import DTypeLike

from mpidist import ClusterSpec, Server, Work, launched
from mpidist.cluster_resolver import ClusterResolver, SimpleClusterResolver
from strategy.checkpoints.lock import checkpoint_lock_of
from strategy.connection.compression import Compressor, parse
from strategy.connection.connection import Connection
from strategy.connection.nan_policy import NanPolicy
from strategy.connection.pace import checked_mode, pace_of
from strategy.connection.reach import TRANSPORTS
from strategy.durable import Durable
from strategy.extended import StrategyExtended
from strategy.gpus import chosen_gpus
from strategy.gradients import GradientPusher
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

# How many strategies each host has: those of different workers are matched by their numbers.
_strategies: WeakKeyDictionary[Host, int] = WeakKeyDictionary()
_counting = threading.Lock()


class ParameterServerStrategy(Strategy, Member, Durable):
    """Local. Puts variables on the ps tasks of the cluster and trains asynchronously.

    Every worker makes its own, and creates the same variables in the same order. Pulls and
    pushes are never collective. Between the ps and the workers of a node they go through shared
    memory, between nodes by messages. A variable for which /dev/shm has no room lies in memory of
    its ps alone, is served by messages, and the ps says so once. Several strategies of a worker
    share variables as those of several workers do; each waits for its own pushes only.

    Without a cluster and a started Server, in an evaluator, given a cluster without jobs, and where
    that of the Server has this one task, it is in local mode: the variables live in this process.
    Options that need other tasks then have no effect: no backup workers, and all places are the one
    there is. A cluster with ps tasks in TF_CONFIG counts as given.

    What it holds is given back by :meth:`close`, or at the end of its ``with`` block.

    Args:
        cluster_resolver: A ClusterResolver, a ClusterSpec, or a dict; by default the cluster of
            the started Server.
        cluster_spec: The cluster, in place of ``cluster_resolver``.
        task_type: Job of this task, checked against the Server's if given.
        task_id: Index of this task, checked against the Server's if given.
        server: The started Server; found if not given.
        variable_partitioner: Into how many parts variables are divided that do not say so
            themselves; see :mod:`strategy.partitioners`. Each part is placed on its own.
        placement: Which ps task a new variable lives on: ``"bytes"`` (that with the fewest),
            ``"round_robin"`` (one after the other, as TensorFlow's), ``"hash"`` (by the name), or a
            function of name, shape and dtype to the index of a ps task, such as TensorFlow's
            :func:`replica_device_setter` and what goes with it. All workers must choose the same;
            it is checked.
        transport: How values and gradients travel. ``"auto"``: through shared memory within a
            node, by messages between nodes. ``"shared"``: through shared memory, or an error.
            ``"rma"``: by MPI's one-sided Get and Put, for networks that do them well; all workers
            must choose it. ``"p2p"``: by messages.
        mode: How workers wait for each other. ``"async"``: not at all. ``"sync"``: every
            ``apply_gradients`` is a step of all workers, which applies the mean of their gradients,
            added up in the order of the workers; all must give gradients of the same variables.
            ``"ssp"``: none gets more than ``staleness`` steps ahead of the slowest. In every mode
            assignments count at once. All workers must have the same.
        staleness: The bound of ``"ssp"``.
        backup_workers: How many workers a step of ``"sync"`` does without: it has the gradients of
            those that come first, and the others' are dropped.
        compression: How gradients of float32 and float64 variables are made smaller on their way:
            ``"fp16"``, ``"bf16"``, or ``("topk", share)``, which sends only the largest elements
            and adds what stays behind to the next gradient; see
            :mod:`strategy.connection.compression`.
        nan: What happens to gradients with NaN or infinite elements: ``"error"``, ``"skip"`` (they
            are not pushed) or ``"pass"`` (nobody looks, which saves a pass over them).
        num_replicas_per_worker: Copies of the step inside each worker, on threads; by default 1, or
            the number of its GPUs. Their gradients are averaged before they are pushed.
        num_gpus_per_worker: GPUs of each worker, on which its replicas run in turn: the thread of
            a replica (with one, that which calls :meth:`run`) has its GPU as the current device of
            CuPy and torch, then and afterwards, and values that it pulls, and batches of
            distributed datasets, are CuPy arrays there.
            Workers of one host, where each sees all GPUs, take them in turn.
        parameter_devices: On which ps tasks variables live, as ``"/job:ps/task:0"``; by default on
            all. ``"/job:ps/task:0/device:GPU:0"`` has those that optimizers can change, and their
            slots, live on that GPU of the task, by CuPy's numbers there; integers and bools stay on
            its host. In local mode ``"/device:GPU:0"``, and names of ps tasks have no effect. All
            workers must have the same.

    Attributes:
        global_step: A variable, advanced by every ``apply_gradients`` of every worker; in mode
            ``"sync"`` by every step.
        pace: How its pushes of gradients wait for those of other workers.
        nan: What happens to gradients that are not finite; ``nan.skipped`` of them were left out.
        compressor: Makes gradients smaller on their way.
        extended: The finer interface.
        gpus: The number of each replica's GPU; empty on the CPU.

    Raises:
        FailedPreconditionError: A cluster is given, or described by TF_CONFIG, and no Server has
            been started; or GPUs are asked for, and CuPy can use none.
        InvalidArgumentError: A ps task has no GPU of the number that is asked for, or workers have
            different arguments.
        ValueError: The cluster has no ps task, or differs from the Server's; or an argument is
            unknown.
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
        super().__init__(replicas)
        self._transport = transport
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
        """Become a worker of a cluster, or of none."""
        if host is not None and needs_no_server(host, spec):
            host = None
        elif host is None:
            check_alone(spec, task_type)
        else:
            check_task(host, spec, task_type, task_id)
        job = spec if host is None else host.cluster_spec
        self._own_host = None
        # An evaluator is a cluster of its own: it reads checkpoints, and nobody waits for it.
        if host is None or host.job_name == "evaluator":
            host = self._own_host = local_host()
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
        self.pace = pace_of(mode, self._connections, self._worker)
        self._variables = Variables(self, self._connections, placement, self._partitioner)
        task = None if alone else (host.job_name, host.task_index)
        kind, count = ("GPU", self._gpus_per_worker) if self.gpus else ("CPU", self._replicas)
        devices = [f"device:{kind}:{number % count}" for number in range(self._replicas)]
        self.extended = StrategyExtended(self, devices, task, servers)
        host.on_drain(self.finish)
        self.global_step = self.create_variable(
            "global_step", (), np.int64, "zeros", False, aggregation="only_first_replica"
        )
        self._gradients = GradientPusher(
            self, self.global_step, self.nan, self.compressor, self.pace
        )

    def _become_worker(self, host: Host, alone: bool) -> pb.Mode:
        """Find out which worker this is; how it waits for the others."""
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
        # One process runs the script of a cluster: its only worker cannot be for backup.
        count = None if alone or (self._workers == 1 and not launched()) else self._workers
        mode = checked_mode(name, count, backups, bound, str(self._compression))
        mode.one_sided = self._transport == "rma"
        return mode

    def _connections_to(
        self, servers: Mapping[int, int | None], host: Host, mode: pb.Mode
    ) -> list[Connection]:
        me = (self._worker, self._transport, mode)
        with _counting:
            number = _strategies.get(host, 0)
            connections = [
                Connection(host, index, *me, number, gpu) for index, gpu in servers.items()
            ]
            _strategies[host] = number + 1
        lock = threading.RLock()
        for connection in connections:
            connection.siblings, connection.pushing_to_all = connections, lock
        return connections

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that was given, or one of the cluster and the task of this process."""
        if self._resolver is None:
            self._resolver = SimpleClusterResolver(
                self._host.cluster_spec,
                task_type=self._host.job_name,
                task_id=self._host.task_index,
            )
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first: the one to save and to report."""
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
        """Local. In the ``with`` block, :func:`get_variable` makes variables of this strategy."""
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
        """Local. Make a variable on ps tasks; see :func:`get_variable`."""
        use = Use.of(trainable, aggregation, synchronization)
        return self._variables.create(name, shape, dtype, initializer, use, partitioner)

    def find_variable(self, name: str) -> Variable | None:
        """Local. The variable of a name that this strategy has made, or None."""
        return self._variables.by_name.get(name)

    def push_gradients(self, optimizer: Optimizer, pairs: Sequence[tuple[Any, Variable]]) -> Work:
        """Push gradients; see :meth:`Optimizer.apply_gradients`, which calls this."""
        self._variables.say_if_uneven()
        return self._gradients.push(optimizer, pairs)

    def placing_with(self, variable: Variable) -> AbstractContextManager[None]:
        """Local. In the block, new variables live where this one does, and are not divided."""
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
