"""Base classes of datasets: nodes describe a sequence, and iterators hold the state of a pass.

A node is immutable and picklable. Each pass over a node is an iterator, made for a
:class:`Context`. Everything that changes during the pass is an attribute of an iterator. To get or
set the state of a pass, each iterator calls the iterator below it, down to the source.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

from dataservice.dataset.spec import Spec, spec_of
from dataservice.errors import pack_error, unpack_error
from mpidist.errors import InternalError, UnimplementedError


class Failure:
    """An error in the place of an element.

    Args:
        error: The error. The frame that caught the error is removed from its traceback: the frame
            refers to this object, so the two would form a reference cycle. An error of a class
            cannot be pickled becomes an UnknownError in a pickle.

    Attributes:
        error: The error.
    """

    def __init__(self, error: BaseException) -> None:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (pack_error(self.error),)


def _unpacked(data: bytes) -> Failure:
    return Failure(unpack_error(data))


# Epochs reserved for one pass over an endless ``repeat``. The next pass has the next as many.
_PASSES = 1 << 32


def pass_epoch(epoch: int, number: int, count: int | None) -> int:
    """Return the epoch of one of several passes inside an epoch; see :meth:`Context.enter`."""
    return epoch * (_PASSES if count is None else count) + number


class SplitsFailed(BaseException):
    """The indices of the elements to evaluate are not available.

    The class is not an ``Exception``: no element has failed, so ``ignore_errors`` must not drop it.

    Args:
        error: The reason.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Splits(ABC):
    """The source indices that this process evaluates.

    All passes over the source share one sequence of positions. Index ``k * n + i`` stands for
    index i of pass k over a source of n indices, see :attr:`Share.period`.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position of the first index that the last checkpoint needs.
    """

    def __init__(self) -> None:
        self.start = self.marked = 0

    @abstractmethod
    def run(self, position: int) -> range:
        """Return the known indices from a position on, in ascending order; empty at the end.

        Raises:
            SplitsFailed: The indices are not available.
        """

    def mark(self, position: int) -> None:
        """Record the position of the first index that the current checkpoint needs."""
        self.marked = position


@dataclass(frozen=True)
class Share:
    """The place of a pass in the sequence of source indices that this process evaluates.

    Attributes:
        splits: The indices.
        period: Number of indices of one pass over the source of the whole dataset.
        ordinal: Number of passes over the source before this one.
        offset: Source index, within the pass, of the reading node's first element. Not 0 if
            ``concatenate`` reads other nodes first.
    """

    splits: Splits
    period: int
    ordinal: int = 0
    offset: int = 0

    @property
    def first(self) -> int:
        """Index of the first element of the pass."""
        return self.ordinal * self.period + self.offset


class Closable(Protocol):
    """A wait that any thread can end."""

    def close(self) -> None:
        """End the wait. A second call does nothing."""


class Scope:
    """The blocking waits of a pass. Any thread can cancel them.

    Attributes:
        closed: Whether the pass has been cancelled. All waits in it then end.
    """

    def __init__(self) -> None:
        self.closed = False
        # Reentrant, because a garbage collection under the lock may close other passes.
        self._lock = threading.RLock()
        self._waiting: weakref.WeakSet[Closable] = weakref.WeakSet()

    def add(self, waiting: Closable) -> None:
        """Register a wait, to be closed with the scope. Close it now if the scope is closed."""
        with self._lock:
            self._waiting.add(waiting)
        if self.closed:
            waiting.close()

    def close(self) -> None:
        """End all waits. A second call does nothing."""
        self.closed = True
        with self._lock:
            waiting = list(self._waiting)
        for each in waiting:
            each.close()


