"""ParameterServerStrategy: variables on ps tasks, shared by all workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist import ClusterSpec, errors, gather_works, started_server
from mpidist.cluster_resolver import ClusterResolver
from strategy import checkpoint
from strategy.client import TRANSPORTS, Connection
from strategy.host import Host, LocalHost, check_task, given_spec, workers_of
from strategy.pace import checked_mode, pace_of
from strategy.parameter_server import ParameterServer
from strategy.parts import Partitioner
from strategy.placement import Place, Placement
from strategy.variable import Variable
from strategy.variables import Variables

_current: ContextVar[ParameterServerStrategy | None] = ContextVar("strategy", default=None)


class ParameterServerStrategy:
    """Local. Puts variables on the ps tasks of the cluster and trains asynchronously.

    Every worker makes its own, and creates the same variables in the same order. Pulls and
    pushes are never collective. Between the ps and the workers of a node they go through shared
    memory, between nodes by messages. A variable for which /dev/shm has no room lies in memory of
    its ps alone, is served by messages, and the ps says so once. Several strategies of a worker
    share variables as those of several workers do; each waits for its own pushes only.

    Without a cluster and a started Server it is in local mode: the variables live in this process.

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
        transport: ``"auto"``, ``"shared"`` (shared memory or an error), or ``"p2p"`` (messages).
        mode: How workers wait for each other. ``"async"``: not at all. ``"sync"``: every
            ``apply_gradients`` is a step of all workers, which applies the mean of their gradients,
            added up in the order of the workers; all must give gradients of the same variables.
            ``"ssp"``: none gets more than ``staleness`` steps ahead of the slowest. In every mode
            assignments count at once. All workers must have the same.
        staleness: The bound of ``"ssp"``.
        backup_workers: How many workers a step of ``"sync"`` does without: it has the gradients of
            those that come first, and the others' are dropped.

    Attributes:
        global_step: A variable, advanced by every ``apply_gradients`` of every worker; in mode
            ``"sync"`` by every step.
        pace: How its pushes of gradients wait for those of other workers.

    Raises:
        FailedPreconditionError: A cluster is given, and no Server has been started.
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
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; the known ones are {TRANSPORTS}")
        spec = given_spec(cluster_resolver, cluster_spec)
        host = server or started_server()
        if host is None and spec is not None:
            raise errors.FailedPreconditionError(
                "no Server has been started in this process: start mpidist.Server(spec, job_name, "
                "task_index) before the strategy"
            )
        self._host: Host = _local_host() if host is None else host
        check_task(self._host, spec, task_type, task_id)
        tasks = self._host.cluster_spec.tasks()
        workers = workers_of(self._host.cluster_spec)
        me = (self._host.job_name, self._host.task_index)
        if me not in workers:
            raise ValueError(f"{me[0]} {me[1]} does not train: only workers make a strategy")
        self._worker, self._workers = workers.index(me), len(workers)
        servers = [index for job, index in tasks if job == "ps"]
        if not servers:
            raise ValueError(f"the cluster has no ps task: {self._host.cluster_spec!r}")
        how = checked_mode(mode, self._workers, backup_workers, staleness)
        self._connections = [
            Connection(self._host, index, self._worker, self._workers, transport, how)
            for index in servers
        ]
        self.pace = pace_of(how, self._connections, self._worker)
        placements = Placement(placement, len(servers))
        self._variables = Variables(self, self._connections, placements, variable_partitioner)
        self._host.on_drain(self.finish)
        self.global_step = self.create_variable("global_step", (), np.int64, "zeros", False)

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of this worker whose gradients make one push."""
        return 1

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
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Local. Call ``fn`` on this worker's replica, in the strategy's scope.

        Args:
            fn: The step.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What ``fn`` returns.
        """
        with self.scope():
            return fn(*args, **(kwargs or {}))

    def experimental_distribute_dataset(self, dataset: Iterable[Any]) -> Iterable[Any]:
        """Local. This worker's part of a dataset.

        Args:
            dataset: Any iterable. One with a method ``shard(num_shards, index)`` is sharded over
                the workers; any other, and one that a data service distributes, is used as it is.

        Returns:
            An iterable.
        """
        shard = getattr(dataset, "shard", None)
        if shard is None or self._workers == 1 or getattr(dataset, "distributed", False):
            return dataset
        part: Iterable[Any] = shard(self._workers, self._worker)
        return part

    def create_variable(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        initializer: Any,
        trainable: bool = True,
        partitioner: Partitioner | None = None,
    ) -> Variable:
        """Local. Make a variable on ps tasks; see :func:`get_variable`."""
        return self._variables.create(name, shape, dtype, initializer, trainable, partitioner)

    def save(self, directory: str, keep: int = 3, extra: Mapping[str, Any] | None = None) -> str:
        """Local. Write a checkpoint; one worker does, usually the chief.

        Each ps task writes its variables and their slots between two pushes. While other workers
        push, the parts of different ps tasks may differ by the pushes then under way.

        Args:
            directory: Folder of all checkpoints, on a file system that every ps task can write.
            keep: How many to keep, at least 1.
            extra: More files for the folder: name, without ``/``, to what is written there as JSON.

        Returns:
            The checkpoint's folder. It is complete, or does not exist.

        Raises:
            FailedPreconditionError: A ps task cannot write into the folder.
            ValueError: ``keep`` is less than 1, or a name in ``extra`` is not that of a file of its
                own in the folder. Nothing has been written.
        """
        self._drain()
        step, files = int(self.global_step), extra or {}
        with checkpoint.Writing(directory, step, len(self._connections), keep, files) as writing:
            for name, content in files.items():
                writing.add_json(name, content)
            works = [
                connection.save(path)
                for connection, path in zip(self._connections, writing.paths, strict=True)
            ]
            for work in works:
                work.wait()
        return writing.path

    def restore(self, path: str | None) -> int:
        """Local, on every worker. Take all variables and slots from a checkpoint.

        All workers call it, with the same paths in the same order, before they train; the servers
        carry out each restore once. The number of ps tasks may differ from that of the checkpoint.
        No variable changes unless all of them fit. A restore that failed may be repeated, or
        another checkpoint restored in its place.

        Args:
            path: A checkpoint's folder.

        Returns:
            The global step.

        Raises:
            NotFoundError: It is None, or no checkpoint, or has not all variables of the program.
            DataLossError: It is damaged.
            InvalidArgumentError: A variable has another shape or dtype there, or another worker
                restored another checkpoint in its place; the message names both.
        """
        if path is None:
            raise errors.NotFoundError(
                "there is no checkpoint to restore: latest_checkpoint() gives None for a folder "
                "without one"
            )
        path = os.path.abspath(path)
        files = checkpoint.files_of(path)
        self._drain()
        checks = [connection.check_restore(files) for connection in self._connections]
        replies = gather_works("restore", checks).result()
        found = {name for reply in replies for name in reply.found}
        missing = [name for name in self._variables.remotes if name not in found]
        if missing:
            raise errors.NotFoundError(f"the checkpoint {path!r} does not have {missing}")
        ordinal = 1 + min(reply.restores for reply in replies)
        # One after the other: of workers with different paths, the first server lets one go on.
        for connection in self._connections:
            connection.restore(path, files, ordinal)
        return int(self.global_step)

    def finish(self) -> None:
        """Local. End this worker's training: others need not wait for steps of it any more.

        Returns when all its pushes have been applied. The end of the Server's context does it too;
        a worker that waits there for others otherwise, say in a barrier, has to finish before.
        """
        self._drain()
        self.pace.leave()

    @staticmethod
    def latest_checkpoint(directory: str) -> str | None:
        """Local. The newest complete checkpoint of a folder, or None."""
        found = checkpoint.checkpoints(directory)
        return found[-1] if found else None

    def _drain(self) -> None:
        for connection in self._connections:
            connection.settle()

    def __copy__(self) -> ParameterServerStrategy:
        raise RuntimeError("a strategy cannot be copied: its variables live on the ps tasks")

    def __deepcopy__(self, memo: Any) -> ParameterServerStrategy:
        return self.__copy__()


