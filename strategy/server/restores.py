"""Which checkpoints a server has restored, and for whom. Pure.

All workers restore the same checkpoints in the same order; the first one to come has each carried
out. A server counts the restores that it has completed for each worker. A worker takes the least
of the servers' counts, so that a restore that failed on one of them keeps its number when it is
repeated.
"""

from __future__ import annotations

from typing import NamedTuple

from mpidist import errors


class Wish(NamedTuple):
    """A worker's wish that a checkpoint be restored.

    Attributes:
        worker: Its index.
        ordinal: Number of the restore among the worker's, from 1.
        path: Of the checkpoint.
        content: What the checkpoint's index says; nothing if the worker does not see it.
    """

    worker: int
    ordinal: int
    path: str
    content: bytes = b""


class Restores:
    """The restores of one server."""

    def __init__(self) -> None:
        self._done: list[Wish] = []  # of those who came first
        self._counts: dict[int, int] = {}

    def count(self, worker: int) -> int:
        """Local. How many restores have been completed for a worker."""
        return self._counts.get(worker, 0)

    def is_due(self, wish: Wish) -> bool:
        """Local. Whether a restore is still to be carried out.

        Raises:
            InvalidArgumentError: Another worker restored another checkpoint at this place.
        """
        worker, ordinal, path, content = wish
        if ordinal > len(self._done):
            return True
        first = self._done[ordinal - 1]
        alike = content == first.content or not (content and first.content)
        if path == first.path and alike:
            return False
        # A worker that repeats its own number has failed on another server: nobody depends on it.
        if first.worker == worker and ordinal == len(self._done):
            return True
        same_name = ", which is another one of this name," if path == first.path else ""
        raise errors.InvalidArgumentError(
            f"worker {worker} restores {path!r} as its restore number {ordinal}, and worker "
            f"{first.worker} restored {first.path!r}{same_name} as number {ordinal}: all workers "
            "must restore the same checkpoints in the same order; let one choose the path and tell "
            "the others"
        )

    def complete(self, wish: Wish) -> None:
        """Local. Note a restore, carried out now or before."""
        if self.is_due(wish):
            self._done[wish.ordinal - 1 :] = [wish]
        self._counts[wish.worker] = wish.ordinal
