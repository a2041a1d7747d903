"""torch's key-value store in the memory of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from mpidist.store import MPIStore


class MpidistStore(dist.Store):
    """An :class:`mpidist.MPIStore` as ``torch.distributed.Store``. It opens no port.

    Args:
        timeout: Time limit for waiting for a key.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._store = MPIStore(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key. Wait until the key has a value."""
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to the number of a key, and return the sum."""
        return self._store.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._store.append(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value."""
        return self._store.check(keys)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set the value of a key if the present value is the expected one."""
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Remove a key. Return whether it had a value."""
        return self._store.delete_key(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys. Wait until all have a value."""
        return self._store.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of several keys."""
        self._store.multi_set(keys, values)

    def num_keys(self) -> int:
        """Return the number of keys with a value."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys with a value."""
        return self._store.list_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Args:
            keys: The keys.
            timeout: Time limit. The default is the time limit of the store.
        """
        self._store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit for waiting for a key."""
        self._store.set_timeout(timeout)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to a queue."""
        self._store.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue."""
        return self._store.queue_pop(key, block)

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue."""
        return self._store.queue_len(key)

    def has_extended_api(self) -> bool:
        """Return True: the store has append, multi_get and multi_set."""
        return True

    def clone(self) -> MpidistStore:
        """Return another store with the same entries and a time limit of its own."""
        return MpidistStore(self._store.timeout)
