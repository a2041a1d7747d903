"""``Dataset.bucket_by_sequence_length``: batches of elements of similar length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.batch import stack
from dataservice.dataset.context import Context
from dataservice.dataset.functions import call
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.padded_batch import Padding
from dataservice.dataset.spec import Spec, ragged, stacked
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True)
class Bucket(UnaryNode):
    """Puts elements into buckets by their length, and gives a bucket as a batch when it is full.

    Attributes:
        parent: The node below.
        length: Says how long an element is.
        boundaries: Bucket i takes lengths from boundary i - 1 on and below boundary i.
        sizes: Elements in a batch of each bucket; one more than there are boundaries.
        padding: How batches are filled up; None stacks elements as they are.
        to_boundary: Whether to fill up to one below the bucket's boundary.
        drop_remainder: Whether to leave out what is in the buckets at the end.
    """

    parent: Node
    length: Callable[..., Any]
    boundaries: tuple[int, ...]
    sizes: tuple[int, ...]
    padding: Padding | None
    to_boundary: bool
    drop_remainder: bool

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.boundaries) + 1 or min(self.sizes) < 1:
            raise ValueError(
                f"bucket_batch_sizes must be {len(self.boundaries) + 1} numbers of at least 1, one "
                f"more than bucket_boundaries, not {list(self.sizes)}"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"bucket_boundaries must ascend, not {list(self.boundaries)}")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        spec = self.parent.element_spec()
        padding = self.padding
        return ragged(stacked(spec, None) if padding is None else padding.spec(spec, None))

    def _iterate(self, context: Context) -> ElementIterator:
        return BucketIterator(self, context)


class BucketIterator(UnaryIterator):
    """One pass; holds the elements in the buckets."""

    def __init__(self, node: Bucket, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._buckets: list[list[Any]] = [[] for _ in node.sizes]
        self._ended = False

    def __next__(self) -> Any:
        while not self._ended:
            try:
                element = next(self._parent)
            except StopIteration:
                self._ended = True
                break
            length = int(call(self._node.length, element, "bucket_by_sequence_length"))
            number = bisect_right(self._node.boundaries, length)
            bucket = self._buckets[number]
            bucket.append(element)
            if len(bucket) == self._node.sizes[number]:
                return self._emptied(number)
        if not self._node.drop_remainder:
            for number, bucket in enumerate(self._buckets):
                if bucket:
                    return self._emptied(number)
        raise StopIteration

    def get_state(self) -> tuple[Sequence[Sequence[Any]], bool, Any]:
        """Local. See :class:`ElementIterator`; what is in the buckets is a part of it."""
        return [list(bucket) for bucket in self._buckets], self._ended, super().get_state()

    def set_state(self, state: tuple[Sequence[Sequence[Any]], bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        buckets, self._ended, below = state
        self._buckets = [list(bucket) for bucket in buckets]
        super().set_state(below)

    def _emptied(self, number: int) -> Any:
        elements, self._buckets[number] = self._buckets[number], []
        padding = self._node.padding
        if padding is None:
            return stack(elements)
        if self._node.to_boundary:
            if number == len(self._node.boundaries):
                raise InvalidArgumentError(
                    "pad_to_bucket_boundary: an element is as long as the last of the boundaries "
                    f"{list(self._node.boundaries)}, or longer"
                )
            padding = padding.up_to(self._node.boundaries[number] - 1, elements[0])
        return padding.stack(elements)
