"""Resolvers for batch systems and MPI operators that list the hosts of the tasks."""

from __future__ import annotations

import abc
import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.job_layout import assign_ranks, check_counts
from mpidist.errors import FailedPreconditionError, InvalidArgumentError
from mpidist.host_list import (
    clean_lines,
    expand_slots,
    is_number,
    parse_host_counts,
    parse_host_lines,
    read_host_lines,
)
from mpidist.mpi.launch_env import rank_hint

_LAST_PORT = 65535

_PBS_REMEDY = "Start the script in a PBS job, with mpiexec or pbsdsh"
_LSF_REMEDY = "Start the script in an LSF job, with mpiexec, blaunch or jsrun"
_SGE_REMEDY = "Start the script in a job with a parallel environment (qsub -pe), with mpiexec"

# Where the MPI operator of Kubernetes mounts its files.
_MPIJOB_HOST_FILE = "/etc/mpi/hostfile"
_MPIJOB_SCRIPT = "/etc/mpi/discover_hosts.sh"
_SCRIPT_LIMIT_S = 10.0


@dataclass(frozen=True)
class TaskHosts:
    """The hosts of the tasks of a cluster.

    Attributes:
        hosts: Host of each task, by rank.
        rank: Rank of this process, or None if it is unknown.
    """

    hosts: tuple[str, ...]
    rank: int | None


