"""Resolvers for clusters that the script describes, and for several clusters as one."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver, with_layer


class SimpleClusterResolver(ClusterResolver):
    """Resolver for a given cluster spec.

    Args:
        cluster_spec: The cluster.
        master: Result of :meth:`master` if no task is named.
        task_type: Job of this process.
        task_id: Index of this process in its job.
        environment: Value of :attr:`environment`.
        num_accelerators: Result of :meth:`num_accelerators`; empty by default.
        rpc_layer: Protocol of the addresses.

    Raises:
        TypeError: ``cluster_spec`` is not a ClusterSpec of any library, or ``master`` is not a
            string.

    Example:
        >>> from mpidist import ClusterSpec
        >>> from mpidist.cluster_resolver import SimpleClusterResolver
        >>> spec = ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222"]})
        >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)
        >>> resolver.master("ps", 0)
        'a:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if hasattr(cluster_spec, "as_cluster_def") and not isinstance(cluster_spec, type):
            cluster_spec = ClusterSpec(cluster_spec)
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec, not {cluster_spec!r}")
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, not {master!r}")
        self._spec = cluster_spec
        self._master = master
        self._environment = environment
        self._accelerators = dict(num_accelerators or {})
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the given cluster."""
        return ClusterSpec(self._spec)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, or the given master if no task is named.

        Raises:
            ValueError: The task does not exist.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._spec.task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self.rpc_layer)

    def _own_accelerators(self) -> dict[str, int]:
        return dict(self._accelerators)

    @property
    def environment(self) -> str:
        """The given environment."""
        return self._environment


class UnionResolver(ClusterResolver):
    """Resolver for the union of the clusters of several resolvers.

    The tasks of a job keep their indices if a resolver has missing indices in that job. Otherwise
    the tasks of later resolvers follow the tasks of earlier ones.

    Args:
        resolvers: One or more resolvers.
        rpc_layer: Protocol of the addresses; by default the first resolver's.
        task_type: Job of this process; by default the first resolver's.
        task_id: Index of this process; by default the first resolver's.

    Raises:
        TypeError: An argument is not a ClusterResolver.
        ValueError: There is no resolver.

    Example:
        >>> from mpidist import ClusterSpec
        >>> from mpidist.cluster_resolver import SimpleClusterResolver, UnionResolver
        >>> servers = SimpleClusterResolver(ClusterSpec({"ps": ["a:2222"]}))
        >>> trainers = SimpleClusterResolver(ClusterSpec({"worker": ["b:2222", "c:2222"]}))
        >>> UnionResolver(servers, trainers).cluster_spec().as_dict()
        {'ps': ['a:2222'], 'worker': ['b:2222', 'c:2222']}
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
        self._has_task = task_type is not None and task_id is not None
        self.rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the union of the clusters. Collective if that of a resolver is.

        Raises:
            KeyError: Two resolvers have a task of the same job and index.
        """
        clusters = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = list(dict.fromkeys(job for cluster in clusters for job in cluster))
        joined: dict[str, dict[int, str]] = {}
        for job in jobs:
            parts = [cluster[job] for cluster in clusters if job in cluster]
            # A job without tasks is an empty dict, which says nothing of indices.
            keeps_indices = any(isinstance(part, dict) and part for part in parts)
            tasks = joined[job] = {}
            for part in parts:
                first = 0 if keeps_indices else len(tasks)
                pairs = part.items() if isinstance(part, dict) else enumerate(part, first)
                for index, address in pairs:
                    if index in tasks:
                        raise KeyError(f"two resolvers have a task {index} of job {job!r}")
                    tasks[index] = address
        return ClusterSpec(joined)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task.

        By default it is the task that was given to this resolver. If no task was given, it is the
        master of the first resolver.

        Raises:
            ValueError: The task does not exist.
        """
        if self._has_task:
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
            ValueError: The task does not exist in the union.
        """
        self._check_task(task_type, task_id)
        return self._resolvers[0].num_accelerators(config_proto=config_proto)

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._resolvers[0].environment
