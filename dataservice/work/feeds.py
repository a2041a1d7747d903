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
    """Every n-th source index, for a fixed number of parts; see :class:`Splits`.

    Args:
        part: Number of the part.
        parts: The number of parts.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position of the first index that the last checkpoint needs.
    """

    def __init__(self, part: int, parts: int) -> None:
        self.start = self.marked = 0
        self._part = part
        self._parts = parts

    def run(self, position: int) -> range:
        """Return indices from a position on. They never end."""
        first = self._part + position * self._parts
        return range(first, first + _AT_ONCE * self._parts, self._parts)

    def mark(self, position: int) -> None:
        """Record the position of the first index that the current checkpoint needs."""
        self.marked = position


class DynamicSplits:
    """Splits of the source that a task requests from the dispatcher; see :class:`Splits`.

    The next split is requested ahead.

    Args:
        task_id: The task.
        dispatcher: Calls the dispatcher.
        patience_s: How long to try to reach the dispatcher, in seconds.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position of the first index that the last checkpoint needs.
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
        """Record the position of the first index that the current checkpoint needs."""
        self.marked = position

    def _ask_ahead(self, position: int) -> None:
        request = pb.GetSplitRequest(task_id=self._task_id, position=position)
        try:
            self._ahead = position, self._dispatcher.start("dispatcher/GetSplit", request)
        except UnavailableError:  # the dispatcher may be restarting; _get() repeats the request
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
                # The dispatcher may be restarting: request the split again. If another worker has
                # the part now, the second request fails as well.
                pass
        request = pb.GetSplitRequest(task_id=self._task_id, position=position)
        try:
            return self._dispatcher.call_with_retry(
                "dispatcher/GetSplit", request, pb.Split, self._patience_s
            )
        except (FailedPreconditionError, NotFoundError) as error:
            raise WithdrawnError(str(error)) from error
