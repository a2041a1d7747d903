"""What replicas are fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategy.reductions import as_array, regrouped


@dataclass(frozen=True)
class InputContext:
    """What an input function is told of the worker that it is called on.

    Attributes:
        num_input_pipelines: Number of workers.
        input_pipeline_id: Index of this one.
        num_replicas_in_sync: Replicas of this worker.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Local. How much of a batch for all replicas of the worker is one replica's.

        Raises:
            ValueError: It cannot be divided equally.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a batch of {global_batch_size} cannot be divided equally among "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """For which replica a value is wanted.

    Attributes:
        replica_id_in_sync_group: Which one, from 0.
        num_replicas_in_sync: Replicas of this worker.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class DatasetIterator:
    """Elements of a dataset, one for each replica at a time.

    Args:
        dataset: Any iterable.
        replicas: How many there are.
    """

    def __init__(self, dataset: Iterable[Any], replicas: int) -> None:
        self._dataset = dataset
        self._replicas = replicas
        self._elements = iter(dataset)

    def initialize(self) -> None:
        """Local. Begin again."""
        self._elements = iter(self._dataset)

    def get_next(self) -> Any:
        """Local. The next elements; of several replicas a PerReplica, or tuples or dicts of them.

        Raises:
            StopIteration: There are no more, or not one for each replica.
        """
        if self._replicas == 1:
            return next(self._elements)
        return regrouped([next(self._elements) for _ in range(self._replicas)])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.get_next()


class NumpyDataset:
    """Rows of arrays; made by ``experimental_make_numpy_dataset``.

    Args:
        arrays: An array, or a tuple, list or dict of them, all equally long.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = _mapped(as_array, arrays)
        lengths = {len(array) for array in _leaves(self._arrays)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays must be equally long, not {sorted(lengths)}")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for row in range(self._length):
            yield _cut(self._arrays, row)

    def batch(self, size: int, drop_remainder: bool = False) -> list[Any]:
        """Local. So many rows at a time, as views; the last batch may be shorter."""
        if size < 1:
            raise ValueError(f"a batch needs at least one row, not {size}")
        end = self._length - self._length % size if drop_remainder else self._length
        starts = range(0, end, size)
        return [_cut(self._arrays, slice(start, start + size)) for start in starts]

    def shard(self, num_shards: int, index: int) -> NumpyDataset:
        """Local. Every ``num_shards``-th row, from ``index`` on."""
        return NumpyDataset(_cut(self._arrays, slice(index, None, num_shards)))


def divided_batches(dataset: Iterable[Any], replicas: int) -> Iterable[Any]:
    """Local. Batches for all replicas of a worker, divided among them along the first axis.

    Args:
        dataset: Its elements are arrays, or tuples, lists or dicts of them.
        replicas: How many there are; for one alone it is the dataset itself.
    """
    return dataset if replicas == 1 else _Divided(dataset, replicas)


class _Divided:
    def __init__(self, dataset: Iterable[Any], replicas: int) -> None:
        self._dataset = dataset
        self._replicas = replicas

    def __iter__(self) -> Iterator[Any]:
        count = self._replicas
        for element in self._dataset:
            parts = _mapped(lambda array: _split(array, count), element)
            yield regrouped([_mapped_lists(parts, element, number) for number in range(count)])


def _split(given: Any, count: int) -> list[Any]:
    array = as_array(given)
    if not array.ndim:
        raise ValueError(
            f"a batch is divided among {count} replicas along the first axis, and {given!r} has "
            "none: batch the dataset first"
        )
    return list(np.array_split(array, count))


def _cut(structure: Any, rows: int | slice) -> Any:
    return _mapped(lambda array: array[rows], structure)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """A tuple, list or dict of arrays, or one alone, with something done to each."""
    if isinstance(structure, Mapping):
        return {key: _mapped(function, value) for key, value in structure.items()}
    if isinstance(structure, tuple | list):
        return _like(structure, [_mapped(function, value) for value in structure])
    return function(structure)


def _mapped_lists(parts: Any, like: Any, number: int) -> Any:
    """Of a structure of lists in the place of arrays, one entry of each."""
    if isinstance(like, Mapping):
        return {key: _mapped_lists(parts[key], like[key], number) for key in like}
    if isinstance(like, tuple | list):
        each = [_mapped_lists(part, one, number) for part, one in zip(parts, like, strict=True)]
        return _like(like, each)
    return parts[number]


def _like(structure: Any, values: list[Any]) -> Any:
    """Values in a tuple or list of the same kind; those of a named tuple come one by one."""
    kind = type(structure)
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(found.append, structure)
    return found
