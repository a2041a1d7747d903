"""One operation that is checked once and repeated.

MPI's own persistent operations (MPI 4.1, 6.13) are not used: measured with MPICH 5.0 they take as
long as plain ones, and with Open MPI 5.0 three times as long from 4 KiB on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mpidist.buffers.host_view import Array, host_view
from mpidist.buffers.reduce_op import PremulSum
from mpidist.group.operation import LARGEST_COUNT, Op
from mpidist.work import Work


class Prepared:
    """An operation of a group that is repeated on the same arrays.

    Made by :meth:`mpidist.ProcessGroup.prepare`.

    Args:
        op: The operation.
        call: Called with ``async_op``, by keyword. It runs or starts the operation.
    """

    def __init__(self, op: Op, call: Callable[..., Work | None]) -> None:
        self._op = op
        self._call = call
        self._other_side = op.root
        self._work: Work | None = None

    def __call__(self) -> None:
        """Collective, or point to point. Run the operation once.

        Raises:
            DeadlineExceededError: The group's time limit passed; the operation stays pending.
            GroupBrokenError: The group cannot go on after an earlier operation.
            ValueError: The operation is still pending after :meth:`start`.
        """
        self._check()
        self._call(async_op=False)

    def start(self) -> Work:
        """Collective, or point to point. Start the operation; raises as a call does.

        The operation can start again once its Work has ended.

        Returns:
            The Work.
        """
        self._check()
        work = self._call(async_op=True)
        if work is None:
            raise ValueError(f"{self._op.describe()} is being collected: call it, do not start it")
        self._work = work
        return work

    def _check(self) -> None:
        for work in (self._work, self._op.late):
            if work is not None and not work.is_completed():
                raise ValueError(
                    f"{self._op.describe()} is still pending: wait for its Work first, or until "
                    "the late ranks have come"
                )
        self._op.root = self._other_side  # a receive from any rank has set it to the sender

    def __repr__(self) -> str:
        return f"<Prepared {self._op!r}>"


def check_repeatable(op: Op, arguments: Iterable[Any]) -> None:
    """Raise ValueError if an operation works on copies, which were made only once.

    Args:
        op: The operation.
        arguments: The arguments of the call that made it.
    """
    given = list(_arrays_in(arguments))
    copied = [buffer for buffer, _ in op.buffers() if buffer.size and not _lies_in(buffer, given)]
    if copied or any(isinstance(one, PremulSum) for one in arguments):
        raise ValueError(
            f"{op.describe()} cannot be prepared: it would work on copies of its arrays; give "
            "C-contiguous arrays of the host, of types that MPI knows, no PREMUL_SUM, and in place "
            "of lists one array (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single)"
        )
    if op.count() > LARGEST_COUNT:
        raise ValueError(
            f"{op.describe()} cannot be prepared: it moves more than {LARGEST_COUNT} elements"
        )


def _lies_in(buffer: Array, arrays: Iterable[Array]) -> bool:
    return any(np.may_share_memory(buffer, array) for array in arrays)


def _arrays_in(arguments: Iterable[Any]) -> Iterable[Array]:
    for one in arguments:
        if isinstance(one, list | tuple):
            yield from _arrays_in(one)
            continue
        try:
            yield host_view(one)
        except TypeError:  # a number, a name, or None
            continue
