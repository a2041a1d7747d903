"""The operations of stores, as pure functions on entries.

All stores use this table. Each operation is atomic: under a lock in memory, in a transaction of a
file, in one handler over MPI.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Sequence

_WHOLE_NUMBER = re.compile(rb"\s*([+-]?\d+)")
_LARGEST = (1 << 63) - 1


class Entries:
    """Values and queues by key, in memory. A key may have both, which are independent.

    A subclass may keep them elsewhere. Callers hold a lock.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._values[key] = value

    def remove(self, key: str) -> bool:
        """Remove the value of a key; return whether it existed."""
        return self._values.pop(key, None) is not None

    def names(self) -> list[str]:
        """Return all keys that have a value."""
        return list(self._values)

    def push(self, key: str, value: bytes) -> None:
        """Append a value to a queue."""
        self._queues.setdefault(key, deque()).append(value)

    def pop(self, key: str) -> bytes | None:
        """Remove and return the first value of a queue, or None if the queue is empty."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return value

    def length(self, key: str) -> int:
        """Return the number of values in a queue."""
        return len(self._queues.get(key, ()))


def execute(
    entries: Entries, operation: str, keys: Sequence[str], values: Sequence[bytes]
) -> list[bytes] | None:
    """Execute one operation on entries.

    Args:
        entries: The entries.
        operation: A name of the table below.
        keys: The keys of the operation.
        values: The values of the operation.

    Returns:
        The results, with numbers as decimal digits; None if the operation must wait for a key. In
        that case nothing was changed.

    Raises:
        ValueError: ``add`` finds a value that is not a number, or the sum exceeds 64 bits.
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
    """Return the number at the beginning of a value; as in torch, other text may follow."""
    match = _WHOLE_NUMBER.match(value)
    if match is None:
        raise ValueError(f"key {key!r} holds {value[:40]!r}, which is not a number")
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
    found = all(entries.get(key) is not None or entries.length(key) for key in keys)
    return [b"%d" % found]


def _wait(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes] | None:
    return [] if _check(entries, keys, values) == [b"1"] else None


def _delete(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [b"%d" % entries.remove(keys[0])]


def _list(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [json.dumps(entries.names()).encode()]


def _count(entries: Entries, keys: Sequence[str], values: Sequence[bytes]) -> list[bytes]:
    return [b"%d" % len(entries.names())]


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
"""Operations that may let a waiting operation succeed."""

READS = frozenset({"get", "check", "wait", "list", "count", "length"})
"""Operations that change nothing."""
