"""The pods of a Kubernetes cluster: those of an MPIJob, or those that labels select."""

from __future__ import annotations

import enum
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.placed import (
    PlacedResolver,
    Placement,
    own_rank,
    read_lines,
    slots,
)
from mpidist.errors import FailedPreconditionError
from mpidist.host_list import clean_lines, parse_host_line

HOST_FILE = "/etc/mpi/hostfile"
DISCOVER_SCRIPT = "/etc/mpi/discover_hosts.sh"
_TIMEOUT_S = 60.0  # for an API server that does not answer
_DEFAULT_LABELS = {"worker": ("job-name=tensorflow",)}
_SCRIPT_SECONDS = 10.0


class MPIJobClusterResolver(PlacedResolver):
    """Gives the slots of the MPI operator's host file, or of its discover script, to jobs.

    This process's task is the rank that its MPI launcher gave it. Arguments and errors as of
    :class:`PlacedResolver`; besides:

    Args:
        jobs: See :class:`PlacedResolver`.
        port_base: Likewise.
        rpc_layer: Likewise.
        hostfile: With lines ``<host> slots=<number>`` or ``<host>:<number>``.
        discover_script: Prints such lines; it knows the pods that run now, and is asked in place of
            the host file where it exists.
    """

    source = "the MPIJob's list of hosts"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        hostfile: str = HOST_FILE,
        discover_script: str = DISCOVER_SCRIPT,
    ) -> None:
        self._host_file, self._script = hostfile, discover_script
        super().__init__(jobs, port_base, rpc_layer)

    def placement(self) -> Placement:
        """Local. Where the tasks are; see :class:`PlacedResolver`."""
        if os.path.exists(self._script):
            lines = _output(self._script)
        else:
            lines = read_lines(self._host_file, "the MPIJob")
        parsed = [parse_host_line(line) for line in lines]
        pairs = [(host, 1 if count is None else count) for hosts, count in parsed for host in hosts]
        return Placement(slots(pairs, self.source), own_rank())


class KubernetesExecutableLocation(enum.Enum):
    """Where a process runs that asks the Kubernetes API: in a pod, or elsewhere."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Asks the Kubernetes API for the pods that labels select, one task a pod.

    The pods of a job are ordered by name, numbers in it by value: ``worker-2`` comes before
    ``worker-10``.

    Args:
        job_to_label_mapping: Jobs to label selectors, several a job; by default
            ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: Port of every task.
        rpc_layer: Protocol of the addresses.
        override_client: A ``kubernetes.client.CoreV1Api``, or what acts as one; by default that of
            the configuration that fits ``executable_location``.
        executable_location: Whether this process runs in a pod, and uses the configuration that
            Kubernetes gives to pods, or elsewhere, and uses the user's. By default what the
            environment says. As ``tf.distribute``'s.
        task_type: Job of this process.
        task_id: Index of this process in its job.

    Raises:
        ImportError: No client was given, and the package kubernetes is not installed.
        ValueError: ``executable_location`` is none.
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
            self._client, self._options = _client(location), {"_request_timeout": _TIMEOUT_S}
        self.rpc_layer, self.task_type, self.task_id = rpc_layer, task_type, task_id

    def cluster_spec(self) -> ClusterSpec:
        """Local. The pods as they are now.

        Raises:
            FailedPreconditionError: A pod does not run; also a RuntimeError.
        """
        return ClusterSpec({job: self._addresses(s) for job, s in self._labels.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Local. Address of a task; the empty string if none is named, and this one is not known.

        Raises:
            FailedPreconditionError: A pod does not run; also a RuntimeError.
            ValueError: There is no such task.
        """
        return self._task_address(task_type, task_id, rpc_layer) or ""

    def _addresses(self, selectors: list[str]) -> list[str]:
        found = []
        for selector in selectors:
            pods = self._client.list_pod_for_all_namespaces(
                label_selector=selector, **self._options
            ).items
            for pod in sorted(pods, key=lambda pod: _natural(pod.metadata.name)):
                if pod.status.phase != "Running":
                    raise FailedPreconditionError(
                        f"pod {pod.metadata.name} of {selector} is {pod.status.phase}, not Running"
                    )
                found.append(pod.status)
        hosts = [status.host_ip for status in found]
        if len(set(hosts)) < len(hosts):  # pods of one node are told apart by their own addresses
            hosts = [status.pod_ip for status in found]
        return [f"{host}:{self._port}" for host in hosts]


def _checked_location(
    location: KubernetesExecutableLocation | None,
) -> KubernetesExecutableLocation:
    """The location, found out if it is not given; ValueError if it is none."""
    within, off = KubernetesExecutableLocation
    if location is None:
        return within if "KUBERNETES_SERVICE_HOST" in os.environ else off
    if location not in (within, off):
        raise ValueError(
            f"executable_location must be a KubernetesExecutableLocation, not {location!r}"
        )
    return location


def _client(location: KubernetesExecutableLocation) -> Any:
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


def _natural(name: str) -> list[tuple[str, int]]:
    """What orders names by the numbers in them."""
    return [(text, int(number or 0)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _output(script: str) -> list[str]:
    try:
        done = subprocess.run(
            [script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCRIPT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FailedPreconditionError(f"{script} does not list the hosts: {error}") from None
    return clean_lines(done.stdout)
