"""Passes over source indices that the node above chooses, as it goes through splits.

A pass may read ahead on threads of its own, as below ``prefetch``.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dataservice.dataset.node import Context, ElementIterator, Feed, Node, Passes, Splits
from dataservice.dataset.source import SplitReader

AT_ONCE = 4096
"""How many indices are chosen at once, at most."""


class Remembered:
    """Splits that several read, some ahead of the others; each is asked for once.

    Args:
        splits: The splits.
    """

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._known: dict[int, range] = {}
        self._lock = threading.Lock()

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        with self._lock:
            if number not in self._known:
                self._known[number] = self._splits.split(number)
            return self._known[number]

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`; what comes before is forgotten."""
        for known in list(self._known):
            if known < number:
                self._known.pop(known, None)
        self._splits.mark(number)


class Runs:
    """Runs of indices, as the splits of a pass whose state nobody takes.

    A run whose elements have all been given is forgotten: whoever reads runs in the pass has read
    it, for every element takes all of them.

    Args:
        runs: Not empty; gone through as the pass asks.
    """

    def __init__(self, runs: Iterator[range]) -> None:
        self._source = runs
        self._runs: deque[range] = deque()
        self._first = 0  # number of the first run that is kept
        self._used = 0  # indices of that run whose elements have been given
        self._lock = threading.Lock()

    def feed(self, passes: Passes) -> Splits:
        """Local. Gives these splits."""
        return self

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        with self._lock:
            while number >= self._first + len(self._runs):
                run = next(self._source, range(0))
                if not run:
                    return run
                self._runs.append(run)
            assert number >= self._first, "a run that has been forgotten is asked for"
            return self._runs[number - self._first]

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`."""

    @property
    def coming(self) -> int | None:
        """Local. The first index that the pass has been given, and whose element it has not given.

        None if it has given all that it was asked for.
        """
        return self._runs[0][self._used] if self._runs else None

    def go_on(self) -> None:
        """Local. The pass has given the element of the index that was coming."""
        self._used += 1
        if self._used == len(self._runs[0]):
            with self._lock:
                self._runs.popleft()
                self._first, self._used = self._first + 1, 0


class FeedFailed(Exception):
    """Splits could not be had.

    Args:
        error: Why.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Chosen:
    """Elements of a node, by their indices.

    Args:
        node: One to one.
        context: Of the pass over it; has a feed.
        runs: Which elements.

    Attributes:
        index: Of the element that was given last, or could not be made.
    """

    def __init__(self, node: Node, context: Context, runs: Iterator[range]) -> None:
        self._runs = Runs(runs)
        self._pass = node.iterate(replace(context, feed=self._runs.feed))
        self.index = -1

    def next(self) -> Any:
        """Local. The next element.

        Raises:
            StopIteration: There is no further run.
            FeedFailed: Whether there is one is not known.
            Exception: What making the element has raised; the next call is for the one after it.
        """
        try:
            element = next(self._pass)
        except StopIteration:
            raise
        except Exception as error:
            if self._runs.coming is None:
                raise FeedFailed(error) from None
            self._go_on()
            raise
        self._go_on()
        return element

    def is_next(self, index: int) -> bool:
        """Local. Whether the pass has been told that the element of this index is the next one."""
        return self._runs.coming == index

    def _go_on(self) -> None:
        coming = self._runs.coming
        assert coming is not None
        self.index = coming
        self._runs.go_on()

    def close(self) -> None:
        """Local. End the pass; idempotent."""
        self._pass.close()


class SplitIterator(ElementIterator):
    """A pass over the elements of some splits, which are made of others, by their indices.

    Args:
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, context: Context, feed: Feed) -> None:
        self._context = context
        self._splits = Remembered(feed(context.passes))
        self._indices = SplitReader(self._splits)

    def __next__(self) -> Any:
        index = self._indices.next()
        try:
            return self._element(index)
        except FeedFailed as failed:
            problem = failed.error
        self.close()  # and begin anew where it was
        self._indices.go_back()
        try:
            raise problem
        finally:
            del problem  # its traceback refers to this frame

    @abstractmethod
    def _element(self, index: int) -> Any:
        """The element of the index that has been read."""

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`; by default, what is held is made again."""
        return self._indices.get_state()

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        self._indices.set_state(state)
