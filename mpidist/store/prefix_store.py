"""A part of another store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mpidist.store.base import Store


class PrefixStore(Store):
    """Another store, with a prefix before each key; as torch's ``PrefixStore``.

    The time limit is that of the other store, and ``num_keys`` counts all its keys.

    Args:
        prefix: Keys become ``"<prefix>/<key>"``.
        store: The other store; it may be a PrefixStore too.

    Raises:
        TypeError: The prefix is no str, or the store is none.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"a prefix must be a str, not {type(prefix).__name__}")
        if not isinstance(store, Store):
            raise TypeError(f"a PrefixStore needs a Store, not {type(store).__name__}")
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that was given."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """How long calls of the underlying store wait for a key."""
        return self._store.timeout

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Local. Set the underlying store's time limit.

        Args:
            timeout: Seconds or a timedelta; 0 does not wait.

        Raises:
            ValueError: It is negative.
        """
        self._store.set_timeout(timeout)

    def list_keys(self) -> list[str]:
        """Local. All keys with this prefix that have a value, without the prefix."""
        start = f"{self._prefix}/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def clone(self) -> PrefixStore:
        """Local. The same prefix before a clone of the underlying store."""
        return PrefixStore(self._prefix, self._store.clone())

    def _carry_out(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        full = [f"{self._prefix}/{key}" for key in keys]
        return self._store._carry_out(operation, full, values, limit_s)

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
