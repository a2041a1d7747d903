"""What can be made of a dataset: each method gives a new one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from dataservice.dataset.batch import Batch
from dataservice.dataset.bucket import Bucket
from dataservice.dataset.cache import Cache
from dataservice.dataset.concatenate import Concatenate
from dataservice.dataset.device import PrefetchToDevice, device_number
from dataservice.dataset.enumerate import Enumerate
from dataservice.dataset.filter import Filter
from dataservice.dataset.ignore_errors import IgnoreErrors
from dataservice.dataset.interleave import Interleave
from dataservice.dataset.map import Map
from dataservice.dataset.node import Node
from dataservice.dataset.padded_batch import PaddedBatch, Padding
from dataservice.dataset.parallel_map import ParallelMap
from dataservice.dataset.prefetch import Prefetch
from dataservice.dataset.repeat import Repeat
from dataservice.dataset.shard import Shard
from dataservice.dataset.shuffle import Shuffle
from dataservice.dataset.skip import Skip
from dataservice.dataset.take import Take
from dataservice.dataset.unbatch import Unbatch
from dataservice.dataset.window import Window


class Transformations(ABC):
    """The transformations of a dataset."""

    _node: Node

    @classmethod
    @abstractmethod
    def of(cls, node: Node) -> Self:
        """Local. A dataset of a description."""

    def map(
        self,
        function: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool = True,
        processes: bool = False,
    ) -> Self:
        """Local. A function of each element.

        Args:
            function: Gets the element, or the members of a tuple as its arguments. Numbers,
                strings and lists in its result become NumPy's.
            num_parallel_calls: How many elements it works on at once, in threads; by default it
                is called by who asks for elements.
            deterministic: Whether elements stay in their order; otherwise who is ready goes first,
                but on workers of a service, where others may have to go on.
            processes: Run it in processes in place of threads, for functions that Python's lock
                would hold up. They get the function by cloudpickle, and share no memory.

        Raises:
            ValueError: ``num_parallel_calls`` is below 1, or missing for processes.
        """
        if num_parallel_calls is None:
            if processes:
                raise ValueError("map needs num_parallel_calls, the number of its processes")
            return self.of(Map(self._node, function))
        calls = num_parallel_calls
        return self.of(ParallelMap(self._node, function, calls, deterministic, processes))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Self:
        """Local. Random order: each element is drawn from the next ``buffer_size`` ones.

        Under ``"distributed_epoch"`` workers shuffle what they have; but if ``buffer_size`` is at
        least the number of elements, which are known by their indices and in no order, the order
        is one of the whole source, and no elements are held.

        Args:
            buffer_size: Elements held to draw from.
            seed: Makes the order the same in every run.
            reshuffle_each_iteration: Whether each pass has another order.

        Raises:
            ValueError: The buffer size is below 1, or the seed is negative.
        """
        return self.of(Shuffle.of(self._node, buffer_size, seed, reshuffle_each_iteration))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Local. Consecutive elements stacked into arrays of shape (batch_size, ...).

        Under ``"distributed_epoch"`` batches are those of one process, unless an element cannot be
        made: it fails its batch, and the next one begins where it would have begun. Behind what
        drops, reorders, flattens or repeats elements they are each worker's own, and each one's
        last may be smaller.

        Args:
            batch_size: Elements in a batch.
            drop_remainder: Whether to leave out a smaller last batch.

        Raises:
            ValueError: The batch size is below 1. During a pass (as InvalidArgumentError):
                elements differ in structure, shape or dtype.
        """
        return self.of(Batch(self._node, batch_size, drop_remainder))

    def repeat(self, count: int | None = None) -> Self:
        """Local. The sequence ``count`` times; None or -1 repeats it for ever.

        Raises:
            ValueError: The count is below -1.
        """
        if count is not None and count < -1:
            raise ValueError(f"repeat needs a count of at least 0, or -1 for ever, not {count}")
        return self.of(Repeat(self._node, None if count == -1 else count))

    def prefetch(self, buffer_size: int) -> Self:
        """Local. Up to ``buffer_size`` elements are made ahead by a thread.

        Raises:
            ValueError: The size is below 1.
        """
        return self.of(Prefetch(self._node, buffer_size))

    def prefetch_to_device(self, device: int | str = 0, buffer_size: int = 2) -> Self:
        """Local. Elements on a GPU, up to ``buffer_size`` of them ahead of their use.

        A thread makes them, and copies them through pinned memory on a stream of its own. The
        current stream of who takes an element waits for its copy; the host does not. Arrays and
        numbers become CuPy arrays; strings, bytes and objects stay as they are. It comes after
        ``distribute``, and no transformation with threads after it: take an element on the stream
        that uses it. Several replicas are fed with arrays of the host, which each brings to its
        GPU.

        Args:
            device: Number of the GPU, or ``"GPU:0"``; of a strategy's only replica
                ``strategy.gpus[0]``.
            buffer_size: How many elements to hold there.

        Raises:
            ValueError: It is no GPU, or the size is below 1. In the first pass, too, where there is
                no such GPU; FailedPreconditionError where CuPy can use none.
        """
        return self.of(PrefetchToDevice(self._node, device_number(device), buffer_size))

    def shard(self, num_shards: int, index: int) -> Self:
        """Local. The elements index, index + num_shards, index + 2 num_shards, ...

        Args:
            num_shards: How many shards there are.
            index: Which of them to take. SHARD_HINT for both stands for the workers of a data
                service, under ShardingPolicy.HINT.

        Raises:
            ValueError: The index is not in [0, num_shards). During a pass of SHARD_HINT:
                FailedPreconditionError, unless a data service has filled it in.
        """
        return self.of(Shard(self._node, num_shards, index))

    def take(self, count: int) -> Self:
        """Local. The first ``count`` elements; -1 takes all.

        Raises:
            ValueError: The count is below -1.
        """
        return self.of(Take(self._node, count))

    def skip(self, count: int) -> Self:
        """Local. All but the first ``count`` elements; -1 leaves none.

        Raises:
            ValueError: The count is below -1.
        """
        return self.of(Skip(self._node, count))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Local. The elements that a function says True of.

        Args:
            predicate: Gets the element, or the members of a tuple as its arguments.
        """
        return self.of(Filter(self._node, predicate))

    def ignore_errors(self, log_warning: bool = False, *, limit: int | None = None) -> Self:
        """Local. All but the elements whose evaluation raised an Exception.

        What the raising transformation had taken is lost with the element: of ``batch``, the batch
        up to there. A source that cannot go on, such as a generator that raised or a data service,
        ends the pass with its error. ``iterator.ignored`` tells how many errors a pass has ignored,
        and ``ignored`` of :func:`mpidist.task_metrics` those of all passes of the process, for its
        task, or for ``dataset 0`` if no Server is started. On workers of a service the same
        elements have to raise whenever they are made: where others go on for a lost worker, an
        error that comes and goes has elements come twice, or not at all.

        Args:
            log_warning: Whether to log each error.
            limit: How many errors to ignore in a pass; the next is raised. None ignores all, and an
                endless dataset without a good element never gives one.

        Raises:
            ValueError: The limit is negative.
        """
        return self.of(IgnoreErrors(self._node, log_warning, limit))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Local. Consecutive elements of different lengths stacked, filled up to the longest.

        Args:
            batch_size: Elements in a batch.
            padded_shapes: A shape, or one for each array in the structure of elements, to fill up
                to; None or -1 in it means as long as the longest of the batch, and so does None.
            padding_values: What to fill up with, likewise; None: 0, False or empty text.
            drop_remainder: Whether to leave out a smaller last batch.

        Raises:
            ValueError: The batch size is below 1. During a pass (as InvalidArgumentError):
                elements differ in structure, dtype or dimensions, or are longer than their shape.
        """
        padding = Padding(padded_shapes, padding_values)
        return self.of(PaddedBatch(self._node, batch_size, padding, drop_remainder))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        drop_remainder: bool = False,
    ) -> Self:
        """Local. Batches of elements of similar length, filled up to the longest.

        Args:
            element_length_func: Says how long an element is.
            bucket_boundaries: Ascending; bucket i takes lengths below boundary i.
            bucket_batch_sizes: Elements in a batch of each bucket; one more than boundaries.
            padded_shapes: See :meth:`padded_batch`.
            padding_values: See :meth:`padded_batch`.
            pad_to_bucket_boundary: Fill up to one below the boundary in place of the longest.
            drop_remainder: Whether to leave out what does not fill a bucket.

        Raises:
            ValueError: Boundaries do not ascend, or the sizes do not belong to them.
        """
        boundaries, sizes = tuple(bucket_boundaries), tuple(bucket_batch_sizes)
        padding = Padding(padded_shapes, padding_values)
        function, to_boundary = element_length_func, pad_to_bucket_boundary
        return self.of(
            Bucket(self._node, function, boundaries, sizes, padding, to_boundary, drop_remainder)
        )

    def unbatch(self) -> Self:
        """Local. The rows of each element's arrays as elements.

        Raises:
            ValueError: During a pass (as InvalidArgumentError): arrays of an element have no rows,
                or not equally many.
        """
        return self.of(Unbatch(self._node))

    def enumerate(self, start: int = 0) -> Self:
        """Local. Pairs of a number, counted from ``start``, as np.int64, and the element."""
        return self.of(Enumerate(self._node, start))

    def concatenate(self, dataset: Transformations) -> Self:
        """Local. The elements of this dataset, then those of another."""
        return self.of(Concatenate((self._node, dataset._node)))

    def interleave(
        self,
        map_func: Callable[..., Transformations],
        cycle_length: int = 16,
        block_length: int = 1,
    ) -> Self:
        """Local. The elements of the datasets that elements become, some of these in turn.

        Args:
            map_func: Makes a dataset of an element.
            cycle_length: How many datasets take turns.
            block_length: How many elements each gives in its turn.

        Raises:
            ValueError: A length is below 1.
        """
        function = _node_of(map_func, "interleave")
        return self.of(Interleave(self._node, function, cycle_length, block_length))

    def flat_map(self, map_func: Callable[..., Transformations]) -> Self:
        """Local. The elements of the datasets that elements become, one after the other.

        Args:
            map_func: Makes a dataset of an element.
        """
        return self.of(Interleave(self._node, _node_of(map_func, "flat_map"), 1, 1))

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Self:
        """Local. Stretches of the sequence, each as a dataset; of a dict or tuple, one of datasets.

        Args:
            size: Elements of a window.
            shift: Elements from the beginning of a window to that of the next; by default the size.
            stride: Elements from one of a window to its next.
            drop_remainder: Whether to leave out windows that the end cuts short.

        Raises:
            ValueError: A number is below 1.
        """
        shift = size if shift is None else shift
        return self.of(Window(self._node, size, shift, stride, drop_remainder, self.of))

    def cache(self, filename: str = "") -> Self:
        """Local. The elements of the first whole pass, kept for later ones.

        Workers that share the source keep each what they have made, in memory, for as long as they
        have the dataset: in the end all of it, for every pass is divided anew.

        Args:
            filename: Where; empty for the memory of this process. A file that is there already is
                read, in place of the dataset. Workers that share the source cannot share a file.

        Raises:
            DataLossError: At a pass: the file is damaged, or something else.
            InvalidArgumentError: At a pass: it is of another dataset.
        """
        return self.of(Cache(self._node, filename))


def _node_of(function: Callable[..., Transformations], name: str) -> Callable[..., Node]:
    return _Nodes(function, name)


class _Nodes:
    """A user's function that makes datasets, as one that makes nodes; it can be pickled."""

    def __init__(self, function: Callable[..., Transformations], name: str) -> None:
        self._function = function
        self._name = name
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, *arguments: Any) -> Node:
        dataset = self._function(*arguments)
        if not isinstance(dataset, Transformations):
            raise TypeError(
                f"the function given to {self._name} gave {type(dataset).__name__}, not a Dataset"
            )
        return dataset._node
