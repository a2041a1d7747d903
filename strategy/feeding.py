"""Prefetch of batches to the GPUs of replicas."""

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
_CLOSE_S = 5.0  # seconds that close() waits for the element that the dataset is making
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


def fed(
    dataset: Iterable[Any], gpus: Sequence[int], ahead: int, *, one_each: bool = False
) -> Iterable[Any]:
    """Return an iterable that prefetches the elements of a dataset to the GPUs of replicas.

    Args:
        dataset: Iterable of arrays, or of tuples, lists or dicts of arrays.
        gpus: GPU index of each replica.
        ahead: Maximum number of prefetched batches.
        one_each: Give each replica an element of its own. Otherwise divide each element among the
            replicas.

    Returns:
        An iterable. Each pass over it is a :class:`FeedIterator`. If the dataset is an iterator,
        the FeedIterator of its only pass.
    """
    if not isinstance(dataset, Iterator):
        return _Feed(dataset, gpus, ahead, one_each)
    # The caller may save the state of the dataset's iterator, so nothing may be prefetched from it.
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
    """A pass over a dataset that prefetches batches to the GPUs of replicas.

    A thread takes elements from the dataset, divides them on the host, and copies each part to its
    GPU on a separate stream. The current streams of the thread that takes a batch wait for the
    copies. Replicas that run afterwards start behind those streams. Arrays and numbers become CuPy
    arrays. Strings, objects and dtypes that CuPy lacks are not converted. Arrays on a GPU are
    copied through the host.

    An error of the dataset is raised in place of the element. After an error, the thread takes the
    next element only when another batch is requested. The thread starts with the first batch. The
    thread ends with the dataset, or when the pass is closed or garbage-collected.

    Args:
        dataset: See :func:`fed`.
        gpus: See :func:`fed`.
        ahead: See :func:`fed`. With 0 there is no thread, and a batch is copied when it is
            requested.
        one_each: See :func:`fed`.
    """

    def __init__(
        self, dataset: Iterable[Any], gpus: Sequence[int], ahead: int, one_each: bool
    ) -> None:
        self._gpus, self._ahead = tuple(gpus), ahead
        self._source = _Source(dataset, self._gpus, one_each)
        self._channel = Channel(ahead)
        self._starting = threading.Lock()
        # The thread has no reference to this object, which would keep a dropped object alive.
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
        if len(self._gpus) == 1:  # a single replica runs on this thread
            make_current(self._gpus[0])
        step = self._next_step()
        if step is OVER:
            raise StopIteration
        try:
            return step.hand_over()
        finally:
            del step  # the traceback of an error refers to this frame

    def get_state(self) -> bytes:
        """Return the state of the pass. Prefetched batches do not count as taken.

        Returns:
            A pickle, which includes the elements of the prefetched batches on the host. A
            FeedIterator for any number of replicas can continue from it.

        Raises:
            UnimplementedError: The dataset's iterator has no ``get_state()``.
        """
        with self._channel.making:
            taken = [element for step in self._channel.waiting() for element in step.taken]
            left = [*taken, *self._source.again]
            return pickle.dumps((_FORMAT, left, state_of(self._source.elements)), protocol=5)

    def set_state(self, state: bytes) -> None:
        """Continue from the state of another pass. Call this before the first batch.

        Args:
            state: Result of :meth:`get_state`, from a trusted source, because it is unpickled.

        Raises:
            DataLossError: The state is damaged, or of another kind.
            FailedPreconditionError: A batch has been requested.
            UnimplementedError: The dataset's iterator has no ``set_state()``.
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
        """End the pass, and wait up to 5 s for its thread; idempotent."""
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
        """Return a step, a Failure or OVER."""
        if not self._ahead:
            return OVER if self._channel.closed else _made(self._source)
        with self._starting:
            if self._thread.ident is None and not self._channel.closed:
                self._thread.start()
        return self._channel.take()


class _Source:
    """The source of steps: an iterator over the elements of a dataset.

    Attributes:
        elements: The iterator of the dataset.
        again: Elements that an earlier pass took but did not use. They come first.
    """

    def __init__(self, dataset: Iterable[Any], gpus: Sequence[int], one_each: bool) -> None:
        self.elements: Any = iter(dataset)
        self.again: deque[Any] = deque()
        self.gpus = gpus
        self._own = self.elements is not dataset
        self._count = len(gpus) if one_each else 1
        self._couriers: dict[int, Prefetcher] = {}

    def step(self) -> _Step:
        """Start the copies of a step and return it; StopIteration without enough elements."""
        taken = [self._take() for _ in range(self._count)]
        count = len(self.gpus)
        parts = taken if len(taken) == count else divided(taken[0], count)
        pairs = zip(parts, self.gpus, strict=True)
        return _Step(taken, [_Part(part, self._courier(gpu)) for part, gpu in pairs])

    def close(self) -> None:
        """Close the iterator if this object created it."""
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
    """The next elements, and their part for each replica."""

    def __init__(self, taken: list[Any], parts: list[_Part]) -> None:
        self.taken = taken
        self._parts = parts

    def hand_over(self) -> Any:
        return regrouped([part.hand_over() for part in self._parts])


class _Part:
    """The part of a step for one replica. Its arrays are being copied to the GPU."""

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
    """Return a value as a host array; None if CuPy has no dtype for it."""
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
    """Make a step and add it. Return False at the end of the dataset."""
    with channel.making:
        step = _made(source, source.gpus[0])  # avoids a CUDA context on another GPU
        channel.add(step)
        return step is not OVER


def _made(source: _Source, gpu: int | None = None) -> Any:
    """Return a step, a Failure or OVER. Make ``gpu`` the current device before, if given."""
    try:
        if gpu is not None:
            make_current(gpu)
        return source.step()
    except StopIteration:
        return OVER
    except BaseException as error:
        return Failure(error)
