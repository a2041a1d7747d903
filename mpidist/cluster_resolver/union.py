"""Several clusters as one."""

from __future__ import annotations

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver, with_layer


class UnionResolver(ClusterResolver):
    """Joins the clusters of several resolvers.

    Tasks of one job keep their indices if one of the resolvers gives indices with holes; else those
    of later resolvers follow those of earlier ones.

    Args:
        resolvers: At least one.
        rpc_layer: Protocol of the addresses; by default the first resolver's.
        task_type: Job of this process; by default the first resolver's.
        task_id: Index of this process; by default the first resolver's.

    Raises:
        TypeError: One is no ClusterResolver.
        ValueError: None was given.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver needs at least one resolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver joins ClusterResolvers, not {resolver!r}")
        first = resolvers[0]
        self._resolvers = resolvers
        self._is_told = task_type is not None and task_id is not None
        self.rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id

    def cluster_spec(self) -> ClusterSpec:
        """Local, as far as those of its resolvers are. The clusters, joined.

        Raises:
            KeyError: Two resolvers give a task the same index.
        """
        clusters = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = list(dict.fromkeys(job for cluster in clusters for job in cluster))
        joined: dict[str, list[str] | dict[int, str]] = {}
        for job in jobs:
            parts = [cluster[job] for cluster in clusters if job in cluster]
            # A job without tasks is a dict, too, and says nothing of indices.
            if any(isinstance(part, dict) and part for part in parts):
                joined[job] = _by_index(job, parts)
            else:
                joined[job] = [address for part in parts if part for address in part]  # type: ignore[misc]
        return ClusterSpec(joined)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Local, as far as its resolvers are. Address of a task.

        By default of the one that this resolver was told to be, or else the first one's master.

        Raises:
            ValueError: There is no such task.
        """
        if self._is_told:
            task_type = self.task_type if task_type is None else task_type
            task_id = self.task_id if task_id is None else task_id
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return with_layer(address, rpc_layer or self.rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the accelerators of each task, as the first resolver tells them.

        Raises:
            ValueError: There is no such task in the joined cluster.
        """
        self._check_task(task_type, task_id)
        return self._resolvers[0].num_accelerators(config_proto=config_proto)

    @property
    def environment(self) -> str:
        """The first resolver's."""
        return self._resolvers[0].environment


def _by_index(job: str, parts: list[list[str] | dict[int, str]]) -> dict[int, str]:
    tasks: dict[int, str] = {}
    for part in parts:
        for index, address in part.items() if isinstance(part, dict) else enumerate(part):
            if index in tasks:
                raise KeyError(f"two resolvers have a task {index} of job {job!r}")
            tasks[index] = address
    return tasks
