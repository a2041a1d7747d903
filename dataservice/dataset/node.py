"""What a dataset is made of: nodes describe, iterators hold the state.

A node is immutable and picklable. One pass over it is an iterator, made for a :class:`Context`;
whatever changes during the pass is an attribute of an iterator, so that its state is had by
walking from the last iterator to its source, and set likewise.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from dataservice.dataset.context import Context
from dataservice.dataset.spec import Spec, spec_of
from mpidist.errors import UnimplementedError

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class NoElementError(ValueError):
    """What elements are like cannot be said, because there is none to look at."""


class ElementIterator(ABC):
    """One pass over a node; ends with StopIteration, and keeps raising it."""

    def __iter__(self) -> ElementIterator:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Local. The next element."""

    @abstractmethod
    def get_state(self) -> Any:
        """Local. Where the pass is, as something that can be pickled.

        Raises:
            UnimplementedError: A part of the pass cannot say.
        """

    @abstractmethod
    def set_state(self, state: Any) -> None:
        """Local. Go on from where a pass over an equal node was; before the first element.

        Args:
            state: What that pass gave.

        Raises:
            UnimplementedError: As :meth:`get_state`.
        """

    @abstractmethod
    def close(self) -> None:
        """Local. Give up threads and connections; idempotent. No element comes after it."""

    def goes_on(self, error: Exception) -> bool:
        """Local. Whether more may come behind an error that has been raised twice in a row.

        By default not: a pass that cannot go on raises the same once more. But a user's function
        may raise one and the same of several elements.
        """
        return False

    def __enter__(self) -> ElementIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Stages(Protocol):
    """Measures how long the nodes of a pass take."""

    def watch(self, node: Node, elements: ElementIterator) -> ElementIterator:
        """Local. A pass over a node, to be used in place of the one that is given."""


class Node(ABC):
    """A description of a sequence of elements; subclasses are frozen dataclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Local. Have the passes of all nodes measured where somebody wants to know."""
        super().__init_subclass__(**kwargs)
        if "iterate" in cls.__dict__:
            setattr(cls, "iterate", _watched(cls.__dict__["iterate"]))  # noqa: B010 - mypy

    @abstractmethod
    def iterate(self, context: Context) -> ElementIterator:
        """Local. Start a pass."""

    @abstractmethod
    def cardinality(self) -> int:
        """Local. The number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    def source_indices(self) -> range:
        """Local. The source indices of one pass, which workers may evaluate in parts.

        Raises:
            UnimplementedError: Parts of the sequence cannot be evaluated apart.
        """
        raise self.cannot_be_split("its parts depend on each other")

    def cannot_be_split(self, why: str) -> UnimplementedError:
        """Local. What :meth:`source_indices` raises where parts cannot be evaluated apart."""
        return UnimplementedError(
            f"{self.summary()} cannot be split between workers: {why}; or use "
            "processing_mode='parallel_epochs', or this transformation after distribute()"
        )

    def element_spec(self) -> Spec:
        """Local. What elements are like; by default, what the first one is like.

        Raises:
            NoElementError: There is no element to look at.
        """
        return spec_of(self.first())

    @property
    def has_static_spec(self) -> bool:
        """Local. Whether what elements are like is known without making one."""
        return False

    def sample(self) -> Node:
        """Return a node with elements like these, whose first one is made here, and by itself.

        Such a node takes nothing from the jobs of data services, fills no buffers and no caches.
        """
        return self

    def first(self) -> Any:
        """Return the first element of a pass of :meth:`sample`.

        Raises:
            NoElementError: It has no element.
        """
        with self.sample().iterate(Context(seed=(0,))) as elements:
            for element in elements:
                return element
        raise NoElementError(
            f"{self.summary()} has no element that says what its elements are like"
        )

    @property
    def one_to_one(self) -> bool:
        """Local. Whether element i depends on source index i alone, in order."""
        return False

    @property
    def steady(self) -> bool:
        """Local. Whether element i is the same in every pass; asked where it is one to one."""
        return True

    @property
    def random_access(self) -> bool:
        """Local. Whether elements can be had in any order; asked where it is one to one."""
        return True

    @property
    def distributed(self) -> bool:
        """Local. Whether a data service deals the elements out to several consumers."""
        return False

    @property
    def on_device(self) -> bool:
        """Local. Whether elements lie on a GPU, and belong to the stream of who takes them."""
        return False

    def summary(self) -> str:
        """Local. The description as text: equal in every process that runs the same script."""
        return f"{type(self).__name__.lower()}({_arguments(self)})"


def _watched(
    iterate: Callable[[Node, Context], ElementIterator],
) -> Callable[[Node, Context], ElementIterator]:
    @functools.wraps(iterate)
    def watched(node: Node, context: Context) -> ElementIterator:
        elements = iterate(node, context)
        return elements if context.stages is None else context.stages.watch(node, elements)

    return watched


class UnaryNode(Node):
    """A node over one other; by default it keeps the other's number of elements and its source."""

    parent: Node

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return self.parent.cardinality()

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        return self.parent.source_indices()

    def sample(self) -> Node:
        """Return this node over the sample of the node below; see :class:`Node`."""
        parent = self.parent.sample()
        if parent is self.parent:
            return self
        node: Node = dataclasses.replace(self, parent=parent)  # type: ignore[type-var]
        return node

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`; by default those of the node below."""
        return self.parent.element_spec()

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`; by default as the node below."""
        return self.parent.has_static_spec

    @property
    def steady(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.steady

    @property
    def random_access(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.random_access

    @property
    def distributed(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.distributed

    @property
    def on_device(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.on_device

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        return f"{self.parent.summary()}.{super().summary()}"

    def check_not_on_device(self, what: str) -> None:
        """Local. ValueError where elements would be taken from a GPU by a thread of ``what``."""
        if self.parent.on_device:
            raise ValueError(
                f"{what} runs on a thread with a CUDA stream of its own: call "
                "prefetch_to_device last"
            )

    def _selected(self, indices: slice) -> range:
        """The parent's source indices of the elements that a slice selects."""
        below = self.parent.source_indices()
        if not self.parent.one_to_one:
            raise self.cannot_be_split(
                f"each would apply {type(self).__name__.lower()} to its own part; call it "
                "before transformations that drop, reorder, flatten or repeat elements"
            )
        return below[indices]


class UnaryIterator(ElementIterator):
    """A pass over a unary node.

    Args:
        parent: The pass over the node below.
    """

    def __init__(self, parent: ElementIterator) -> None:
        self._parent = parent

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`; by default that of the pass below."""
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        self._parent.set_state(state)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._parent.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`; by default as the pass below."""
        return self._parent.goes_on(error)


def _arguments(node: Node) -> str:
    assert dataclasses.is_dataclass(node)
    shown = (
        getattr(node, field.name)
        for field in dataclasses.fields(node)
        if field.repr and field.name != "parent"
    )
    return ", ".join(
        getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else repr(value)
        for value in shown
    )
