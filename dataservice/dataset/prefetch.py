"""``Dataset.prefetch``: elements that are made ahead."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dataservice.dataset.context import Context, Scope
from dataservice.dataset.execution import STAGES, Over, Pool, ReadAhead
from dataservice.dataset.failure import Failure
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryNode

logger = logging.getLogger(__name__)

# How long close() waits for a user's function to return.
_CLOSE_S = 5.0
# Passes that prefetch at the same time in this process have so many threads together, however many
# there are. The consumers of the others make the elements themselves, as without a prefetch.
_THREADS = 8


@dataclass(frozen=True)
class Prefetch(UnaryNode):
    """Makes elements ahead of their use.

    Attributes:
        parent: The node below.
        buffer_size: How many elements to hold ready.
        threads: The least number of such passes that the process can advance at the same time.
    """

    parent: Node
    buffer_size: int
    threads: int = field(default=_THREADS, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ValueError(f"prefetch needs a buffer_size of at least 1, not {self.buffer_size}")
        self.check_not_on_device("prefetch")

    def indexed_length(self) -> int | None:
        return self.parent.indexed_length()

    def sample(self) -> Node:
        return self.parent.sample()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return self._begin(partial(self.parent.read, places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return self._begin(self.parent.iterate, context)

    def _begin(
        self, begin: Callable[[Context], ElementIterator], context: Context
    ) -> ElementIterator:
        return PrefetchIterator(begin, context, self.buffer_size, STAGES, self.threads)


class PrefetchIterator(ElementIterator):
    """One pass; one call at a time advances the pass below.

    Args:
        begin: Starts the pass below in a context.
        context: The context of this pass.
        size: How many elements to hold ready.
        pool: Provides the thread.
        threads: The number of threads that the pool needs at least.
    """

    def __init__(
        self,
        begin: Callable[[Context], ElementIterator],
        context: Context,
        size: int,
        pool: Pool,
        threads: int,
    ) -> None:
        self._size = size
        # Of this pass alone: closing it ends the waits of the pass below, and of no other.
        scope = Scope()
        if context.scope is not None:
            context.scope.add(scope)
        self._parent = begin(dataclasses.replace(context, scope=scope))
        self._ahead = ReadAhead(_Advance(self._parent), 1, pool, scope, threads=threads)
        self._finalizer = weakref.finalize(self, scope.close)

    def __next__(self) -> Any:
        self._fill()
        try:
            return self._ahead.take()
        finally:
            # Also before an error is raised, for the next call makes _Advance forget that error,
            # which refers to the frames of this pass as soon as it has been raised. If there is no
            # thread for it, nothing is lost.
            with contextlib.suppress(RuntimeError):
                self._fill()

    def get_state(self) -> tuple[list[Any], bool, Failure | None, Any]:
        # The elements that were made ahead are a part of the state.
        with self._ahead.paused():
            made = [call.result for call in self._ahead.calls() if call.done]
            over = made.pop() if made and isinstance(made[-1], Over) else None
            failure = over.failure if over is not None else None
            return made, over is not None, failure, self._parent.get_state()

    def set_state(self, state: tuple[list[Any], bool, Failure | None, Any]) -> None:
        elements, ended, failure, below = state
        self._parent.set_state(below)
        for element in elements:
            self._ahead.put(element)
        if ended:
            self._ahead.put(Over(failure))

    def close(self) -> None:
        self._finalizer()
        if self._ahead.close(_CLOSE_S):
            self._parent.close()
        else:
            logger.warning("prefetch: a function is still running %g s after close()", _CLOSE_S)

    def goes_on(self, error: Exception) -> bool:
        ends = (call.result for call in self._ahead.calls() if isinstance(call.result, Over))
        return not any(over.failure and over.failure.error is error for over in ends)

    def _fill(self) -> None:
        while len(self._ahead) < self._size:
            self._ahead.add(None)


class _Advance:
    """Makes the next element of a pass.

    The second of two equal errors in a row ends the pass, unless the pass can go on after it.
    """

    def __init__(self, elements: ElementIterator) -> None:
        self._elements = elements
        self._last: Exception | None = None

    def __call__(self, _: None) -> Any:
        try:
            element = next(self._elements)
        except StopIteration:
            over = Over()
        except BaseException as error:
            again = error is self._last and not self._elements.goes_on(error)
            if isinstance(error, Exception) and not again:
                self._last = error
                return Failure(error)
            over = Over(Failure(error))
        else:
            self._last = None
            return element
        self._elements.close()
        return over
