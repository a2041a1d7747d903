"""Memory that is lent out as arrays, and comes back by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


class _Lease(weakref.ref[Array]):
    """Dies with the array that was handed out, and with every view of it."""

    __slots__ = ("memory",)

    memory: Any


class Leases:
    """Tells when the last view of an array is gone.

    Args:
        take_back: Called then, on any thread, with what was lent.
    """

    def __init__(self, take_back: Callable[[Any], None]) -> None:
        self._take_back = take_back
        self._leases: dict[int, _Lease] = {}

    def lend(self, array: Array, memory: Any) -> None:
        """Local. Watch an array.

        Args:
            array: Made from foreign memory: views of it keep it alive, not what it was made from.
            memory: What is given back.
        """
        lease = _Lease(array, self._ended)
        lease.memory = memory
        self._leases[id(lease)] = lease

    def lent(self) -> list[Any]:
        """Local. What is lent now."""
        return [lease.memory for lease in list(self._leases.values())]

    def __len__(self) -> int:
        return len(self._leases)

    def _ended(self, lease: Any) -> None:
        del self._leases[id(lease)]
        self._take_back(lease.memory)
