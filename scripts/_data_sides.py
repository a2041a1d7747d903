"""Sides of bench_dataservice: our service, TensorFlow's service, torch and Grain."""

import os

import numpy as np
from _bench import alternate
from _data_contents import ENDLESS, IMAGES, Rows
from _data_processes import Child

from dataservice import Dataset, distribute

_DRAINED = 16  # untimed elements before the timed ones, to use up the prefetched elements
_PLACES = 16


class Turn:
    """A timed use of an iterator.

    Args:
        make: Function that makes the iterator. It is not timed.
        use: Timed function of the iterator.
        begin: Function to call with the iterator before each use. It is not timed.
        keep: Whether all turns use the same iterator, because it takes seconds to make one.
    """

    def __init__(self, make, use, begin=lambda iterator: None, keep=False):
        self._make = make
        self._use = use
        self._begin = begin
        self._keep = keep
        self._iterator = None
        self._is_fresh = False

    def open(self):
        """Prepare the iterator for a timed use."""
        if self._iterator is None:
            self._iterator = self._make()
        self._begin(self._iterator)
        self._is_fresh = True

    def run(self):
        """Use the iterator. This call is timed."""
        if not self._is_fresh:
            self.close()
            self.open()
        self._is_fresh = False
        self._use(self._iterator)

    def close(self):
        """Close the iterator, so that it does not work while other sides are timed."""
        if self._keep or self._iterator is None:
            return
        if hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator, self._is_fresh = None, False


def take_turns(turns, rounds):
    """Return the median seconds of each turn, by name."""

    def close_all():
        for turn in turns.values():
            turn.close()

    sides = {name: turn.run for name, turn in turns.items()}
    opens = {name: turn.open for name, turn in turns.items()}
    times = alternate(sides, rounds, 0.0, before=close_all, warm=opens)
    close_all()
    return times


def taker(count):
    """Return a function that takes ``count`` elements of an iterator."""

    def take(iterator):
        for _ in range(count):
            next(iterator)

    return take


def ending(make):
    """Time the end of an epoch: from its last element, the 100th, to StopIteration."""
    return Turn(make, lambda elements: next(elements, None), taker(100))


def whole(make):
    """Time a whole epoch, from ``iter`` to StopIteration."""
    return Turn(lambda: None, lambda _: [None for _ in make()])


def stream(make, count, keep=False):
    """Time elements in the middle of a long iteration."""
    return Turn(make, taker(count), taker(min(count, _DRAINED)), keep)


def our_stream(content, target, mode, count):
    """Time elements of an endless dataset of our service."""
    if len(content.array) <= len(IMAGES):
        # With repeat(), each element would be a pass, and in distributed_epoch at least a split.
        dataset = Dataset.range(ENDLESS).map(Rows(content.array))
    else:
        dataset = Dataset.from_tensor_slices(content.array).repeat()
    if content.batch:
        dataset = dataset.batch(content.batch)
    dataset = dataset.apply(distribute(mode, target))
    return stream(lambda: iter(dataset), count)


def memcpy(count):
    """Time copies of all images.

    The copies go to one target again and again, or to 16 targets in turn, which no cache holds.
    """
    targets = [IMAGES.copy() for _ in range(_PLACES)]

    def copy(places):
        for index in range(count):
            np.copyto(targets[index % places], IMAGES)

    return {
        "memcpy": Turn(lambda: 1, copy),
        "memcpy, 16 targets": Turn(lambda: _PLACES, copy),
    }


class TensorFlow:
    """TensorFlow's service in a process of its own."""

    def __init__(self, tf):
        self._tf = tf
        self._child = Child("tensorflow")

    @classmethod
    def start(cls):
        """Start the service. Return None if TensorFlow is not installed."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        try:
            import tensorflow as tf
        except ImportError:
            return None
        return cls(tf)

    def stream(self, content, count, compression):
        """Time elements of an endless dataset."""
        dataset = self._tf.data.Dataset.from_tensor_slices(content.array).repeat()
        if content.batch:
            dataset = dataset.batch(content.batch)
        dataset = self._distributed(dataset, compression)
        return stream(lambda: iter(dataset), count)

    def range(self, count):
        """Return a function that starts an epoch of ``count`` elements."""
        dataset = self._distributed(self._tf.data.Dataset.range(count), "AUTO")
        return lambda: iter(dataset)

    def _distributed(self, dataset, compression):
        distribute = self._tf.data.experimental.service.distribute
        apply = distribute("parallel_epochs", self._child.ready, compression=compression)
        return dataset.apply(apply)

    def stop(self):
        """Stop the process of the service."""
        self._child.stop()


def torch_stream(content, count):
    """Time elements of a DataLoader with one worker process.

    Return None if torch is not installed.
    """
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        return None
    # A process with MPI must not fork.
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(Rows(content.array), batch_size=content.batch or None, **options)
    return stream(lambda: iter(loader), count, keep=True)


def grain_stream(content, count):
    """Time elements of a Grain dataset with one worker process.

    Return None if Grain is not installed.
    """
    try:
        import grain
    except ImportError:
        return None
    dataset = grain.MapDataset.range(ENDLESS).map(Rows(content.array)).to_iter_dataset()
    if content.batch:
        dataset = dataset.batch(content.batch)
    dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    return stream(lambda: iter(dataset), count, keep=True)
