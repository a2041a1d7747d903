"""Which source indices a task evaluates."""

from __future__ import annotations

import contextlib

from dataservice.calls import Caller
from dataservice.dataset.context import Passes, Splits
from dataservice.dataset.node import Node
from dataservice.dataset.source import Whole
from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.errors import WithdrawnError
from mpidist import Work
from mpidist.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)


class StridedFeed:
    """Every n-th index, for parts that are fixed in number: with no state outside the task.

    Args:
        node: The dataset.
        part: Which part this is.
        parts: How many there are.
    """

    def __init__(self, node: Node, part: int, parts: int) -> None:
        self._indices = node.source_indices()[part::parts]

    def __call__(self, passes: Passes) -> Splits:
        """Local. The splits of a pass."""
        return Whole(self._indices)


class DynamicFeed:
    """What the dispatcher gives to the task as it goes.

    Args:
        node: The dataset.
        task_id: The task.
        dispatcher: Calls the dispatcher.
        patience_s: For how long it may be away.

    Attributes:
        marked: The pass, and the number of its split, that the state last taken begins with.
    """

    def __init__(self, node: Node, task_id: int, dispatcher: Caller, patience_s: float) -> None:
        self.indices = node.source_indices()
        self.marked: tuple[Passes, int] = ((), 0)
        self._last_given: Passes | None = None
        self._task_id = task_id
        self._dispatcher = dispatcher
        self._patience_s = patience_s

    def __call__(self, passes: Passes) -> Splits:
        """Local. The splits of a pass."""
        return _DynamicSplits(self, passes)

    def received(self, passes: Passes) -> bool:
        """Return whether the task was given indices in a pass, or in one inside it.

        Args:
            passes: The numbers of the pass that was evaluated last.
        """
        return self._last_given is not None and self._last_given[: len(passes)] == passes

    def give(self, passes: Passes, split: pb.Split) -> range:
        """Return the indices of a split of a pass."""
        indices = self.indices[split.start : split.stop]
        if indices:
            self._last_given = passes
        return indices

    def ask(self, passes: Passes, number: int) -> Work:
        """Local. Begin to ask for a split."""
        request = pb.GetSplitRequest(task_id=self._task_id, passes=passes, number=number)
        return self._dispatcher.start("dispatcher/GetSplit", request)

    def finish(self, work: Work) -> bytes:
        """Local. Wait for what :meth:`ask` began; raises as Caller.finish."""
        return self._dispatcher.finish(work).body

    def ask_patiently(self, passes: Passes, number: int) -> pb.Split:
        """Local. A split, from a dispatcher that may just be starting again."""
        request = pb.GetSplitRequest(task_id=self._task_id, passes=passes, number=number)
        try:
            return self._dispatcher.ask_patiently(
                "dispatcher/GetSplit", request, pb.Split, self._patience_s
            )
        except (FailedPreconditionError, NotFoundError) as error:
            raise WithdrawnError(str(error)) from error


class _DynamicSplits:
    """The splits of one pass; the next one is asked for ahead."""

    def __init__(self, feed: DynamicFeed, passes: Passes) -> None:
        self._feed = feed
        self._passes = passes
        self._ahead: tuple[int, Work] | None = None

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        split = self._get(number)
        if split.start < split.stop:
            try:
                self._ahead = (number + 1, self._feed.ask(self._passes, number + 1))
            except UnavailableError:
                self._ahead = None
        return self._feed.give(self._passes, split)

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`."""
        self._feed.marked = (self._passes, number)

    def _get(self, number: int) -> pb.Split:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            # The dispatcher may be starting again: then it is asked anew.
            # Whether the task is still ours, the second answer says as well as the first.
            with contextlib.suppress(
                DeadlineExceededError, FailedPreconditionError, NotFoundError, UnavailableError
            ):
                return pb.Split.FromString(self._feed.finish(ahead[1]))
        return self._feed.ask_patiently(self._passes, number)
