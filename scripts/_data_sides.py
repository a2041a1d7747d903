"""What bench_dataservice times: elements of our service, of TensorFlow's, torch and Grain."""

import os

import numpy as np
from _bench import alternate
from _data_contents import ENDLESS, IMAGES, Rows
from _data_processes import Child

from dataservice import Dataset, distribute

_DRAINED = 16  # elements before those that are timed, so that what was made ahead is used up
_PLACES = 16


class Turn:
    """A timed use of an iterator.

    Args:
        make: Makes the iterator; untimed.
        use: What is timed; gets the iterator.
        begin: Called with the iterator before each use, untimed.
        keep: Whether one iterator is made for all turns, because to make one takes seconds.
    """

    def __init__(self, make, use, begin=lambda iterator: None, keep=False):
        self._make = make
        self._use = use
        self._begin = begin
        self._keep = keep
        self._iterator = None
        self._is_fresh = False

    def open(self):
        """Be ready to be timed."""
        if self._iterator is None:
            self._iterator = self._make()
        self._begin(self._iterator)
        self._is_fresh = True

    def run(self):
        """What is timed."""
        if not self._is_fresh:
            self.close()
            self.open()
        self._is_fresh = False
        self._use(self._iterator)

    def close(self):
        """Leave nothing that works while others are timed."""
        if self._keep or self._iterator is None:
            return
        if hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator, self._is_fresh = None, False


def take_turns(turns, rounds):
    """Median seconds of each turn, by name."""

    def close_all():
        for turn in turns.values():
            turn.close()

    sides = {name: turn.run for name, turn in turns.items()}
    opens = {name: turn.open for name, turn in turns.items()}
    times = alternate(sides, rounds, 0.0, before=close_all, warm=opens)
    close_all()
    return times


def taker(count):
    """A function that takes so many elements of an iterator."""

    def take(iterator):
        for _ in range(count):
            next(iterator)

    return take


def ending(make):
    """The end of an epoch alone: from its last element, the 100th, to StopIteration."""
    return Turn(make, lambda elements: next(elements, None), taker(100))


def whole(make):
    """A whole epoch, from ``iter`` to StopIteration."""
    return Turn(lambda: None, lambda _: [None for _ in make()])


def stream(make, count, keep=False):
    """Elements in the middle of a long iteration."""
    return Turn(make, taker(count), taker(min(count, _DRAINED)), keep)


def our_stream(content, target, mode, count):
    """Endless elements of a service."""
    if len(content.array) <= len(IMAGES):
        # Not repeated: that would be a pass, and in distributed_epoch at least a split, an element.
        dataset = Dataset.range(ENDLESS).map(Rows(content.array))
    else:
        dataset = Dataset.from_tensor_slices(content.array).repeat()
    if content.batch:
        dataset = dataset.batch(content.batch)
    dataset = dataset.apply(distribute(mode, target))
    return stream(lambda: iter(dataset), count)


def memcpy(count):
    """Copies of all images to one place again and again, and to places that no cache holds."""
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
        """Start it, or give None where TensorFlow is not installed."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        try:
            import tensorflow as tf
        except ImportError:
            return None
        return cls(tf)

    def stream(self, content, count, compression):
        """Endless elements."""
        dataset = self._tf.data.Dataset.from_tensor_slices(content.array).repeat()
        if content.batch:
            dataset = dataset.batch(content.batch)
        dataset = self._distributed(dataset, compression)
        return stream(lambda: iter(dataset), count)

    def range(self, count):
        """A function that starts an epoch of so many elements."""
        dataset = self._distributed(self._tf.data.Dataset.range(count), "AUTO")
        return lambda: iter(dataset)

    def _distributed(self, dataset, compression):
        distribute = self._tf.data.experimental.service.distribute
        apply = distribute("parallel_epochs", self._child.ready, compression=compression)
        return dataset.apply(apply)

    def stop(self):
        """End it."""
        self._child.stop()


def torch_stream(content, count):
    """DataLoader with a worker process; None where torch is not installed."""
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        return None
    # A process with MPI must not fork.
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(Rows(content.array), batch_size=content.batch or None, **options)
    return stream(lambda: iter(loader), count, keep=True)


def grain_stream(content, count):
    """Grain with a worker process; None where it is not installed."""
    try:
        import grain
    except ImportError:
        return None
    dataset = grain.MapDataset.range(ENDLESS).map(Rows(content.array)).to_iter_dataset()
    if content.batch:
        dataset = dataset.batch(content.batch)
    dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    return stream(lambda: iter(dataset), count, keep=True)
