"""The interface between a group's submission of operations and the library that runs them."""

from __future__ import annotations

from typing import Protocol

from mpidist.group.operation import Op
from mpidist.work import Work


class Backend(Protocol):
    """Runs the operations of one group.

    A backend raises ``error`` and its subclasses for failures of its library. Other exceptions,
    such as ValueError, report wrong arguments or come from a signal handler.
    """

    error: type[Exception]

    def run(self, op: Op) -> None:
        """Run an operation and return when it has ended on this rank.

        Collective, or point to point. A receive from any peer sets ``op.root`` to the sender.
        """

    def start(self, op: Op) -> Work:
        """Start an operation and return its Work. Collective, or point to point.

        The backend registers the Work as pending until it has ended.
        """

    def free(self) -> None:
        """Release the communicator. Collective; no operation is pending."""
