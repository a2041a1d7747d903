"""Input of replicas: datasets, their iterators and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import errors
from strategy.reductions import as_array, regrouped
from strategy.shared.numbers import whole_number


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


class DatasetIterator:
    """An iterator over a dataset that returns one element for each replica at a time.

    Args:
        dataset: Any iterable.
        replicas: Number of elements to combine; 1 if the elements are combined already.
    """

    def __init__(self, dataset: Iterable[Any], replicas: int) -> None:
        self._dataset = dataset
        self._replicas = replicas
        self._elements = iter(dataset)

    def initialize(self) -> None:
        """Restart at the beginning of the dataset."""
        self._elements = iter(self._dataset)

    def get_next(self) -> Any:
        """Return the next element; for several replicas a PerReplica, or tuples or dicts of these.

        Raises:
            StopIteration: The dataset does not have one more element for each replica.
        """
        if self._replicas == 1:
            return next(self._elements)
        return regrouped([next(self._elements) for _ in range(self._replicas)])

    def get_state(self) -> Any:
        """Return the position in the dataset; see :func:`state_of`."""
        return state_of(self._elements)

    def set_state(self, state: Any) -> None:
        """Continue from a saved state; see :func:`set_state_of`.

        The number of replicas may differ from the number at the save. A state of replicas with GPUs
        needs replicas with GPUs.
        """
        set_state_of(self._elements, state)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.get_next()


class Calls:
    """An iterator over the results of a function, until the function raises StopIteration.

    Args:
        function: Called without arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._function()


class NumpyDataset:
    """A dataset of the rows of arrays; made by ``experimental_make_numpy_dataset``.

    Args:
        arrays: An array, or a tuple, list or dict of arrays of the same length.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = over_leaves(as_array, arrays)
        lengths = {len(array) for array in leaves_of(self._arrays)}
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


def divided_batches(dataset: Iterable[Any], replicas: int) -> Iterable[Any]:
    """Return an iterable that divides batches among replicas, along the first axis.

    Args:
        dataset: Iterable of arrays, or of tuples, lists or dicts of arrays.
        replicas: Number of replicas. For 1, the dataset itself is returned.
    """
    return dataset if replicas == 1 else _Divided(dataset, replicas)


class _Divided:
    def __init__(self, dataset: Iterable[Any], replicas: int) -> None:
        self._dataset = dataset
        self._replicas = replicas

    def __iter__(self) -> Iterator[Any]:
        count = self._replicas
        for element in self._dataset:
            yield regrouped(divided(element, count))


def divided(element: Any, count: int) -> list[Any]:
    """Divide a batch along the first axis of each of its arrays.

    Args:
        element: An array, or a tuple, list or dict of arrays.
        count: Number of parts. Their lengths differ by at most one row, and may be 0.

    Raises:
        ValueError: An array has no axes.
    """
    parts = over_leaves(lambda array: _split(array, count), element)
    return [_mapped_lists(parts, element, number) for number in range(count)]


def state_of(elements: Any) -> Any:
    """Return the state of an iterator, from its ``get_state()``.

    Raises:
        UnimplementedError: The iterator has no such method.
    """
    if not hasattr(elements, "get_state"):
        raise errors.UnimplementedError(
            f"a {type(elements).__name__} cannot say where it is: the dataset's iterator needs "
            "get_state() and set_state(), as those of dataservice have"
        )
    return elements.get_state()


def set_state_of(elements: Any, state: Any) -> None:
    """Set the state of an iterator, by its ``set_state()``.

    Raises:
        UnimplementedError: The iterator has no such method.
    """
    if not hasattr(elements, "set_state"):
        raise errors.UnimplementedError(
            f"a {type(elements).__name__} cannot go on where another one was: it has no set_state()"
        )
    elements.set_state(state)


def _split(given: Any, count: int) -> list[Any]:
    array = as_array(given)
    if not array.ndim:
        raise ValueError(
            f"a batch is divided among {count} replicas along the first axis, and {given!r} has "
            "none: batch the dataset first"
        )
    return list(np.array_split(array, count))


def _cut(structure: Any, rows: int | slice) -> Any:
    return over_leaves(lambda array: array[rows], structure)


def over_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to each leaf of nested tuples, lists and dicts. Return the same nesting."""
    if isinstance(structure, Mapping):
        return {key: over_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, tuple | list):
        return _like(structure, [over_leaves(function, value) for value in structure])
    return function(structure)


def _mapped_lists(parts: Any, like: Any, number: int) -> Any:
    """Take part ``number`` of the list at each leaf of ``parts``, which is nested as ``like``."""
    if isinstance(like, Mapping):
        return {key: _mapped_lists(parts[key], like[key], number) for key in like}
    if isinstance(like, tuple | list):
        each = [_mapped_lists(part, one, number) for part, one in zip(parts, like, strict=True)]
        return _like(like, each)
    return parts[number]


def _like(structure: Any, values: list[Any]) -> Any:
    """Return values in a tuple or list of the same type, also in a namedtuple."""
    kind = type(structure)
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def leaves_of(structure: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    over_leaves(found.append, structure)
    return found
