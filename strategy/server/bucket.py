"""Small variables of one dtype side by side, so that one call of a rule updates several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.rules.rule import FoundRule, Update
from strategy.server.memory import Place
from strategy.shared.push_layout import JOINED_BYTES
from strategy.shared.shard import Layout

Array = NDArray[Any]

DATA_BYTES = 256 << 10
VERSIONS_BYTES = 16 << 10


def is_small(layout: Layout) -> bool:
    """Return whether a variable may lie in a bucket. Halves are changed in float32, one by one."""
    return 0 < layout.data_bytes < JOINED_BYTES and not layout.is_half


@dataclass(eq=False)
class Bucket:
    """Memory for small variables.

    Attributes:
        place: Where versions and values lie.
        dtype: The dtype of the values.
        sync: Orders loads and stores before it against those after it.
        used: Number of elements that variables have.
        count: Number of variables.
        slots: The arrays of optimizers beside the values, by ``<name of the optimizer>/<slot>``.
    """

    place: Place
    dtype: np.dtype[Any]
    sync: Callable[[], None]
    used: int = 0
    count: int = 0
    slots: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        versions, data = self.place.offsets
        memory = self.place.memory
        self.versions: Array = memory[versions : versions + VERSIONS_BYTES].view(np.int64)
        self.flat: Array = memory[data : data + DATA_BYTES].view(self.dtype)

    def has_room(self, layout: Layout) -> bool:
        """Return whether another variable fits in."""
        return self.used + layout.size <= self.flat.size and self.count < self.versions.size

    def take(self, layout: Layout) -> Span:
        """Return the span of a new variable."""
        span = Span(self, self.count, self.used, layout.size)
        self.count += 1
        self.used += layout.size
        return span

    def change(self, variables: slice, elements: slice, found: FoundRule, gradient: Array) -> None:
        """Change adjacent variables, each of which advances by a version.

        Args:
            variables: Their indices.
            elements: The indices of their elements.
            found: The rule.
            gradient: The gradients of all, flat.
        """
        name, rule, numbers = found
        param, versions = self.flat[elements], self.versions[variables]
        slots = [self.slots[f"{name}/{slot}"][elements] for slot in rule.slots]
        step = rule.tile or max(param.size, 1)
        versions += 1
        self.sync()
        try:
            with np.errstate(all="ignore"):
                for start in range(0, param.size, step):
                    here = slice(start, start + step)
                    parts = [slot[here] for slot in slots]
                    rule.on_host(Update(param[here], gradient[here], parts, numbers))
        finally:
            self.sync()
            versions += 1

    def slot(self, key: str) -> Array:
        """Return the slot of all variables, as large as the values."""
        if key not in self.slots:
            self.slots[key] = np.zeros(self.flat.size, self.dtype)
        return self.slots[key]


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a bucket that belongs to one variable.

    Attributes:
        bucket: The bucket.
        number: Index of the variable in the bucket.
        start: Index of its first element.
        size: Number of its elements.
    """

    bucket: Bucket
    number: int
    start: int
    size: int

    @property
    def place(self) -> Place:
        """Where the version and the values of the variable lie."""
        whole = self.bucket.place
        versions, data = whole.offsets
        offsets = (versions + 8 * self.number, data + self.start * self.bucket.dtype.itemsize)
        return Place(whole.memory, offsets, whole.segment, whole.one_sided)

    def slot(self, key: str) -> Array:
        """Return the part of a slot."""
        return self.bucket.slot(key)[self.start : self.start + self.size]

    def comes_after(self, other: Span) -> bool:
        """Return whether this variable lies directly behind another one."""
        return other.bucket is self.bucket and other.number == self.number - 1


def joined(spans: Sequence[Span]) -> tuple[slice, slice]:
    """Return the versions and the elements of adjacent variables."""
    first, last = spans[0], spans[-1]
    return slice(first.number, last.number + 1), slice(first.start, last.start + last.size)
