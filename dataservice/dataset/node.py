"""What a dataset is made of: nodes describe, iterators hold the state.

A node is immutable and picklable. One pass over it is an iterator, made for a :class:`Context`;
whatever changes during the pass is an attribute of an iterator, so that its state is had by
walking from the last iterator to its source, and set likewise.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from dataservice.dataset.context import Context, Share
from dataservice.dataset.spec import Spec, spec_of
from mpidist.errors import UnimplementedError

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

ENDLESS = 1 << 62
"""The length of an indexed node without an end."""

Place = tuple[int, int]
"""An epoch, and the index of an element in it."""


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


class Reader(ElementIterator):
    """The elements at some places of an indexed node, in order, each of them or its error.

    It has no state: :class:`IndexedIterator` knows the place.
    """

    def get_state(self) -> Any:
        """Return None."""
        return None

    def set_state(self, state: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing; readers of other nodes close these."""

    def goes_on(self, error: Exception) -> bool:
        """Return True: an error stands in the place of one element."""
        return True


class Stages(Protocol):
    """Measures how long the nodes of a pass take."""

    def watch(self, node: Node, elements: ElementIterator) -> ElementIterator:
        """Return an iterator over a node to use in place of the given one."""


# The attribute in which ``fingerprint.identity`` keeps its result.
IDENTITY = "identity_hash"


class Node(ABC):
    """A description of a sequence of elements; subclasses are frozen dataclasses.

    A node is *indexed* if each of its elements can be computed alone. Then :meth:`indexed_length`
    gives their number, and :meth:`_read` computes those at given places. The state of a pass is a
    number. All other nodes are *sequential*: :meth:`_iterate` starts a pass, whose iterator has a
    state. A node over others may be the one or the other, as these are.
    """

    def indexed_length(self) -> int | None:
        """Return the number of elements of an epoch if the node is indexed; None if it is not.

        ``ENDLESS`` stands for no end.
        """
        return None

    def read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        """Start to read elements of an indexed node.

        Args:
            places: Places of the elements, in any order. They may be taken ahead, on any thread.
            context: What the pass depends on; its epoch is that of no place.

        Returns:
            An iterator with one element, or error, for each place, in their order.
        """
        return _timed(self, self._read(places, context), context)

    def iterate(self, context: Context) -> ElementIterator:
        """Start a pass over all elements, or over those that the context says."""
        if self.indexed_length() is not None:
            return IndexedIterator(self, context)
        return _timed(self, self._iterate(context), context)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        """See :meth:`read`; to be overridden where :meth:`indexed_length` gives a number."""
        raise NotImplementedError(f"{type(self).__name__} is not indexed")

    def _iterate(self, context: Context) -> ElementIterator:
        """See :meth:`iterate`; to be overridden where :meth:`indexed_length` gives None."""
        raise NotImplementedError(f"{type(self).__name__} is not sequential")

    @abstractmethod
    def cardinality(self) -> int:
        """Local. The number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    def source_length(self) -> int:
        """Return the number of source indices of one pass, which workers may share.

        Raises:
            UnimplementedError: Parts of the sequence cannot be evaluated apart.
        """
        length = self.indexed_length()
        if length is None:
            raise self.cannot_be_split("its parts depend on each other")
        return length

    def cannot_be_split(self, why: str) -> UnimplementedError:
        """Return the error of :meth:`source_length` where parts cannot be evaluated apart."""
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
    def same_every_epoch(self) -> bool:
        """Whether element i is the same in all epochs; asked where the node is indexed."""
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

    def identity_values(self) -> Iterable[Any]:
        """Return the values that tell this node apart from others of its class.

        By default these are the values of the fields that are compared.
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return [getattr(self, each.name) for each in fields if each.compare]

    def __getstate__(self) -> dict[str, Any]:
        # Pickles of equal nodes stay equal, whether the identity has been computed or not.
        return {name: value for name, value in vars(self).items() if name != IDENTITY}


def _timed(node: Node, elements: ElementIterator, context: Context) -> ElementIterator:
    return elements if context.stages is None else context.stages.watch(node, elements)


