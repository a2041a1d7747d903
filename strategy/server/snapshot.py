"""A copy of the variables of a server at one time, made while pushes are applied."""

from __future__ import annotations

import threading

import numpy as np

from mpidist.checkpoints.core_sharing import CHUNK_BYTES, CoreSharing
from strategy.checkpoints.parts import PartState
from strategy.protocol.cluster import Bytes


class Snapshot:
    """The variables and slots of a server at one time (copy on write).

    A thread calls :meth:`finish`, which copies one variable after the other. The server calls
    :meth:`copy` before a push changes a variable. A restore needs no call: the worker that saves
    keeps restores out until the save has ended.

    Args:
        state: The variables and slots.
        memory: Buffer for the copies, of ``state.nbytes`` bytes.

    Attributes:
        copies: The copies. They are complete after :meth:`finish`.
    """

    def __init__(self, state: PartState, memory: Bytes) -> None:
        self.copies = state.empty_like(memory)
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
            sharing: Yields between chunks; by default there are no yields, since a push waits.
        """
        found = self._left.get(variable)
        if found is None:  # the variable had no initial value yet
            return
        lock, pairs = found
        with lock:
            for target, source in pairs:
                flat, values = target.reshape(-1), source.reshape(-1)
                step = max(1, CHUNK_BYTES // target.itemsize)
                for start in range(0, flat.size, step):
                    np.copyto(flat[start : start + step], values[start : start + step])
                    if sharing is not None:
                        sharing.yield_if_due()
            pairs.clear()

    def finish(self) -> None:
        """Copy all variables that are left."""
        sharing = CoreSharing()
        for name in self._left:
            self.copy(name, sharing)
