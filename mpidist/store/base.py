"""What all stores have in common: their methods, in terms of one step each can do."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from operator import index

from mpidist.errors import DistStoreError, QueueEmptyError
from mpidist.runtime.exits import exits, installed
from mpidist.work import Timeout, seconds

DEFAULT_TIMEOUT = timedelta(seconds=300)

Value = str | bytes | bytearray

_LONGEST_S = threading.TIMEOUT_MAX / 2  # the same as none
_SHOWN_KEYS = 5
_SHOWN_CHARACTERS = 60


class Store(ABC):
    """Values by key, and queues by key, for threads, processes or ranks; as torch's ``Store``.

    Keys are str. Values are str or bytes, and come back as bytes. Every call is one step that no
    other call comes between. A queue and a value may have the same key: ``check`` and ``wait``
    look at both, ``get``, ``list_keys``, ``num_keys`` and ``delete_key`` only at values.

    Args:
        timeout: How long calls wait for a key, in seconds or as a timedelta.
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        Store.set_timeout(self, timeout)

    # What a store implements

    @abstractmethod
    def _carry_out(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        """One operation of :mod:`mpidist.store.operations`; None if the limit passed first."""

    @abstractmethod
    def clone(self) -> Store:
        """Local. Another store with the same entries, and a time limit of its own."""

    # Values

    def set(self, key: str, value: Value) -> None:
        """Local. Give a key a value, whether or not it has one.

        Args:
            key: The key.
            value: The value; a str is stored as UTF-8.

        Raises:
            DistStoreError: The store cannot be reached; so for all methods.
            TypeError: The key is no str, or the value neither str nor bytes; so for all methods.
        """
        self._do("set", [_checked_key(key)], [_as_bytes(value)])

    def get(self, key: str) -> bytes:
        """Local. The value of a key; waits until it has one.

        Args:
            key: The key.

        Raises:
            DistStoreError: It has none within the time limit.
        """
        return self._do("get", [_checked_key(key)])[0]

    def add(self, key: str, amount: int) -> int:
        """Local. Add to the number that a key holds; to 0 if it has no value or an empty one.

        Args:
            key: The key; its value is kept as decimal digits.
            amount: An integer of 64 bits.

        Returns:
            The sum.

        Raises:
            ValueError: The value does not begin with a number, or the sum takes over 64 bits.
        """
        return int(self._do("add", [_checked_key(key)], [b"%d" % index(amount)])[0])

    def append(self, key: str, value: Value) -> None:
        """Local. Add to the end of a key's value; set it if there is none.

        Args:
            key: The key.
            value: What to add.
        """
        self._do("append", [_checked_key(key)], [_as_bytes(value)])

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Local. Set a value if the present one is as expected.

        Args:
            key: The key.
            expected_value: What it should have; empty also stands for no value.
            desired_value: What it gets then.

        Returns:
            The value that the key has afterwards; ``expected_value`` if it has none.
        """
        values = [_as_bytes(expected_value), _as_bytes(desired_value)]
        return self._do("compare_set", [_checked_key(key)], values)[0]

    def delete_key(self, key: str) -> bool:
        """Local. Remove a key and its value.

        Args:
            key: The key.

        Returns:
            Whether it had a value.
        """
        return self._do("delete", [_checked_key(key)]) == [b"1"]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Local. The values of several keys, of one moment; waits until all have one.

        Args:
            keys: The keys.

        Raises:
            DistStoreError: Not all have one within the time limit.
        """
        return self._do("get", _checked_keys(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Local. Give several keys values, all at once.

        Args:
            keys: The keys.
            values: As many values.

        Raises:
            ValueError: There are not as many values as keys.
        """
        checked = _checked_keys(keys)
        if isinstance(values, Value):
            raise TypeError(f"values must be a list of values, not {type(values).__name__}")
        data = [_as_bytes(value) for value in values]
        if len(checked) != len(data):
            raise ValueError(f"{self!r}: multi_set got {len(checked)} keys and {len(data)} values")
        self._do("set", checked, data)

    # What is there

    def check(self, keys: Sequence[str]) -> bool:
        """Local. Whether all keys have a value, or a queue that is not empty.

        Args:
            keys: The keys.
        """
        return self._do("check", _checked_keys(keys)) == [b"1"]

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Local. Wait until all keys have a value, or a queue that is not empty.

        Args:
            keys: The keys.
            timeout: Seconds or a timedelta; by default the store's.

        Raises:
            DistStoreError: Not all have within the time limit.
        """
        self._do("wait", _checked_keys(keys), timeout=timeout)

    def num_keys(self) -> int:
        """Local. How many keys have a value."""
        return int(self._do("count", [])[0])

    def list_keys(self) -> list[str]:
        """Local. All keys that have a value, in any order."""
        return [key.decode() for key in self._do("list", [])]

    # Queues

    def queue_push(self, key: str, value: Value) -> None:
        """Local. Add a value at the end of a queue.

        Args:
            key: Of the queue.
            value: The value.
        """
        self._do("push", [_checked_key(key)], [_as_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Local. Take the first value of a queue.

        Args:
            key: Of the queue.
            block: Whether to wait for one.

        Raises:
            QueueEmptyError: There is none, and ``block`` is False.
            DistStoreError: There is none within the time limit.
        """
        found = self._do("pop" if block else "pop_now", [_checked_key(key)])
        if not found:
            raise QueueEmptyError(f"{self._here()}: the queue {_shown([key])} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        """Local. How many values a queue has; 0 if there is none of this key.

        Args:
            key: Of the queue.
        """
        return int(self._do("length", [_checked_key(key)])[0])

    # All together

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Collective over ``world_size`` callers. Wait until as many have called it.

        Args:
            key: Of this barrier. It serves once: who comes after all have come does not wait.
            world_size: How many callers there are.
            timeout: Seconds or a timedelta; by default the store's.

        Raises:
            DistStoreError: Not all have come within the time limit.
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
        """How long calls wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Local. Set how long calls of this object wait for a key.

        Args:
            timeout: Seconds or a timedelta; 0 does not wait.

        Raises:
            ValueError: It is negative.
        """
        limit_s = seconds(timeout)
        if limit_s is None:
            raise TypeError("a store's time limit must be seconds or a timedelta, not None")
        self._timeout = timedelta(seconds=min(limit_s, _LONGEST_S))

    def has_extended_api(self) -> bool:
        """Local. True: every store has append, multi_get, multi_set and the queues."""
        return True

    # Inside

    def _do(
        self,
        operation: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        timeout: Timeout = None,
    ) -> list[bytes]:
        limit_s = seconds(self.timeout if timeout is None else timeout) or 0.0
        limit_s = min(limit_s, _LONGEST_S)
        result = self._carry_out(operation, keys, values, limit_s)
        if result is None:
            what = "nothing in the queue" if operation == "pop" else "no value for"
            raise DistStoreError(
                f"{self._here()}: {what} {_shown(keys)} within {limit_s:g} s: another thread, "
                "process or rank must put it there; set_timeout() changes the limit"
            )
        return result

    def _here(self) -> str:
        """The store, and the rank if this is one, for messages."""
        return f"{self!r} on rank {exits().world.rank}" if installed() else repr(self)


def _checked_key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    key.encode()  # what has no UTF-8 is refused here, by all stores
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
