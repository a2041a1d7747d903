"""A consistent cut: the pushes that a checkpoint contains. Pure.

A push to several servers must be in the checkpoint on all of them or on none. Every push carries
the sequence numbers of the worker's last pushes to all servers (a vector clock; Mattern, "Virtual
Time and Global States of Distributed Systems", 1988). At a save, every server holds new pushes and
returns the vector clock of the last push that it has applied from each connection. The greatest
number for a server is the last push that the server applies before it writes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Key = tuple[int, str]
"""A connection to a server: the index of the worker and the name of its strategy."""


class Cut:
    """The pushes that one server still applies before it writes its part of a checkpoint.

    Args:
        owner: Number of the connection that saves.
        path: Path of the server's file, which identifies the save.

    Attributes:
        owner: The argument.
        path: The argument.
        then: The function to call when these pushes have been applied.
    """

    def __init__(self, owner: int, path: str) -> None:
        self.owner = owner
        self.path = path
        self._targets: Mapping[Key, int] | None = None
        self.then: Callable[[], None] = _nothing

    def aim(self, targets: Mapping[Key, int], then: Callable[[], None]) -> None:
        """Set the last push to apply of each connection, and the function to call afterwards."""
        self._targets, self.then = targets, then

    def allows(self, key: Key, sequence: int) -> bool:
        """Return whether a push may be applied before the server writes its part."""
        return self._targets is not None and sequence <= self._targets.get(key, 0)

    def is_reached(self, applied: Mapping[Key, int]) -> bool:
        """Return whether all pushes of the cut have been applied.

        Closed connections, which are not in ``applied``, have no pushes left.
        """
        targets = self._targets
        return targets is not None and all(
            applied.get(key, sequence) >= sequence for key, sequence in targets.items()
        )


def targets_of(
    said: Mapping[int, Iterable[tuple[Key, Sequence[int]]]],
) -> dict[int, dict[Key, int]]:
    """Return, for each server, the sequence number of each connection's last push in the cut.

    Args:
        said: For each ps task and connection, the vector clock of the last applied push, by index
            of the ps task.
    """
    targets: dict[int, dict[Key, int]] = {index: {} for index in said}
    for clocks in said.values():
        for key, sent in clocks:
            for index, own in targets.items():
                if index < len(sent):
                    own[key] = max(sent[index], own.get(key, 0))
    return targets


def _nothing() -> None:
    """Do nothing. This is ``Cut.then`` before :meth:`Cut.aim`."""
