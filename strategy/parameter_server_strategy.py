"""The strategy: a worker's variables, its connections to ps tasks, training and checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self
from weakref import finalize

import numpy as np

from mpidist import ClusterSpec, Server, errors, launched
from mpidist.checkpoints import folder
from mpidist.checkpoints.manager import Pace, Stateful
from mpidist.cluster_resolver import ClusterResolver, SimpleClusterResolver
from strategy.base import Strategy, current_strategy
from strategy.checkpoints.lock import checkpoint_lock_of
from strategy.checkpoints.manager import StrategyCheckpoints
from strategy.checkpoints.parts import step_in
from strategy.client.checkpoints import CheckpointClient
from strategy.client.connection import TRANSPORTS, Connection, Transport
from strategy.client.sync_modes import ModeName, checked_mode, sync_mode_of
from strategy.creation import Use, VariableCreator
from strategy.gradients import Compressor, GradientPusher, NanPolicy, Policy
from strategy.placement import Place, Placement
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.checks import whole_number
from strategy.protocol.cluster import (
    LOCAL_DEVICE,
    Host,
    check_alone,
    check_task,
    chosen_servers,
    device_name,
    given_spec,
    local_gpu,
    needs_no_server,
    workers_of,
)
from strategy.protocol.partition import Partitioner
from strategy.replicas.gpu import chosen_gpus
from strategy.server.parameter_server import LocalHost
from strategy.variable import VariableAggregation


class _Closed:
    """The replacement for a connection of a closed strategy. Every use raises an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _closed_error()


_CLOSED: Any = _Closed()


def _closed_error() -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(
        "the strategy has been closed, and its variables with it: use them before close(), or in "
        "the strategy's with block; what it has saved can be restored by another strategy"
    )


