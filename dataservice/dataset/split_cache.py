"""What ``cache`` does where the source indices are dealt out: it keeps elements by their index.

Another pass is given other splits than the one before. So no pass is kept as a whole, and an
element that has been made once is not made again in this process, whichever split it is in.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from dataservice.dataset.node import Context, Feed, Node, Splits
from dataservice.dataset.runs import AT_ONCE, Chosen, SplitIterator


class SplitCacheIterator(SplitIterator):
    """A pass over some splits: what is kept is given, the rest is made and kept.

    Args:
        parent: The node below, one to one.
        kept: Its elements by index; other passes may add to it.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, parent: Node, kept: dict[int, Any], context: Context, feed: Feed) -> None:
        super().__init__(context, feed)
        self._parent = parent
        self._kept = kept
        self._chosen: Chosen | None = None

    def _element(self, index: int) -> Any:
        chosen = self._chosen
        if chosen is None or not chosen.is_next(index):
            # An element may be None.
            if index in self._kept:
                return self._kept[index]
            chosen = self._begin()
        element = chosen.next()
        self._kept[index] = element
        return element

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._chosen is not None:
            self._chosen.close()
            self._chosen = None

    def _begin(self) -> Chosen:
        """Have what is not kept made, from the index on that has been read last."""
        self.close()
        number, position = self._indices.place
        runs = _missing(self._splits, self._kept, number, position - 1)
        self._chosen = Chosen(self._parent, self._context, runs)
        return self._chosen


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
