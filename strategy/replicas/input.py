"""The input of replicas: shards of datasets, batches for each replica, prefetch to GPUs."""

from __future__ import annotations

import contextvars
import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import errors
from mpidist.gpu import Prefetcher, has_dtype, make_current
from strategy.array_like import is_on_gpu
from strategy.protocol.checks import whole_number
from strategy.replicas.nest import tree_leaves, tree_map, with_leaves
from strategy.replicas.reduce import as_array, regrouped

logger = logging.getLogger(__name__)

OVER = object()
"""The end of the queue."""

_FORMAT = "strategy.feeding 1"
_CLOSE_S = 5.0  # seconds that close() waits for the element that the dataset is making
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


class Failure:
    """An error in the queue, in place of the step that could not be made.

    Args:
        error: The error.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def hand_over(self) -> Any:
        """Raise the error."""
        try:
            raise self.error
        finally:
            del self  # the traceback refers to this frame


class Channel:
    """A queue of prefetched steps.

    After a failure, the producer makes no step until the consumer requests one.

    Args:
        size: Maximum number of steps.

    Attributes:
        making: Lock that the producer holds while it makes and adds a step.
        closed: True if the consumer takes no more steps.
    """

    def __init__(self, size: int) -> None:
        self.making = threading.Lock()
        self.closed = False
        self._size = size
        # The lock is reentrant: the garbage collector may call close() inside any method.
        self._changed = threading.Condition()
        self._steps: deque[Any] = deque()
        self._failed = False

    def wait_for_room(self) -> bool:
        """Wait until the producer may make a step. Return False if the queue was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or (len(self._steps) < self._size and not self._failed)
            )
            return not self.closed

    def add(self, step: Any) -> None:
        """Add a step, a Failure or OVER, unless the queue was closed."""
        with self._changed:
            if not self.closed:
                self._steps.append(step)
                self._failed = isinstance(step, Failure)
                self._changed.notify_all()

    def waiting(self) -> list[Any]:
        """Return the steps in the queue, without Failures and OVER."""
        with self._changed:
            return [step for step in self._steps if isinstance(step, _Step)]

    def take(self) -> Any:
        """Wait for the next step and remove it. At the end or after close(), return OVER."""
        with self._changed:
            if not self._steps:
                self._failed = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._steps or self.closed)
            if self.closed or self._steps[0] is OVER:
                return OVER
            self._changed.notify_all()
            return self._steps.popleft()

    def close(self) -> None:
        """Drop all steps and take no more; idempotent."""
        with self._changed:
            self.closed = True
            self._steps.clear()
            self._changed.notify_all()


@dataclass(frozen=True)
class InputContext:
    """The worker for which an input function is called.

    Attributes:
        num_input_pipelines: Number of workers.
        input_pipeline_id: Index of this worker.
        num_replicas_in_sync: Number of replicas of this worker.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Args:
            global_batch_size: Batch size of all replicas of the worker together.

        Raises:
            ValueError: The batch cannot be divided equally.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a batch of {global_batch_size} cannot be divided equally among "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """The replica for which a value function is called.

    Attributes:
        replica_id_in_sync_group: Index of the replica.
        num_replicas_in_sync: Number of replicas of this worker.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True)
