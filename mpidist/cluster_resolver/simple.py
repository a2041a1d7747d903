"""A cluster that the script itself knows."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver, with_layer


class SimpleClusterResolver(ClusterResolver):
    """Gives what it was given.

    Args:
        cluster_spec: The cluster.
        master: What :meth:`master` gives where no task is named.
        task_type: Job of this process.
        task_id: Index of this process in its job.
        environment: What :attr:`environment` gives.
        num_accelerators: What :meth:`num_accelerators` gives; by default nothing.
        rpc_layer: Protocol of the addresses.

    Raises:
        TypeError: ``cluster_spec`` is not a ClusterSpec of any library, or ``master`` no string.
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
        """Local. The cluster that was given."""
        return ClusterSpec(self._spec)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Local. Address of the task that is named, or else the master that was given.

        Raises:
            ValueError: There is no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._spec.task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the accelerators that were given, of every task; errors as of the base class."""
        self._check_task(task_type, task_id)
        return dict(self._accelerators)

    @property
    def environment(self) -> str:
        """The environment that was given."""
        return self._environment