class Count:
    """The number of errors that a whole pass has ignored. Its nodes add from their threads.

    Args:
        value: The number so far.

    Attributes:
        value: The number.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._lock = threading.Lock()

    def add(self) -> None:
        """Count an error."""
        with self._lock:
            self.value += 1


class Epochs:
    """Numbers of the passes over one dataset in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def begin(self) -> int:
        """Return the number of a pass that begins."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def resume(self, number: int) -> None:
        """Have the next pass follow one that has been resumed."""
        with self._lock:
            self._next = number + 1


@dataclass(frozen=True)
class Context:
    """The inputs of one pass, besides the node.

    Attributes:
        seed: Seed of the nodes that have none of their own. It is the same in all processes that
            evaluate parts of the pass.
        epoch: Number of the pass over the Dataset object, of the job's iteration, or of the pass in
            a ``repeat``.
        scope: Ends the waits of the pass; None if no other thread can cancel the pass.
        stages: Measures the time spent in each node; None turns the measurement off.
        part: Added to the seed for random numbers that may differ between processes.
        numbered: Whether elements must keep their order because another process may have to
            continue the pass. Otherwise ``map`` may return results as soon as they are ready.
        share: The source indices that this process evaluates; None for all of them.
        ignored: The number of errors that ``ignore_errors`` has ignored in the whole pass.
    """

    seed: tuple[int, ...]
    epoch: int = 0
    scope: Scope | None = None
    stages: StageTimes | None = None
    part: tuple[int, ...] = ()
    numbered: bool = False
    share: Share | None = None
    ignored: Count = field(default_factory=Count)

    def enter(self, number: int, count: int | None = None) -> Context:
        """Return the context of one of several passes inside this one.

        Args:
            number: Number of the pass, from 0.
            count: The number of passes; None if they are endless.
        """
        share = self.share
        if share is not None:
            ordinal = pass_epoch(share.ordinal, number, count)
            share = dataclasses.replace(share, ordinal=ordinal)
        return dataclasses.replace(self, epoch=pass_epoch(self.epoch, number, count), share=share)

    def branch(self, number: int) -> Context:
        """Return the context of one of several parallel passes, with its own seed."""
        return dataclasses.replace(self, seed=(*self.seed, number))

    def alone(self) -> Context:
        """Return the context of a pass over all source indices."""
        return dataclasses.replace(self, share=None)

    @property
    def own_seed(self) -> tuple[int, ...]:
        """The seed of random numbers that only this process needs."""
        return *self.seed, *self.part


INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

ENDLESS = 1 << 62
"""The length of an infinite indexed node."""

Place = tuple[int, int]
"""An epoch, and the index of an element in it."""


class NoElementError(ValueError):
    """The spec of the elements is unknown, because there is no element to look at."""


class ElementIterator(ABC):
    """One pass over a node. After the last element every call raises StopIteration."""

    def __iter__(self) -> ElementIterator:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next element."""

    @abstractmethod
    def get_state(self) -> Any:
        """Return the position of the pass as an object that can be pickled.

        Raises:
            UnimplementedError: A part of the pass has no state.
        """

    @abstractmethod
    def set_state(self, state: Any) -> None:
        """Continue from the state of a pass over an equal node. Called before the first element.

        Args:
            state: The result of :meth:`get_state` of that pass.

        Raises:
            UnimplementedError: As :meth:`get_state`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. Idempotent. No element follows."""

    def goes_on(self, error: Exception) -> bool:
        """Return whether elements may follow an error that has been raised twice in a row.

        By default none follow, because a pass that cannot continue raises the same error again.
        But a user's function may raise the same error object for several elements.
        """
        return False

    def __enter__(self) -> ElementIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class SuccessivePasses(ElementIterator):
    """Base of iterators that read several passes, one after the other.

    ``_pass`` is the open pass. It is None before the first pass, and after the end of a pass.
    """

    def __init__(self) -> None:
        self._pass: ElementIterator | None = None

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def goes_on(self, error: Exception) -> bool:
        return self._pass is not None and self._pass.goes_on(error)


