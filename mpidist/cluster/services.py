"""What a Server runs for the tasks of service jobs; other packages bring it along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mpidist.cluster.spec import Task
from mpidist.errors import NotFoundError


class Service(Protocol):
    """What a Server runs for a task of a service job; made as ``factory(server)``."""

    def close(self) -> None:
        """Local. Serve no more."""


def make_services(tasks: Sequence[Task], server: Any) -> Iterator[Service]:
    """Local. Start what is installed for tasks, one after the other.

    Args:
        tasks: Those of service jobs in this process.
        server: The Server, which has started.

    Raises:
        NotFoundError: Nothing is installed for one.
    """
    from importlib.metadata import entry_points  # slow, and of no use to process groups

    known = {point.name: point for point in entry_points(group="mpidist.services")}
    for job, index in tasks:
        if job not in known:
            raise NotFoundError(
                f"nothing is installed that serves {job} {index}: the distribution mpidist brings "
                "it along; install it (pip install mpidist), do not only put it on the path"
            )
        yield known[job].load()(server)
