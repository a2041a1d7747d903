"""``Dataset.window``: consecutive elements as datasets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.base import (
    Context,
    ElementIterator,
    Failure,
    Node,
    Place,
    Reader,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.indexed import InMemory
from dataservice.dataset.spec import Spec


@dataclass(frozen=True)
class Window(UnaryNode):
    """Window i has the elements i * shift, i * shift + stride, ..., ``size`` of them.

    Attributes:
        parent: The node below.
        size: Elements of a window.
        shift: Elements from the beginning of a window to the beginning of the next.
        stride: Elements from one of a window to the next.
        drop_remainder: Whether to leave out windows that the end of the sequence cuts short.
        make: Makes a Dataset of a node.
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

    def indexed_length(self) -> int | None:
        below = self.parent.indexed_length()
        return None if below is None else self._count(below)

    def source_length(self) -> int:
        return self.counted_length()

    def element_spec(self) -> Spec:
        """Return the type of a dataset for each array of an element of the node below."""
        kind = type(self.make(InMemory([])))
        return tree.map_leaves(lambda _: kind, self.parent.element_spec())

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _WindowReader(self, places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return WindowIterator(self, context)

    def of(self, elements: Sequence[Any]) -> Any:
        """Return the window of these elements: a dataset for each of their components."""
        datasets = [self.make(InMemory(column)) for column in tree.columns(elements)]
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
        return list(self._held), self._skip, self._ended, super().get_state()

    def set_state(self, state: tuple[list[Any], int, bool, Any]) -> None:
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


class _WindowReader(Reader):
    """Windows by their numbers. Elements that windows have in common are evaluated once."""

    def __init__(self, node: Window, places: Iterator[Place], context: Context) -> None:
        self._node = node
        # The node below may take places ahead, on another thread.
        self._windows: deque[_Needed] = deque()
        length = node.parent.indexed_length()
        assert length is not None
        below = _places_of(places, node, length, self._windows)
        self._parent = node.parent.read(below, context)
        self._ahead: deque[Any] = deque()  # elements that are taken, and not yet held
        self._held: dict[int, Any] = {}

    def __next__(self) -> Any:
        if not self._windows:
            self._take()  # the node below takes the place of a window first
        if not self._windows:
            raise StopIteration
        needed = self._windows.popleft()
        if needed.anew:
            self._held.clear()
        for index in needed.missing:
            if not self._ahead:
                self._take()
            self._held[index] = self._ahead.popleft()
        elements = [self._held[index] for index in needed.indices]
        for index in [index for index in self._held if index < needed.indices.start]:
            del self._held[index]
        for element in elements:
            if isinstance(element, Failure):
                try:
                    raise element.error
                finally:
                    del element, elements  # the error's traceback refers to this frame
        return self._node.of(elements)

    def _take(self) -> None:
        """Take the next element of the node below, if there is one, or the error in its place."""
        try:
            self._ahead.append(next(self._parent))
        except StopIteration:
            return
        except Exception as error:  # all windows with the element fail
            self._ahead.append(Failure(error))

    def close(self) -> None:
        self._parent.close()


@dataclass(frozen=True)
class _Needed:
    """The elements that a window needs from the node below.

    Attributes:
        indices: The indices of all its elements.
        missing: The indices that are not held for a previous window.
        anew: Whether nothing is held, because the window does not follow the previous one.
    """

    indices: range
    missing: list[int]
    anew: bool


def _places_of(
    places: Iterator[Place], node: Window, length: int, windows: deque[_Needed]
) -> Iterator[Place]:
    """Yield the places of the elements of windows. Append the needs of each window to a queue."""
    held: set[int] = set()
    before = (-1, -1)
    for epoch, window in places:
        first = window * node.shift
        anew = epoch != before[0] or first < before[1]
        before = epoch, first
        indices = range(first, min(first + node.spread, length), node.stride)
        held = set() if anew else {index for index in held if index >= first}
        missing = [index for index in indices if index not in held]
        held.update(missing)
        windows.append(_Needed(indices, missing, anew))
        for index in missing:
            yield epoch, index
