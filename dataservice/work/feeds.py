"""The source indices that a task evaluates."""

from __future__ import annotations

from dataservice.calls import RpcClient
from dataservice.dataset.base import SplitsFailed
from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.errors import WithdrawnError
from mpidist import Work
from mpidist.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)

_AT_ONCE = 4096


class StridedSplits:
    """Every n-th index, for parts that are fixed in number; see :class:`Splits`.

    Args:
        part: Which part this is.
        parts: How many there are.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position where the state that was taken last begins.
    """

    def __init__(self, part: int, parts: int) -> None:
        self.start = self.marked = 0
        self._part = part
        self._parts = parts

    def run(self, position: int) -> range:
        """Return indices from a position on; there is no end of them."""
        first = self._part + position * self._parts
        return range(first, first + _AT_ONCE * self._parts, self._parts)

    def mark(self, position: int) -> None:
        """Note where the state that is being taken begins."""
        self.marked = position


class DynamicSplits:
    """The indices that the dispatcher gives to a task as it goes; see :class:`Splits`.

    The next ones are asked for ahead.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher.
        patience_s: How long it may be away, in seconds.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position where the state that was taken last begins.
    """

    def __init__(self, task_id: int, dispatcher: RpcClient, patience_s: float) -> None:
        self.start = self.marked = 0
        self._task_id = task_id
        self._dispatcher = dispatcher
        self._patience_s = patience_s
        self._last = 0, range(0)  # position of the first index, and the indices
        self._ahead: tuple[int, Work] | None = None

    def run(self, position: int) -> range:
        """Return indices from a position on; see :class:`Splits`."""
        first, run = self._last
        if not first <= position < first + len(run):
            try:
                split = self._get(position)
                first, run = self._last = position, range(split.start, split.stop)
                if run:
                    self._ask_ahead(position + len(run))
            except Exception as error:
                raise SplitsFailed(error) from error
        return run[position - first :]

    def mark(self, position: int) -> None:
        """Note where the state that is being taken begins."""
        self.marked = position

    def _ask_ahead(self, position: int) -> None:
        request = pb.GetSplitRequest(task_id=self._task_id, position=position)
        try:
            self._ahead = position, self._dispatcher.start("dispatcher/GetSplit", request)
        except UnavailableError:  # it may be starting again, and is asked once more
            self._ahead = None

    def _get(self, position: int) -> pb.Split:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == position:
            try:
                return pb.Split.FromString(self._dispatcher.finish(ahead[1]).body)
            except (
                DeadlineExceededError,
                FailedPreconditionError,
                NotFoundError,
                UnavailableError,
            ):
                # The dispatcher may be starting again. Whether the task is still ours, the second
                # answer says as well as the first.
                pass
        request = pb.GetSplitRequest(task_id=self._task_id, position=position)
        try:
            return self._dispatcher.call_with_retry(
                "dispatcher/GetSplit", request, pb.Split, self._patience_s
            )
        except (FailedPreconditionError, NotFoundError) as error:
            raise WithdrawnError(str(error)) from error
