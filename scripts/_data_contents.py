"""What bench_dataservice reads: datasets, and functions of them."""

import time
from dataclasses import dataclass

import numpy as np

from dataservice import Dataset

# Noise, as images are to who would compress them.
IMAGES = np.random.default_rng(0).integers(0, 256, (64, 224, 224, 3), np.uint8)
SMALL = np.ones((1 << 16, 64), np.uint8)
SLEEP_S = 0.01
ENDLESS = 1 << 40


class Rows:
    """Rows of an array, over and over: a function of an index, and a dataset for torch.

    Args:
        array: Of shape (rows, ...).
    """

    def __init__(self, array):
        self._array = array

    def __call__(self, index):
        """A row."""
        return self._array[index % len(self._array)]

    def __getitem__(self, index):
        """A row, as a tensor that has not been in shared memory before."""
        import torch

        return torch.from_numpy(self(index))

    def __len__(self):
        return ENDLESS


@dataclass(frozen=True)
class Content:
    """What is read, endlessly.

    Attributes:
        title: In words.
        array: Its rows, over and over.
        batch: How many rows the worker puts into an element; 0 gives rows as they are.
        nbytes: Of an element.
    """

    title: str
    array: np.ndarray
    batch: int = 0

    @property
    def nbytes(self):
        """See above."""
        return self.array[0].nbytes * (self.batch or 1)


CONTENTS = {
    "batches": Content("batches of 9.6 MB, made before", IMAGES[None]),
    "images": Content("batches of 64 images, made by the worker", IMAGES, batch=64),
    "small": Content("elements of 64 B", SMALL),
}


def nap(index):
    """Take 10 ms."""
    time.sleep(SLEEP_S)
    return index


def fill(index):
    """A MiB of memory of its own."""
    return np.full(1 << 20, index, np.uint8)


# By name: our datasets of a number of elements.
EPOCHS = {
    "batches": lambda count: Dataset.range(count).map(Rows(IMAGES[None])),
    "small": lambda count: Dataset.from_tensor_slices(np.resize(SMALL, (count, SMALL.shape[1]))),
    "fresh": lambda count: Dataset.range(count).map(fill),
}
