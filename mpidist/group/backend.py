"""The interface between a group's submission of operations and the library that runs them."""

from __future__ import annotations

from typing import Protocol

from mpidist.group.operation import Op
from mpidist.work import Work


class Backend(Protocol):
    """Runs the operations of one group.

    MpiBackend raises MPI.Exception, which the submission maps to DistBackendError. The others raise
    DistBackendError themselves.
    """

    def run(self, op: Op) -> None:
        """Run an operation and return when it has ended on this rank.

        Collective, or point to point. A receive from any peer sets ``op.root`` to the sender. The
        caller then calls ``op.finish``.
        """

    def start(self, op: Op) -> Work:
        """Start an operation and return its Work. Collective, or point to point.

        The backend registers the Work as pending until it has ended. The Work calls ``op.finish``
        before it ends.
        """

    def free(self) -> object:
        """Release the communicator. Collective; no operation is pending."""
