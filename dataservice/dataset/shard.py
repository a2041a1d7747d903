"""``Dataset.shard``: every n-th element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    Place,
    UnaryIterator,
    UnaryNode,
)
from mpidist.errors import FailedPreconditionError, InvalidArgumentError

SHARD_HINT = -1
"""Both arguments of a ``shard`` that ShardingPolicy.HINT fills in."""


@dataclass(frozen=True)
class Shard(UnaryNode):
    """Attributes: the node below, the number of shards, and which of them this is."""

    parent: Node
    num_shards: int
    index: int

    def __post_init__(self) -> None:
        if self.hint:
            return
        if SHARD_HINT in (self.num_shards, self.index):
            raise InvalidArgumentError(
                f"shard needs 0 <= index < num_shards, or SHARD_HINT ({SHARD_HINT}) for both, not "
                f"index {self.index} of {self.num_shards}"
            )
        if self.num_shards < 1 or not 0 <= self.index < self.num_shards:
            raise ValueError(
                f"shard needs 0 <= index < num_shards, not index {self.index} of {self.num_shards}"
            )

    @property
    def hint(self) -> bool:
        """Local. Whether the workers of a data service are still to be filled in."""
        return self.num_shards == self.index == SHARD_HINT

    def indexed_length(self) -> int | None:
        """Return the number of elements of the shard; see :class:`Node`."""
        below = self.parent.indexed_length()
        return None if below is None or self.hint else len(self._indices(below))

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        if self.hint and count > 0:
            return UNKNOWN_CARDINALITY
        return count if count < 0 else len(self._indices(count))

    def source_length(self) -> int:
        """Return the number of elements; see :class:`Node`."""
        self._check_filled_in()
        return self.indexed_only()

    def _indices(self, count: int) -> range:
        """Return the indices of the shard among those of the node below."""
        return range(self.index, count, self.num_shards)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        first, step = self.index, self.num_shards
        return self.parent.read(((epoch, first + index * step) for epoch, index in places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        self._check_filled_in()
        return ShardIterator(self.parent.iterate(context), self.num_shards, self.index)

    def _check_filled_in(self) -> None:
        if self.hint:
            raise FailedPreconditionError(
                f"{self.parent.summary()}.shard(SHARD_HINT, SHARD_HINT) can only be read by the "
                "workers of a data service, under distribute(ShardingPolicy.HINT, ...)"
            )


class ShardIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, num_shards: int, index: int) -> None:
        super().__init__(parent)
        self._num_shards = num_shards
        self._skip = index

    def __next__(self) -> Any:
        while self._skip:
            next(self._parent)
            self._skip -= 1
        element = next(self._parent)
        self._skip = self._num_shards - 1
        return element

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._skip, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._skip, below = state
        super().set_state(below)
