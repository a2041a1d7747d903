"""What ``cache`` does where the source indices are dealt out: it keeps elements by their index.

Another pass is given other splits than the one before. So no pass is kept as a whole, and an
element that has been made once is not made again in this process, whichever split it is in.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context, Feed
from dataservice.dataset.failure import FeedFailed
from dataservice.dataset.node import Node
from dataservice.dataset.runs import AT_ONCE, NEAR, Remembered, SplitUnaryIterator


class SplitCacheIterator(SplitUnaryIterator):
    """A pass over some splits: what is kept is given, the rest is made and kept.

    Args:
        parent: The node below, one to one.
        kept: Its elements by index; other passes may add to it.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, parent: Node, kept: dict[int, Any], context: Context, feed: Feed) -> None:
        super().__init__(parent, context, feed)
        self._kept = kept

    def _element(self, index: int) -> Any:
        coming = None if self._chosen is None else self._chosen.coming
        if coming != index and index in self._kept:  # an element may be None
            return tree.opened(self._kept[index])
        if coming not in (None, index):
            self.close()  # another pass has made what this one was told of
        try:
            return self._make(index)
        except StopIteration:  # what was missing for a while has been made
            self.close()
        return self._make(index)

    def _make(self, index: int) -> Any:
        """The next element that is missing: of this index, unless another pass makes it now."""
        try:
            element = tree.read_only(self._next_below())
        except (StopIteration, FeedFailed):
            raise
        except Exception:
            assert self._chosen is not None
            if self._chosen.index == index:
                raise
        else:
            assert self._chosen is not None
            self._kept[self._chosen.index] = element
            if self._chosen.index == index:
                return tree.opened(element)
        self.close()
        return tree.opened(self._kept[index])

    def _runs(self, number: int, position: int) -> Iterator[range]:
        # In the order of a node above, splits are short, and nobody else could begin with others.
        return _missing(self._splits, self._kept, number, position, NEAR * self._context.chosen)


def _missing(
    splits: Remembered, kept: Container[int], number: int, position: int, ahead: int
) -> Iterator[range]:
    """Runs of indices that are not kept, from a place on, until there is none for a while.

    So no split is taken ahead, before others who could begin with it, that has nothing to be made,
    unless it begins in the next ``ahead`` indices.
    """
    passed = 0
    while True:
        found, split = splits.split_from(number)
        if not split:
            return
        number, position = found, position if found == number else 0
        while position < len(split):
            near = range(position, min(position + AT_ONCE, len(split)))
            first = next((place for place in near if split[place] not in kept), None)
            if first is None:
                passed += len(near)
                if passed > ahead:
                    return
                position = near.stop
                continue
            passed = 0
            rest = range(first, near.stop)
            position = next((place for place in rest if split[place] in kept), near.stop)
            yield split[first:position]
        number, position = number + 1, 0
