"""What can be done to the entries of a store, as functions. Pure.

Every store carries the same operations out, each as one step that no other comes between: in
memory under a lock, in a file in a transaction, over MPI in one handler.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

_WHOLE_NUMBER = re.compile(rb"\s*([+-]?\d+)")
_LARGEST = (1 << 63) - 1


class Entries(Protocol):
    """Values and queues by key; a key may have both, and they do not know of each other."""

    def get(self, key: str) -> bytes | None:
        """Local. The value of a key; None if there is none."""

    def put(self, key: str, value: bytes) -> None:
        """Local. Give a key a value."""

    def remove(self, key: str) -> bool:
        """Local. Remove a key and its value; whether there was one."""

    def names(self) -> list[str]:
        """Local. All keys that have a value."""

    def count(self) -> int:
        """Local. How many keys have a value."""

    def push(self, key: str, value: bytes) -> None:
        """Local. Add a value at the end of a queue."""

    def pop(self, key: str) -> bytes | None:
        """Local. Take the first value of a queue; None if it is empty."""

    def length(self, key: str) -> int:
        """Local. How many values a queue has."""


class MemoryEntries:
    """Entries in memory; see :class:`Entries`. Not safe for threads by itself."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}

    def get(self, key: str) -> bytes | None:
        """Local. See :class:`Entries`."""
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Local. See :class:`Entries`."""
        self._values[key] = value

    def remove(self, key: str) -> bool:
        """Local. See :class:`Entries`."""
        return self._values.pop(key, None) is not None

    def names(self) -> list[str]:
        """Local. See :class:`Entries`."""
        return list(self._values)

    def count(self) -> int:
        """Local. See :class:`Entries`."""
        return len(self._values)

    def push(self, key: str, value: bytes) -> None:
        """Local. See :class:`Entries`."""
        self._queues.setdefault(key, deque()).append(value)

    def pop(self, key: str) -> bytes | None:
        """Local. See :class:`Entries`."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return value

    def length(self, key: str) -> int:
        """Local. See :class:`Entries`."""
        return len(self._queues.get(key, ()))


def carry_out(
    entries: Entries, operation: str, keys: Sequence[str], values: Sequence[bytes]
) -> list[bytes] | None:
    """Local. Do one operation to entries.

    Args:
        entries: The entries.
        operation: A name of the table below.
        keys: The keys that it concerns.
        values: The values that it brings.

    Returns:
        What it gives, numbers as decimal digits; None if it has to wait for one of the keys, and
        nothing was changed.

    Raises:
        ValueError: The value to add to is no number of 64 bits.
    """
    return _OPERATIONS[operation](entries, keys, values)


def _set(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    for key, value in zip(keys, values, strict=True):
        entries.put(key, value)
    return []


def _get(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes] | None:
    found = []
    for key in keys:
        value = entries.get(key)
        if value is None:
            return None
        found.append(value)
    return found


def _add(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    (key,), (amount,) = keys, values
    before = entries.get(key)
    total = int(amount) + (_number(key, before) if before else 0)
    if not -_LARGEST - 1 <= total <= _LARGEST:
        raise ValueError(f"key {key!r}: the sum {total} does not fit into 64 bits")
    entries.put(key, b"%d" % total)
    return [b"%d" % total]


def _number(key: str, value: bytes) -> int:
    """The number that a value begins with, as C reads it: torch takes what follows for nothing."""
    match = _WHOLE_NUMBER.match(value)
    if match is None:
        raise ValueError(f"key {key!r} holds {value[:40]!r}, which is no number to add to")
    return int(match[1])


def _append(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    (key,), (value,) = keys, values
    entries.put(key, (entries.get(key) or b"") + value)
    return []


def _compare_set(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    (key,), (expected, desired) = keys, values
    before = entries.get(key)
    if before is None and expected:
        return [expected]
    if before is not None and before != expected:
        return [before]
    entries.put(key, desired)
    return [desired]


def _check(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    there = all(entries.get(key) is not None or entries.length(key) for key in keys)
    return [b"%d" % there]


def _wait(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes] | None:
    return [] if _check(entries, keys, values) == [b"1"] else None


def _delete(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [b"%d" % entries.remove(keys[0])]


def _list(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [key.encode() for key in entries.names()]


def _count(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [b"%d" % entries.count()]


def _push(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    entries.push(keys[0], values[0])
    return []


def _pop(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes] | None:
    value = entries.pop(keys[0])
    return None if value is None else [value]


def _pop_now(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return _pop(entries, keys, values) or []


def _length(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [b"%d" % entries.length(keys[0])]


_OPERATIONS: dict[str, Callable[[Entries, Sequence[str], Sequence[bytes]], list[bytes] | None]] = {
    "set": _set,
    "get": _get,
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "check": _check,
    "wait": _wait,
    "delete": _delete,
    "list": _list,
    "count": _count,
    "push": _push,
    "pop": _pop,
    "pop_now": _pop_now,
    "length": _length,
}

ADDS = frozenset({"set", "add", "append", "compare_set", "push"})
"""After these, others that wait may go on."""

READS = frozenset({"get", "check", "wait", "list", "count", "length"})
"""These change nothing."""