class InputOptions:
    """Options for the input of replicas, like TensorFlow's ``tf.distribute.InputOptions``.

    Methods with input options also accept TensorFlow's class.

    Attributes:
        experimental_fetch_to_device: Copy batches to the GPUs of replicas that have GPUs. None
            means True.
        experimental_replication_mode: ``"per_worker"``, the only mode.
        experimental_place_dataset_on_device: Must be False: datasets run on the host.
        experimental_per_replica_buffer_size: Maximum number of batches that are prefetched to the
            GPUs. With 0, a batch is copied when it is requested.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: Any = "per_worker"
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 2


def ahead_of(options: Any) -> int | None:
    """Return the maximum number of batches to prefetch to GPUs; None to keep them on the host.

    Args:
        options: InputOptions; None for the defaults.

    Raises:
        TypeError: The options are not InputOptions.
        ValueError: An option has a value that is not valid.
    """
    if options is None:
        options = InputOptions()
    if not hasattr(options, "experimental_fetch_to_device"):
        raise TypeError(f"options must be InputOptions, not {options!r}")
    check_per_worker(options.experimental_replication_mode)
    if options.experimental_place_dataset_on_device:
        raise ValueError(
            "experimental_place_dataset_on_device must be False: datasets run on the host"
        )
    ahead = whole_number(
        experimental_per_replica_buffer_size=options.experimental_per_replica_buffer_size
    )
    if ahead < 0:
        raise ValueError(f"experimental_per_replica_buffer_size cannot be negative: {ahead}")
    return ahead if options.experimental_fetch_to_device in (None, True) else None


def check_per_worker(replication_mode: Any) -> None:
    """Raise ValueError unless a replication mode is ``"per_worker"``, as a name or a member."""
    mode = str(getattr(replication_mode, "name", replication_mode)).lower()
    if mode != "per_worker":
        raise ValueError(f"the replication mode is 'per_worker', not {replication_mode!r}")


class NumpyDataset:
    """A dataset of the rows of arrays; made by ``experimental_make_numpy_dataset``.

    Args:
        arrays: An array, or a tuple, list or dict of arrays of the same length.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = tree_map(as_array, _as_tree(arrays))
        lengths = {len(array) for array in tree_leaves(self._arrays)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays must be equally long, not {sorted(lengths)}")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for row in range(self._length):
            yield _cut(self._arrays, row)

    def batch(self, size: int, drop_remainder: bool = False) -> list[Any]:
        """Return views of ``size`` rows each. ``drop_remainder`` drops a shorter last batch."""
        if size < 1:
            raise ValueError(f"a batch needs at least one row, not {size}")
        end = self._length - self._length % size if drop_remainder else self._length
        starts = range(0, end, size)
        return [_cut(self._arrays, slice(start, start + size)) for start in starts]

    def shard(self, num_shards: int, index: int) -> NumpyDataset:
        """Return every ``num_shards``-th row, beginning with row ``index``."""
        return NumpyDataset(_cut(self._arrays, slice(index, None, num_shards)))


def divided(element: Any, count: int) -> list[Any]:
    """Divide a batch along the first axis of each of its arrays.

    Args:
        element: An array, or a tree of arrays.
        count: Number of parts. Their lengths differ by at most one row, and may be 0.

    Raises:
        ValueError: An array has no axes.
    """
    element = _as_tree(element)
    divided_leaves = [_split(leaf, count) for leaf in tree_leaves(element)]
    return [
        with_leaves(element, [parts[number] for parts in divided_leaves]) for number in range(count)
    ]


def _split(given: Any, count: int) -> list[Any]:
    array = as_array(given)
    if not array.ndim:
        raise ValueError(
            f"a batch is divided among {count} replicas along the first axis, and {given!r} has "
            "none: batch the dataset first"
        )
    return list(np.array_split(array, count))


def _cut(structure: Any, rows: int | slice) -> Any:
    return tree_map(lambda array: array[rows], structure)


def _as_tree(element: Any) -> Any:
    """Return a tree with dicts and lists in place of mappings and sequences of other types."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return _as_tree(dict(leaf))
        return _as_tree(list(leaf)) if isinstance(leaf, list | tuple) else leaf

    return tree_map(convert, element)


class Feed:
    """The elements of a dataset for the replicas of a worker.

    Each pass over a Feed is a :class:`FeedIterator`.

    Args:
        dataset: Iterable of arrays, or of tuples, lists or dicts of arrays.
        replicas: Number of replicas.
        gpus: GPU index of each replica; empty to leave the elements on the host.
        ahead: Maximum number of batches that are prefetched to the GPUs. With 0 there is no
            thread, and a batch is copied when it is requested.
        one_each: Give each replica an element of its own. Otherwise divide each element among the
            replicas.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        replicas: int,
        gpus: Sequence[int],
        ahead: int,
        *,
        one_each: bool,
    ) -> None:
        self.dataset = dataset
        self.replicas = replicas
        self.gpus = tuple(gpus)
        # The caller may save the state of the iterator, so nothing may be prefetched from it.
        has_state = isinstance(dataset, Iterator) and hasattr(dataset, "get_state")
        self.ahead = 0 if has_state or not gpus else ahead
        self.elements_a_step = replicas if one_each else 1

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self)

    def __len__(self) -> int:
        return len(self.dataset) // self.elements_a_step  # type: ignore[arg-type]


