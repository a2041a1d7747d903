"""Resolver for the tasks of a Slurm job step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from mpidist.cluster.spec import as_integer
from mpidist.cluster_resolver.accelerators import visible_gpus
from mpidist.cluster_resolver.base import gpu_count
from mpidist.cluster_resolver.batch_systems import (
    HostListResolver,
    TaskHosts,
    env_number,
    require_env,
)
from mpidist.errors import FailedPreconditionError, InvalidArgumentError
from mpidist.host_list import expand_hosts, is_number, parse_counts, read_host_lines
from mpidist.mpi.launch_env import launcher_of, rank_hint

_REMEDY = (
    "Start the script with srun; under mpirun and mpidist run, MPIClusterResolver knows the tasks"
)
_STEP = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)

TasksPerNode = int | Mapping[str, int] | Sequence[int]


class SlurmClusterResolver(HostListResolver):
    """Resolver for the job step that ``srun`` started: its tasks are assigned to jobs by rank.

    It supports steps smaller than their job, any host list, uneven numbers of tasks, steps over
    several components of a heterogeneous job, and the distributions block, cyclic, plane and
    arbitrary. It checks the layout against the node and local number that Slurm gave this process.

    Args:
        jobs: See :class:`HostListResolver`.
        port_base: Port of the first task of each node.
        gpus_per_node: Number of GPUs to use on each node; by default the visible ones.
        gpus_per_task: Number of GPUs of each task; by default an equal share of the node's GPUs,
            which may be 0.
        tasks_per_node: Number of tasks of each node, in place of Slurm's: one number for all nodes,
            numbers in the order of the nodes, or numbers by host.
        auto_set_gpu: Whether to set ``CUDA_VISIBLE_DEVICES`` to the GPUs of this process. The
            variable keeps its value if Slurm has bound GPUs to tasks, or if fewer GPUs are visible
            than the step has on the node.
        rpc_layer: Protocol of the addresses.

    Raises:
        FailedPreconditionError: srun did not start this process, or a node has fewer GPUs than
            requested.
        InvalidArgumentError: The jobs do not match the tasks, Slurm's variables contradict each
            other, or a number of GPUs is negative; also a ValueError.
        TypeError: A number of GPUs is not a number; or as for :class:`HostListResolver`.
    """

    source = "the Slurm job step"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: TasksPerNode | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._tasks_per_node = tasks_per_node
        for name, count in ("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task):
            if count is not None and as_integer(count, name) < 0:
                raise InvalidArgumentError(f"{name} must be 0 or more, or None, not {count}")
        super().__init__(jobs, port_base, rpc_layer)
        names = visible_gpus()
        bound = _are_bound(len(names))
        self._gpus = names if bound else self._own_gpus(names, gpus_per_node, gpus_per_task)
        if auto_set_gpu and self._gpus and not bound:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    def _own_accelerators(self) -> dict[str, int]:
        return gpu_count(self._gpus)

    def task_hosts(self) -> TaskHosts:
        """Read the hosts of the tasks; see :class:`HostListResolver`."""
        env = os.environ
        _, _, node_list, counts_text = require_env(_STEP, "srun", _REMEDY)
        rank = env_number("SLURM_PROCID")
        if rank_hint(env) not in (rank, None):
            raise FailedPreconditionError(
                f"an MPI launcher started this process as rank {rank_hint(env)}, and srun only "
                f"that launcher's helper, as task {rank}: use MPIClusterResolver"
            )
        nodes = expand_hosts(node_list)
        counts = self._counts(nodes, counts_text)
        components = _components(nodes)
        distribution = _distribution(components, counts)
        hosts = [
            host for names in components for host in _lay_out_component(names, counts, distribution)
        ]
        if len(hosts) != env_number("SLURM_STEP_NUM_TASKS"):
            raise InvalidArgumentError(
                f"SLURM_STEP_NUM_TASKS is {env['SLURM_STEP_NUM_TASKS']}, but the nodes "
                f"{node_list} have {len(hosts)} tasks together"
            )
        _check_layout(rank, hosts, [node for names in components for node in names])
        return TaskHosts(tuple(hosts), rank)

    def _counts(self, nodes: list[str], text: str) -> dict[str, int]:
        """Return the number of tasks of each node."""
        given, name = self._tasks_per_node, "number of tasks of a node"
        if isinstance(given, Mapping):
            return {node: as_integer(given.get(node, 0), name) for node in nodes}
        if given is None:
            counts = parse_counts(text)
        elif isinstance(given, Sequence) and not isinstance(given, str):
            counts = [as_integer(count, name) for count in given]
        else:
            counts = [as_integer(given, name)] * len(nodes)
        if len(counts) != len(nodes):
            raise InvalidArgumentError(
                f"Slurm names {len(nodes)} nodes, but numbers of tasks for {len(counts)}"
            )
        return dict(zip(nodes, counts, strict=True))

    def _own_gpus(self, names: list[str], per_node: int | None, per_task: int | None) -> list[str]:
        if per_node is not None and per_node > len(names):
            raise FailedPreconditionError(
                f"{per_node} GPUs per node are asked for, and this one shows {len(names)}"
            )
        names = names[:per_node]
        hosts, rank = self.task_hosts().hosts, env_number("SLURM_PROCID")
        tasks, before = hosts.count(hosts[rank]), hosts[:rank].count(hosts[rank])
        share = len(names) // tasks if per_task is None else per_task
        if share * tasks > len(names):
            raise FailedPreconditionError(
                f"{tasks} tasks with {share} GPUs each are on {hosts[rank]}, and it has "
                f"{len(names)} for them"
            )
        return names[before * share : (before + 1) * share]


def is_step_of_several() -> bool:
    """Return whether srun started this process as one of several tasks.

    The body of a batch script has no variables of a step. It is task 0 of the job. An interactive
    shell is a step of one task. If only some variables of a step are set, the answer is True, and
    the resolver raises an error that names them. No MPI launcher has started the process.
    """
    env = os.environ
    rank = env.get("SLURM_PROCID")
    if not any(name in env for name in _STEP[1:]):
        return rank not in (None, "0")
    # Under mpirun -n 1 the step has the helpers of mpirun, one on each node of the job.
    alone = env.get("SLURM_STEP_NUM_TASKS") == "1" or launcher_of(env) == "prte"
    return rank != "0" or not alone


def _are_bound(visible: int) -> bool:
    """Return whether each task sees its own GPUs only.

    Newer versions of Slurm do not tell tasks how GPUs are bound. They tell the number of GPUs of
    the step on the node. A task that sees fewer GPUs has GPUs of its own, from Slurm or from an
    earlier resolver.

    Args:
        visible: Number of GPUs that this process sees.
    """
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    fewer = is_number(on_node) and visible < int(on_node)
    return fewer or bool(os.environ.get("SLURM_GPUS_PER_TASK"))


def _components(nodes: list[str]) -> list[list[str]]:
    """Return the nodes of the step in the order of its tasks, by component of the job.

    Slurm tells the nodes of each component of the job, and the sorted nodes of the step.
    """
    groups: list[list[str]] = []
    for name in ("HET", "PACK"):  # srun in a job sets HET, and srun that creates a job sets PACK
        while not groups or groups[-1]:
            text = os.environ.get(f"SLURM_JOB_NODELIST_{name}_GROUP_{len(groups)}", "")
            groups.append(expand_hosts(text) if text else [])
        groups.pop()
        if groups:
            break
    within = [[node for node in group if node in nodes] for group in groups]
    return [group for group in within if group] or [nodes]


def _distribution(components: list[list[str]], counts: Mapping[str, int]) -> str:
    """Return the distribution of tasks on the nodes of each component.

    Slurm tells the distribution of this process's component only. Its default is cyclic if no node
    of the component has two tasks, and block otherwise. Such a component is the same under block.
    """
    env = os.environ
    distribution = env.get("SLURM_DISTRIBUTION", "block")
    own = [nodes for nodes in components if env.get("SLURMD_NODENAME") in nodes]
    if len(components) > 1 and own and max(counts[node] for node in own[0]) < 2:
        return "block"
    return distribution


def _lay_out_component(
    nodes: list[str], counts: Mapping[str, int], distribution: str
) -> tuple[str, ...]:
    """Return the host of each task of a component."""
    if distribution.startswith("arbitrary"):
        (path,) = require_env(("SLURM_HOSTFILE",), "srun", _REMEDY)
        return tuple(host for line in read_host_lines(path) for host in expand_hosts(line))
    plane = env_number("SLURM_DIST_PLANESIZE") if "SLURM_DIST_PLANESIZE" in os.environ else 0
    return hosts_of_tasks(nodes, [counts[node] for node in nodes], distribution, plane)


def hosts_of_tasks(
    hosts: Sequence[str], counts: Sequence[int], distribution: str = "block", plane: int = 0
) -> tuple[str, ...]:
    """Return the host of each task, by rank.

    Args:
        hosts: Hosts of the step, in Slurm's order.
        counts: Number of tasks of each host.
        distribution: The value of ``srun --distribution``. Its first part, up to a colon or comma,
            is the order in which tasks go to nodes.
        plane: Number of tasks in a plane, for the distribution ``plane``.

    Returns:
        The hosts: node by node for ``block``, in turns for ``cyclic`` and ``plane``.

    Raises:
        InvalidArgumentError: The distribution is not supported, or the plane size is missing.
    """
    kind, _, size = re.split("[:,]", distribution.strip().lower() or "block")[0].partition("=")
    plane = int(size) if is_number(size) else plane
    most = max(counts, default=0)
    at_once = {"block": most, "pack": most, "nopack": most, "*": most, "cyclic": 1, "plane": plane}
    if kind not in at_once:
        raise InvalidArgumentError(
            f"the order of tasks is unknown for the distribution {distribution!r}: start with "
            "srun --distribution=block, or use MPIClusterResolver"
        )
    if kind == "plane" and plane < 1:
        raise InvalidArgumentError("Slurm does not say how many tasks a plane has")
    step = max(at_once[kind], 1)
    return tuple(
        host
        for begin in range(0, most, step)
        for host, count in zip(hosts, counts, strict=True)
        for _ in range(min(count - begin, step))
    )


def _check_layout(rank: int, hosts: list[str], nodes: list[str]) -> None:
    """Check the layout against the variables that Slurm has set for this process."""
    if rank >= len(hosts):
        raise InvalidArgumentError(f"SLURM_PROCID is {rank}, but there are {len(hosts)} tasks")
    host = hosts[rank]
    expected = {
        "SLURMD_NODENAME": host,
        "SLURM_LOCALID": str(hosts[:rank].count(host)),
        "SLURM_NODEID": str(nodes.index(host)) if host in nodes else "",
    }
    for name, value in expected.items():
        if os.environ.get(name, value) != value:
            raise InvalidArgumentError(
                f"{name} of task {rank} is {os.environ[name]}, and should be {value}: the tasks "
                "are distributed in another way than Slurm says; start with "
                "srun --distribution=block, or use MPIClusterResolver"
            )
