"""The server of a task: membership, shared memory and services of one member of a cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from mpidist.cluster.addresses import check_addresses, check_alone, check_ranks, ranks_by_address
from mpidist.cluster.definition import server_def
from mpidist.cluster.members import Members
from mpidist.cluster.memory import Memory
from mpidist.cluster.services import Service, make_services
from mpidist.cluster.spec import SERVICE_JOBS, ClusterSpec, Task
from mpidist.cluster.started import forget, set_started
from mpidist.config import config as settings
from mpidist.errors import (
    AlreadyExistsError,
    DistBackendError,
    DistNetworkError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from mpidist.group import ProcessGroup, group_of
from mpidist.proto.mpidist_pb2 import ServerDef, TaskState
from mpidist.rpc import REMOTE_ALIASES, Endpoint, open_endpoint, transport_of
from mpidist.runner import exit_reason, status_of
from mpidist.runtime import exits, launched, world

_Part = TypeVar("_Part")


class Server:
    """A member of a cluster; as ``tf.distribute.Server``.

    A Server of a ps or data task runs that job's service. In a plain process, and for tasks that
    share a rank, the script sees its own task and the services run on a thread.

    There is no session: ``target`` names the server, and nothing connects to it by that name
    alone. Use it as a context manager: leaving it drains what is under way.

    A process has one started Server at a time. A Server stays started until :meth:`stop`, the end
    of its ``with`` block, or the end of the process, whether or not the script keeps a reference
    to it. :func:`mpidist.started_server` returns it.

    Args:
        server_or_cluster_def: A ServerDef, a ClusterDef, a ClusterSpec, or a dict.
        job_name: Job of this task; by default the ServerDef's, or the only job.
        task_index: Index of this task; by default the ServerDef's, or the job's only one.
        protocol: ``"mpi"``, ``"inproc"``, or one of TensorFlow's names, which mean the default;
            by default mpi in a launched world, inproc in a plain process.
        config: A ConfigProto, kept in ``server_def``.
        start: Whether to start at once.

    Raises:
        ValueError: The task cannot be told, or does not exist; or the protocol is unknown.
        TypeError: An argument has a wrong type.
        OpError: Or one of its subclasses, if it cannot start.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        definition = server_def(server_or_cluster_def, job_name, task_index, protocol, config)
        self._definition: ServerDef = definition
        self._spec = ClusterSpec(definition.cluster)
        self._task: Task = (definition.job_name, definition.task_index)
        named = definition.protocol or None
        # The names of other systems for a network: outside of a world all tasks are in one process.
        alone = named in REMOTE_ALIASES and not launched()
        self._transport = transport_of(None if alone else named, launched=launched())
        if self._transport == "tcp":
            raise InvalidArgumentError(
                "protocol 'tcp' is for endpoints and data services: the tasks of a Server are "
                "ranks of one MPI world ('mpi'), or all in one process ('inproc')"
            )
        self._endpoint: Endpoint | None = None
        self._members: Members | None = None
        self._memory: Memory | None = None
        self._own_tasks: list[Task] = []
        self._services: list[Service] = []
        self._drains: list[Callable[[], None]] = []
        self._groups: dict[str, ProcessGroup] = {}
        self._stopped = False
        self._starting = threading.RLock()
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Local. A cluster of one task, in a job called "local", inside this process.

        Args:
            config: A ConfigProto, kept in ``server_def``.
            start: Whether to start at once.
        """
        return Server({"local": ["localhost:0"]}, protocol="grpc+local", config=config, start=start)

    @property
    def server_def(self) -> ServerDef:
        """The complete description of this server."""
        copy = ServerDef()
        copy.CopyFrom(self._definition)
        return copy

    @property
    def target(self) -> str:
        """``<protocol>://<address>`` of this task."""
        protocol = self._definition.protocol or self._transport
        return f"{protocol}://{self._spec.task_address(*self._task)}"

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster."""
        return ClusterSpec(self._spec)

    @property
    def job_name(self) -> str:
        """Job of this task."""
        return self._task[0]

    @property
    def task_index(self) -> int:
        """Index of this task."""
        return self._task[1]

    def start(self) -> None:
        """Start the server; a second call does nothing. Collective over the tasks of the cluster.

        If another thread is starting this Server, the call waits until the Server is started. A
        Server that could not start is stopped; make a new one to try again.

        A rank is in one cluster at a time: a task that needs a rank that is in another one gives it
        a second to leave it.

        Raises:
            AlreadyExistsError: Another Server of this process has been started and not stopped, or
                another endpoint has the number of this task's.
            DeadlineExceededError: A task has not started in time; the message names it.
            FailedPreconditionError: The server was stopped, the cluster needs more ranks than there
                are, or there is no MPI.
            InvalidArgumentError: Tasks believe in different clusters, an address is no
                ``<host>:<port>``, or two tasks of a job have the same; the message names them.
        """
        with self._starting:
            if self._stopped:
                raise FailedPreconditionError(
                    "a Server that was stopped cannot start; make a new one"
                )
            if self._endpoint is None:
                self._start()

    def _start(self) -> None:
        set_started(self)
        try:
            check_addresses(self._spec)
            if self._transport == "mpi":
                self._start_in_world()
            else:
                self._start_alone()
            self._start_services()
        except BaseException as error:
            self._close()
            who = f"{self._task[0]} {self._task[1]} cannot start"
            if isinstance(error, DistNetworkError):  # of the endpoint's number
                raise AlreadyExistsError(f"{who}: {error}; close that endpoint first") from error
            if isinstance(error, DistBackendError):
                raise FailedPreconditionError(f"{who}: {error}") from error
            raise

    def join(self) -> None:
        """Local. Serve until the work of the cluster is done.

        Returns when a task has closed or left and every other is in ``join`` itself or is an
        evaluator; otherwise when :meth:`stop` is called, at once if it has been.

        Raises:
            FailedPreconditionError: The server has not been started.
        """
        if self._stopped:
            return
        endpoint, members = self.endpoint, self._members
        if members is not None:
            members.announce(TaskState.JOINING)
        endpoint.serve(lambda: self._stopped or (members is not None and members.all_over()))

    def stop(self) -> None:
        """Local. Finish what is under way, then leave the cluster; a second call does nothing."""
        try:
            if self._endpoint is not None and not self._stopped:
                for drain in self._drains:
                    drain()
        finally:
            self._close()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and status_of(error.code) == 0):
            self.stop()
            return
        if isinstance(error, SystemExit) and self._members is not None:
            exits().fail(exit_reason(error.code, "SystemExit"), "", error.code)
        self._close()  # what is under way may be what failed: it cannot be waited for

    # For services, and for the packages built on this one

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that serves this task.

        Raises:
            FailedPreconditionError: The server has not been started, or was stopped.
        """
        return self._running(self._endpoint)

    @property
    def own_tasks(self) -> list[Task]:
        """All (job, index) that live in this process, the script's first."""
        return list(self._own_tasks)

    def own_index(self, job: str) -> int:
        """Local. Index of this process's task of a job; NotFoundError if it has none."""
        for name, index in self._own_tasks:
            if name == job:
                return index
        raise NotFoundError(f"no task of job {job!r} lives in the process of {self.target}")

    def task_address(self, job: str, index: int) -> str:
        """Local. Address of the endpoint of a task; ValueError if there is no such task."""
        self._spec.task_address(job, index)
        address = self.endpoint.address
        if self._members is None:
            return str(address)
        rank = self._members.rank_of((job, index))
        return f"{address.protocol}://{world().hosts[rank]}:{rank}"

    @property
    def memory(self) -> Memory:
        """Memory of the ps tasks, as far as this process reaches it.

        Raises:
            FailedPreconditionError: The server has not been started, or was stopped.
        """
        return self._running(self._memory)

    def has_left(self, job: str, index: int) -> bool:
        """Local. Whether a task of the cluster has ended, or has closed its Server."""
        return self._members is not None and self._members.has_left((job, index))

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Local. Have ``callback()`` called when the server is left, before anything is closed."""
        self._drains.append(callback)

    def job_group(self, job: str) -> ProcessGroup:
        """Collective over the tasks of the job. Their process group; made by the first call.

        Raises:
            ValueError: There is no such job, or this task is not in it.
        """
        if job not in self._groups:
            tasks = [(job, index) for index in self._spec.task_indices(job)]
            if not any(task in self._own_tasks for task in tasks):
                raise ValueError(f"{self.target} is not in job {job!r}")
            comm = world().comm
            ranks = [comm.rank]
            if self._members is not None:
                ranks = [self._members.rank_of(task) for task in tasks]
            self._groups[job] = group_of(comm, ranks, job)
        return self._groups[job]

    # Inside

    def _running(self, part: _Part | None) -> _Part:
        """Return a part that a running server has; FailedPreconditionError if it does not run."""
        if self._stopped:
            raise FailedPreconditionError(f"the Server {self.target} was stopped; make a new one")
        if part is None:
            raise FailedPreconditionError(f"the Server {self.target} is not running; start() it")
        return part

    def _start_alone(self) -> None:
        check_alone(self._spec, self._task, launched=launched())
        port = self._spec.task_address(*self._task).rpartition(":")[2]
        number = None if self._task[0] == "local" else int(port)
        self._endpoint = open_endpoint("inproc", number)
        self._own_tasks = [self._task, *(t for t in self._spec.tasks() if t != self._task)]
        self._memory = Memory(self._spec, self._own_ps())
        self._memory.open_alone()

    def _start_in_world(self) -> None:
        here = world()
        exits().identify(*self._task)
        by_address = ranks_by_address(self._spec, here.hosts)
        if by_address is None:
            check_ranks(self._spec, self._task, here.rank, here.size)
        shared = {t: r for t, r in (by_address or {}).items() if self._spec.task_of(r) != t}
        if by_address is not None and by_address[self._task] != here.rank:
            raise FailedPreconditionError(
                f"{self._task[0]} {self._task[1]} is rank {by_address[self._task]} of the cluster "
                f"spec, and this is rank {here.rank}: use the resolver's task_type and task_id"
            )
        self._own_tasks = [self._task, *(t for t, r in shared.items() if r == here.rank)]
        self._endpoint = open_endpoint("mpi", here.rank)
        members = Members(self._spec, self._task)
        everybody = list(range(here.size))
        candidates = everybody if by_address is None else sorted(set(by_address.values()))
        colocated = {t: self._spec.task_of(r) for t, r in shared.items()}
        members.gather(candidates, colocated, settings.start_timeout_s)
        self._members = members
        self._memory = Memory(self._spec, self._own_ps())
        self._memory.open_in_world(members)

    def _own_ps(self) -> int | None:
        return next((index for job, index in self._own_tasks if job == "ps"), None)

    def _start_services(self) -> None:
        tasks = [task for task in self._own_tasks if task[0] in SERVICE_JOBS]
        for service in make_services(tasks, self):
            self._services.append(service)
        # A dedicated task serves in join(); beside a script, services need a thread.
        if self._services and self._task[0] not in SERVICE_JOBS:
            self.endpoint.serve_in_thread()

    def _close(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        forget(self)
        with contextlib.ExitStack() as rest:  # all of it, whatever fails; the last comes first
            if self._endpoint is not None:
                rest.callback(self._endpoint.close)
                if self._members is not None:
                    rest.callback(self._members.announce, TaskState.CLOSED)
            for service in self._services:
                rest.callback(service.close)
