"""Datasets for torch's DataLoader. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dataservice.dataset import Dataset
from dataservice.dataset.dataset import DatasetIterator
from dataservice.dataset.tree import map_leaves
from mpidist.errors import UnimplementedError
from mpidist.gpu import lies_on_gpu


class IterableDataset(torch.utils.data.IterableDataset):
    """A dataset as torch's IterableDataset, with tensors and a position that can be saved.

    Arrays and NumPy scalars become tensors that share their memory. Read-only arrays are copied.
    Text and values of other kinds stay as they are.

    Use ``DataLoader(dataset, num_workers=0)``: the data service, or ``map`` with
    ``num_parallel_calls``, runs in parallel. If the dataset makes the batches itself, give the
    DataLoader ``batch_size=None``. torchdata's ``StatefulDataLoader`` saves and restores the
    position by itself.

    Args:
        dataset: The dataset, usually a result of :func:`dataservice.distribute`.

    Example:
        >>> import torch
        >>> from dataservice import Dataset
        >>> from dataservice.torch import IterableDataset
        >>> from torch.utils.data import DataLoader
        >>> numbers = IterableDataset(Dataset.range(6).shuffle(6, seed=1).batch(2))
        >>> batches = iter(DataLoader(numbers, batch_size=None))
        >>> first = next(batches)
        >>> state = numbers.state_dict()
        >>> later = IterableDataset(Dataset.range(6).shuffle(6, seed=1).batch(2))
        >>> later.load_state_dict(state)
        >>> [torch.equal(one, other) for one, other in zip(batches, later, strict=True)]
        [True, True]
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._next: DatasetIterator | None = None  # the iterator of the next iteration, if any
        self._current: DatasetIterator | None = None  # the last iterator, unless it has ended

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration, at the position of ``load_state_dict`` if it has been called.

        Raises:
            UnimplementedError: This is a process of a DataLoader. Each process would read the
                whole dataset, and the trainer would not know the position.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            raise UnimplementedError(
                f"num_workers={worker.num_workers} of the DataLoader must be 0, because each of "
                "its processes would read the whole dataset: let the data service or "
                "map(..., num_parallel_calls=...) run in parallel"
            )
        return self._tensors()

    def _tensors(self) -> Iterator[Any]:
        # This runs at the first element: torchdata's loader makes an iterator that it never uses.
        self._current, self._next = self._next or iter(self._dataset), None
        elements = self._current
        for element in elements:
            yield map_leaves(_tensor, element)
        if self._current is elements:
            self._current = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for :meth:`load_state_dict`.

        The position is after the last element of the last iteration. If that iteration has ended,
        or none has begun, the position is the start of the next iteration.

        Raises:
            UnimplementedError: See :meth:`dataservice.dataset.DatasetIterator.get_state`.
        """
        elements = self._next or self._current
        if elements is None:
            elements = self._next = iter(self._dataset)
        return elements.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a saved position. Iterations that have begun go on.

        Args:
            state_dict: The result of :meth:`state_dict`. It is unpickled, so load only states that
                you trust.

        Raises:
            DataLossError: See :meth:`dataservice.dataset.DatasetIterator.set_state`, which raises
                the other errors, too.
        """
        elements = iter(self._dataset)
        elements.load_state_dict(state_dict)
        self._next = elements


def _tensor(leaf: Any) -> Any:
    """Return a tensor over the memory of a leaf, and other leaves unchanged."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return torch.from_dlpack(leaf) if lies_on_gpu(leaf) else leaf
    array = np.asarray(leaf)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch has no strides below 0, or between two elements.
    usable = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not (usable and array.flags.writeable):
        array = array.copy()
    if array.dtype.kind == "V" and hasattr(torch, array.dtype.name):  # bfloat16 and float8
        bits = torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name))
    try:
        return torch.from_numpy(array)
    except TypeError:  # torch has no such dtype
        return leaf