class Reader(ElementIterator):
    """Iterator over the elements of an indexed node at given places, in order.

    A failed element raises its error in its place. A reader has no state, because
    :class:`IndexedIterator` keeps the position.
    """

    def get_state(self) -> Any:
        """Return None."""
        return None

    def set_state(self, state: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing. Readers over another reader override this method."""

    def goes_on(self, error: Exception) -> bool:
        """Return True: an error stands in the place of one element."""
        return True


# The attribute in which ``fingerprint.identity`` keeps its result.
IDENTITY = "identity_hash"


class Node(ABC):
    """A description of a sequence of elements; subclasses are frozen dataclasses.

    A node is *indexed* if each of its elements can be computed alone. Then :meth:`indexed_length`
    returns the number of elements, and :meth:`_read` computes the elements at given places. The
    state of a pass over it is a number. All other nodes are *sequential*: :meth:`_iterate` starts a
    pass, and the iterator of the pass has a state. Many transformations are indexed if their input
    is indexed, and sequential otherwise.
    """

    def indexed_length(self) -> int | None:
        """Return the number of elements of an epoch if the node is indexed; None if it is not.

        ``ENDLESS`` means that the node is infinite.
        """
        return None

    def read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        """Start to read elements of an indexed node.

        Args:
            places: Places of the elements, in any order. Nodes may read the places ahead, on any
                thread.
            context: The context of the pass. Its epoch is ignored: each place names its epoch.

        Returns:
            An iterator with one element, or error, for each place, in their order.
        """
        return _timed(self, self._read(places, context), context)

    def iterate(self, context: Context) -> ElementIterator:
        """Start a pass over all elements, or over the share of the context."""
        if self.indexed_length() is not None:
            return IndexedIterator(self, context)
        return _timed(self, self._iterate(context), context)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        """Implement :meth:`read`; overridden if :meth:`indexed_length` returns a number."""
        raise NotImplementedError(f"{type(self).__name__} is not indexed")

    def _iterate(self, context: Context) -> ElementIterator:
        """Implement :meth:`iterate`; overridden if :meth:`indexed_length` returns None."""
        raise NotImplementedError(f"{type(self).__name__} is not sequential")

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    def source_length(self) -> int:
        """Return the number of source indices of one pass, which workers may share.

        Raises:
            UnimplementedError: The node cannot be split between workers.
        """
        return self.indexed_only("its parts depend on each other")

    def indexed_only(self, why: str) -> int:
        """Return the length of an indexed node.

        Args:
            why: The reason why the node cannot be split if it is not indexed.

        Raises:
            UnimplementedError: The node is not indexed.
        """
        length = self.indexed_length()
        if length is None:
            raise self.cannot_be_split(why)
        return length

    def cannot_be_split(self, why: str) -> UnimplementedError:
        """Return the error of :meth:`source_length` for a node that cannot be split."""
        return UnimplementedError(
            f"{self.summary()} cannot be split between workers: {why}; or use "
            "processing_mode='parallel_epochs', or this transformation after distribute()"
        )

    def input_fields(self) -> dict[str, tuple[Node, ...]]:
        """Return the nodes whose elements this process evaluates for this one, by their field."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        several = {
            name: value if isinstance(value, tuple) else (value,) for name, value in fields.items()
        }
        return {
            name: values
            for name, values in several.items()
            if values and all(isinstance(value, Node) for value in values)
        }

    def inputs(self) -> list[Node]:
        """Return the nodes of :meth:`input_fields`."""
        return [node for nodes in self.input_fields().values() for node in nodes]

    def with_inputs(self, change: Callable[[Node], Node]) -> Node:
        """Return the node over ``change(n)`` in place of each input n; itself if none changes."""
        changes: dict[str, Any] = {}
        for name, nodes in self.input_fields().items():
            new = tuple(map(change, nodes))
            if any(one is not other for one, other in zip(new, nodes, strict=True)):
                changes[name] = new if isinstance(getattr(self, name), tuple) else new[0]
        if not changes:
            return self
        node: Node = dataclasses.replace(self, **changes)  # type: ignore[type-var]
        return node

    def element_spec(self) -> Spec:
        """Return the spec of the elements; by default the spec of the first one.

        Raises:
            NoElementError: There is no element to look at.
        """
        return spec_of(self.first())

    @property
    def has_static_spec(self) -> bool:
        """True if :meth:`element_spec` computes no element."""
        return False

    def sample(self) -> Node:
        """Return a node with the same element spec, from which one element can be computed.

        To compute it, the node takes no elements of a data service's job, computes no other
        elements ahead, and fills no buffers and no caches.
        """
        return self.with_inputs(lambda node: node.sample())

    def first(self) -> Any:
        """Return the first element of a pass of :meth:`sample`.

        Raises:
            NoElementError: There is no element.
        """
        with self.sample().iterate(Context(seed=(0,))) as elements:
            for element in elements:
                return element
        raise NoElementError(f"{self.summary()} has no element that could describe its elements")

    @property
    def same_every_epoch(self) -> bool:
        """True if element i is the same in all epochs. Used only for indexed nodes."""
        return True

    @property
    def distributed(self) -> bool:
        """True if a data service divides the elements among several consumers."""
        return False

    @property
    def on_device(self) -> bool:
        """True if elements are in GPU memory, on the stream of the thread that takes them."""
        return False

    def entropy(self, seed: int | None, of_pass: tuple[int, ...], epoch: int) -> tuple[int, ...]:
        """Return the seed of an epoch's random numbers.

        Args:
            seed: The seed that the user gave.
            of_pass: The seed of the pass, in place of one by the user.
            epoch: The epoch.
        """
        if seed is not None:
            return seed, epoch
        # Of the description as text alone, so that a state means the same to another process.
        return *of_pass, crc32(self.summary().encode()), epoch

    def summary(self) -> str:
        """Return the description as text, equal in every process that runs the same script."""
        return f"{self.method_name()}({_arguments(self)})"

    @classmethod
    def method_name(cls) -> str:
        """Return the method of ``Dataset`` that makes the node, for messages."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def identity_values(self) -> Iterable[Any]:
        """Return the values that distinguish this node from others of its class.

        By default they are the values of the fields that ``==`` compares.
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return [getattr(self, each.name) for each in fields if each.compare]

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached identity, so that equal nodes have equal pickles.
        return {name: value for name, value in vars(self).items() if name != IDENTITY}


