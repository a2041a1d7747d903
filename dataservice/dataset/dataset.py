"""The fluent face of the nodes."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.batch import Batch
from dataservice.dataset.iteration import DatasetIterator
from dataservice.dataset.map import Map
from dataservice.dataset.node import Context, ElementIterator, Node, UnaryIterator
from dataservice.dataset.prefetch import Prefetch
from dataservice.dataset.range import Range
from dataservice.dataset.repeat import Repeat
from dataservice.dataset.shard import Shard
from dataservice.dataset.shuffle import Shuffle
from dataservice.dataset.skip import Skip
from dataservice.dataset.take import Take
from dataservice.dataset.tensor_slices import TensorSlices


class Dataset:
    """An immutable description of a sequence of elements.

    An element is a NumPy scalar or array, or a dict or tuple of them, nested. Every ``for`` makes
    a pass of its own. Passes of one Dataset object are numbered, and ``shuffle`` with a seed
    depends on the number, so that epochs differ while a rerun of the script repeats them.

    Args:
        node: The description; use the class methods below.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._passes = itertools.count()

    @property
    def node(self) -> Node:
        """Local. The description by itself."""
        return self._node

    # Sources

    @classmethod
    def range(cls, *args: int) -> Dataset:
        """Local. Whole numbers, as np.int64.

        Args:
            *args: As for Python's range: ``stop``, or ``start, stop``, or ``start, stop, step``.

        Raises:
            TypeError: An argument is no whole number, or there are none or more than three.
            ValueError: The step is 0.
        """
        numbers = range(*args)
        return cls(Range(numbers.start, numbers.stop, numbers.step))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Dataset:
        """Local. The rows of arrays.

        Args:
            tensors: Array-likes of shape (rows, ...), or dicts and tuples of them, nested; held by
                reference where they are arrays.

        Returns:
            A dataset of ``rows`` elements; their arrays are read-only views of shape (...).

        Raises:
            ValueError: There is no array, one has no rows, or their numbers of rows differ.
        """
        return cls(TensorSlices.of(tensors))

    # Transformations

    def map(self, function: Callable[..., Any]) -> Dataset:
        """Local. A function of each element.

        Args:
            function: Gets the element, or the members of a tuple as its arguments. Numbers,
                strings and lists in its result become NumPy's.
        """
        return Dataset(Map(self._node, function))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Local. Random order: each element is drawn from the next ``buffer_size`` ones.

        Args:
            buffer_size: Elements held to draw from.
            seed: Makes the order the same in every run.
            reshuffle_each_iteration: Whether each pass has another order.

        Raises:
            ValueError: The buffer size is below 1, or the seed is negative.
        """
        return Dataset(Shuffle.of(self._node, buffer_size, seed, reshuffle_each_iteration))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Local. Consecutive elements stacked into arrays of shape (batch_size, ...).

        Args:
            batch_size: Elements in a batch.
            drop_remainder: Whether to leave out a smaller last batch.

        Raises:
            ValueError: The batch size is below 1. During a pass (as InvalidArgumentError):
                elements differ in structure, shape or dtype.
        """
        return Dataset(Batch(self._node, batch_size, drop_remainder))

    def repeat(self, count: int | None = None) -> Dataset:
        """Local. The sequence ``count`` times; None or -1 repeats it for ever.

        Raises:
            ValueError: The count is below -1.
        """
        if count is not None and count < -1:
            raise ValueError(f"repeat needs a count of at least 0, or -1 for ever, not {count}")
        return Dataset(Repeat(self._node, None if count == -1 else count))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Local. Up to ``buffer_size`` elements are made ahead by a thread.

        Raises:
            ValueError: The size is below 1.
        """
        return Dataset(Prefetch(self._node, buffer_size))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Local. The elements index, index + num_shards, index + 2 num_shards, ...

        Raises:
            ValueError: The index is not in [0, num_shards).
        """
        return Dataset(Shard(self._node, num_shards, index))

    def take(self, count: int) -> Dataset:
        """Local. The first ``count`` elements; -1 takes all.

        Raises:
            ValueError: The count is below -1.
        """
        return Dataset(Take(self._node, count))

    def skip(self, count: int) -> Dataset:
        """Local. All but the first ``count`` elements; -1 leaves none.

        Raises:
            ValueError: The count is below -1.
        """
        return Dataset(Skip(self._node, count))

    def apply(self, transformation: Callable[[Dataset], Dataset]) -> Dataset:
        """Local. ``transformation(self)``, for instance with what ``distribute`` returns.

        Raises:
            TypeError: It does not give a Dataset.
        """
        result = transformation(self)
        if not isinstance(result, Dataset):
            raise TypeError(f"the transformation gave {type(result).__name__}, not a Dataset")
        return result

    # Elements

    def __iter__(self) -> DatasetIterator:
        context = Context(seed=(secrets.randbits(63),), passes=(next(self._passes),))
        return DatasetIterator(self._node, context)

    def as_numpy_iterator(self) -> ElementIterator:
        """Local. A pass whose leaves are all NumPy scalars and arrays.

        Raises:
            TypeError: During the pass: a leaf is neither NumPy's nor has ``__array__``.
        """
        return _NumpyIterator(iter(self))

    @property
    def distributed(self) -> bool:
        """Local. Whether a data service deals the elements out to several consumers.

        A training loop does not shard such a dataset once more.
        """
        return self._node.distributed

    def cardinality(self) -> int:
        """Local. The number of elements, -1 if it is infinite, -2 if it is unknown."""
        return self._node.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            raise TypeError(f"the length of {self!r} is {'infinite' if count == -1 else 'unknown'}")
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Dataset {self._node.summary()}>"

    def __reduce__(self) -> tuple[type[Dataset], tuple[Node]]:
        return Dataset, (self._node,)


class _NumpyIterator(UnaryIterator):
    def __next__(self) -> Any:
        return tree.only_numpy(next(self._parent))
