"""The tasks of a Slurm job step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import index
from typing import SupportsIndex

from mpidist.cluster.spec import as_integer
from mpidist.cluster_resolver.accelerators import visible_gpus
from mpidist.cluster_resolver.placed import PlacedResolver, Placement, needed, number, read_lines
from mpidist.cluster_resolver.slurm_layout import lay_out, parse_counts
from mpidist.errors import FailedPreconditionError, InvalidArgumentError
from mpidist.host_list import expand_hosts
from mpidist.runtime.launch import launcher_of, rank_hint

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


class SlurmClusterResolver(PlacedResolver):
    """Gives the tasks of the job step that ``srun`` started to jobs, by rank.

    Steps that are smaller than their job, any host list, uneven numbers of tasks, and the
    distributions block, cyclic, plane and arbitrary; steps over several components of a
    heterogeneous job. That the layout is right is checked by the node and local number that Slurm
    gave this process.

    Args:
        jobs: See :class:`PlacedResolver`.
        port_base: Port of a node's first task.
        gpus_per_node: GPUs of each node to use; by default those that are visible.
        gpus_per_task: GPUs of each task; by default an equal share of the node's, which may be 0.
        tasks_per_node: Tasks of each node, in place of what Slurm says: one number, numbers in
            the order of the nodes, or by host.
        auto_set_gpu: Whether to show this process its GPUs only, by ``CUDA_VISIBLE_DEVICES``.
            Where Slurm has bound GPUs to tasks, or less is visible than the step has on the node,
            it stays as it is.
        rpc_layer: Protocol of the addresses.

    Raises:
        FailedPreconditionError: srun did not start this process, or a node has fewer GPUs than are
            asked for.
        InvalidArgumentError: The jobs do not fit the tasks, or Slurm's variables contradict each
            other, or a number of GPUs is negative; also a ValueError.
        TypeError: A number of GPUs is none; or as :class:`PlacedResolver`.
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
        _check_gpus("gpus_per_node", gpus_per_node)
        _check_gpus("gpus_per_task", gpus_per_task)
        super().__init__(jobs, port_base, rpc_layer)
        names = visible_gpus()
        bound = _are_bound(len(names))
        self._gpus = names if bound else self._own_gpus(names, gpus_per_node, gpus_per_task)
        if auto_set_gpu and self._gpus and not bound:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the GPUs of each task: ``{"GPU": 2}``, or ``{}``; errors as of the base class."""
        self._check_task(task_type, task_id)
        return {"GPU": len(self._gpus)} if self._gpus else {}

    def placement(self) -> Placement:
        """Local. Where the tasks are; see :class:`PlacedResolver`."""
        env = os.environ
        _, _, node_list, counts_text = needed(env, _STEP, "srun", _REMEDY)
        rank = number(env, "SLURM_PROCID")
        if rank_hint(env) not in (rank, None):
            raise FailedPreconditionError(
                f"an MPI launcher started this process as rank {rank_hint(env)}, and srun only "
                f"that launcher's helper, as task {rank}: use MPIClusterResolver"
            )
        nodes = expand_hosts(node_list)
        counts = self._counts(nodes, counts_text)
        components = _components(env, nodes)
        distribution = _distribution(env, components, counts)
        hosts = [
            host
            for names in components
            for host in _lay_out_component(env, names, counts, distribution)
        ]
        if len(hosts) != number(env, "SLURM_STEP_NUM_TASKS"):
            raise InvalidArgumentError(
                f"SLURM_STEP_NUM_TASKS is {env['SLURM_STEP_NUM_TASKS']}, but the nodes "
                f"{node_list} have {len(hosts)} tasks together"
            )
        _check_own(env, rank, hosts, [node for names in components for node in names])
        return Placement(tuple(hosts), rank)

    def _counts(self, nodes: list[str], text: str) -> dict[str, int]:
        """How many tasks of the step each node has."""
        given, what = self._tasks_per_node, "number of tasks of a node"
        if isinstance(given, Mapping):
            return {node: as_integer(given.get(node, 0), what) for node in nodes}
        if given is None:
            counts = parse_counts(text)
        elif isinstance(given, Sequence) and not isinstance(given, str):
            counts = [as_integer(count, what) for count in given]
        else:
            counts = [as_integer(given, what)] * len(nodes)
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
        hosts, rank = self.placement().hosts, self.placement().own
        assert rank is not None
        tasks, before = hosts.count(hosts[rank]), hosts[:rank].count(hosts[rank])
        share = len(names) // tasks if per_task is None else per_task
        if share * tasks > len(names):
            raise FailedPreconditionError(
                f"{tasks} tasks with {share} GPUs each are on {hosts[rank]}, and it has "
                f"{len(names)} for them"
            )
        return names[before * share : (before + 1) * share]


def _check_gpus(name: str, count: object) -> None:
    """InvalidArgumentError or TypeError unless it is a number of GPUs, or None."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, SupportsIndex):
        raise TypeError(f"{name} must be a number of GPUs, or None, not {count!r}")
    if index(count) < 0:
        raise InvalidArgumentError(f"{name} must be 0 or more, or None, not {count}")


