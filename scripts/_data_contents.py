"""Datasets and map functions for bench_dataservice."""

import time
from dataclasses import dataclass

import numpy as np

from dataservice import Dataset

# Noise: decoded images hardly compress either.
IMAGES = np.random.default_rng(0).integers(0, 256, (64, 224, 224, 3), np.uint8)
SMALL = np.ones((1 << 16, 64), np.uint8)
SLEEP_S = 0.01
ENDLESS = 1 << 40


class Rows:
    """Rows of an array in an endless cycle: a map function, and a dataset for torch.

    Args:
        array: Array of shape (rows, ...).
    """

    def __init__(self, array):
        self._array = array

    def __call__(self, index):
        """Return a row as an array."""
        return self._array[index % len(self._array)]

    def __getitem__(self, index):
        """Return a row as a tensor outside of torch's shared memory."""
        import torch

        return torch.from_numpy(self(index))

    def __len__(self):
        return ENDLESS


@dataclass(frozen=True)
class Content:
    """The content of an endless dataset.

    Attributes:
        title: Description for the title of the table.
        array: Array with the rows, which repeat endlessly.
        batch: Rows that the worker puts into an element. With 0, an element is one row.
    """

    title: str
    array: np.ndarray
    batch: int = 0

    @property
    def nbytes(self):
        """The size of an element in bytes."""
        return self.array[0].nbytes * (self.batch or 1)


CONTENTS = {
    "batches": Content("batches of 9.6 MB, made before", IMAGES[None]),
    "images": Content("batches of 64 images, made by the worker", IMAGES, batch=64),
    "small": Content("elements of 64 B", SMALL),
}


def nap(index):
    """Sleep for 10 ms and return the index."""
    time.sleep(SLEEP_S)
    return index


def fill(index):
    """Return a new array of 1 MiB."""
    return np.full(1 << 20, index, np.uint8)


# Functions that make our datasets of a given number of elements, by name.
EPOCHS = {
    "batches": lambda count: Dataset.range(count).map(Rows(IMAGES[None])),
    "small": lambda count: Dataset.from_tensor_slices(np.resize(SMALL, (count, SMALL.shape[1]))),
    "fresh": lambda count: Dataset.range(count).map(fill),
}
