"""The tasks of a Slurm job step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mpidist.cluster_resolver.accelerators import visible_gpus
from mpidist.cluster_resolver.host_list import expand_hosts
from mpidist.cluster_resolver.placed import PlacedResolver, Placement, needed, number, read_lines
from mpidist.cluster_resolver.slurm_layout import lay_out, parse_counts
from mpidist.errors import FailedPreconditionError, InvalidArgumentError
from mpidist.runtime.launch import rank_hint

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
            Where Slurm has bound GPUs to tasks, it stays as it is.
        rpc_layer: Protocol of the addresses.

    Raises:
        FailedPreconditionError: srun did not start this process, or a node has fewer GPUs than are
            asked for.
        InvalidArgumentError: The jobs do not fit the tasks, or Slurm's variables contradict each
            other; also a ValueError.
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
        super().__init__(jobs, port_base, rpc_layer)
        self._gpus = self._own_gpus(gpus_per_node, gpus_per_task)
        if auto_set_gpu and self._gpus and not _are_bound():
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Local. GPUs of each task: ``{"GPU": 2}``, or ``{}``."""
        return {"GPU": len(self._gpus)} if self._gpus else {}

    def placement(self) -> Placement:
        """Local. Where the tasks are; see :class:`PlacedResolver`."""
        env = os.environ
        needed(env, _STEP[:1], "srun", _REMEDY)
        rank = number(env, "SLURM_PROCID")
        if rank_hint(env) not in (rank, None):
            raise FailedPreconditionError(
                f"an MPI launcher started this process as rank {rank_hint(env)}, and srun only "
                f"that launcher's helper, as task {rank}: use MPIClusterResolver"
            )
        components = _components(env)
        hosts: list[str] = []
        for nodes, counts in components:
            hosts += self._component(nodes, counts)
        _check_total(env, len(hosts), len(components))
        _check_own(env, rank, hosts)
        return Placement(tuple(hosts), rank)

    def _component(self, node_list: str, counts_text: str) -> tuple[str, ...]:
        """Hosts by task of a component of a heterogeneous job, or of the whole step."""
        env = os.environ
        given = self._tasks_per_node
        distribution = env.get("SLURM_DISTRIBUTION", "block")
        if distribution.startswith("arbitrary") and given is None:
            path = needed(env, ("SLURM_HOSTFILE",), "srun", _REMEDY)[0]
            return tuple(host for line in read_lines(path, "srun") for host in expand_hosts(line))
        nodes = expand_hosts(node_list)
        if given is None:
            counts = parse_counts(counts_text)
        elif isinstance(given, int):
            counts = [given] * len(nodes)
        elif isinstance(given, Mapping):
            counts = [given.get(node, 0) for node in nodes]
        else:
            counts = list(given)
        plane = number(env, "SLURM_DIST_PLANESIZE") if "SLURM_DIST_PLANESIZE" in env else 1
        return lay_out(nodes, counts, distribution, plane)

    def _own_gpus(self, per_node: int | None, per_task: int | None) -> list[str]:
        names = visible_gpus()
        if _are_bound():
            return names
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


def _are_bound() -> bool:
    """Whether Slurm shows each task its own GPUs."""
    return bool(os.environ.get("SLURM_GPUS_PER_TASK"))


def _components(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Host lists and numbers of tasks by node: of the step, or of each component it runs in."""
    het = [
        (env[nodes], env[nodes.replace("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")])
        for nodes in (
            f"SLURM_JOB_NODELIST_HET_GROUP_{n}" for n in range(int(env.get("SLURM_HET_SIZE", 0)))
        )
    ]
    if het:
        return het
    _, _, nodes_text, counts_text = needed(env, _STEP, "srun", _REMEDY)
    return [(nodes_text, counts_text)]


def _check_total(env: Mapping[str, str], total: int, components: int) -> None:
    if components == 1 and total != number(env, "SLURM_STEP_NUM_TASKS"):
        raise InvalidArgumentError(
            f"SLURM_STEP_NUM_TASKS is {env['SLURM_STEP_NUM_TASKS']}, but the nodes "
            f"{env['SLURM_STEP_NODELIST']} have {total} tasks together"
        )


def _check_own(env: Mapping[str, str], rank: int, hosts: list[str]) -> None:
    """Whether the layout agrees with the node and local number that Slurm gave this process."""
    if rank >= len(hosts):
        raise InvalidArgumentError(f"SLURM_PROCID is {rank}, but there are {len(hosts)} tasks")
    before = hosts[:rank].count(hosts[rank])
    node = list(dict.fromkeys(hosts)).index(hosts[rank])
    for name, derived in (("SLURM_LOCALID", before), ("SLURM_NODEID", node)):
        if name in env and number(env, name) != derived:
            raise InvalidArgumentError(
                f"task {rank} should be number {before} on {hosts[rank]}, but {name} is "
                f"{env[name]}: the tasks are distributed in another way than Slurm says; start "
                "with srun --distribution=block, or use MPIClusterResolver"
            )
