"""The splits of a node over several others, as each of these sees them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from dataservice.dataset.context import Context, Feed, Splits
from dataservice.dataset.node import Node


class Portion:
    """The splits of a node whose source indices are a stretch of those of another one.

    Args:
        splits: Those of the other node; their indices ascend.
        indices: Source indices of the node.
        start: Index of the first of these in the other node.
        first: Number of the first split that is not wholly before ``start``.

    Attributes:
        following: Number of the first split that is not wholly within the stretch or before it,
            when the last one has been asked for.
    """

    def __init__(self, splits: Splits, indices: range, start: int, first: int) -> None:
        self._splits = splits
        self._indices = indices
        self._start = start
        self._first = first
        self.following = first

    @property
    def feed(self) -> Feed:
        """Local. Gives these splits."""
        return lambda passes: self

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        whole = self._splits.split(self._first + number)
        stop = self._start + len(self._indices)
        own = whole[bisect_left(whole, self._start) : bisect_left(whole, stop)]
        if own:
            self.following = self._first + number + (whole[-1] < stop)
        return self._indices[own.start - self._start : own.stop - self._start : own.step]

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`; the node after this one may begin in a split that is over."""
        self._splits.mark(min(self._first + number, self.following))


class _Marked:
    """Splits that several passes read side by side: the lowest of their marks counts."""

    def __init__(self, splits: Splits, marks: list[int], place: int) -> None:
        self._splits = splits
        self._marks = marks
        self._place = place

    def split(self, number: int) -> range:
        return self._splits.split(number)

    def mark(self, number: int) -> None:
        self._marks[self._place] = number
        self._splits.mark(min(self._marks))


def side_by_side(context: Context, nodes: Sequence[Node]) -> list[Context]:
    """Local. Contexts of passes in which every node evaluates the same splits.

    Args:
        context: Of the node over them.
        nodes: Element i of each belongs to index i of that.
    """
    feed = context.feed
    branches = [context.branch(number) for number in range(len(nodes))]
    if feed is None:
        return branches
    length = min(len(node.source_indices()) for node in nodes)
    marks = [0] * len(nodes)
    portions = [
        Portion(_Marked(feed(context.passes), marks, place), node.source_indices()[:length], 0, 0)
        for place, node in enumerate(nodes)
    ]
    return [
        replace(branch, feed=portion.feed)
        for branch, portion in zip(branches, portions, strict=True)
    ]
