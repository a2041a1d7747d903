"""Which devices of others the tasks of a cluster see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpidist.cluster.arguments import index_of_task, text
from mpidist.proto import mpidist_pb2


class ClusterDeviceFilters:
    """Device filters of a cluster's tasks; as ``tf.train.ClusterDeviceFilters``.

    They are kept in a ServerDef and handed on. A task without filters sees all devices, and every
    task its own.
    """

    def __init__(self) -> None:
        self._filters: dict[str, dict[int, list[str]]] = {}

    def set_device_filters(
        self, job_name: str, task_index: int, device_filters: Sequence[str]
    ) -> None:
        """Local. Say what a task sees; replaces what was said of it before.

        Args:
            job_name: Its job.
            task_index: Its index.
            device_filters: Such as ``["/job:ps", "/job:worker/task:1"]``.

        Raises:
            TypeError: They are not strings in a list, the job's name is no string, or the index no
                number.
            ValueError: There is no such index.
        """
        if isinstance(device_filters, str) or not isinstance(device_filters, Iterable):
            raise TypeError(f"device_filters is a list of strings, not {device_filters!r}")
        filters = list(device_filters)
        if any(not isinstance(each, str) for each in filters):
            raise TypeError(f"device_filters is a list of strings, not {filters!r}")
        job = text(job_name, "job_name")
        index = index_of_task(task_index, f"index of a task of job {job!r}")
        self._filters.setdefault(job, {})[index] = filters

    def as_cluster_device_filters(self) -> mpidist_pb2.ClusterDeviceFilters:
        """Local. The protobuf message: jobs by name, tasks by index."""
        message = mpidist_pb2.ClusterDeviceFilters()
        for name in sorted(self._filters):
            job = message.jobs.add(name=name)
            for index, filters in sorted(self._filters[name].items()):
                job.tasks[index].device_filters.extend(filters)
        return message

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterDeviceFilters):
            return self._filters == other._filters
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]
