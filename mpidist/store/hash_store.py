"""A store in the memory of one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

from mpidist.store.base import Store
from mpidist.store.operations import ADDS, MemoryEntries, carry_out


class HashStore(Store):
    """A store for the threads of one process; as torch's ``HashStore``."""

    def __init__(self) -> None:
        super().__init__()
        self._entries = MemoryEntries()
        self._changed = threading.Condition()

    def clone(self) -> HashStore:
        """Local. Another store with the same entries, and a time limit of its own."""
        return copy.copy(self)

    def _carry_out(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        with self._changed:
            result: list[bytes] | None = None

            def is_done() -> bool:
                nonlocal result
                result = carry_out(self._entries, operation, keys, values)
                return result is not None

            self._changed.wait_for(is_done, limit_s)
            if operation in ADDS:
                self._changed.notify_all()
            return result

    def __repr__(self) -> str:
        return "HashStore()"
