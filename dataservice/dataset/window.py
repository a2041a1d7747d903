"""``Dataset.window``: stretches of the sequence as datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context, Feed
from dataservice.dataset.failure import Failure, FeedFailed
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.runs import AT_ONCE, Remembered, SplitUnaryIterator
from dataservice.dataset.source import IndexedSource
from dataservice.dataset.spec import Spec


@dataclass(frozen=True, eq=False)
class Listed(IndexedSource):
    """Attributes: elements, as they are."""

    elements: list[Any]

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return len(self.elements)

    def element(self, index: int) -> Any:
        """Local. See :class:`IndexedSource`."""
        return self.elements[index]

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        return f"{len(self.elements)} elements"


@dataclass(frozen=True)
class Window(UnaryNode):
    """Window i has the elements i * shift, i * shift + stride, ..., ``size`` of them.

    Attributes:
        parent: The node below.
        size: Elements of a window.
        shift: Elements from the beginning of a window to that of the next.
        stride: Elements from one of a window to the next.
        drop_remainder: Whether to leave out windows that the end of the sequence cuts short.
        make: Makes what users hold of a node.
    """

    parent: Node
    size: int
    shift: int
    stride: int
    drop_remainder: bool
    make: Callable[[Node], Any] = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("size", "shift", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"window needs a {name} of at least 1, not {getattr(self, name)}")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        return count if count < 0 else self._count(count)

    def _count(self, elements: int) -> int:
        if not self.drop_remainder:
            return -(-elements // self.shift)
        return 0 if elements < self.spread else (elements - self.spread) // self.shift + 1

    @property
    def spread(self) -> int:
        """Elements from the first of a window to its last, both included."""
        return (self.size - 1) * self.stride + 1

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    @property
    def random_access(self) -> bool:
        """Local. See :class:`Node`; the elements of windows that overlap are held."""
        return False

    def source_indices(self) -> range:
        """Local. See :class:`Node`; the numbers of the windows."""
        below = self.parent.source_indices()
        if not self.parent.one_to_one:
            raise self.cannot_be_split(
                "windows would end where the parts do; call window before transformations that "
                "drop, reorder, flatten or repeat elements"
            )
        return range(self._count(len(below)))

    def element_spec(self) -> Spec:
        """Return the type of a dataset for each array of an element of the node below."""
        kind = type(self.make(Listed([])))
        return tree.map_leaves(lambda _: kind, self.parent.element_spec())

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        if context.feed is not None:
            return SplitWindowIterator(self, context, context.feed)
        return WindowIterator(self, context)

    def of(self, elements: Sequence[Any]) -> Any:
        """Local. The window of these elements: one dataset for each of their components."""
        datasets = [self.make(Listed(column)) for column in tree.columns(elements)]
        return tree.unflatten(elements[0], datasets)


class WindowIterator(UnaryIterator):
    """One pass; holds the elements that later windows begin with."""

    def __init__(self, node: Window, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._held: list[Any] = []
        self._skip = 0  # elements before the next window, where windows do not touch
        self._ended = False

    def __next__(self) -> Any:
        node = self._node
        self._fill(node.spread)
        if not self._held or (node.drop_remainder and len(self._held) < node.spread):
            self._held, self._ended = [], True
            raise StopIteration
        elements = self._held[: node.spread : node.stride]
        self._skip = max(node.shift - len(self._held), 0)
        self._held = self._held[node.shift :]
        return node.of(elements)

    def get_state(self) -> tuple[list[Any], int, bool, Any]:
        """Local. See :class:`ElementIterator`."""
        return list(self._held), self._skip, self._ended, super().get_state()

    def set_state(self, state: tuple[list[Any], int, bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        held, self._skip, self._ended, below = state
        self._held = list(held)
        super().set_state(below)

    def _fill(self, count: int) -> None:
        while len(self._held) < count and not self._ended:
            try:
                element = next(self._parent)
            except StopIteration:
                self._ended = True
                return
            if self._skip:
                self._skip -= 1
            else:
                self._held.append(element)


class SplitWindowIterator(SplitUnaryIterator):
    """A pass over the windows of some splits, whose elements the pass below makes once each.

    Args:
        node: The windows.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, node: Window, context: Context, feed: Feed) -> None:
        super().__init__(node.parent, context, feed)
        self._node = node
        self._held: dict[int, Any] = {}  # by place below

    def _element(self, window: int) -> Any:
        node = self._node
        first = window * node.shift
        places = range(first, min(first + node.spread, len(self._below)), node.stride)
        self._held = {place: held for place, held in self._held.items() if place >= first}
        elements = [self._held_at(place) for place in places]
        for element in elements:
            if isinstance(element, Failure):
                try:
                    raise element.error
                finally:
                    del element, elements  # the error's traceback refers to this frame
        return node.of(elements)

    def _held_at(self, place: int) -> Any:
        while place not in self._held:
            try:
                element = self._next_below()
            except (StopIteration, FeedFailed):
                raise
            except Exception as error:  # every window that it is in fails
                element = Failure(error)
            assert self._chosen is not None
            self._held[self._below.index(self._chosen.index)] = element
            del element  # the frames of its error refer to this one
        return self._held[place]

    def _runs(self, number: int, position: int) -> Iterator[range]:
        below = self._below
        needed = _needed(self._splits, number, position, self._node, below)
        return (below[places.start : places.stop] for places in needed)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        super().close()
        self._held = {}


def _needed(
    splits: Remembered, number: int, position: int, node: Window, below: range
) -> Iterator[range]:
    """Places of the elements of windows, each once, from a place among the splits on."""
    needed = range(0)
    while True:
        found, split = splits.split_from(number)
        if not split:
            return
        number, position = found, position if found == number else 0
        for window in split[position:]:
            start, stop = window * node.shift, min(window * node.shift + node.spread, len(below))
            start = max(start, needed.stop)
            if start > needed.stop or len(needed) >= AT_ONCE:
                if needed:
                    yield needed
                needed = range(start, start)
            needed = range(needed.start, max(stop, needed.stop))
        if needed:
            yield needed
            needed = range(needed.stop, needed.stop)
        number, position = number + 1, 0
