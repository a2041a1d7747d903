"""ParameterServerStrategy: variables on ps tasks, shared by all workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike

from mpidist import ClusterSpec, errors, started_server
from mpidist.cluster_resolver import ClusterResolver
from strategy.client import Connection
from strategy.compression import Compressor, parse
from strategy.durable import Durable
from strategy.extended import StrategyExtended
from strategy.host import (
    Host,
    LocalHost,
    check_task,
    chosen_servers,
    described_spec,
    given_spec,
    workers_of,
)
from strategy.local import local_host
from strategy.nan_policy import NanPolicy
from strategy.numbers import whole_number
from strategy.pace import checked_mode, pace_of
from strategy.parts import Partitioner
from strategy.placement import Place, Placement
from strategy.reach import TRANSPORTS
from strategy.replicated import Replicated, current_strategy
from strategy.variable import Variable
from strategy.variables import Use, Variables

# How many strategies each host has: those of different workers are matched by their numbers.
_strategies: WeakKeyDictionary[Host, int] = WeakKeyDictionary()
_counting = threading.Lock()


class ParameterServerStrategy(Replicated, Durable):
    """Local. Puts variables on the ps tasks of the cluster and trains asynchronously.

    Every worker makes its own, and creates the same variables in the same order. Pulls and
    pushes are never collective. Between the ps and the workers of a node they go through shared
    memory, between nodes by messages. A variable for which /dev/shm has no room lies in memory of
    its ps alone, is served by messages, and the ps says so once. Several strategies of a worker
    share variables as those of several workers do; each waits for its own pushes only.

    Without a cluster and a started Server it is in local mode: the variables live in this process.
    A cluster with ps tasks in TF_CONFIG counts as given.

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
            function of name, shape and dtype to the index of a ps task. All workers must choose the
            same; it is checked.
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
            and adds what stays behind to the next gradient; see :mod:`strategy.compression`.
        nan: What happens to gradients with NaN or infinite elements: ``"error"``, ``"skip"`` (they
            are not pushed) or ``"pass"`` (nobody looks, which saves a pass over them).
        num_replicas_per_worker: Copies of the step inside each worker, on threads; by default 1, or
            the number of its GPUs. Their gradients are averaged before they are pushed.
        num_gpus_per_worker: GPUs that each worker's replicas run on.
        parameter_devices: On which ps tasks variables live, as ``"/job:ps/task:0"``; by default on
            all.

    Attributes:
        global_step: A variable, advanced by every ``apply_gradients`` of every worker; in mode
            ``"sync"`` by every step.
        pace: How its pushes of gradients wait for those of other workers.
        nan: What happens to gradients that are not finite; ``nan.skipped`` of them were left out.
        compressor: Makes gradients smaller on their way.
        extended: The finer interface.

    Raises:
        FailedPreconditionError: A cluster is given, or described by TF_CONFIG, and no Server has
            been started.
        UnimplementedError: Replicas on GPUs are asked for.
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
        placement: str | Place = "bytes",
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
        if num_gpus_per_worker:
            raise errors.UnimplementedError(
                "replicas on GPUs do not exist yet; num_replicas_per_worker makes some on the CPU"
            )
        replicas = whole_number(
            num_replicas_per_worker=1
            if num_replicas_per_worker is None
            else num_replicas_per_worker
        )
        if replicas < 1:
            raise ValueError(f"a worker needs at least one replica, not {replicas}")
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
        self._nan = nan
        self._compression = parse(compression)
        spec = given_spec(cluster_resolver, cluster_spec)
        self._connect(server or started_server(), spec, task_type, task_id)

    def _connect(
        self,
        host: Host | None,
        spec: ClusterSpec | None,
        task_type: str | None,
        task_id: int | None,
    ) -> None:
        """Become a worker of a cluster, or of none."""
        if host is None and (spec is not None or described_spec() is not None):
            source = "the strategy is given" if spec is not None else "TF_CONFIG describes"
            raise errors.FailedPreconditionError(
                f"{source} a cluster, and no Server has been started in this process: start "
                "mpidist.Server(spec, job_name, task_index) before the strategy"
            )
        if host is not None:
            check_task(host, spec, task_type, task_id)
        # An evaluator is a cluster of its own: it reads checkpoints, and nobody waits for it.
        if host is None or host.job_name == "evaluator":
            host = local_host()
        self._host: Host = host
        workers = workers_of(host.cluster_spec)
        me = (host.job_name, host.task_index)
        if me not in workers:
            raise ValueError(f"{me[0]} {me[1]} does not train: only workers make a strategy")
        self._worker, self._workers = workers.index(me), len(workers)
        servers = chosen_servers(host.cluster_spec, self._devices)
        name, backups, bound = self._mode
        mode = checked_mode(name, self._workers, backups, bound, str(self._compression))
        mode.one_sided = self._transport == "rma"
        self.compressor = Compressor(self._compression)
        self.nan = NanPolicy(self._nan, self._worker)
        placement = Placement(self._placement, len(servers))
        with _counting:
            number = _strategies.get(host, 0)
            self._connections = [
                Connection(host, index, self._worker, self._workers, self._transport, mode, number)
                for index in servers
            ]
            _strategies[host] = number + 1
        lock = threading.RLock()
        for connection in self._connections:
            connection.siblings, connection.pushing_to_all = self._connections, lock
        self.pace = pace_of(mode, self._connections, self._worker)
        self._variables = Variables(self, self._connections, placement, self._partitioner)
        task = None if isinstance(host, LocalHost) else me
        self.extended = StrategyExtended(self, self.num_replicas_in_sync, task, servers)
        host.on_drain(self.finish)
        self.global_step = self.create_variable(
            "global_step", (), np.int64, "zeros", False, aggregation="only_first_replica"
        )

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

    def begin_step(self) -> None:
        """Local. Called by optimizers when they are about to push."""
        self._variables.say_if_uneven()

    def placing_with(self, variable: Variable) -> AbstractContextManager[None]:
        """Local. In the block, new variables live where this one does, and are not divided."""
        return self._variables.placing_with(variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Local. Join a cluster after the strategy has been made, before it has variables.

        Args:
            session_config: A ConfigProto; its device filters are set.
            cluster_spec: The cluster; its Server has been started.
            task_type: Job of this task, checked against the Server's if given.
            task_id: Index of this task, checked against the Server's if given.

        Raises:
            RuntimeError: It has variables.
            FailedPreconditionError: No Server has been started.
            ValueError: The cluster or the task is not the Server's.
        """
        if cluster_spec is not None:
            if len(self._variables.by_name) > 1:  # the global step is there from the beginning
                raise RuntimeError("configure comes too late: the strategy has variables already")
            spec = given_spec(None, cluster_spec)
            self._connect(started_server(), spec, task_type, task_id)
        if session_config is not None:
            session_config.CopyFrom(self.update_config_proto(session_config))

    def update_config_proto(self, config_proto: Any) -> Any:
        """Local. A copy of a ConfigProto, with filters for the devices that this task needs.

        A worker needs itself and the ps tasks; an evaluator itself; in local mode there are none.

        Args:
            config_proto: TensorFlow's message, or another with ``device_filters``.
        """
        updated = type(config_proto)()
        updated.CopyFrom(config_proto)
        del updated.device_filters[:]
        server = started_server()
        if server is not None:
            own = f"/job:{server.job_name}/task:{server.task_index}"
            alone = server.job_name == "evaluator"
            updated.device_filters.extend([own] if alone else [own, "/job:ps"])
        return updated

    def finish(self) -> None:
        """Local. End this worker's training: others need not wait for steps of it any more.

        Returns when all its pushes have been applied. The end of the Server's context does it too;
        a worker that waits there for others otherwise, say in a barrier, has to finish before.
        """
        try:
            self._drain()
        finally:
            self.pace.leave()

    def _drain(self) -> None:
        for connection in self._connections:
            connection.settle()

    def __copy__(self) -> ParameterServerStrategy:
        raise RuntimeError("a strategy cannot be copied: its variables live on the ps tasks")

    def __deepcopy__(self, memo: Any) -> ParameterServerStrategy:
        return self.__copy__()
