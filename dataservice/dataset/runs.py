"""Passes over source indices that the node above chooses, as it goes through splits.

A pass may read ahead on threads of its own, as below ``prefetch``.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dataservice.dataset.context import Context, Feed, Passes, Splits
from dataservice.dataset.failure import FeedFailed
from dataservice.dataset.node import ElementIterator, Node
from dataservice.dataset.source import SplitReader

AT_ONCE = 4096
"""How many indices are chosen at once, at most."""

NEAR = 64
"""Up to so many indices are looked through for the next one that is needed, before a pass ends."""


class Remembered:
    """Splits that several read, some ahead of the others; each is asked for once.

    Args:
        splits: The splits.
    """

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._known: dict[int, range] = {}
        self._oldest = 0
        self._looking = threading.Lock()
        self._asking = threading.Lock()

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        known = self._known.get(number)
        if known is None:
            with self._asking:
                known = self._known.get(number)
                if known is None:
                    known = self._splits.split(number)
                    with self._looking:
                        self._known[number] = known
        return known

    def split_from(self, number: int) -> tuple[int, range]:
        """Local. The split of this number, or the first one that is still read; and its number."""
        with self._looking:
            number = max(number, self._oldest)
            known = self._known.get(number)
        # One that is not known has not been read: so it can be asked for.
        return number, self.split(number) if known is None else known

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`."""
        self._splits.mark(number)

    def forget_before(self, number: int) -> None:
        """Local. Nobody reads those before this one any more."""
        with self._looking:
            self._oldest = number
            for known in [known for known in self._known if known < number]:
                del self._known[known]


class Runs:
    """Runs of indices, as the splits of a pass whose state nobody takes.

    A run whose elements have all been given is forgotten: whoever reads runs in the pass has read
    it, for every element takes all of them.

    Args:
        runs: Not empty; gone through as the pass asks. What it raises ends it, and is raised as
            FeedFailed, whoever asks.

    Attributes:
        error: What it has raised.
    """

    def __init__(self, runs: Iterator[range]) -> None:
        self._source = runs
        self._runs: dict[int, range] = {}
        self._count = 0
        self._first = 0  # number of the first run that is kept
        self._used = 0  # indices of that run whose elements have been given
        self._asking = threading.Lock()
        self.error: BaseException | None = None

    def feed(self, passes: Passes) -> Splits:
        """Local. Gives these splits."""
        return self

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        if number >= self._count:
            with self._asking:
                while number >= self._count:
                    run = self._next_run()
                    if not run:
                        return run
                    self._runs[self._count] = run
                    self._count += 1
        return self._runs[number]

    def _next_run(self) -> range:
        if self.error is None:
            try:
                return next(self._source, range(0))
            except FeedFailed as failed:
                self.error = failed.error
            except Exception as error:
                # Its frames, and whoever called them, would be in a circle with it.
                self.error = error.with_traceback(None)
        raise FeedFailed(self.error)

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`."""

    @property
    def coming(self) -> int | None:
        """Local. The first index that the pass has been given, and whose element it has not given.

        None if it has given all that it was asked for.
        """
        run = self._runs.get(self._first)
        return None if run is None else run[self._used]

    def go_on(self) -> None:
        """Local. The pass has given the element of the index that was coming."""
        self._used += 1
        if self._used == len(self._runs[self._first]):
            del self._runs[self._first]
            self._first, self._used = self._first + 1, 0


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
        self._pass = node.iterate(replace(context, feed=self._runs.feed, chosen=True))
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
            if self._runs.error is not None:
                raise FeedFailed(self._runs.error) from None
            raise
        except FeedFailed:
            raise
        except Exception as error:
            if self._runs.coming is None:  # it is no element's
                raise FeedFailed(error) from None
            self._go_on()
            raise
        self._go_on()
        return element

    @property
    def coming(self) -> int | None:
        """Local. See :class:`Runs`."""
        return self._runs.coming

    def close(self) -> None:
        """Local. End the pass; idempotent."""
        self._pass.close()

    def _go_on(self) -> None:
        coming = self._runs.coming
        assert coming is not None
        self.index = coming
        self._runs.go_on()


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
        self._reading = -1
        self._failed = False  # without having got further

    def __next__(self) -> Any:
        self._failed = False
        index = self._indices.next()
        reading, _ = self._indices.last
        if reading != self._reading:
            self._reading = reading
            self._splits.forget_before(reading)
        try:
            return self._element(index)
        except FeedFailed as failed:
            # Above, where indices are chosen, it must not be taken for the error of an element.
            problem = FeedFailed(failed.error) if self._context.chosen else failed.error
        self._failed = True
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

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return not self._failed


class SplitUnaryIterator(SplitIterator):
    """Such a pass over a node over one other.

    Args:
        parent: The node below; one to one.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, parent: Node, context: Context, feed: Feed) -> None:
        super().__init__(context, feed)
        self._parent = parent
        self._below = parent.source_indices()
        self._chosen: Chosen | None = None

    def _next_below(self) -> Any:
        """The next of the elements that elements are made of; see :meth:`Chosen.next`."""
        if self._chosen is None:
            self._chosen = Chosen(self._parent, self._context, self._runs(*self._indices.last))
        return self._chosen.next()

    @abstractmethod
    def _runs(self, number: int, position: int) -> Iterator[range]:
        """The indices of what elements are made of, from a place among the splits on.

        It must not refer to this pass, which would be a circle.
        """

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._chosen is not None:
            self._chosen.close()
            self._chosen = None
