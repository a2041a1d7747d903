"""What every resolver gives."""

from __future__ import annotations

import abc

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.accelerators import visible_gpus


class ClusterResolver(abc.ABC):
    """Finds out which tasks a cluster has and which one this process is.

    Every method asks its source anew at each call. As ``tf.distribute.cluster_resolver``'s.

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
        """The cluster as it is now."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Address of a task, with its protocol.

        Args:
            task_type: Its job; by default this process's.
            task_id: Its index; by default this process's.
            rpc_layer: The protocol; by default the resolver's.
        """

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the accelerators that a task may use, by kind.

        Args:
            task_type: Its job; by default this process's.
            task_id: Its index; by default this process's. Only this process's own accelerators are
                known: all tasks are taken to have as many.
            config_proto: Not used: there is no session.

        Returns:
            ``{"GPU": 4}``, or ``{}``.

        Raises:
            ValueError: There is no such task.
        """
        self._check_task(task_type, task_id)
        count = len(visible_gpus())
        return {"GPU": count} if count else {}

    def _check_task(self, task_type: str | None, task_id: int | None) -> None:
        """Raise ValueError if a task that is named, in part or wholly, does not exist."""
        if task_type is None and task_id is None:
            return
        job = self.task_type if task_type is None else task_type
        if job is None:
            return  # an index of a job that is not known
        spec = self.cluster_spec()
        if task_id is not None:
            spec.task_address(job, task_id)
        else:
            spec.num_tasks(job)

    @property
    def environment(self) -> str:
        """Always the empty string, as everywhere outside of Google."""
        return ""

    def _task_address(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str | None:
        """``<layer>://<address>`` of a task; None if it is not known which one is meant."""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return None
        return with_layer(self.cluster_spec().task_address(job, index), rpc_layer or self.rpc_layer)


def with_layer(address: str, rpc_layer: str | None) -> str:
    """Local. An address with its protocol before it, where there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
