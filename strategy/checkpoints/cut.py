"""A consistent cut: what a server has applied when it is saved. Pure.

A push to several servers must be in the checkpoint everywhere or nowhere. Every push says how many
the worker has sent to each server by then (a vector clock; Mattern, "Virtual Time and Global States
of Distributed Systems", 1988). All servers hold what comes, and say what the last push that they
have applied has said of each; the greatest number for a server is up to where it must go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Key = tuple[int, int]
"""Which connection to a server: the worker, and the number of its strategy."""


class Cut:
    """What one server still applies before it is saved.

    Args:
        owner: Number of the connection that saves.
        path: File of the save, by which the save is known.

    Attributes:
        owner: The same.
        path: The same.
        then: What to do when it has been applied.
    """

    def __init__(self, owner: int, path: str) -> None:
        self.owner = owner
        self.path = path
        self._targets: Mapping[Key, int] | None = None
        self.then: Callable[[], None] = _nothing

    def aim(self, targets: Mapping[Key, int], then: Callable[[], None]) -> None:
        """Local. Say up to which push of each connection to go on, and what to do then."""
        self._targets, self.then = targets, then

    def allows(self, key: Key, sequence: int) -> bool:
        """Local. Whether a push may be applied before the server is saved."""
        return self._targets is not None and sequence <= self._targets.get(key, 0)

    def is_reached(self, applied: Mapping[Key, int]) -> bool:
        """Return whether all pushes that are to be saved were applied.

        Closed connections, which are not in ``applied``, have no pushes left.
        """
        targets = self._targets
        return targets is not None and all(
            applied.get(key, sequence) >= sequence for key, sequence in targets.items()
        )


def targets_of(
    said: Sequence[Iterable[tuple[Key, Sequence[int]]]],
) -> list[dict[Key, int]]:
    """Local. Up to which push of each connection every server has to go on.

    Args:
        said: Of each server: for each connection, what the last push that it has applied has said
            of the pushes to all servers.
    """
    targets: list[dict[Key, int]] = [{} for _ in said]
    for server in said:
        for key, sent in server:
            for own, sequence in zip(targets, sent, strict=False):
                own[key] = max(sequence, own.get(key, 0))
    return targets


def _nothing() -> None:
    """Before it is known what to do."""
