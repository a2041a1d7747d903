"""Batches on the GPUs of replicas, ahead of their use."""

from __future__ import annotations

import contextvars
import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist import errors
from mpidist.gpu import Prefetcher, has_dtype, make_current
from strategy.array_like import is_on_gpu
from strategy.channel import OVER, Channel, Failure
from strategy.inputs import divided, leaves_of, over_leaves, set_state_of, state_of
from strategy.reductions import as_array, regrouped

logger = logging.getLogger(__name__)

_FORMAT = "strategy.feeding 1"
_CLOSE_S = 5.0  # how long close() waits for the dataset to give the element it is at
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


def fed(
    dataset: Iterable[Any], gpus: Sequence[int], ahead: int, *, one_each: bool = False
) -> Iterable[Any]:
    """Local. What replicas get of a dataset, on their GPUs.

    Args:
        dataset: Its elements are arrays, or tuples, lists or dicts of them.
        gpus: The GPU of each replica.
        ahead: How many batches may lie there ahead of their use.
        one_each: Whether each replica gets an element of its own; otherwise they share one.

    Returns:
        An iterable whose passes are each a :class:`FeedIterator`; if the dataset is an iterator,
        that of the one pass which there is.
    """
    if not isinstance(dataset, Iterator):
        return _Feed(dataset, gpus, ahead, one_each)
    # Who holds it may ask it where it is, and what was only brought ahead must not count.
    return FeedIterator(dataset, gpus, 0 if hasattr(dataset, "get_state") else ahead, one_each)


class _Feed:
    def __init__(
        self, dataset: Iterable[Any], gpus: Sequence[int], ahead: int, one_each: bool
    ) -> None:
        self._dataset = dataset
        self._how = (gpus, ahead, one_each)
        self._elements_a_step = len(gpus) if one_each else 1

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self._dataset, *self._how)

    def __len__(self) -> int:
        return len(self._dataset) // self._elements_a_step  # type: ignore[arg-type]


class FeedIterator:
    """A pass over a dataset, whose batches lie on the GPUs of replicas when they are asked for.

    A thread takes them from the dataset, divides them on the host, and copies each part to its GPU
    on a stream of its own. The current streams of who takes a batch wait for the copies, and
    replicas that are run afterwards begin behind those. Arrays and numbers become CuPy arrays;
    strings, objects and other dtypes that CuPy does not have stay as they are. Arrays on a GPU go
    by way of the host.

    Errors of the dataset come where their elements would; behind one, the dataset is asked again
    only when another batch is. The thread begins with the first batch, and ends with the pass:
    when that is closed, or dropped.

    Args:
        dataset: See :func:`fed`, also for the others.
        gpus: The GPU of each replica.
        ahead: With 0 there is no thread; batches are copied when they are asked for.
        one_each: Whether each replica gets an element of its own.
    """

    def __init__(
        self, dataset: Iterable[Any], gpus: Sequence[int], ahead: int, one_each: bool
    ) -> None:
        self._gpus, self._ahead = tuple(gpus), ahead
        self._source = _Source(dataset, self._gpus, one_each)
        self._channel = Channel(ahead)
        self._starting = threading.Lock()
        # It knows nothing of this object, lest it keep one that is dropped.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(_fill, self._channel, self._source),
            name="batches for GPUs",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self._channel.close)

    def __iter__(self) -> FeedIterator:
        return self

    def __next__(self) -> Any:
        if len(self._gpus) == 1:  # the replica's, for this is its thread
            make_current(self._gpus[0])
        step = self._next_step()
        if step is OVER:
            raise StopIteration
        try:
            return step.hand_over()
        finally:
            del step  # the traceback of an error refers to this frame

    def get_state(self) -> bytes:
        """Local. Where the pass is; batches that were only brought ahead are still to come.

        Returns:
            A pickle, with the elements of those batches as they are on the host. A pass for any
            number of replicas can go on from it, on GPUs.

        Raises:
            UnimplementedError: The dataset's iterator cannot say where it is.
        """
        with self._channel.making:
            taken = [element for step in self._channel.waiting() for element in step.taken]
            left = [*taken, *self._source.again]
            return pickle.dumps((_FORMAT, left, state_of(self._source.elements)), protocol=5)

    def set_state(self, state: bytes) -> None:
        """Local. Go on where another pass was; before the first batch.

        Args:
            state: What :meth:`get_state` gave. It is unpickled: it must come from somebody who is
                trusted.

        Raises:
            DataLossError: It is damaged, or no such state.
            FailedPreconditionError: A batch has been asked for.
            UnimplementedError: The dataset's iterator cannot go on where another one was.
        """
        if self._thread.ident is not None:
            raise errors.FailedPreconditionError(
                "set_state comes before the first batch of a pass: begin another one"
            )
        try:
            kind, left, below = pickle.loads(state)
        except Exception as error:
            raise errors.DataLossError(f"the state of a pass is damaged: {error!r}") from error
        if kind != _FORMAT:
            raise errors.DataLossError(f"this is no state of batches for GPUs, but of {kind!r}")
        set_state_of(self._source.elements, below)
        self._source.again = deque(left)

    def close(self) -> None:
        """Local. End the pass, and its thread; idempotent."""
        self._finalizer()
        if self._thread.ident is None:
            self._source.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning(
                    "a dataset has not given its next element %g s after the pass was closed; its "
                    "thread ends when it does",
                    _CLOSE_S,
                )

    def __enter__(self) -> FeedIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _next_step(self) -> Any:
        """A step, a failure in its place, or OVER."""
        if not self._ahead:
            return OVER if self._channel.closed else _made(self._source)
        with self._starting:
            if self._thread.ident is None and not self._channel.closed:
                self._thread.start()
        return self._channel.take()


