"""The interface of cluster resolvers."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.accelerators import visible_gpus


class ClusterResolver(abc.ABC):
    """Base class of resolvers, which find the tasks of a cluster and the task of this process.

    Every method reads its source anew. As ``tf.distribute.cluster_resolver.ClusterResolver``.

    Attributes:
        task_type: Job of this process, or None if unknown.
        task_id: Index of this process in its job, or None if unknown.
        rpc_layer: Protocol of the addresses, or None.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, with its protocol; empty if the task is unknown.

        Args:
            task_type: Job of the task; by default this process's.
            task_id: Index of the task; by default this process's.
            rpc_layer: The protocol; by default the resolver's.

        Raises:
            ValueError: The task does not exist.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return ""
        return with_layer(self.cluster_spec().task_address(job, index), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the number of accelerators of a task, by kind.

        Args:
            task_type: Job of the task; by default this process's.
            task_id: Index of the task; by default this process's. A process knows its own
                accelerators only, and assumes the same number for all tasks.
            config_proto: Ignored, because there are no sessions.

        Returns:
            ``{"GPU": 4}``, or ``{}``.

        Raises:
            ValueError: The task does not exist.
        """
        self._check_task(task_type, task_id)
        return self._own_accelerators()

    @property
    def environment(self) -> str:
        """The empty string, as everywhere outside of Google."""
        return ""

    def _own_accelerators(self) -> dict[str, int]:
        return gpu_count(visible_gpus())

    def _check_task(self, task_type: str | None, task_id: int | None) -> None:
        """Raise ValueError if the job or the index does not exist."""
        if task_type is None and task_id is None:
            return
        job = self.task_type if task_type is None else task_type
        if job is None:
            return  # the job of the index is unknown
        spec = self.cluster_spec()
        if task_id is not None:
            spec.task_address(job, task_id)
        else:
            spec.num_tasks(job)


def gpu_count(gpus: Sequence[str]) -> dict[str, int]:
    """Return the result of :meth:`ClusterResolver.num_accelerators` for some GPUs."""
    return {"GPU": len(gpus)} if gpus else {}


def with_layer(address: str, rpc_layer: str | None) -> str:
    """Return an address with its protocol as prefix, if both are given."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
