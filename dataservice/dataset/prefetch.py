"""``Dataset.prefetch``: elements made ahead by a thread."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dataservice.dataset.context import Context, Scope
from dataservice.dataset.failure import Failure
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryNode

logger = logging.getLogger(__name__)

# How long close() waits for a user's function to return.
_CLOSE_S = 5.0
_OVER = object()


@dataclass(frozen=True)
class Prefetch(UnaryNode):
    """Attributes: the node below, and how many elements to hold ready."""

    parent: Node
    buffer_size: int

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ValueError(f"prefetch needs a buffer_size of at least 1, not {self.buffer_size}")
        self.check_not_on_device("prefetch")

    def indexed_length(self) -> int | None:
        """Return the length of the node below; see :class:`Node`."""
        return self.parent.indexed_length()

    def sample(self) -> Node:
        """Return the sample of the node below, whose elements are alike; see :class:`Node`."""
        return self.parent.sample()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return PrefetchIterator(partial(self.parent.read, places), context, self.buffer_size)

    def _iterate(self, context: Context) -> ElementIterator:
        return PrefetchIterator(self.parent.iterate, context, self.buffer_size)


class PrefetchIterator(ElementIterator):
    """One pass; its thread, begun with the first element, ends when it is closed or dropped.

    Args:
        begin: Starts the pass below in a context.
        context: What the pass depends on.
        size: How many elements to hold ready.
    """

    def __init__(
        self, begin: Callable[[Context], ElementIterator], context: Context, size: int
    ) -> None:
        self._channel = _Channel(size)
        self._starting = threading.Lock()
        # The error that ends the pass, if one does. Once it has been raised its frames refer to the
        # pass: so the channel must not have it, for the finalizer keeps that one.
        self._ending: list[Failure] = []
        if context.scope is not None:
            context.scope.add(self._channel)
        below = dataclasses.replace(context, scope=self._channel.scope)
        self._parent = begin(below)
        # The thread knows the channel only, lest it keep a dropped iterator alive.
        self._thread = threading.Thread(
            target=_fill,
            args=(self._channel, self._parent, self._ending),
            name="dataservice-prefetch",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self._channel.close)

    def __next__(self) -> Any:
        if self._thread.ident is None and not self._channel.closed:
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()
        element = self._channel.take()
        if element is _OVER:
            if not self._ending:
                raise StopIteration
            element = self._ending[0]
        if not isinstance(element, Failure):
            return element
        try:
            raise element.error
        finally:
            del element  # the error's traceback refers to this frame

    def get_state(self) -> tuple[list[Any], bool, Failure | None, Any]:
        """Local. See :class:`ElementIterator`; the elements made ahead are a part of it."""
        with self._channel.making:
            elements, ended = self._channel.content()
            failure = self._ending[0] if ended and self._ending else None
            return elements, ended, failure, self._parent.get_state()

    def set_state(self, state: tuple[list[Any], bool, Failure | None, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        elements, ended, failure, below = state
        self._parent.set_state(below)
        for element in elements:
            self._channel.add(element)
        if ended:
            self._ending += [] if failure is None else [failure]
            self._channel.finish()

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._finalizer()
        if self._thread is threading.current_thread():
            return
        if self._thread.ident is None:
            self._parent.close()
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("prefetch: a function is still running %g s after close()", _CLOSE_S)

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return not self._ending or self._ending[0].error is not error


class _Channel:
    """A bounded queue with an end, an error, and a way to give up.

    Attributes:
        scope: Of what fills it.
        making: Held while an element is made and added.
        closed: Whether nobody wants elements any more.
    """

    def __init__(self, size: int) -> None:
        self.scope = Scope()
        self.making = threading.Lock()
        self._changed = threading.Condition()
        self._elements: deque[Any] = deque()
        self._size = size
        self._ended = False
        self.closed = False

    def wait_for_room(self) -> bool:
        """Wait until one more may be made; False if nobody wants it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._elements) < self._size or self.closed)
            return not (self.closed or self._ended)

    def add(self, element: Any) -> None:
        with self._changed:
            if not self.closed:
                self._elements.append(element)
                self._changed.notify_all()

    def content(self) -> tuple[list[Any], bool]:
        """The elements that wait, and whether they are the last."""
        with self._changed:
            return list(self._elements), self._ended

    def finish(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self) -> Any:
        """The next element, or a Failure in its place; behind the last, _OVER."""
        with self._changed:
            self._changed.wait_for(lambda: self._elements or self._ended or self.closed)
            if not self._elements:
                return _OVER
            self._changed.notify_all()
            return self._elements.popleft()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._elements.clear()
            self._changed.notify_all()
        self.scope.close()


def _fill(channel: _Channel, elements: ElementIterator, ending: list[Failure]) -> None:
    last: Exception | None = None
    try:
        with elements:
            while channel.wait_for_room():
                with channel.making:
                    try:
                        channel.add(next(elements))
                        last = None
                    except StopIteration:
                        break
                    except Exception as error:
                        if error is last and not elements.goes_on(error):
                            raise
                        channel.add(Failure(error))
                        last = error
    except BaseException as error:
        ending.append(Failure(error))
    last = None  # its traceback refers to this frame
    channel.finish()