class _Source:
    """Where steps are made from.

    Attributes:
        elements: The iterator of the dataset.
        again: Elements that come before its own: an earlier pass had taken, and not used them.
    """

    def __init__(self, dataset: Iterable[Any], gpus: Sequence[int], one_each: bool) -> None:
        self.elements: Any = iter(dataset)
        self.again: deque[Any] = deque()
        self.gpus = gpus
        self._own = self.elements is not dataset
        self._count = len(gpus) if one_each else 1
        self._couriers: dict[int, Prefetcher] = {}

    def step(self) -> _Step:
        """The next one, on its way; StopIteration if there are not enough elements."""
        taken = [self._take() for _ in range(self._count)]
        count = len(self.gpus)
        parts = taken if len(taken) == count else divided(taken[0], count)
        pairs = zip(parts, self.gpus, strict=True)
        return _Step(taken, [_Part(part, self._courier(gpu)) for part, gpu in pairs])

    def close(self) -> None:
        """Give up the iterator, unless it is somebody else's."""
        if self._own and hasattr(self.elements, "close"):
            self.elements.close()

    def _take(self) -> Any:
        if not self.again:
            return next(self.elements)
        element = self.again.popleft()
        return element.hand_over() if isinstance(element, Failure) else element

    def _courier(self, gpu: int) -> Prefetcher:
        if gpu not in self._couriers:
            self._couriers[gpu] = Prefetcher(gpu)
        return self._couriers[gpu]


class _Step:
    """What all replicas get next: the elements it is of, and the part of each."""

    def __init__(self, taken: list[Any], parts: list[_Part]) -> None:
        self.taken = taken
        self._parts = parts

    def hand_over(self) -> Any:
        return regrouped([part.hand_over() for part in self._parts])


class _Part:
    """What one replica gets, with its numbers on their way to a GPU."""

    def __init__(self, part: Any, courier: Prefetcher) -> None:
        self._part = part
        self._leaves = leaves_of(part)
        arrays = [_as_number(leaf) for leaf in self._leaves]
        self._places = [place for place, array in enumerate(arrays) if array is not None]
        self._parcel = courier.send([array for array in arrays if array is not None])

    def hand_over(self) -> Any:
        leaves = list(self._leaves)
        for place, array in zip(self._places, self._parcel.hand_over(), strict=True):
            leaves[place] = array
        rest = iter(leaves)
        return over_leaves(lambda _: next(rest), self._part)


def _as_number(leaf: Any) -> Any:
    """A host array of what CuPy has a dtype for; None of anything else."""
    if isinstance(leaf, _NUMBERS):
        array = np.asarray(leaf)
    elif hasattr(leaf, "__dlpack__") or is_on_gpu(leaf):
        array = as_array(leaf)
    else:
        return None
    return array if has_dtype(array.dtype) else None


def _fill(channel: Channel, source: _Source) -> None:
    try:
        while channel.wait_for_room() and _add_next(channel, source):
            pass
    finally:
        channel.add(OVER)
        source.close()


def _add_next(channel: Channel, source: _Source) -> bool:
    """Make a step and add it; whether that is not the end."""
    with channel.making:
        step = _made(source, source.gpus[0])  # this thread shall have no context on another one
        channel.add(step)
        return step is not OVER


def _made(source: _Source, gpu: int | None = None) -> Any:
    """A step, a failure in its place, or OVER; with a GPU as the current one."""
    try:
        if gpu is not None:
            make_current(gpu)
        return source.step()
    except StopIteration:
        return OVER
    except BaseException as error:
        return Failure(error)