class ParameterServerStrategy(Strategy):
    """Data-parallel training by workers that share variables on ps tasks.

    Every worker creates its own strategy. Workers may create variables in any order. The first
    worker that creates a variable decides the parts and the ps tasks of the variable, and pushes
    the initial value. Several strategies of a worker share variables by name, as several workers
    do. In local mode each strategy has variables of its own.

    In mode ``"async"``, pulls and pushes do not wait for other workers. In mode ``"sync"``,
    ``apply_gradients`` waits for the other workers of the step, and later pulls wait for the end of
    the step. In mode ``"ssp"``, ``apply_gradients`` waits for workers that are too far behind.

    No pull or push is a collective of MPI. Workers on the node of a ps task pull from its memory.
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
        creator: The creator and registry of the variables.
        global_step: Variable that counts the calls of ``apply_gradients`` of all workers; in mode
            ``"sync"``, the steps. Skipped or late gradients do not advance the global step.
        sync_mode: The synchronization mode of pushes.
        nan: The policy for gradients that are not finite. ``nan.skipped`` counts skipped pushes.
        compressor: The compression of gradients.
        worker_index: Index of this worker among the workers.
        num_workers: Number of workers.
        worker_devices: Name of the device of each replica of this worker.
        parameter_devices: Names of the devices that hold variables: ps tasks, with their GPU if
            any; in local mode the local device.
        gpus: GPU index of each replica; empty on the CPU.

    Raises:
        AlreadyExistsError: This worker has an open strategy of this name.
        FailedPreconditionError: A cluster is given, or described by TF_CONFIG, but no Server has
            been started. Or GPUs are requested, but CuPy can use none.
        InvalidArgumentError: A ps task has no GPU of the requested index, or workers have different
            arguments.
        ValueError: The cluster has no ps task or differs from the Server's, or an argument is not
            valid.

    Example:
        >>> import numpy as np
        >>> from strategy import ParameterServerStrategy, get_variable, optimizers
        >>> strategy = ParameterServerStrategy()  # without a cluster: a ps task on a thread
        >>> with strategy.scope():
        ...     w = get_variable("w", shape=(2,), initializer="zeros")
        >>> push = optimizers.SGD(0.5).apply_gradients([(np.ones(2, "float32"), w)])
        >>> w.numpy()
        array([-0.5, -0.5], dtype=float32)
        >>> strategy.close()
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
        transport: Transport = "auto",
        mode: ModeName = "async",
        staleness: int | None = None,
        backup_workers: int = 0,
        compression: str | tuple[str, float] | None = None,
        nan: Policy = "error",
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
        self._closed = False
        self._own_host: LocalHost | None = None  # of local mode
        self._transport = transport
        self._mode = (mode, backup_workers, staleness)
        self._placement = placement
        self._partitioner = variable_partitioner
        self._devices = parameter_devices
        self._gpus_per_worker = gpus
        self._nan = nan
        self.compressor = Compressor(compression)
        self._resolver: ClusterResolver | None = None
        if isinstance(cluster_resolver, ClusterResolver):
            self._resolver = cluster_resolver
        spec = given_spec(cluster_resolver, cluster_spec)
        host = server or Server.current()
        if host is None and task_type is None:
            task_type = getattr(cluster_resolver, "task_type", None)
        self._connect(host, spec, task_type, task_id)

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
        return self.worker_index == 0

    @contextlib.contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Make :func:`get_variable` create variables of this strategy in the ``with`` block."""
        self._check_open()
        token = current_strategy.set(self)
        try:
            yield self
        finally:
            current_strategy.reset(token)

    # Joining and leaving the cluster

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Join a cluster after the strategy was created, but before it has variables.

        Args:
            session_config: A ConfigProto whose device filters are set.
            cluster_spec: The cluster, whose Server must have been started. A cluster without jobs
                is not joined.
            task_type: Job of this task, checked against the Server if given.
            task_id: Index of this task, checked against the Server if given.

        Raises:
            RuntimeError: The strategy has variables.
            FailedPreconditionError: No Server has been started, or the strategy was closed.
            ValueError: The cluster or the task differs from the Server's.
        """
        self._check_open()
        spec = given_spec(None, cluster_spec)
        if spec:
            if len(self.creator.by_name) > 1:  # one is the global step
                raise RuntimeError("configure comes too late: the strategy has variables already")
            server = Server.current()
            if server is not None and server is self._host:  # the strategy has joined already
                check_task(server, spec, task_type, task_id)
            else:
                before = self._own_host
                self._connect(server, spec, task_type, task_id)
                if before is not None:
                    before.close()
        if session_config is not None:
            session_config.CopyFrom(self.update_config_proto(session_config))

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of a ConfigProto with filters for the devices that this task needs.

        A worker needs itself and the ps tasks. An evaluator needs itself. Without a Server there
        are no filters.

        Args:
            config_proto: TensorFlow's message, or another message with ``device_filters``.
        """
        updated = type(config_proto)()
        updated.CopyFrom(config_proto)
        del updated.device_filters[:]
        server = Server.current()
        if server is not None:
            own = f"/job:{server.job_name}/task:{server.task_index}"
            alone = server.job_name == "evaluator"
            updated.device_filters.extend([own] if alone else [own, "/job:ps"])
        return updated

    def finish(self) -> None:
        """End the training of this worker, so that other workers do not wait for its steps.

        The call returns when all pushes of the strategy have been applied. In mode ``"async"`` the
        call does nothing else. The end of the Server's context also finishes the strategy. Call
        this method before this worker waits for others in another way, such as in a barrier. The
        call waits for saves and restores of other threads of this process; in local mode, only for
        saves and restores of this strategy.
        """
        with self._checkpoint_lock.held("finish()"):
            self._finish()

    def close(self) -> None:
        """Finish and release the strategy; idempotent. The end of a ``with`` block also closes it.

        Neither the strategy nor its variables can be used afterwards. Its name can be used again.
        Let all workers close theirs, and meet in a barrier, before they make the next one.
        In a cluster the ps tasks keep the variables. In local mode the variables, their memory and
        the thread of the ps task are released, so save the variables before. The call waits for
        saves and restores of other threads of this process, as :meth:`finish` does.
        """
        with self._checkpoint_lock.held("close()"):
            try:
                self._finish()
            finally:
                self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            # The first error is raised, since it often is the cause of this one.
            error.add_note(f"Closing the strategy failed too: {late!r}")

    # Checkpoints

    def save(self, directory: str, keep: int = 3, extra: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint. One worker calls it, usually the chief.

        The checkpoint is a consistent cut: a push to several ps tasks is in all of its parts or in
        none. Training goes on, but each ps task holds pushes from the start of the save until the
        task has written its part. While a ps task writes, pulls by message from the task wait, too.
        Saves and restores by several threads of a process run one after the other.

        Args:
            directory: Folder of all checkpoints. A ps task that does not see the folder, on another
                host without a shared file system, sends its part to this worker.
            keep: Number of checkpoints to keep, at least 1. Older ones are removed, by the time of
                their save.
            extra: More files for the folder, by name without ``/``: bytes, such as the state of a
                data iterator, or an object that is written as JSON.

        Returns:
            The folder of the checkpoint. It is complete, or does not exist.

        Raises:
            FailedPreconditionError: A ps task or this worker cannot write into the folder, another
                worker is saving, or this thread is saving already, as in a signal handler. The
                earlier checkpoints are unchanged.
            ValueError: ``keep`` is less than 1, or a name in ``extra`` is not valid. Nothing has
                been written.
        """
        with self._checkpoint_lock.held("save()"):
            self.drain()
            step, files = int(self.global_step), extra or {}
            names = list(self.creator.by_name)
            count = len(self._connections)
            with folder.Writing(directory, step, count, keep, files, names) as writing:
                for name, content in files.items():
                    writing.add(name, content)
                self._checkpoints.begin_save(writing.paths).end()
                writing.name_by(step_in(writing.paths, self.global_step.name, step))
            return writing.path

    def restore(self, path: str | None) -> int:
        """Restore all variables and optimizer slots from a checkpoint. Every worker calls it.

        All workers restore the same checkpoints in the same order, before they train. The chief
        reads the checkpoint and sends the values to the ps tasks. The other workers wait, and need
        not see the checkpoint. The number of ps tasks, the partitioners and the placement may
        differ from those of the save.

        The chief restores every variable of the checkpoint that exists on the ps tasks when it
        calls ``restore``, whichever worker created the variable. A variable created later keeps its
        initial value.

        Shapes and dtypes of all variables are compared before anything changes. A damaged file may
        be noticed later, when some variables have changed. A restore that failed may be repeated,
        or another checkpoint restored in its place.

        Args:
            path: Folder of the checkpoint.

        Returns:
            The global step.

        Raises:
            NotFoundError: The path is None or no checkpoint, or a variable of this worker is
                missing in it. Or this worker does not see it, and the chief has not restored it.
            AbortedError: The chief failed while this worker waited for the same path.
            DataLossError: The checkpoint is damaged.
            InvalidArgumentError: A variable has another shape or dtype in the checkpoint, or the
                chief restored another checkpoint in its place.
            ResourceExhaustedError: A ps task has no memory for a slot.
        """
        if path is None:
            raise errors.NotFoundError(
                "there is no checkpoint to restore: latest_checkpoint() gives None for a folder "
                "without one"
            )
        with self._checkpoint_lock.held("restore()"):
            self.drain()
            self._checkpoints.restore(os.path.abspath(path))
            return int(self.global_step)

    def checkpoints(
        self,
        directory: str | os.PathLike[str],
        every: int | None = None,
        keep: int = 3,
        extra: Mapping[str, Stateful] | None = None,
        own: Mapping[str, Stateful] | None = None,
    ) -> StrategyCheckpoints:
        """Collective over the workers. Return a manager that saves during the training.

        All workers call ``restore()`` of the manager once, ``step()`` after each of their steps,
        and ``close()`` at the end. When a checkpoint is due, the workers wait for each other, so it
        has the same number of steps of each worker. The ps tasks copy the variables and write the
        copies while the training goes on. Each variable is copied before its next update.

        After SIGUSR1, as a batch system sends it before the time limit, the workers save, and the
        job ends with status 75. In mode ``"async"`` they first continue to the step of the fastest
        worker. In mode ``"ssp"``, and with backup workers, each stops after its own step.
        ``mpidist run --restarts`` starts a job again that has failed. In mode ``"sync"`` without
        backup workers and top-k compression, the training has the same result, bit by bit, as one
        that was not interrupted, if ``extra`` and ``own`` have the states of the data.

        Args:
            directory: Folder of all checkpoints; see :meth:`save`.
            every: Steps of each worker between two checkpoints. By default there is one only at
                the end, and after a signal. With backup workers it must be None: workers take
                different numbers of steps.
            keep: Number of checkpoints to keep, at least 1.
            extra: Objects with a state that holds for all workers, by name of a file: an iterator
                over all batches, or over a data service with a fixed order, or any object with
                ``get_state() -> bytes`` and ``set_state(bytes)``. The state of the chief is saved,
                and restored on all workers, of any number.
            own: Objects with a state of each worker, such as an iterator over its own files. Such a
                checkpoint can be restored only by as many workers.

        Raises:
            ValueError: ``every`` or ``keep`` is less than 1, a name is not valid, or ``every`` is
                given with backup workers.

        Example:
            >>> import tempfile
            >>> import numpy as np
            >>> from strategy import ParameterServerStrategy, get_variable, optimizers
            >>> strategy, folder = ParameterServerStrategy(), tempfile.mkdtemp()
            >>> with strategy.scope():
            ...     w = get_variable("w", (2,), initializer="zeros")
            >>> optimizer = optimizers.SGD(0.5)
            >>> with strategy.checkpoints(folder, every=10) as checkpoints:
            ...     for step in range(checkpoints.restore(), 20):
            ...         work = optimizer.apply_gradients([(-np.ones(2, "float32"), w)])
            ...         checkpoints.step()
            >>> w.numpy()
            array([10., 10.], dtype=float32)
            >>> strategy.checkpoints(folder).restore()
            20
        """
        name, backups, _ = self._mode
        if backups and every is not None:
            raise ValueError(
                "with backup workers, workers take different numbers of steps: leave out every"
            )
        self._groups_made += 1
        group = self._host.task_group(
            workers_of(self._host.cluster_spec),
            f"checkpoints {self._groups_made} of strategy {self.name!r}",
        )
        pace = {"sync": Pace.BOUNDED if backups else Pace.LOCKSTEP, "async": Pace.FREE}
        return StrategyCheckpoints(
            self, self._checkpoints, self._checkpoint_lock, os.fspath(directory), every, keep,
            extra, own, group, pace.get(name, Pace.BOUNDED),
        )  # fmt: skip

    @staticmethod
    def latest_checkpoint(directory: str) -> str | None:
        """Return the complete checkpoint of a folder that was saved last, or None."""
        found = folder.checkpoints(directory)
        return found[-1] if found else None

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
            host = own_host = LocalHost()
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
        self._groups_made = 0
        self._connections = self._connections_to(servers, host, mode)
        self.sync_mode = sync_mode_of(mode, self._connections, self.worker_index)
        self.creator = VariableCreator(self, self._connections, placement, self._partitioner)
        self._checkpoints = CheckpointClient(
            self._connections, host, self.worker_index, self.creator.remotes
        )
        self._name_devices(None if alone else (host.job_name, host.task_index), servers)
        self._own_host = own_host
        try:
            use = Use(trainable=False, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
            self.global_step = self.creator.create("global_step", (), np.int64, "zeros", use)
        except BaseException:
            _detach(self._connections)
            raise
        self._stop_draining = host.on_drain(self.finish)
        # A bound method, because a method here would add a Python frame to every push.
        self.push_gradients = GradientPusher(
            self,
            self.global_step,
            self.nan,
            self.compressor,
            self.sync_mode,
            self.creator.warn_if_uneven,
        ).push

    def _name_devices(
        self, worker: tuple[str, int] | None, servers: Mapping[int, int | None]
    ) -> None:
        """Set the names of the devices of this worker and of the ps tasks.

        Args:
            worker: Job and index of this worker; None in local mode.
            servers: Indices of the ps tasks that hold variables, each with its GPU index, or None
                for the host.
        """
        task = "" if worker is None else f"/job:{worker[0]}/task:{worker[1]}"
        kind, count = ("GPU", self._gpus_per_worker) if self.gpus else ("CPU", self._replicas)
        self.worker_devices = tuple(
            f"{task}/device:{kind}:{number % count}" for number in range(self._replicas)
        )
        self._ps_tasks = {
            index: "" if worker is None else f"/job:ps/task:{index}" for index in servers
        }
        self.parameter_devices = tuple(
            (self._ps_tasks[index] or LOCAL_DEVICE)
            if gpu is None
            else device_name(self._ps_tasks[index], gpu)
            for index, gpu in servers.items()
        )

    def device_of(self, server: int, gpu: int | None) -> str:
        """Return the name of a device of a ps task: of a GPU, or of the host if ``gpu`` is None."""
        return device_name(self._ps_tasks[server], gpu)

    def _become_worker(self, host: Host, alone: bool) -> pb.Mode:
        """Set the index, GPUs and policies of this worker. Return the synchronization mode."""
        workers = workers_of(host.cluster_spec)
        me = (host.job_name, host.task_index)
        if me not in workers:
            raise ValueError(f"{me[0]} {me[1]} does not train: only workers make a strategy")
        self.worker_index, self.num_workers = workers.index(me), len(workers)
        wanted = self._gpus_per_worker
        self.gpus = chosen_gpus(wanted, self._replicas, host.cluster_spec, workers, me)
        self.nan = NanPolicy(self._nan, self.worker_index)
        name, backups, bound = self._mode
        # If the script of a cluster runs as one process, its only worker cannot be a backup worker.
        count = None if alone or (self.num_workers == 1 and not launched()) else self.num_workers
        return checked_mode(name, count, backups, bound, str(self.compressor))

    def _connections_to(
        self, servers: Mapping[int, int | None], host: Host, mode: pb.Mode
    ) -> list[Connection]:
        me = (self.worker_index, self._transport, mode)
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

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _finish(self) -> None:
        if self._closed:
            return
        try:
            self.drain()
        finally:
            self.sync_mode.leave()

    def drain(self) -> None:
        """Wait until all pushes of this worker have been applied.

        Raises:
            Exception: The first error of a push.
        """
        problem: BaseException | None = None
        for connection in self._connections:
            try:
                connection.drain()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _give_up(self) -> None:
        """Release the connections. In local mode, end the server and release its memory.

        In a cluster only the mapped views of the variables are dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_draining()
        for connection in self._connections:
            connection.detach()
        for remote in list(self.creator.remotes.values()):  # threads may still create some
            remote.connection, remote.shared = _CLOSED, None
        self._connections[:] = [_CLOSED] * len(self._connections)
        if self._own_host is not None:
            self._own_host.close()

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
