"""A copy of the variables of a server at one time, made while pushes are applied."""

from __future__ import annotations

import threading

import numpy as np

from mpidist.checkpoints.core_sharing import PIECE_BYTES, CoreSharing
from strategy.checkpoints.parts import PartState
from strategy.protocol.cluster import Bytes


class Snapshot:
    """A copy of variables and slots, which copies a variable at the latest before it changes.

    This is copy on write. A thread calls :meth:`finish`, which copies one variable after the other.
    The server calls :meth:`copy` before it changes a variable.

    Args:
        state: The variables and slots.
        memory: Memory for the copies, of ``state.nbytes`` bytes.

    Attributes:
        copies: The copies. They are complete after :meth:`finish`.
    """

    def __init__(self, state: PartState, memory: Bytes) -> None:
        self.copies = state.placed_in(memory)
        # For each variable a lock, and the pairs of arrays that are left to copy.
        self._left = {
            name: (
                threading.Lock(),
                list(zip(self.copies.variables[name].values(), arrays.values(), strict=True)),
            )
            for name, arrays in state.variables.items()
        }

    def copy(self, variable: str, sharing: CoreSharing | None = None) -> None:
        """Copy a variable and its slots, unless they are copied. Any thread may call it.

        Args:
            variable: Name of the variable.
            sharing: Shares the core of this thread; by default the thread does not share it.
        """
        found = self._left.get(variable)
        if found is None:  # the variable is newer
            return
        lock, pairs = found
        with lock:
            for target, source in pairs:
                flat, values = target.reshape(-1), source.reshape(-1)
                step = max(1, PIECE_BYTES // target.itemsize)
                for start in range(0, flat.size, step):
                    np.copyto(flat[start : start + step], values[start : start + step])
                    if sharing is not None:
                        sharing.share()
            pairs.clear()

    def finish(self) -> None:
        """Copy all variables that are left."""
        sharing = CoreSharing()
        for name in self._left:
            self.copy(name, sharing)
