"""Which ps task a variable lives on. Pure.

All workers create the same variables in the same order, so that all come to the same result without
asking each other.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import md5

import numpy as np

from strategy.shared.shard import Layout

Place = Callable[[str, tuple[int, ...], "np.dtype[np.generic]"], int]
"""From the name, shape and dtype of a new variable to the index of a ps task."""

PLACEMENTS = ("bytes", "round_robin", "hash")


# From when on an imbalance is worth a word: times the mean, and bytes beyond it.
_UNEVEN, _UNEVEN_BYTES = 1.5, 1 << 20


class Placement:
    """Where new variables go.

    Args:
        placement: One of :data:`PLACEMENTS`, or a function; see :data:`Place`. None, which
            :func:`replica_device_setter` gives without ps tasks: ``"bytes"``.
        servers: Number of ps tasks.
        alone: Whether this is local mode, where the last ps task stands for all that a job has.

    Raises:
        TypeError: It is neither a name nor a function.
        ValueError: The name is unknown.
    """

    def __init__(self, placement: str | Place | None, servers: int, alone: bool = False) -> None:
        placement = PLACEMENTS[0] if placement is None else placement
        own: dict[str, Place] = dict(
            zip(PLACEMENTS, (self._by_bytes, self._in_turn, self._by_name), strict=True)
        )
        if isinstance(placement, str):
            if placement not in own:
                known = ", ".join(map(repr, PLACEMENTS))
                raise ValueError(f"unknown placement {placement!r}; the known ones are {known}")
            self._choose = own[placement]
        elif callable(placement):
            self._choose = placement
        else:
            raise TypeError(f"a placement is one of {PLACEMENTS} or a function, not {placement!r}")
        self._loads = [0] * servers
        self._alone = alone
        self._count = 0

    def imbalance(self) -> str:
        """Local. What is wrong with where variables are, in words; nothing if it is fine.

        The ps task with the most bytes takes the longest: others wait for it.
        """
        most, mean = max(self._loads), sum(self._loads) / len(self._loads)
        if most <= _UNEVEN * mean or most - mean <= _UNEVEN_BYTES:
            return ""
        shares = ", ".join(f"{load / (1 << 20):,.1f}" for load in self._loads)
        return (
            f"variables are spread unevenly: {shares} MiB on the ps tasks, in their order; every "
            f"step waits for the fullest, which has {most / mean:.1f} times the mean. Divide large "
            "variables by a partitioner, and leave the placement at 'bytes'"
        )

    def choose(self, name: str, layout: Layout) -> int:
        """Local. Index of the ps task for a new variable; changes nothing.

        Raises:
            TypeError: The user's function gives no index.
            ValueError: It gives one that is not there.
        """
        server = self._choose(name, layout.shape, layout.dtype)
        if isinstance(server, bool) or not isinstance(server, int | np.integer):
            raise TypeError(f"the placement of variable {name!r} gives {server!r}, no index")
        if self._alone and server >= len(self._loads):
            server = len(self._loads) - 1
        if not 0 <= server < len(self._loads):
            raise ValueError(
                f"the placement of variable {name!r} gives ps {server}, and there are "
                f"{len(self._loads)}"
            )
        return int(server)

    def note(self, server: int, layout: Layout) -> None:
        """Local. A variable is created there."""
        # A server of many tiny variables is not idle: count an entry's overhead too.
        self._loads[server] += layout.data_bytes + 64
        self._count += 1

    def forget(self, server: int, layout: Layout) -> None:
        """Local. It has not been created after all."""
        self._loads[server] -= layout.data_bytes + 64
        self._count -= 1

    def _by_bytes(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """The server with the fewest bytes so far, the first of several."""
        return min(range(len(self._loads)), key=self._loads.__getitem__)

    def _in_turn(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """One server after the other, as TensorFlow has it."""
        return self._count % len(self._loads)

    def _by_name(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """By the name alone: where a variable lives does not depend on the others."""
        digest = md5(name.encode(), usedforsecurity=False).digest()
        return int.from_bytes(digest, "big") % len(self._loads)