def rewritten(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return a dataset with ``change(n)`` in place of every node n, from the sources up.

    A node that is used twice is replaced once. The result is the same object if no node changes.
    """
    results: dict[int, Node] = {}

    def result(each: Node) -> Node:
        if id(each) not in results:
            results[id(each)] = change(each.with_inputs(result))
        return results[id(each)]

    return result(node)


def _timed(node: Node, elements: ElementIterator, context: Context) -> ElementIterator:
    return elements if context.stages is None else context.stages.watch(node, elements)


class IndexReader:
    """The source indices that this process evaluates in a pass, in order.

    Args:
        length: Number of indices of the pass.
        share: The place of the pass in the source; None: this process evaluates all indices.

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
        if run and run[0] < first:
            raise InternalError(f"a pass over {first} and later source indices is given {run}")
        own = run[: bisect_left(run, first + self._length)]
        if not own:
            splits.start = self.position
        return range(own.start - first, own.stop - first, own.step)

    def get_state(self) -> int:
        """Return the position of the next index, and mark the position."""
        self.mark(self.position)
        return self.position

    def set_state(self, position: int) -> None:
        """Continue at a position."""
        self.position, self._run = position, iter(())

    def mark(self, position: int) -> None:
        """Record the position of the first index that the current checkpoint needs."""
        if self._share is not None:
            self._share.splits.mark(position)


class IndexedIterator(ElementIterator):
    """A pass over an indexed node. Its state is a number.

    Args:
        node: The node.
        context: The context of the pass. Its share gives the elements that this process evaluates.
    """

    def __init__(self, node: Node, context: Context) -> None:
        length = node.indexed_length()
        assert length is not None
        self._node = node
        self._context = context
        self._indices = IndexReader(length, context.share)
        self._position = self._indices.position  # of the next element; indices are read ahead
        self._elements: ElementIterator | None = None
        self._closed = False

    def __next__(self) -> Any:
        scope = self._context.scope
        if self._closed or (scope is not None and scope.closed):
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
        except BaseException:
            # Nodes may have consumed places of the element: start the read again at this element.
            self._elements.close()
            self._elements = None
            self._indices.set_state(self._position)
            raise
        self._position += 1
        return element

    def get_state(self) -> int:
        """Return the position of the next element."""
        self._indices.mark(self._position)
        return self._position

    def set_state(self, state: int) -> None:
        """Continue at a position. Called before the first element."""
        self._position = state
        self._indices.set_state(state)

    def close(self) -> None:
        self._closed = True
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def goes_on(self, error: Exception) -> bool:
        """Return True: an error stands in the place of one element."""
        return True


class IndexedSource(Node):
    """A source that computes elements from their indices 0, 1, ..."""

    @abstractmethod
    def element(self, index: int) -> Any:
        """Return the element with an index below ``cardinality()``."""

    def indexed_length(self) -> int | None:
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
    """Base class of nodes over one other node.

    By default the node below gives the number of elements and the source.
    """

    parent: Node

    def cardinality(self) -> int:
        return self.parent.cardinality()

    def source_length(self) -> int:
        """Return the length if the node is indexed, else the source length of the node below."""
        length = self.indexed_length()
        return self.parent.source_length() if length is None else length

    def element_spec(self) -> Spec:
        return self.parent.element_spec()

    @property
    def has_static_spec(self) -> bool:
        return self.parent.has_static_spec

    @property
    def same_every_epoch(self) -> bool:
        return self.parent.same_every_epoch

    @property
    def distributed(self) -> bool:
        return self.parent.distributed

    @property
    def on_device(self) -> bool:
        return self.parent.on_device

    def summary(self) -> str:
        return f"{self.parent.summary()}.{super().summary()}"

    def check_not_on_device(self, method: str) -> None:
        """Raise ValueError if a method would take elements from a GPU on a thread of its own."""
        if self.parent.on_device:
            raise ValueError(
                f"{method} runs on a thread with a CUDA stream of its own: call "
                "prefetch_to_device last"
            )

    def counted_length(self) -> int:
        """Return :meth:`indexed_only` of a transformation that counts all elements, as ``take``."""
        return self.indexed_only(
            f"each would apply {self.method_name()} to its own part; call it before "
            "transformations that drop, flatten or group elements, and before a small shuffle"
        )


class FunctionNode(UnaryNode):
    """A unary node that makes elements by a user's function. The first element gives the spec."""

    def element_spec(self) -> Spec:
        return spec_of(self.first())

    @property
    def has_static_spec(self) -> bool:
        return False


class UnaryIterator(ElementIterator):
    """A pass over a unary node.

    Args:
        parent: The pass over the node below.
    """

    def __init__(self, parent: ElementIterator) -> None:
        self._parent = parent

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)

    def close(self) -> None:
        self._parent.close()

    def goes_on(self, error: Exception) -> bool:
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


