"""What every resolver gives."""

from __future__ import annotations

import abc
import os

from mpidist.cluster import ClusterSpec


class ClusterResolver(abc.ABC):
    """Finds out which tasks a cluster has and which one this process is.

    Every method asks its source anew at each call.

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
        """Local. Accelerators of this host by kind: ``{"GPU": 4}``, or ``{}``.

        Args:
            task_type: Not used: every task is asked on its own host.
            task_id: Not used.
            config_proto: Not used.
        """
        path = "/proc/driver/nvidia/gpus"
        count = len(os.listdir(path)) if os.path.isdir(path) else 0
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str:
        """Always the empty string, as everywhere outside of Google."""
        return ""
