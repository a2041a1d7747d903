"""Buckets: adjacent small variables of one dtype, which a rule can update together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.rules import FoundRule, Update
from strategy.server.memory import Place
from strategy.shared.push_message import JOINED_BYTES
from strategy.shared.shard import Layout

Array = NDArray[Any]

DATA_BYTES = 256 << 10
VERSIONS_BYTES = 16 << 10


def is_small(layout: Layout) -> bool:
    """Return whether a variable may lie in a bucket."""
    # Halves may not, because they are updated in float32, one variable at a time.
    return 0 < layout.data_bytes < JOINED_BYTES and not layout.is_half


@dataclass(eq=False)
class Bucket:
    """Memory for small variables of one dtype.

    Attributes:
        place: Location of the versions and the values.
        dtype: The dtype of the values.
        sync: Memory fence: orders earlier loads and stores before later loads and stores.
        used: Number of elements in use.
        count: Number of variables.
        slots: Optimizer slots, each for all variables, by ``<name of the optimizer>/<slot>``.
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
        """Return whether another variable fits into the bucket."""
        return self.used + layout.size <= self.flat.size and self.count < self.versions.size

    def take(self, layout: Layout) -> Span:
        """Allocate the span of a new variable."""
        span = Span(self, self.count, self.used, layout.size)
        self.count += 1
        self.used += layout.size
        return span

    def change(self, variables: slice, elements: slice, found: FoundRule, gradient: Array) -> None:
        """Update adjacent variables. The version of each variable advances by one.

        Args:
            variables: Indices of the variables in the bucket.
            elements: Indices of the elements of these variables.
            found: The rule, its name for slots, and its numbers.
            gradient: The gradients of these variables, joined in one flat array.
        """
        name, rule, numbers = found
        param, versions = self.flat[elements], self.versions[variables]
        slots = [self.slots[f"{name}/{slot}"][elements] for slot in rule.slots]
        step = rule.tile or max(param.size, 1)
        versions += 1
        self.sync()
        try:
            for start in range(0, param.size, step):
                here = slice(start, start + step)
                parts = [slot[here] for slot in slots]
                rule.on_host(Update(param[here], gradient[here], parts, numbers))
        finally:
            self.sync()
            versions += 1

    def slot(self, key: str) -> Array:
        """Return the slot array of all variables, in the shape of ``flat``."""
        if key not in self.slots:
            self.slots[key] = np.zeros(self.flat.size, self.dtype)
        return self.slots[key]


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a bucket that belongs to one variable.

    Attributes:
        bucket: The bucket.
        number: Index of the variable in the bucket.
        start: Index of the variable's first element in the bucket.
        size: Number of elements of the variable.
    """

    bucket: Bucket
    number: int
    start: int
    size: int

    @property
    def place(self) -> Place:
        """Location of the version and the values of the variable."""
        whole = self.bucket.place
        versions, data = whole.offsets
        offsets = (versions + 8 * self.number, data + self.start * self.bucket.dtype.itemsize)
        return Place(whole.segment, offsets)

    def slot(self, key: str) -> Array:
        """Return the part of a slot array that belongs to the variable."""
        return self.bucket.slot(key)[self.start : self.start + self.size]

    def comes_after(self, other: Span) -> bool:
        """Return whether this variable directly follows another variable in the bucket."""
        return other.bucket is self.bucket and other.number == self.number - 1


def joined(spans: Sequence[Span]) -> tuple[slice, slice]:
    """Return the index ranges of adjacent variables and of their elements in the bucket."""
    first, last = spans[0], spans[-1]
    return slice(first.number, last.number + 1), slice(first.start, last.start + last.size)
