"""What can be made of a dataset: each method gives a new one."""

from __future__ import annotations

import os
from typing import Self

from dataservice.dataset.autotune import AHEAD, AUTOTUNE
from dataservice.dataset.cache import Cache
from dataservice.dataset.checks import path, whole, whole_or_none
from dataservice.dataset.concatenate import Concatenate
from dataservice.dataset.device import PrefetchToDevice, device_number
from dataservice.dataset.enumerate import Enumerate
from dataservice.dataset.functional import Functional
from dataservice.dataset.ignore_errors import IgnoreErrors
from dataservice.dataset.in_order import InOrder
from dataservice.dataset.prefetch import Prefetch
from dataservice.dataset.repeat import Repeat
from dataservice.dataset.several import check_alike
from dataservice.dataset.shard import Shard
from dataservice.dataset.shuffle import Shuffle
from dataservice.dataset.skip import Skip
from dataservice.dataset.take import Take


class Transformations(Functional, InOrder):
    """The transformations of a dataset."""

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Self:
        """Local. Random order: each element is drawn from the next ``buffer_size`` ones.

        Under ``"distributed_epoch"`` workers shuffle what they have; but if ``buffer_size`` is at
        least the number of elements, which are known by their indices and in no order, the order
        is one of the whole source, and no elements are held.

        Args:
            buffer_size: Elements held to draw from; UNKNOWN_CARDINALITY, as ``cardinality()`` may
                give it: all of them.
            seed: Makes the order the same in every run.
            reshuffle_each_iteration: Whether each pass has another order.

        Raises:
            TypeError: The buffer size or the seed is no whole number.
            ValueError: The buffer size is below 1, or the seed is negative; or all elements of what
                has no end shall be held.
        """
        size = whole("shuffle", "buffer_size", buffer_size)
        seed = whole_or_none("shuffle", "seed", seed)
        return self.of(Shuffle.of(self._node, size, seed, reshuffle_each_iteration))

    def repeat(self, count: int | None = None) -> Self:
        """Local. The sequence ``count`` times; None or -1 repeats it for ever.

        For ever takes elements: if the first pass has none, as behind a ``filter`` that wants
        nothing, it is the last. Where consumers of a data service share elements, others may have
        taken those of a pass, and the next one begins.

        Raises:
            TypeError: The count is no whole number.
            ValueError: The count is below -1.
        """
        count = whole_or_none("repeat", "count", count)
        if count is not None and count < -1:
            raise ValueError(f"repeat needs a count of at least 0, or -1 for ever, not {count}")
        return self.of(Repeat(self._node, None if count == -1 else count))

    def prefetch(self, buffer_size: int) -> Self:
        """Local. Up to ``buffer_size`` elements are made ahead by a thread; AUTOTUNE: two.

        Raises:
            TypeError: The size is no whole number.
            ValueError: The size is below 1.
        """
        size = whole("prefetch", "buffer_size", buffer_size)
        return self.of(Prefetch(self._node, AHEAD if size == AUTOTUNE else size))

    def prefetch_to_device(self, device: int | str = 0, buffer_size: int = 2) -> Self:
        """Local. Elements on a GPU, up to ``buffer_size`` of them ahead of their use.

        A thread makes them, and copies them through pinned memory on a stream of its own. The
        current stream of who takes an element waits for its copy; the host does not. Arrays and
        numbers become CuPy arrays; strings, bytes and objects stay as they are. It comes after
        ``distribute``, and no transformation with threads after it: take an element on the stream
        that uses it. Several replicas are fed on their GPUs by what a strategy makes of a dataset
        whose elements are on the host.

        Args:
            device: Number of the GPU, or ``"GPU:0"``; of a strategy's only replica
                ``strategy.gpus[0]``.
            buffer_size: How many elements to hold there.

        Raises:
            TypeError: It is neither number nor name, or the size no whole number.
            ValueError: It is no GPU, or the size is below 1. In the first pass, too, where there is
                no such GPU; FailedPreconditionError where CuPy can use none.
        """
        size = whole("prefetch_to_device", "buffer_size", buffer_size)
        return self.of(PrefetchToDevice(self._node, device_number(device), size))

    def shard(self, num_shards: int, index: int) -> Self:
        """Local. The elements index, index + num_shards, index + 2 num_shards, ...

        Args:
            num_shards: How many shards there are.
            index: Which of them to take. SHARD_HINT for both stands for the workers of a data
                service, under ShardingPolicy.HINT.

        Raises:
            TypeError: A number is no whole one.
            ValueError: The index is not in [0, num_shards). During a pass of SHARD_HINT:
                FailedPreconditionError, unless a data service has filled it in.
        """
        shards, index = whole("shard", "num_shards", num_shards), whole("shard", "index", index)
        return self.of(Shard(self._node, shards, index))

    def take(self, count: int) -> Self:
        """Local. The first ``count`` elements; -1 takes all.

        Raises:
            TypeError: The count is no whole number.
            ValueError: The count is below -1.
        """
        return self.of(Take(self._node, whole("take", "count", count)))

    def skip(self, count: int) -> Self:
        """Local. All but the first ``count`` elements; -1 leaves none.

        Raises:
            TypeError: The count is no whole number.
            ValueError: The count is below -1.
        """
        return self.of(Skip(self._node, whole("skip", "count", count)))

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
            TypeError: The limit is no whole number.
            ValueError: The limit is negative.
        """
        limit = whole_or_none("ignore_errors", "limit", limit)
        return self.of(IgnoreErrors(self._node, log_warning, limit))

    def enumerate(self, start: int = 0) -> Self:
        """Local. Pairs of a number, counted from ``start``, as np.int64, and the element.

        Raises:
            TypeError: ``start`` is no whole number.
        """
        return self.of(Enumerate(self._node, whole("enumerate", "start", start)))

    def concatenate(self, dataset: Transformations) -> Self:
        """Local. The elements of this dataset, then those of another.

        Raises:
            TypeError: That is no dataset, or known to have elements of another structure or dtype.
        """
        if not isinstance(dataset, Transformations):
            raise TypeError(f"concatenate needs a Dataset as dataset, not {dataset!r}")
        check_alike("concatenate", (self._node, dataset._node))
        return self.of(Concatenate((self._node, dataset._node)))

    def cache(self, filename: str | os.PathLike[str] = "") -> Self:
        """Local. The elements of the first whole pass, kept for later ones.

        What is kept in memory is given as read-only views, lest one pass change another.

        Workers that share the source keep each what they have made, in memory, for as long as they
        have the dataset: in the end all of it, for every pass is divided anew.

        Args:
            filename: Where, from the current folder of who describes the dataset on; empty for
                the memory of this process. A file that is there already is read, in place of the
                dataset. A pass that is given up leaves none. Workers that share the source cannot
                share a file.

        Raises:
            DataLossError: At a pass: the file is damaged, or something else.
            InvalidArgumentError: At a pass: it is of another dataset.
            TypeError: The name is no path.
        """
        file = path("cache", "filename", filename)
        # Workers, which may run elsewhere, mean the same file.
        return self.of(Cache(self._node, os.path.abspath(file) if file else ""))