class IndexReader:
    """The source indices that this process evaluates in a pass, in order.

    Args:
        length: Number of indices of the pass.
        share: The place of the pass among all; None: this process evaluates all indices.

    Attributes:
        position: Position of the next index.
    """

    def __init__(self, length: int, share: Share | None) -> None:
        self._length = length
        self._share = share
        self.position = 0 if share is None else share.splits.start
        self._run: Iterator[int] = iter(())

    def __iter__(self) -> IndexReader:
        return self

    def __next__(self) -> int:
        index = next(self._run, None)
        if index is None:
            self._run = iter(self._next_run())
            index = next(self._run)
        self.position += 1
        return index

    def _next_run(self) -> range:
        if self._share is None:
            return range(self.position, self._length)
        splits, first = self._share.splits, self._share.first
        run = splits.run(self.position)
        own = run[: bisect_left(run, first + self._length)]
        if not own:
            splits.start = self.position
        return range(own.start - first, own.stop - first, own.step)

    def get_state(self) -> int:
        """Return the position of the next index, and mark it."""
        self.mark(self.position)
        return self.position

    def set_state(self, position: int) -> None:
        """Go on at a position."""
        self.position, self._run = position, iter(())

    def mark(self, position: int) -> None:
        """Note that the state that is being taken needs no index before a position."""
        if self._share is not None:
            self._share.splits.mark(position)


class IndexedIterator(ElementIterator):
    """A pass over an indexed node. Its state is a number.

    Args:
        node: The node.
        context: What the pass depends on; says which elements this process evaluates.
    """

    def __init__(self, node: Node, context: Context) -> None:
        length = node.indexed_length()
        assert length is not None
        self._node = node
        self._context = context
        self._indices = IndexReader(length, context.share)
        self._position = self._indices.position  # of the next element; nodes may read ahead
        self._elements: ElementIterator | None = None
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        if self._elements is None:
            places = zip(itertools.repeat(self._context.epoch), self._indices, strict=False)
            self._elements = self._node.read(places, self._context)
        try:
            element = next(self._elements)
        except StopIteration:
            raise
        except Exception:
            self._position += 1
            raise
        self._position += 1
        return element

    def get_state(self) -> int:
        """Return the position of the next element."""
        self._indices.mark(self._position)
        return self._position

    def set_state(self, state: int) -> None:
        """Go on at a position; before the first element."""
        self._position = state
        self._indices.set_state(state)

    def close(self) -> None:
        """End the pass; see :class:`ElementIterator`."""
        self._closed = True
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def goes_on(self, error: Exception) -> bool:
        """Return True: an error stands in the place of one element."""
        return True


class IndexedSource(Node):
    """A source of elements 0, 1, ..., any of which can be computed from its index."""

    @abstractmethod
    def element(self, index: int) -> Any:
        """Return the element of an index below ``cardinality()``."""

    def indexed_length(self) -> int | None:
        """Return the number of elements; see :class:`Node`."""
        return self.cardinality()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _SourceReader(self, places)


class _SourceReader(Reader):
    def __init__(self, source: IndexedSource, places: Iterator[Place]) -> None:
        self._element = source.element
        self._places = places

    def __next__(self) -> Any:
        return self._element(next(self._places)[1])


class UnaryNode(Node):
    """A node over one other; by default it keeps the other's number of elements and its source."""

    parent: Node

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return self.parent.cardinality()

    def source_length(self) -> int:
        """Return the number of elements if the node is indexed, or that of the source below."""
        length = self.indexed_length()
        return self.parent.source_length() if length is None else length

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
    def same_every_epoch(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.same_every_epoch

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

    def indexed_only(self) -> int:
        """Return the length of a node whose elements go by their numbers in the whole sequence.

        Raises:
            UnimplementedError: The node below is not indexed.
        """
        length = self.indexed_length()
        if length is None:
            raise self.cannot_be_split(
                f"each would apply {type(self).__name__.lower()} to its own part; call it "
                "before transformations that drop, flatten or group elements"
            )
        return length


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
