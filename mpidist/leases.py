"""Callbacks for the time when the last view of an array is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


class _Lease(weakref.ref[Array]):
    """A weak reference to an array. Its callback runs when the array and all views are deleted."""

    __slots__ = ("memory",)

    memory: Any


class Leases:
    """Calls back when the last view of an array is gone, so that its memory can be used again.

    Args:
        take_back: Called with the memory, on any thread.
    """

    def __init__(self, take_back: Callable[[Any], None]) -> None:
        self._take_back = take_back
        self._leases: dict[int, _Lease] = {}

    def lend(self, array: Array, memory: Any) -> None:
        """Watch an array.

        Args:
            array: An array over foreign memory. Its views keep the array alive.
            memory: The argument of the callback.
        """
        lease = _Lease(array, self._ended)
        lease.memory = memory
        self._leases[id(lease)] = lease

    def lent(self) -> list[Any]:
        """Return the memory of all arrays that are alive."""
        return [lease.memory for lease in list(self._leases.values())]

    def _ended(self, lease: Any) -> None:
        del self._leases[id(lease)]
        self._take_back(lease.memory)
