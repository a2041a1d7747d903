"""What a Server runs for the tasks of service jobs; other packages bring it along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mpidist.cluster.spec import Task
from mpidist.errors import NotFoundError
from mpidist.runner import explain


class Service(Protocol):
    """What a Server runs for a task of a service job; made as ``factory(server)``."""

    def close(self) -> None:
        """Local. Serve no more."""


def make_services(tasks: Sequence[Task], server: Any) -> Iterator[Service]:
    """Start the installed services of tasks, one after the other. Local.

    Args:
        tasks: The tasks of service jobs in this process.
        server: The Server, which has started.

    Yields:
        The service of each task.

    Raises:
        NotFoundError: No service is installed for a job.
        ImportError, AttributeError: A module cannot be imported. If a file of the user's hides
            the package of the service, a note names that file.
    """
    from importlib.metadata import entry_points  # slow, and of no use to process groups

    known = {point.name: point for point in entry_points(group="mpidist.services")}
    for job, index in tasks:
        if job not in known:
            raise NotFoundError(
                f"nothing is installed that serves {job} {index}: the distribution mpidist brings "
                "it along; install it (pip install mpidist), do not only put it on the path"
            )
        try:
            service = known[job].load()
        except (ImportError, AttributeError) as error:
            explain(error)
            raise
        yield service(server)