def get_variable(
    name: str,
    shape: Sequence[int] | int | None = None,
    dtype: DTypeLike | None = None,
    initializer: Any = "glorot_uniform",
    trainable: bool = True,
    partitioner: Partitioner | None = None,
) -> Variable:
    """Local. Make a variable of the strategy whose scope is open; a local one without a scope.

    All workers make the same variables in the same order. The first worker to come gives the
    first value.

    Args:
        name: Unique; without ``:``.
        shape: Its shape; may be left out if the initializer is an array or a number.
        dtype: Its dtype; by default that of an initializer array, else float32.
        initializer: A name (``"zeros"``, ``"glorot_uniform"``, ...), a callable
            ``(shape, dtype) -> array``, an array, or a number.
        trainable: Whether optimizers are meant to change it.
        partitioner: Into how many parts it is divided; see :mod:`strategy.partitioners`. By default
            the strategy's ``variable_partitioner``.

    Returns:
        The variable; a :class:`ShardedVariable` if it is divided.

    Raises:
        ValueError: The name is missing or taken, or the shape is missing or wrong.
        TypeError: The dtype is not bool, an integer, bfloat16, float16, float32 or float64.
        DeadlineExceededError: The ps task has no room for it, and workers of its node, with whom
            it would make some, have not made the variable; the message names them.
        InvalidArgumentError: Another worker made it otherwise; the message names both.
        ResourceExhaustedError: The ps task has no room for it.
    """
    if not isinstance(initializer, str) and not callable(initializer):
        value = np.asarray(initializer)
        shape = value.shape if shape is None else shape
        dtype = value.dtype if dtype is None and value.ndim else dtype
    if shape is None:
        raise ValueError(f"variable {name!r} needs a shape, or an array as initializer")
    axes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    owner = _current.get() or _local_strategy()
    return owner.create_variable(
        name, axes, dtype or np.float32, initializer, trainable, partitioner
    )


@cache
def _local_strategy() -> ParameterServerStrategy:
    return ParameterServerStrategy(server=_local_host())


def _local_host() -> LocalHost:
    host = LocalHost()
    ParameterServer(host)
    host.endpoint.serve_in_thread()
    return host
