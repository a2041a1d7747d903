"""A process's place in a cluster, as the strategy and its server see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidist import ClusterSpec, Endpoint, ProcessGroup, Window, errors, open_endpoint
from mpidist.cluster_resolver import ClusterResolver

Bytes = NDArray[np.uint8]

_LOCAL_ARENA_BYTES = 1 << 36  # address space only: pages come with the first write


class Host(Protocol):
    """The part of :class:`mpidist.Server` that is used here."""

    @property
    def endpoint(self) -> Endpoint:
        """Serves this process's tasks."""

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster."""

    @property
    def job_name(self) -> str:
        """Job of the script's task."""

    @property
    def task_index(self) -> int:
        """Index of the script's task."""

    def own_index(self, job: str) -> int:
        """Local. Index of this process's task of a job."""

    def task_address(self, job: str, index: int) -> str:
        """Local. Address of the endpoint of a task."""

    def task_memory(self, job: str, index: int) -> Bytes | None:
        """Local. Arena of a ps task, or None if it is on another node."""

    def memory(self) -> Bytes:
        """Local. This process's own arena."""

    def sync(self) -> None:
        """Local. Order loads and stores before the call against those after it."""

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Local. Have ``callback()`` called before the process leaves the cluster."""

    def job_group(self, job: str) -> ProcessGroup:
        """Collective over the tasks of the job. Their process group."""


class LocalHost:
    """A cluster of one ps and one worker inside this process, for local mode."""

    def __init__(self) -> None:
        self._window = Window.private(_LOCAL_ARENA_BYTES)
        self.endpoint = open_endpoint("inproc")
        self.cluster_spec = ClusterSpec({"ps": ["localhost:0"], "worker": ["localhost:0"]})
        self.job_name = "worker"
        self.task_index = 0

    def own_index(self, job: str) -> int:
        """Local. Always 0."""
        return 0

    def task_address(self, job: str, index: int) -> str:
        """Local. The one endpoint's address."""
        return str(self.endpoint.address)

    def task_memory(self, job: str, index: int) -> Bytes | None:
        """Local. The one arena."""
        return self._window.local

    def memory(self) -> Bytes:
        """Local. The one arena."""
        return self._window.local

    def sync(self) -> None:
        """Local. See :class:`Host`."""
        self._window.sync()

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Local. Nothing to do: nobody but this process waits for what is under way."""

    def job_group(self, job: str) -> ProcessGroup:
        """Local. FailedPreconditionError: there is no job to group."""
        raise errors.FailedPreconditionError("in local mode there is no process group")


def given_spec(first: Any, spec: Any) -> ClusterSpec | None:
    """Local. The cluster that a strategy's arguments name.

    Args:
        first: ``cluster_resolver``.
        spec: ``cluster_spec``.

    Returns:
        The cluster, or None if neither was given.

    Raises:
        ValueError: Both were given.
    """
    if first is not None and spec is not None:
        raise ValueError("give cluster_resolver or cluster_spec, not both")
    source = first if first is not None else spec
    if source is None:
        return None
    return source.cluster_spec() if isinstance(source, ClusterResolver) else ClusterSpec(source)


def check_task(
    host: Host, spec: ClusterSpec | None, task_type: str | None, task_id: int | None
) -> None:
    """Local. ValueError if what a strategy is given differs from the started Server's."""
    if spec is not None and spec != host.cluster_spec:
        raise ValueError(
            f"the strategy is given {spec!r}, and the started Server is of {host.cluster_spec!r}"
        )
    for what, given, true in (
        ("task_type", task_type, host.job_name),
        ("task_id", task_id, host.task_index),
    ):
        if given is not None and given != true:
            raise ValueError(f"{what} is {given!r}, and that of the started Server {true!r}")
