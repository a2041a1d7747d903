"""``Dataset.prefetch``: elements made ahead by a thread."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.node import Context, ElementIterator, Node, Scope, UnaryNode

logger = logging.getLogger(__name__)

# How long close() waits for a user's function to return.
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Prefetch(UnaryNode):
    """Attributes: the node below, and how many elements to hold ready."""

    parent: Node
    buffer_size: int

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ValueError(f"prefetch needs a buffer_size of at least 1, not {self.buffer_size}")

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return PrefetchIterator(self.parent, context, self.buffer_size)


class PrefetchIterator(ElementIterator):
    """One pass; its thread ends when the iterator is closed or dropped."""

    def __init__(self, parent: Node, context: Context, size: int) -> None:
        self._channel = _Channel(size)
        if context.scope is not None:
            context.scope.add(self._channel)
        below = dataclasses.replace(context, scope=self._channel.scope)
        # The thread knows the channel only, lest it keep a dropped iterator alive.
        self._thread = threading.Thread(
            target=_fill,
            args=(self._channel, parent, below),
            name="dataservice-prefetch",
            daemon=True,
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._channel.close)

    def __next__(self) -> Any:
        return self._channel.take()

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._finalizer()
        if self._thread is threading.current_thread():
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("prefetch: a function is still running %g s after close()", _CLOSE_S)


class _Channel:
    """A bounded queue with an end, an error, and a way to give up.

    Attributes:
        scope: Of what fills it.
    """

    def __init__(self, size: int) -> None:
        self.scope = Scope()
        self._changed = threading.Condition()
        self._elements: deque[Any] = deque()
        self._size = size
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    def put(self, element: Any) -> bool:
        """Add an element when there is room; False if nobody wants it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._elements) < self._size or self._closed)
            if not self._closed:
                self._elements.append(element)
                self._changed.notify_all()
            return not self._closed

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def take(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._elements or self._ended or self._closed)
            if self._elements:
                self._changed.notify_all()
                return self._elements.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._elements.clear()
            self._changed.notify_all()
        self.scope.close()


def _fill(channel: _Channel, parent: Node, context: Context) -> None:
    try:
        with parent.iterate(context) as elements:
            for element in elements:
                if not channel.put(element):
                    break
    except BaseException as error:
        channel.finish(error)
    else:
        channel.finish(None)