class HostListResolver(ClusterResolver):
    """Base class of resolvers that get a list of hosts, one for each task.

    Tasks are assigned to jobs by rank. Addresses are ``<host>:<port>``: the first task on a host
    has the port ``port_base``, the next one ``port_base + 1``, and so on. ``task_type`` and
    ``task_id`` are set at construction. Both are None if the batch system does not tell the rank of
    this process. Subclasses implement :meth:`task_hosts`.

    Args:
        jobs: Number of tasks of each job, in the order of the ranks. One job may have -1, for the
            remaining tasks. By default all tasks are workers.
        port_base: First port on each host.
        rpc_layer: Protocol of the addresses.

    Raises:
        InvalidArgumentError: The jobs do not match the number of tasks, or variables of the batch
            system contradict each other; also a ValueError.
        FailedPreconditionError: The batch system has not started this process.
        TypeError: The number of tasks of a job is not a number, or ``jobs`` is not a dict.
    """

    source = "the batch system"
    """Name of the source of the hosts, for messages."""

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._jobs = check_counts({"worker": -1} if jobs is None else jobs)
        self._port_base = index(port_base)
        if not 0 < self._port_base <= _LAST_PORT:
            raise InvalidArgumentError(f"port_base {port_base} is not a port: 1 to {_LAST_PORT}")
        self.rpc_layer = rpc_layer
        self.task_type, self.task_id = self.get_task_info()

    @abc.abstractmethod
    def task_hosts(self) -> TaskHosts:
        """Read the hosts of the tasks."""

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Read the job and the index of this process. Both are None if its rank is unknown."""
        found = self.task_hosts()
        ranks_of_jobs = self._ranks_of_jobs(len(found.hosts))
        if found.rank is None:
            return None, None
        for job, ranks in ranks_of_jobs.items():
            if found.rank in ranks:
                return job, ranks.index(found.rank)
        raise InvalidArgumentError(
            f"this process is rank {found.rank}, but {self.source} names {len(found.hosts)} tasks"
        )

    def cluster_spec(self) -> ClusterSpec:
        """Read the current cluster."""
        hosts = self.task_hosts().hosts
        ranks_of_jobs = self._ranks_of_jobs(len(hosts))
        tasks_on: Counter[str] = Counter()
        addresses = []
        for host in hosts:
            port = self._port_base + tasks_on[host]
            if port > _LAST_PORT:
                raise InvalidArgumentError(
                    f"port_base {self._port_base} leaves no ports for the tasks of {host}"
                )
            addresses.append(f"{host}:{port}")
            tasks_on[host] += 1
        return ClusterSpec(
            {job: [addresses[rank] for rank in ranks] for job, ranks in ranks_of_jobs.items()}
        )

    def _ranks_of_jobs(self, tasks: int) -> dict[str, list[int]]:
        try:
            return assign_ranks(self._jobs, range(tasks))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} ({self.source})") from None


class PBSClusterResolver(HostListResolver):
    """Resolver for PBS Pro, OpenPBS and Torque: each line of ``$PBS_NODEFILE`` is a task.

    The rank of this process is that of its MPI launcher or, under Torque's pbsdsh, its
    ``PBS_VNODENUM``. Arguments and errors as for :class:`HostListResolver`.
    """

    source = "PBS_NODEFILE"

    def task_hosts(self) -> TaskHosts:
        """Read the hosts of the tasks; see :class:`HostListResolver`."""
        (path,) = require_env(("PBS_NODEFILE",), "PBS", _PBS_REMEDY)
        slots = [(host, 1) for host in read_host_lines(path)]
        hosts = expand_slots(slots, f"PBS_NODEFILE={path}")
        return TaskHosts(hosts, launcher_rank("PBS_VNODENUM"))


class LSFClusterResolver(HostListResolver):
    """Resolver for LSF: the slots of ``$LSB_MCPU_HOSTS`` or ``$LSB_HOSTS`` are tasks.

    The rank of this process is that of its MPI launcher, jsrun's ``JSM_NAMESPACE_RANK`` or, under
    blaunch, its ``LSF_PM_TASKID`` minus one. Errors as for :class:`HostListResolver`.

    Args:
        jobs: See :class:`HostListResolver`.
        port_base: See :class:`HostListResolver`.
        rpc_layer: See :class:`HostListResolver`.
        skip_first_host: Whether to leave out the first host of the job. On systems with jsrun the
            batch script runs there, and no tasks. By default True if jsrun started this process.
    """

    source = "LSF's list of hosts"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        skip_first_host: bool | None = None,
    ) -> None:
        self._skip_first_host = skip_first_host
        super().__init__(jobs, port_base, rpc_layer)

    def task_hosts(self) -> TaskHosts:
        """Read the hosts of the tasks; see :class:`HostListResolver`."""
        env = os.environ
        if env.get("LSB_MCPU_HOSTS", "").strip():
            text = env["LSB_MCPU_HOSTS"]
            slots = parse_host_counts(text)
        else:
            (text,) = require_env(("LSB_HOSTS",), "LSF", _LSF_REMEDY)
            slots = [(host, 1) for host in text.split()]
        skips = self._skip_first_host
        if skips or (skips is None and "JSM_NAMESPACE_RANK" in env):
            first = slots[0][0] if slots else ""
            slots = list(itertools.dropwhile(lambda slot: slot[0] == first, slots))
        rank = launcher_rank("JSM_NAMESPACE_RANK")
        if rank is None and "LSF_PM_TASKID" in env:
            rank = env_number("LSF_PM_TASKID") - 1
            if rank < 0:
                raise InvalidArgumentError(
                    "LSF_PM_TASKID is 0, but blaunch counts tasks from 1: unset it, or start the "
                    "script with blaunch"
                )
        return TaskHosts(expand_slots(slots, text), rank)


class SGEClusterResolver(HostListResolver):
    """Resolver for Grid Engine (SGE, UGE, OGS): the slots of ``$PE_HOSTFILE`` are tasks.

    The rank of this process is that of its MPI launcher. Arguments and errors as for
    :class:`HostListResolver`.
    """

    source = "PE_HOSTFILE"

    def task_hosts(self) -> TaskHosts:
        """Read the hosts of the tasks; see :class:`HostListResolver`."""
        (path,) = require_env(("PE_HOSTFILE",), "Grid Engine", _SGE_REMEDY)
        slots = []
        for line in read_host_lines(path):
            host, *rest = line.split()  # host, slots, queue, processors
            if not rest or not is_number(rest[0]):
                raise InvalidArgumentError(f"{path} has no number of slots in the line {line!r}")
            slots.append((host, int(rest[0])))
        return TaskHosts(expand_slots(slots, f"PE_HOSTFILE={path}"), launcher_rank())


class MPIJobClusterResolver(HostListResolver):
    """Resolver for an MPIJob of Kubernetes: the slots of the MPI operator's host file are tasks.

    The rank of this process is that of its MPI launcher. Errors as for :class:`HostListResolver`.

    Args:
        jobs: See :class:`HostListResolver`.
        port_base: See :class:`HostListResolver`.
        rpc_layer: See :class:`HostListResolver`.
        hostfile: Path of a file with lines ``<host> slots=<number>`` or ``<host>:<number>``.
        discover_script: Path of a script that prints such lines for the running pods. If it exists,
            it replaces the host file.
    """

    source = "the MPIJob's list of hosts"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        hostfile: str = _MPIJOB_HOST_FILE,
        discover_script: str = _MPIJOB_SCRIPT,
    ) -> None:
        self._host_file, self._script = hostfile, discover_script
        super().__init__(jobs, port_base, rpc_layer)

    def task_hosts(self) -> TaskHosts:
        """Read the hosts of the tasks; see :class:`HostListResolver`."""
        if os.path.exists(self._script):
            lines = _output_lines(self._script)
        else:
            lines = read_host_lines(self._host_file)
        slots = [(host, 1 if n is None else n) for host, n in parse_host_lines(lines)]
        return TaskHosts(expand_slots(slots, self.source), launcher_rank())


def require_env(names: tuple[str, ...], source: str, remedy: str) -> list[str]:
    """Return the values of variables that a batch system sets for each task.

    Args:
        names: The variables.
        source: Name of the batch system.
        remedy: Advice for the message.

    Raises:
        FailedPreconditionError: Variables are missing; the message names them.
    """
    env = os.environ
    missing = [name for name in names if not env.get(name, "").strip()]
    if missing:
        raise FailedPreconditionError(
            f"{source} has not started this process: {', '.join(missing)} not set. {remedy}"
        )
    return [env[name].strip() for name in names]


def env_number(name: str) -> int:
    """Return the number in a variable; raise InvalidArgumentError if it is not a number."""
    text = os.environ.get(name, "").strip()
    if not is_number(text):
        raise InvalidArgumentError(f"{name}={text!r} is not a number")
    return int(text)


def launcher_rank(*variables: str) -> int | None:
    """Return the rank that a launcher gave this process, or None.

    Args:
        variables: Variables with the rank, for processes that no MPI launcher started.

    Raises:
        InvalidArgumentError: The first variable that is set is not a number.
    """
    rank = rank_hint(os.environ)
    for name in variables:
        if rank is None and name in os.environ:
            rank = env_number(name)
    return rank


def _output_lines(script: str) -> list[str]:
    try:
        done = subprocess.run(
            [script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCRIPT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FailedPreconditionError(f"{script} does not list the hosts: {error}") from None
    return clean_lines(done.stdout)
