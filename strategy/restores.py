"""Which checkpoints a server has restored, and for whom. Pure.

All workers restore the same checkpoints in the same order; the first one to come has each carried
out. A server counts the restores that it has completed for each worker. A worker takes the least
of the servers' counts, so that a restore that failed on one of them keeps its number when it is
repeated.
"""

from __future__ import annotations

from mpidist import errors


class Restores:
    """The restores of one server."""

    def __init__(self) -> None:
        self._done: list[tuple[str, int]] = []  # the checkpoint, and who came first
        self._counts: dict[int, int] = {}

    def count(self, worker: int) -> int:
        """Local. How many restores have been completed for a worker."""
        return self._counts.get(worker, 0)

    def is_due(self, worker: int, ordinal: int, checkpoint: str) -> bool:
        """Local. Whether a restore is still to be carried out.

        Args:
            worker: Who asks.
            ordinal: Number of the restore among the worker's, from 1.
            checkpoint: What it restores.

        Raises:
            InvalidArgumentError: Another worker restored another checkpoint at this place.
        """
        if ordinal > len(self._done):
            return True
        known, first = self._done[ordinal - 1]
        if checkpoint == known:
            return False
        # A worker that repeats its own number has failed on another server: nobody depends on it.
        if first == worker and ordinal == len(self._done):
            return True
        raise errors.InvalidArgumentError(
            f"worker {worker} restores {checkpoint!r} as its restore number {ordinal}, and worker "
            f"{first} restored {known!r} as number {ordinal}: all workers must restore the same "
            "checkpoints in the same order; let one choose the path and tell the others"
        )

    def complete(self, worker: int, ordinal: int, checkpoint: str) -> None:
        """Local. Note a restore, carried out now or before; arguments as :meth:`is_due`."""
        if self.is_due(worker, ordinal, checkpoint):
            self._done[ordinal - 1 :] = [(checkpoint, worker)]
        self._counts[worker] = ordinal
