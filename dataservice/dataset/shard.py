"""``Dataset.shard``: every n-th element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
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

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        if self.hint and count > 0:
            return UNKNOWN_CARDINALITY
        return count if count < 0 else len(range(self.index, count, self.num_shards))

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        self._check_filled_in()
        return self._selected(slice(self.index, None, self.num_shards))

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        self._check_filled_in()
        parent = self.parent.iterate(context)
        # What feeds the source has selected by source_indices().
        return parent if context.feed else ShardIterator(parent, self.num_shards, self.index)

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
