"""Servers: a task of a cluster, with its endpoint, shared memory and services."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

from mpidist.cluster.membership import (
    Membership,
    check_addresses,
    check_single_process,
    place_in_world,
)
from mpidist.cluster.server_def import server_def
from mpidist.cluster.spec import SERVICE_JOBS, ClusterSpec, Task, split_address
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
from mpidist.mpi import launched, waiting_for, world
from mpidist.proto.mpidist_pb2 import ServerDef, TaskState
from mpidist.ps_memory import PsMemory
from mpidist.rpc import REMOTE_ALIASES, Endpoint, open_endpoint, transport_of
from mpidist.runner import exit_reason, explain, status_of

_Part = TypeVar("_Part")


class Service(Protocol):
    """The service of a task of a service job, created by ``factory(server)``."""

    def close(self) -> None:
        """Stop serving."""


class Server:
    """A server of one task of a cluster; as ``tf.distribute.Server``.

    The Server of a ps or data task runs the service of that job. If another task shares its
    process, the services run on a thread beside the script of that task.

    There are no sessions: ``target`` names the server, and no client connects by that name. Use the
    Server as a context manager: the end of the block finishes pending pushes and other work.

    A process has one started Server at a time. A Server stays started until :meth:`stop`, the end
    of its ``with`` block, or the end of the process, whether or not the script keeps a reference
    to it. :meth:`current` returns it.

    Args:
        server_or_cluster_def: A ServerDef, a ClusterDef, a ClusterSpec, or a dict.
        job_name: Job of this task; by default the ServerDef's, or the only job.
        task_index: Index of this task; by default the ServerDef's, or the only task of the job.
        protocol: ``"mpi"``, ``"inproc"``, or a TensorFlow name, which means the default: mpi in a
            launched world, inproc in a plain process.
        config: A ConfigProto, stored in ``server_def``.
        start: Whether to start at once.

    Raises:
        ValueError: The task is ambiguous or does not exist, or the protocol is unknown.
        TypeError: An argument has a wrong type.
        OpError: The server cannot start; a subclass says why.
    """

    _current: ClassVar[Server | None] = None
    _current_lock: ClassVar[threading.Lock] = threading.Lock()

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
        # TensorFlow's names of network protocols also work in a plain process, without a network.
        use_default = named in REMOTE_ALIASES and not launched()
        self._transport = transport_of(None if use_default else named, launched=launched())
        if self._transport == "tcp":
            raise InvalidArgumentError(
                "protocol 'tcp' is for endpoints and data services: the tasks of a Server are "
                "ranks of one MPI world ('mpi'), or all in one process ('inproc')"
            )
        self._endpoint: Endpoint | None = None
        self._membership: Membership | None = None
        self._memory: PsMemory | None = None
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
        """Create the Server of a cluster with one task, of a job "local", in this process.

        Args:
            config: A ConfigProto, stored in ``server_def``.
            start: Whether to start at once.
        """
        return Server({"local": ["localhost:0"]}, protocol="grpc+local", config=config, start=start)

    @staticmethod
    def current() -> Server | None:
        """Return the started Server of this process, or None if no Server is started."""
        return Server._current

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
        """The cluster spec."""
        return ClusterSpec(self._spec)

    @property
    def job_name(self) -> str:
        """The job of this task."""
        return self._task[0]

    @property
    def task_index(self) -> int:
        """The index of this task in its job."""
        return self._task[1]

    def start(self) -> None:
        """Collective over the tasks of the cluster. Start the server; a second call does nothing.

        If another thread is starting this Server, the call waits until the Server is started. A
        Server that could not start is stopped; make a new one to try again.

        A rank is in one cluster at a time. A task that needs a rank of another cluster waits one
        second for it.

        Raises:
            AlreadyExistsError: Another Server of this process is started, or another endpoint has
                the number of this task's endpoint.
            DeadlineExceededError: A task has not started in time; the message names it.
            FailedPreconditionError: The server was stopped, the cluster needs more ranks than the
                world has, or MPI is missing.
            InvalidArgumentError: Tasks have different cluster specs, an address is not
                ``<host>:<port>``, or two tasks of a job have the same address; the message names
                them.
            UnavailableError: The script of a rank has ended before its task has started.
        """
        with self._starting:
            if self._stopped:
                raise FailedPreconditionError(
                    "a Server that was stopped cannot start; make a new one"
                )
            if self._endpoint is None:
                self._start()

    def _start(self) -> None:
        with Server._current_lock:
            started = Server._current
            if started is not None:
                raise AlreadyExistsError(
                    f"this process has a Server already: {started.target}; stop it first: "
                    "mpidist.Server.current().stop()"
                )
            Server._current = self
        try:
            check_addresses(self._spec)
            if self._transport == "mpi":
                self._start_in_world()
            else:
                self._start_in_process()
            self._memory = self._make_memory()
            self._start_services()
        except BaseException as error:
            self._close()
            problem = f"{self._task[0]} {self._task[1]} cannot start: {error}"
            if isinstance(error, DistNetworkError):  # the endpoint number is in use
                raise AlreadyExistsError(f"{problem}; close that endpoint first") from error
            if isinstance(error, DistBackendError):
                raise FailedPreconditionError(problem) from error
            raise

    def join(self) -> None:
        """Serve until the work of the cluster is done.

        The call returns when at least one other task has closed or left, and all remaining tasks
        are in ``join`` or are evaluators. It also returns when :meth:`stop` is called.

        Meanwhile SIGUSR1, which tells the workers to save a checkpoint, is ignored if it has no
        handler.

        Raises:
            FailedPreconditionError: The server has not been started.
        """
        if self._stopped:
            return
        endpoint, membership = self.endpoint, self._membership
        with waiting_for("requests"), _ignored_save_signal():
            if membership is None:
                endpoint.serve(lambda: self._stopped)
            else:
                membership.announce(TaskState.JOINING)
                endpoint.serve(lambda: self._stopped or membership.finished())

    def stop(self) -> None:
        """Finish pending work, then leave the cluster; a second call does nothing."""
        try:
            if self._endpoint is not None and not self._stopped:
                for drain in list(self._drains):
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
        if isinstance(error, SystemExit) and self._membership is not None:
            world().shutdown.end_job(exit_reason(error.code, type(error).__name__), code=error.code)
        self._close()  # without draining: the pending work may be the reason of the error

    # For services and for the packages built on this one

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that serves this task.

        Raises:
            FailedPreconditionError: The server has not been started, or was stopped.
        """
        return self._running(self._endpoint)

    @property
    def own_tasks(self) -> list[Task]:
        """All (job, index) pairs of this process; the task of the script comes first."""
        return list(self._own_tasks)

    def own_index(self, job: str) -> int:
        """Return the index of this process's task of a job.

        Raises:
            NotFoundError: This process has no task of the job.
        """
        for name, index in self._own_tasks:
            if name == job:
                return index
        raise NotFoundError(f"no task of job {job!r} lives in the process of {self.target}")

    def task_address(self, job: str, index: int) -> str:
        """Return the address of a task's endpoint; raise ValueError if the task does not exist."""
        self._spec.task_address(job, index)
        address = self.endpoint.address
        if self._membership is None:
            return str(address)
        rank = self._membership.rank_of((job, index))
        return f"{address.protocol}://{world().hosts[rank]}:{rank}"

    @property
    def memory(self) -> PsMemory:
        """The memory of the ps tasks that this process can access.

        Raises:
            FailedPreconditionError: The server has not been started, or was stopped.
        """
        return self._running(self._memory)

    def has_left(self, job: str, index: int) -> bool:
        """Return whether a task of the cluster has ended, or has closed its Server."""
        return self._membership is not None and self._membership.has_left((job, index))

    def on_drain(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a function that :meth:`stop` calls before it closes anything.

        Returns:
            A function that removes the registration.
        """
        self._drains.append(callback)
        return lambda: self._drains.remove(callback)

    def job_group(self, job: str) -> ProcessGroup:
        """Collective over the tasks of the job. Return their process group.

        The first call creates the group.

        Raises:
            ValueError: The job does not exist, or this task is not in it.
        """
        if job not in self._groups:
            tasks = [(job, index) for index in self._spec.task_indices(job)]
            if not any(task in self._own_tasks for task in tasks):
                raise ValueError(f"{self.target} is not in job {job!r}")
            made = self.task_group(tasks, job)
            if made is None:
                made = group_of(world().comm, [world().rank], job)
            self._groups[job] = made
        return self._groups[job]

    def task_group(self, tasks: Sequence[Task], name: str) -> ProcessGroup | None:
        """Collective over the tasks. Return a new process group of them.

        Args:
            tasks: Pairs of job and index, with the task of this process, equal on all tasks.
            name: Name of the group, for messages.

        Returns:
            The group; None if the cluster lies in a single process.
        """
        if self._membership is None:
            return None
        ranks = [self._membership.rank_of(task) for task in tasks]
        return group_of(world().comm, ranks, name)

    # Internals

    def _running(self, part: _Part | None) -> _Part:
        """Return a part of a running server; raise FailedPreconditionError if it is not running."""
        if self._stopped:
            raise FailedPreconditionError(f"the Server {self.target} was stopped; make a new one")
        if part is None:
            raise FailedPreconditionError(f"the Server {self.target} is not running; start() it")
        return part

    def _start_in_process(self) -> None:
        check_single_process(self._spec, self._task, launched=launched())
        _, port = split_address(self._spec.task_address(*self._task))
        self._endpoint = open_endpoint("inproc", None if self._task[0] == "local" else port)
        self._own_tasks = [self._task, *(t for t in self._spec.tasks() if t != self._task)]

    def _start_in_world(self) -> None:
        here = world()
        here.identify(*self._task)
        placement = place_in_world(self._spec, self._task, here.rank, here.hosts)
        self._own_tasks = placement.own_tasks
        self._endpoint = open_endpoint("mpi", here.rank)
        membership = Membership(self._spec, self._task, placement)
        membership.rendezvous(settings.start_timeout_s)
        self._membership = membership

    def _make_memory(self) -> PsMemory:
        membership = self._membership
        if membership is None:
            return PsMemory()
        owners = {n: membership.rank_of((job, n)) for job, n in self._spec.tasks() if job == "ps"}
        return PsMemory(membership.ranks(), owners)

    def _start_services(self) -> None:
        """Start the installed services of this process's tasks, one after the other.

        Other packages bring services along, by the entry points of the group ``mpidist.services``.
        """
        from importlib.metadata import entry_points  # slow, and of no use to process groups

        known = {point.name: point for point in entry_points(group="mpidist.services")}
        for job, index in self._own_tasks:
            if job not in SERVICE_JOBS:
                continue
            if job not in known:
                raise NotFoundError(
                    f"nothing is installed that serves {job} {index}: the distribution mpidist "
                    "brings it along; install it (pip install mpidist), do not only put it on the "
                    "path"
                )
            try:
                service = known[job].load()
            except (ImportError, AttributeError) as error:
                explain(error)  # a file of the user may hide the package of the service
                raise
            self._services.append(service(self))
        # The Server of a service task serves in join(). Beside a script, services need a thread.
        if self._services and self._task[0] not in SERVICE_JOBS:
            self.endpoint.serve_in_thread()

    def _close(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        with Server._current_lock:
            if Server._current is self:
                Server._current = None
        with contextlib.ExitStack() as rest:  # all steps run even if one fails, the last one first
            if self._endpoint is not None:
                rest.callback(self._endpoint.close)
                if self._membership is not None:
                    rest.callback(self._membership.announce, TaskState.CLOSED)
            for service in self._services:
                rest.callback(service.close)


@contextlib.contextmanager
def _ignored_save_signal() -> Iterator[None]:
    """Ignore SIGUSR1 in the block, unless the program handles it: it is for workers."""
    number = signal.SIGUSR1
    is_main = threading.current_thread() is threading.main_thread()
    if not (settings.hooks and is_main and signal.getsignal(number) is signal.SIG_DFL):
        yield
        return
    signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)
