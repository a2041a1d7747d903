"""``Dataset.window``: stretches of the sequence as datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.node import Context, ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.source import IndexedSource
from dataservice.dataset.spec import Spec, spec_of


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
        if count < 0:
            return count
        if not self.drop_remainder:
            return -(-count // self.shift)
        spread = (self.size - 1) * self.stride + 1
        return 0 if count < spread else (count - spread) // self.shift + 1

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        raise self.cannot_be_split("windows would end where the parts do")

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return spec_of(self.first())

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return WindowIterator(self, context)


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
        spread = (node.size - 1) * node.stride + 1
        self._fill(spread)
        if not self._held or (node.drop_remainder and len(self._held) < spread):
            self._held, self._ended = [], True
            raise StopIteration
        elements = self._held[: spread : node.stride]
        self._skip = max(node.shift - len(self._held), 0)
        self._held = self._held[node.shift :]
        columns = zip(*map(tree.flatten, elements), strict=True)
        datasets = [node.make(Listed(list(column))) for column in columns]
        return tree.unflatten(elements[0], datasets)

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