class FeedIterator:
    """A pass over a dataset that returns the next elements of all replicas at a time.

    Several replicas get a PerReplica, or a tree of PerReplica values if the elements are trees. An
    error of the dataset is raised in place of the element.

    For replicas with GPUs, a thread prefetches batches. The thread takes elements from the dataset,
    divides them on the host, and copies each part to its GPU on a separate stream. The current
    streams of the thread that takes a batch wait for the copies. Replicas that run afterwards start
    behind those streams. Arrays and numbers become CuPy arrays. Strings, objects and dtypes that
    CuPy lacks are not converted. Arrays on a GPU are copied through the host.

    After an error, the thread takes the next element only when another batch is requested. The
    thread starts with the first batch. The thread ends with the dataset, or when the pass is closed
    or garbage-collected.

    Args:
        feed: The dataset and its replicas.

    Attributes:
        gpus: GPU index of each replica; empty if the elements stay on the host.
    """

    def __init__(self, feed: Feed) -> None:
        self.gpus = feed.gpus
        self._ahead = feed.ahead
        self._source = _Source(feed)
        self._channel = Channel(feed.ahead)
        self._starting = threading.Lock()
        # The thread has no reference to this object, which would keep a dropped object alive.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(_fill, self._channel, self._source),
            name="batches for GPUs",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self._channel.close)

    def __iter__(self) -> FeedIterator:
        return self

    def __next__(self) -> Any:
        if len(self.gpus) == 1:  # a single replica runs on this thread
            make_current(self.gpus[0])
        step = self._next_step()
        if step is OVER:
            raise StopIteration
        try:
            return step.hand_over()
        finally:
            del step  # the traceback of an error refers to this frame

    def get_state(self) -> bytes:
        """Return the state of the pass. Prefetched batches do not count as taken.

        An error that was prefetched is not part of the state: the other pass continues behind the
        element that could not be made.

        Returns:
            A pickle, which includes the elements of the prefetched batches on the host. A
            FeedIterator for any number of replicas, with GPUs or without, can continue from it.

        Raises:
            UnimplementedError: The dataset's iterator has no ``get_state()``.
        """
        source = self._source
        if not hasattr(source.elements, "get_state"):
            raise errors.UnimplementedError(
                f"a {type(source.elements).__name__} cannot say where it is: the dataset's "
                "iterator needs get_state() and set_state(), as those of dataservice have"
            )
        with self._channel.making:
            left = [element for step in self._channel.waiting() for element in step.taken]
            state = (_FORMAT, [*left, *source.again], source.elements.get_state())
            return pickle.dumps(state, protocol=5)

    def set_state(self, state: bytes) -> None:
        """Continue from the state of another pass. With GPUs, call this before the first batch.

        Args:
            state: Result of :meth:`get_state`, from a trusted source, because it is unpickled.

        Raises:
            DataLossError: The state is damaged, or of another kind.
            FailedPreconditionError: The thread has begun to prefetch batches.
            UnimplementedError: The dataset's iterator has no ``set_state()``.
        """
        if self._thread.ident is not None:
            raise errors.FailedPreconditionError(
                "set_state comes before the first batch of a pass: begin another one"
            )
        elements = self._source.elements
        if not hasattr(elements, "set_state"):
            raise errors.UnimplementedError(
                f"a {type(elements).__name__} cannot go on where another one was: it has no "
                "set_state()"
            )
        try:
            kind, left, below = pickle.loads(state)
        except Exception as error:
            raise errors.DataLossError(f"the state of a pass is damaged: {error!r}") from error
        if kind != _FORMAT:
            raise errors.DataLossError(
                f"the state is not of batches for replicas, but of {kind!r}: give a state that "
                "get_state() of a distributed dataset has returned"
            )
        elements.set_state(below)
        self._source.again = deque(left)

    def close(self) -> None:
        """End the pass, and wait up to 5 s for its thread; idempotent."""
        self._finalizer()
        if self._thread.ident is None:
            self._source.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning(
                    "a dataset has not given its next element %g s after the pass was closed; its "
                    "thread ends when it does",
                    _CLOSE_S,
                )

    def __enter__(self) -> FeedIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _next_step(self) -> Any:
        """Return a step, a Failure or OVER."""
        if not self._ahead:
            return OVER if self._channel.closed else _made(self._source)
        with self._starting:
            if self._thread.ident is None and not self._channel.closed:
                self._thread.start()
        return self._channel.take()