class StageTimes:
    """Times of the nodes of a pass, for a sample of its elements.

    Nodes of one kind count together, because functions make new nodes for every element.

    Attributes:
        on: Whether the current element is timed. The evaluating loop sets it.
    """

    def __init__(self) -> None:
        self.on = False
        self._stages: dict[str, _NodeTiming] = {}
        self._local = threading.local()

    def watch(self, node: Node, elements: ElementIterator) -> ElementIterator:
        """Return an iterator over a node to use in place of the given one."""
        name = node.method_name()
        stage = self._stages.get(name)
        if stage is None:
            stage = self._stages.setdefault(name, _NodeTiming(_depth(node)))
        return TimedIterator(elements, self, stage)

    def timed(self, stage: _NodeTiming, elements: ElementIterator) -> Any:
        """Return the next element, and add the time to the stage, without the time of nodes below.

        Calls on other threads, for example below ``prefetch``, are measured separately.
        """
        local = self._local
        outer: float = getattr(local, "below", 0.0)
        local.below, began = 0.0, time.perf_counter()
        try:
            return next(elements)
        finally:
            seconds = time.perf_counter() - began
            stage.seconds += seconds - local.below
            local.below = outer + seconds

    def own_seconds(self) -> list[tuple[str, float]]:
        """Return the kinds of nodes, from the sources on, and the seconds spent in each alone."""
        # A copy, because the running pass may add nodes.
        known = [*self._stages.items()]
        known.sort(key=lambda each: each[1].depth)
        return [(name, stage.seconds) for name, stage in known]


class _NodeTiming:
    """Attributes: the depth of the first node of a kind, and the seconds in all of that kind."""

    __slots__ = ("depth", "seconds")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.seconds = 0.0


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, node.inputs()), default=0)


class TimedIterator(UnaryIterator):
    """A pass that is timed.

    Args:
        elements: The pass.
        times: The times of all nodes; its ``on`` turns the measurement on.
        stage: The time of the node of the pass.
    """

    def __init__(self, elements: ElementIterator, times: StageTimes, stage: _NodeTiming) -> None:
        super().__init__(elements)
        self._times = times
        self._stage = stage

    def __next__(self) -> Any:
        if not self._times.on:
            return next(self._parent)
        return self._times.timed(self._stage, self._parent)
