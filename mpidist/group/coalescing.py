"""Several operations of a group, begun together; small ones become one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist.array_lists import collect, hand_out, overlaps, own_memory
from mpidist.arrays import Array, Upload
from mpidist.cuda import layout_of
from mpidist.group.operation import Op
from mpidist.group.submission import Submission
from mpidist.work import Timeout, Work, gather_works

# Bytes. Larger arrays gain less by travelling together than it costs to copy them.
_WORTH_OWN_CALL = 256 << 10
_ELEMENTWISE = frozenset(("all_reduce", "broadcast"))


class Coalescing:
    """What a coalescing manager gives: the handle of all that it has begun.

    Attributes:
        work: The Work of all operations, where the manager was asked for one.
    """

    def __init__(self) -> None:
        self.work: Work | None = None

    def wait(self, timeout: Timeout = None) -> bool:
        """Local. Block until all operations have ended; see :meth:`mpidist.Work.wait`.

        Raises:
            ValueError: The operations have not begun, or the manager was not asked for a Work.
        """
        if self.work is None:
            raise ValueError(
                "there is nothing to wait for: give async_ops=True, and wait after the with block"
            )
        return self.work.wait(timeout)


@contextmanager
def coalesce(submission: Submission, name: str, async_ops: bool) -> Iterator[Coalescing]:
    """Collective. See :meth:`mpidist.ProcessGroup.coalesce`.

    Args:
        submission: The submission of the group.
        name: For messages.
        async_ops: Whether to give a Work.
    """
    begun = Coalescing()
    with submission.collecting() as ops:
        yield begun
    begun.work = begin_together(submission, name, ops, async_ops)


def begin_together(
    submission: Submission, name: str, ops: Sequence[Op], async_op: bool
) -> Work | None:
    """Collective. Begin several operations, and wait for them if no Work is wanted.

    Args:
        submission: The submission of the group.
        name: For messages.
        ops: The operations; no memory that one writes is used by another.
        async_op: Whether to give a Work.

    Returns:
        A Work of all if ``async_op``, unless a block of another manager collects them; else None.
    """
    check_distinct(ops)
    limit = submission.limit
    at_once = limit is None and not async_op
    works = [submission.submit(op, not at_once) for op in merged(ops)]
    under_way: list[Work] = [work for work in works if work is not None]
    if at_once or len(under_way) < len(works):  # in a block of another manager none begins
        return None
    if async_op:
        return gather_works(name, under_way)
    if limit is not None:
        submission.wait_for_all(name, under_way, limit)
    return None


def returning(work: Work | None, outputs: Sequence[Any]) -> Work | None:
    """Return a Work whose result is a list of output arrays; None where there is no Work."""
    return None if work is None else work.then(lambda _: list(outputs))


def check_distinct(ops: Sequence[Op]) -> None:
    """Local. ValueError if what one operation writes is read or written by another."""
    used = [
        (number, op, buffer, writes)
        for number, op in enumerate(ops)
        for buffer, writes in _places(op)
        if buffer.size
    ]
    if own_memory([buffer for _, _, buffer, _ in used]):
        return
    spans = []
    for position, (_, _, buffer, _) in enumerate(used):
        spans.append((*np.lib.array_utils.byte_bounds(buffer), position))
    for one, other in overlaps(spans):
        number, first, here, writes = used[one]
        number_too, second, there, writes_too = used[other]
        if number != number_too and (writes or writes_too) and np.shares_memory(here, there):
            raise ValueError(
                f"{first.name} and {second.name} use the same memory, which one of them writes: "
                "collect operations whose arrays have nothing in common"
            )


def _places(op: Op) -> list[tuple[Array, bool]]:
    """Where what an operation uses lies, on GPUs too, each with whether it writes it."""
    places = [(layout_of(buffer), writes) for buffer, writes in op.buffers()]
    if isinstance(op.finish, Upload):
        places.append((op.finish.layout, True))
    return places


def merged(ops: Sequence[Op]) -> list[Op]:
    """Local. The operations, with small ones made one that share a kind, a root and a dtype.

    The dtypes of broadcasts, which only move bytes, may differ.
    """
    kinds: dict[tuple[object, ...], list[Op]] = {}
    for number, op in enumerate(ops):
        buffer = op.recv
        if op.name in _ELEMENTWISE and buffer is not None and buffer.nbytes <= _WORTH_OWN_CALL:
            # What is only moved may be bytes here and numbers there.
            dtype = None if op.name == "broadcast" else buffer.dtype
            key: tuple[object, ...] = (op.name, op.reduce, op.root, dtype)
        else:
            key = (number,)
        kinds.setdefault(key, []).append(op)
    return [_as_one(alike) for alike in kinds.values()]


def _as_one(ops: list[Op]) -> Op:
    first = ops[0]
    if len(ops) == 1:
        return first
    buffers = [op.recv for op in ops if op.recv is not None]
    if first.name == "broadcast":
        buffers = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
    together = collect(buffers)
    receives = first.name != "broadcast" or first.group.rank != first.root
    is_copy = not np.may_share_memory(together, buffers[0])

    def finish() -> None:
        if receives and is_copy:
            hand_out(together, buffers)
        for op in ops:
            if op.finish is not None:
                op.finish()

    whole = Op(first.name, first.group, None, together, first.reduce, first.root, finish=finish)
    whole.outputs = [output for op in ops for output in op.outputs or ()]
    return whole