class DatasetIterator(Iterator[Any]):
    """An iterator over a dataset that returns one element for each replica at a time.

    Args:
        feed: The dataset and its replicas; or the only pass, which cannot restart.
    """

    def __init__(self, feed: Feed | FeedIterator) -> None:
        self._feed = feed
        self.initialize()

    def initialize(self) -> None:
        """Restart at the beginning of the dataset."""
        self._pass = iter(self._feed)

    def get_next(self) -> Any:
        """Return the next element; for several replicas a PerReplica, or tuples or dicts of these.

        Raises:
            StopIteration: The dataset does not have one more element for each replica.
        """
        return next(self._pass)

    __next__ = get_next

    def get_state(self) -> bytes:
        """Return the position in the dataset; see :meth:`FeedIterator.get_state`."""
        return self._pass.get_state()

    def set_state(self, state: bytes) -> None:
        """Continue from a saved state; see :meth:`FeedIterator.set_state`."""
        self._pass.set_state(state)


class Calls(Iterator[Any]):
    """An iterator over the results of a function, until the function raises StopIteration.

    Args:
        function: Called without arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __next__(self) -> Any:
        return self._function()


class _Source:
    """The source of steps: an iterator over the elements of a dataset.

    Attributes:
        elements: The iterator of the dataset.
        again: Elements that an earlier pass took but did not use. They come first.
    """

    def __init__(self, feed: Feed) -> None:
        self.elements: Any = iter(feed.dataset)
        self.again: deque[Any] = deque()
        self.gpus = feed.gpus
        self._own = self.elements is not feed.dataset
        self._count, self._replicas = feed.elements_a_step, feed.replicas
        self._prefetchers: dict[int, Prefetcher] = {}

    def step(self) -> _Step:
        """Start the copies of a step and return it; StopIteration without enough elements."""
        taken = [self._take() for _ in range(self._count)]
        parts = taken if self._count == self._replicas else divided(taken[0], self._replicas)
        if self.gpus:
            pairs = zip(parts, self.gpus, strict=True)
            parts = [_PartOnGpu(part, self._prefetcher(gpu)) for part, gpu in pairs]
        return _Step(taken, parts)

    def close(self) -> None:
        """Close the iterator if this object created it."""
        if self._own and hasattr(self.elements, "close"):
            self.elements.close()

    def _take(self) -> Any:
        return self.again.popleft() if self.again else next(self.elements)

    def _prefetcher(self, gpu: int) -> Prefetcher:
        if gpu not in self._prefetchers:
            self._prefetchers[gpu] = Prefetcher(gpu)
        return self._prefetchers[gpu]


class _Step:
    """The next elements, and their part for each replica."""

    def __init__(self, taken: list[Any], parts: list[Any]) -> None:
        self.taken = taken
        self._parts = parts

    def hand_over(self) -> Any:
        parts = self._parts
        return regrouped([one.hand_over() if isinstance(one, _PartOnGpu) else one for one in parts])


class _PartOnGpu:
    """The part of a step for one replica. Its arrays are being copied to the GPU."""

    def __init__(self, part: Any, prefetcher: Prefetcher) -> None:
        self._part = _as_tree(part)
        self._leaves = tree_leaves(self._part)
        arrays = [_as_number(leaf) for leaf in self._leaves]
        self._places = [place for place, array in enumerate(arrays) if array is not None]
        self._copies = prefetcher.send([array for array in arrays if array is not None])

    def hand_over(self) -> Any:
        leaves = list(self._leaves)
        for place, array in zip(self._places, self._copies.hand_over(), strict=True):
            leaves[place] = array
        return with_leaves(self._part, leaves)


def _as_number(leaf: Any) -> Any:
    """Return a value as a host array; None if CuPy has no dtype for it."""
    if isinstance(leaf, _NUMBERS):
        array = np.asarray(leaf)
    elif hasattr(leaf, "__dlpack__") or is_on_gpu(leaf):
        array = as_array(leaf)
    else:
        return None
    return array if has_dtype(array.dtype) else None


def _fill(channel: Channel, source: _Source) -> None:
    try:
        while channel.wait_for_room() and _add_next(channel, source):
            pass
    finally:
        channel.add(OVER)
        source.close()


def _add_next(channel: Channel, source: _Source) -> bool:
    """Make a step and add it. Return False at the end of the dataset."""
    with channel.making:
        step = _made(source, source.gpus[0])  # avoids a CUDA context on another GPU
        channel.add(step)
        return step is not OVER


def _made(source: _Source, gpu: int | None = None) -> Any:
    """Return a step, a Failure or OVER. Make ``gpu`` the current device before, if given."""
    try:
        if gpu is not None:
            make_current(gpu)
        return source.step()
    except StopIteration:
        return OVER
    except BaseException as error:
        return Failure(error)