def is_step_of_several(env: Mapping[str, str]) -> bool:
    """Local. Whether srun started this process as one of several tasks, as far as is said.

    It did not where no variable of a step is set, as in the body of a batch script, which is task
    0, or where a step has one task, as in an interactive shell. Variables that are half-set count
    as a step: the resolver says what is wrong with them.

    Args:
        env: Usually ``os.environ``, of a process that is not one of several ranks.
    """
    rank = env.get("SLURM_PROCID")
    if not any(name in env for name in _STEP[1:]):
        return rank not in (None, "0")
    # The step of mpirun -n 1 is its helpers', one on each node of the job.
    alone = env.get("SLURM_STEP_NUM_TASKS") == "1" or launcher_of(env) == "prte"
    return rank != "0" or not alone


def _are_bound(visible: int) -> bool:
    """Whether Slurm shows each task its own GPUs.

    Newer versions do not tell tasks how they are bound, only how many GPUs the step has on the
    node: a task that sees fewer has its own, be it from Slurm or from a resolver before.

    Args:
        visible: How many GPUs this process sees.
    """
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    fewer = on_node.isascii() and on_node.isdigit() and visible < int(on_node)
    return fewer or bool(os.environ.get("SLURM_GPUS_PER_TASK"))


def _components(env: Mapping[str, str], nodes: list[str]) -> list[list[str]]:
    """The step's nodes in the order of its tasks: by component where the job has several.

    Slurm tells the nodes of each component of the job, and the nodes of the step, sorted.
    """
    groups: list[list[str]] = []
    for name in ("HET", "PACK"):  # as srun sets them in a job, and as srun does that makes one
        while not groups or groups[-1]:
            text = env.get(f"SLURM_JOB_NODELIST_{name}_GROUP_{len(groups)}", "")
            groups.append(expand_hosts(text) if text else [])
        groups.pop()
        if groups:
            break
    within = [[node for node in group if node in nodes] for group in groups]
    return [group for group in within if group] or [nodes]


def _distribution(
    env: Mapping[str, str], components: list[list[str]], counts: Mapping[str, int]
) -> str:
    """How tasks are laid out on the nodes of each component.

    Of several components, Slurm tells the distribution of this process's own. Unless a user has
    chosen one, it is cyclic where no node has two tasks, where that changes nothing, else block.
    """
    distribution = env.get("SLURM_DISTRIBUTION", "block")
    own = [nodes for nodes in components if env.get("SLURMD_NODENAME") in nodes]
    if len(components) > 1 and own and max(counts[node] for node in own[0]) < 2:
        return "block"
    return distribution


def _lay_out_component(
    env: Mapping[str, str], nodes: list[str], counts: Mapping[str, int], distribution: str
) -> tuple[str, ...]:
    """Host of each task of a component."""
    if distribution.startswith("arbitrary"):
        path = needed(env, ("SLURM_HOSTFILE",), "srun", _REMEDY)[0]
        return tuple(host for line in read_lines(path, "srun") for host in expand_hosts(line))
    plane = number(env, "SLURM_DIST_PLANESIZE") if "SLURM_DIST_PLANESIZE" in env else 0
    return lay_out(nodes, [counts[node] for node in nodes], distribution, plane)


def _check_own(env: Mapping[str, str], rank: int, hosts: list[str], nodes: list[str]) -> None:
    """Whether the layout agrees with what Slurm says of this process."""
    if rank >= len(hosts):
        raise InvalidArgumentError(f"SLURM_PROCID is {rank}, but there are {len(hosts)} tasks")
    host = hosts[rank]
    expected = {
        "SLURMD_NODENAME": host,
        "SLURM_LOCALID": str(hosts[:rank].count(host)),
        "SLURM_NODEID": str(nodes.index(host)) if host in nodes else "",
    }
    for name, value in expected.items():
        if env.get(name, value) != value:
            raise InvalidArgumentError(
                f"{name} of task {rank} is {env[name]}, and should be {value}: the tasks are "
                "distributed in another way than Slurm says; start with "
                "srun --distribution=block, or use MPIClusterResolver"
            )
