"""torch's handle of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from mpidist.work import Work


class MpidistWork(dist.Work):
    """The handle of an operation, as ``torch.distributed.Work``.

    Args:
        work: The handle of mpidist; None if the operation has ended.
        tensors: The result of the operation.
        ranks: World ranks of the group, to find the sender of a message.

    Attributes:
        limit: Time limit of :meth:`wait`. The default is the time limit of the group.
    """

    # Class attributes for values that most works never set make a Work cheaper.
    _ranks: Sequence[int] = ()
    limit: timedelta | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None

    def __init__(
        self, work: Work | None, tensors: Sequence[torch.Tensor], ranks: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        if ranks:
            self._ranks = ranks

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended.

        Args:
            timeout: Time limit. The default is ``limit``.

        Raises:
            DeadlineExceededError: The operation has not ended in time. It stays pending.
            Exception: The error of the operation.
        """
        if self._work is not None:
            # C++ passes 0 for the default.
            self._work.wait(timeout or self.limit)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with success or an error."""
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._work is None or self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if it is pending or has succeeded."""
        return None if self._work is None else self._work.exception()

    def synchronize(self) -> None:
        """Block until the operation has ended, as :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the output tensors."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message."""
        assert self._work is not None
        return self._ranks.index(self._work.result())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future with the output tensors. A background thread completes it.

        Each future has a thread of its own for its callbacks. A callback may wait for the future of
        a further operation, as PowerSGD's does.
        """
        if self._future is None:
            self._future = _future_of(self._work, list(self._tensors))
        return self._future


def _future_of(
    work: Work | None, tensors: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    ended: torch.futures.Future[Any] = torch.futures.Future()
    if work is None:
        ended.set_result(tensors)
        return ended
    future = work.get_future()

    def start_callbacks(_: object) -> None:
        Thread(target=ended.set_result, args=(None,), name="mpidist-torch", daemon=True).start()

    def result(_: object) -> list[torch.Tensor]:
        error = future.exception()
        if error is not None:
            raise error
        return tensors

    future.add_done_callback(start_callbacks)
    # set_exception of torch's futures stores the error as a value. Autograd's threads, which are in
    # C++, would take it for the tensors. The error of a callback reaches them as an error.
    return ended.then(result)
