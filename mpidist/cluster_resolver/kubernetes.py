"""Resolver for pods of Kubernetes that labels select."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.errors import FailedPreconditionError

_TIMEOUT_S = 60.0  # for an API server that does not answer
_DEFAULT_LABELS = {"worker": ("job-name=tensorflow",)}


class KubernetesExecutableLocation(enum.Enum):
    """The location of a process that asks the Kubernetes API: in a pod, or elsewhere."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Resolver that asks the Kubernetes API for the pods of label selectors, one task each.

    The pods of a job are sorted by name. Numbers in names are sorted by value: ``worker-2`` comes
    before ``worker-10``.

    Args:
        job_to_label_mapping: Label selectors of each job; by default
            ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: Port of every task.
        rpc_layer: Protocol of the addresses.
        override_client: A ``kubernetes.client.CoreV1Api``, or an object with its methods; by
            default a client with the configuration of ``executable_location``.
        executable_location: Whether this process runs in a pod and uses the configuration of pods,
            or runs elsewhere and uses the configuration of the user. By default the environment
            decides. As ``tf.distribute``'s.
        task_type: Job of this process.
        task_id: Index of this process in its job.

    Raises:
        ImportError: No client was given, and the package kubernetes is not installed.
        ValueError: ``executable_location`` has another type.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Iterable[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation | None = None,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        labels = job_to_label_mapping or _DEFAULT_LABELS
        self._labels = {
            job: [selectors] if isinstance(selectors, str) else list(selectors)
            for job, selectors in labels.items()
        }
        self._port = tf_server_port
        location = _checked_location(executable_location)
        self._client, self._options = override_client, {}
        if override_client is None:
            self._client, self._options = _create_client(location), {"_request_timeout": _TIMEOUT_S}
        self.rpc_layer, self.task_type, self.task_id = rpc_layer, task_type, task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the current pods.

        Raises:
            FailedPreconditionError: A pod is not running; also a RuntimeError.
        """
        return ClusterSpec({job: self._addresses(s) for job, s in self._labels.items()})

    def _addresses(self, selectors: list[str]) -> list[str]:
        found = []
        for selector in selectors:
            pods = self._client.list_pod_for_all_namespaces(
                label_selector=selector, **self._options
            ).items
            for pod in sorted(pods, key=lambda pod: _natural_order(pod.metadata.name)):
                if pod.status.phase != "Running":
                    raise FailedPreconditionError(
                        f"pod {pod.metadata.name} of {selector} is {pod.status.phase}, not Running"
                    )
                found.append(pod.status)
        hosts = [status.host_ip for status in found]
        if len(set(hosts)) < len(hosts):  # pods of one node differ by their pod addresses only
            hosts = [status.pod_ip for status in found]
        return [f"{host}:{self._port}" for host in hosts]


def _checked_location(
    location: KubernetesExecutableLocation | None,
) -> KubernetesExecutableLocation:
    """Return the location, by default from the environment; raise ValueError for other types."""
    within, off = KubernetesExecutableLocation
    if location is None:
        return within if "KUBERNETES_SERVICE_HOST" in os.environ else off
    if location not in (within, off):
        raise ValueError(
            f"executable_location must be a KubernetesExecutableLocation, not {location!r}"
        )
    return location


def _create_client(location: KubernetesExecutableLocation) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ImportError(
            'KubernetesClusterResolver needs the package kubernetes: pip install "mpidist['
            'kubernetes]", or give override_client'
        ) from error
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()


def _natural_order(name: str) -> list[tuple[str, int]]:
    """Return a sort key that compares the numbers in names by value."""
    return [(text, int(number or 0)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", name)]
