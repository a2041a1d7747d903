"""Store, the base class of key-value stores, and PrefixStore."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from operator import index

from mpidist.errors import DistStoreError, QueueEmptyError
from mpidist.mpi import started_world
from mpidist.work import Timeout, seconds

DEFAULT_TIMEOUT = timedelta(seconds=300)

Value = str | bytes | bytearray

_LONGEST_S = threading.TIMEOUT_MAX / 2  # stands for no limit
_SHOWN_KEYS = 5
_SHOWN_CHARACTERS = 60


class Store(ABC):
    """A key-value store with queues, for threads, processes or ranks; as torch's ``Store``.

    Keys are str. Values are str or bytes, and are returned as bytes. Every call is atomic. A queue
    and a value may have the same key: ``check`` and ``wait`` see both, ``get``, ``list_keys``,
    ``num_keys`` and ``delete_key`` see values only.

    Args:
        timeout: Time limit for waiting for a key, in seconds or as a timedelta.
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        Store.set_timeout(self, timeout)

    # For subclasses

    @abstractmethod
    def _execute(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        """Execute an operation of :mod:`mpidist.store.operations`; return None at the limit."""

    @abstractmethod
    def clone(self) -> Store:
        """Return another store with the same entries and a time limit of its own."""

    # Values

    def set(self, key: str, value: Value) -> None:
        """Set the value of a key.

        Args:
            key: The key.
            value: The value; a str is stored as UTF-8.

        Raises:
            DistStoreError: The store cannot be reached. All methods raise it.
            TypeError: The key is not a str, or the value is neither str nor bytes. All methods
                raise it.
        """
        self._run("set", [_checked_key(key)], [_as_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return the value of a key. Wait until the key has a value.

        Raises:
            DistStoreError: The key has no value within the time limit.
        """
        return self._run("get", [_checked_key(key)])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key. A missing or empty value counts as 0.

        Args:
            key: The key; its value is stored as decimal digits.
            amount: An integer of 64 bits.

        Returns:
            The sum.

        Raises:
            ValueError: The value does not begin with a number, or the sum exceeds 64 bits.
        """
        return int(self._run("add", [_checked_key(key)], [b"%d" % index(amount)])[0])

    def append(self, key: str, value: Value) -> None:
        """Append to the value of a key. A missing value counts as empty."""
        self._run("append", [_checked_key(key)], [_as_bytes(value)])

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set the value of a key if the present value is the expected one.

        Args:
            key: The key.
            expected_value: The expected value; an empty one also matches a missing value.
            desired_value: The new value.

        Returns:
            The value of the key after the call, or ``expected_value`` if the key has none.
        """
        values = [_as_bytes(expected_value), _as_bytes(desired_value)]
        return self._run("compare_set", [_checked_key(key)], values)[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key and its value.

        Returns:
            True if the key had a value.
        """
        return self._run("delete", [_checked_key(key)]) == [b"1"]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys in one atomic step. Wait until all have a value.

        Raises:
            DistStoreError: A key has no value within the time limit.
        """
        return self._run("get", _checked_keys(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set the values of several keys in one atomic step.

        Args:
            keys: The keys.
            values: One value for each key.

        Raises:
            ValueError: The numbers of keys and values differ.
        """
        checked = _checked_keys(keys)
        if isinstance(values, Value):
            raise TypeError(f"values must be a list of values, not {type(values).__name__}")
        data = [_as_bytes(value) for value in values]
        if len(checked) != len(data):
            raise ValueError(f"{self!r}: multi_set got {len(checked)} keys and {len(data)} values")
        self._run("set", checked, data)

    # Keys

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have a value or a queue that is not empty."""
        return self._run("check", _checked_keys(keys)) == [b"1"]

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Wait until all keys have a value or a queue that is not empty.

        Args:
            keys: The keys.
            timeout: Seconds or a timedelta; by default the store's.

        Raises:
            DistStoreError: A key has neither within the time limit.
        """
        self._run("wait", _checked_keys(keys), timeout=timeout)

    def num_keys(self) -> int:
        """Return the number of keys that have a value."""
        return int(self._run("count", [])[0])

    def list_keys(self) -> list[str]:
        """Return all keys that have a value, in any order."""
        return list(json.loads(self._run("list", [])[0]))

    # Queues

    def queue_push(self, key: str, value: Value) -> None:
        """Append a value to a queue."""
        self._run("push", [_checked_key(key)], [_as_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue.

        Args:
            key: The key of the queue.
            block: Whether to wait for a value.

        Raises:
            QueueEmptyError: The queue is empty, and ``block`` is False.
            DistStoreError: The queue stays empty within the time limit.
        """
        found = self._run("pop" if block else "pop_now", [_checked_key(key)])
        if not found:
            raise QueueEmptyError(f"{self._here()}: the queue {_shown([key])} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue, 0 if the queue does not exist."""
        return int(self._run("length", [_checked_key(key)])[0])

    # Barrier

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Collective over ``world_size`` callers. Wait until all have called.

        Args:
            key: The key of the barrier. A barrier works once: later calls return at once.
            world_size: Number of callers.
            timeout: Seconds or a timedelta; by default the store's.

        Raises:
            DistStoreError: A caller is missing within the time limit.
            ValueError: ``world_size`` is not positive.
        """
        if index(world_size) < 1:
            raise ValueError(f"a barrier needs at least one caller, not {world_size}")
        last = f"{_checked_key(key)}/last_member"
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(last, "1")
        self.wait([last], timeout)

    # The time limit

    @property
    def timeout(self) -> timedelta:
        """The time limit for waiting for a key."""
        return self._timeout

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set the time limit of this object for waiting for a key.

        Args:
            timeout: Seconds or a timedelta; 0 does not wait.

        Raises:
            ValueError: The limit is negative.
        """
        limit_s = seconds(timeout)
        if limit_s is None:
            raise TypeError("a store's time limit must be seconds or a timedelta, not None")
        self._timeout = timedelta(seconds=min(limit_s, _LONGEST_S))

    def has_extended_api(self) -> bool:
        """Return True: every store has append, multi_get, multi_set and the queues."""
        return True

    # Internals

    def _run(
        self,
        operation: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        timeout: Timeout = None,
    ) -> list[bytes]:
        limit_s = seconds(self.timeout if timeout is None else timeout) or 0.0
        limit_s = min(limit_s, _LONGEST_S)
        result = self._execute(operation, keys, values, limit_s)
        if result is None:
            missing = "nothing in the queue" if operation == "pop" else "no value for"
            raise DistStoreError(
                f"{self._here()}: {missing} {_shown(keys)} within {limit_s:g} s: another thread, "
                "process or rank must put it there; set_timeout() changes the limit"
            )
        return result

    def _here(self) -> str:
        """Return the name of the store and the rank, for messages."""
        here = started_world()
        return repr(self) if here is None else f"{self!r} on rank {here.rank}"


class PrefixStore(Store):
    """A view of another store, with a prefix on each key; as torch's ``PrefixStore``.

    The time limit is the other store's, and ``num_keys`` counts all keys of the other store.

    Args:
        prefix: Keys become ``"<prefix>/<key>"``.
        store: The other store; it may be a PrefixStore too.

    Raises:
        TypeError: The prefix is not a str, or the store is not a Store.
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
        """The other store."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The time limit of the other store."""
        return self._store.timeout

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set the time limit of the other store; see :meth:`Store.set_timeout`."""
        self._store.set_timeout(timeout)

    def list_keys(self) -> list[str]:
        """Return all keys that have this prefix and a value, without the prefix."""
        start = f"{self._prefix}/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def clone(self) -> PrefixStore:
        """Return a view of a clone of the other store, with the same prefix."""
        return PrefixStore(self._prefix, self._store.clone())

    def _execute(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        full = [f"{self._prefix}/{key}" for key in keys]
        return self._store._execute(operation, full, values, limit_s)

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"


def _checked_key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    key.encode()  # raises UnicodeEncodeError for lone surrogates, in all stores alike
    return key


def _checked_keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys must be a list of str, not one {type(keys).__name__}")
    return [_checked_key(key) for key in keys]


def _as_bytes(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"a value must be str or bytes, not {type(value).__name__}")
    return bytes(value)


def _shown(keys: Sequence[str]) -> str:
    names = [
        repr(key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}...")
        for key in keys[:_SHOWN_KEYS]
    ]
    more = len(keys) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
