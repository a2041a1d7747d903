"""What ``cache`` does where the source indices are dealt out: it keeps elements by their index.

Another pass is given other splits than the one before. So no pass is kept as a whole, and an
element that has been made once is not made again in this process, whichever split it is in.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from dataservice.dataset.node import Context, ElementIterator, Feed, Node, Splits
from dataservice.dataset.runs import AT_ONCE, Remembered, Runs
from dataservice.dataset.source import SplitReader


class SplitCacheIterator(ElementIterator):
    """A pass over some splits: what is kept is given, the rest is made and kept.

    Args:
        parent: The node below, one to one.
        kept: Its elements by index; other passes may add to it.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, parent: Node, kept: dict[int, Any], context: Context, feed: Feed) -> None:
        self._parent = parent
        self._kept = kept
        self._context = context
        self._splits = Remembered(feed(context.passes))
        self._indices = SplitReader(self._splits)
        self._runs = Runs(iter(()))
        self._pass: ElementIterator | None = None

    def __next__(self) -> Any:
        index = self._indices.next()
        if not self._is_coming(index):
            # An element may be None.
            if index in self._kept:
                return self._kept[index]
            self._begin()
        assert self._pass is not None
        try:
            element = next(self._pass)
        finally:
            if self._is_coming(index):
                self._runs.coming.popleft()
        self._kept[index] = element
        return element

    def get_state(self) -> tuple[int, int]:
        """Local. See :class:`ElementIterator`; who goes on has other elements, or none, kept."""
        return self._indices.get_state()

    def set_state(self, state: tuple[int, int]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._indices.set_state(state)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def _is_coming(self, index: int) -> bool:
        coming = self._runs.coming
        return bool(coming) and coming[0] == index

    def _begin(self) -> None:
        """Have what is not kept made, from the index on that has been read last."""
        self.close()
        number, position = self._indices.place
        self._runs = Runs(_missing(self._splits, self._kept, number, position - 1))
        self._pass = self._parent.iterate(replace(self._context, feed=self._runs.feed))


def _missing(splits: Splits, kept: Container[int], number: int, position: int) -> Iterator[range]:
    """Runs of indices that are not kept, from a place on, until there is none for a while.

    So no split is taken ahead, before others who could begin with it, that has nothing to be made.
    """
    while split := splits.split(number):
        while position < len(split):
            near = range(position, min(position + AT_ONCE, len(split)))
            first = next((place for place in near if split[place] not in kept), None)
            if first is None:
                return
            rest = range(first, near.stop)
            position = next((place for place in rest if split[place] in kept), near.stop)
            yield split[first:position]
        number, position = number + 1, 0
