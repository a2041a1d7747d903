"""Several operations of a group that start together; small operations are fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mpidist.buffers.host_view import Array
from mpidist.buffers.lists import are_distinct_owners, flatten, overlaps, unflatten_into
from mpidist.buffers.packing import UploadCallback
from mpidist.gpu import layout_of
from mpidist.group.operation import Op
from mpidist.group.submission import Submission
from mpidist.work import Timeout, Work, gather_works

# For larger arrays the copies take longer than the calls that fusing saves. A fused buffer above
# 256 KiB gets new pages at every call, and the page faults take longer than the saved calls.
_LARGE_BYTES = 32 << 10
_MAX_FUSED_BYTES = 256 << 10
_ELEMENTWISE = frozenset(("all_reduce", "broadcast"))


class Coalescing:
    """The handle of the operations that one ``with`` block has started.

    Attributes:
        work: The Work of all operations, with ``async_ops=True``.
    """

    def __init__(self) -> None:
        self.work: Work | None = None

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until all operations have ended; see :meth:`mpidist.Work.wait`.

        Raises:
            ValueError: The operations have not started, or ``async_ops`` is False.
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
        name: Name of the operations, for messages.
        async_ops: Whether the block ends at once.
    """
    begun = Coalescing()
    with submission.collecting() as ops:
        yield begun
    begun.work = submit_coalesced(submission, name, ops, async_ops)


def submit_coalesced(
    submission: Submission, name: str, ops: Sequence[Op], async_op: bool
) -> Work | None:
    """Collective. Start several operations, and wait for them unless ``async_op``.

    Args:
        submission: The submission of the group.
        name: Name of the operations, for messages.
        ops: The operations; none uses memory that another one writes.
        async_op: Return a Work instead of waiting for the results.

    Returns:
        A Work of all if ``async_op``, unless an outer block collects them; else None.
    """
    check_distinct(ops)
    limit = submission.limit
    at_once = limit is None and not async_op
    works = [submission.submit(op, not at_once) for op in fuse(ops)]
    under_way: list[Work] = [work for work in works if work is not None]
    if at_once or len(under_way) < len(works):  # an outer block collects them
        return None
    if async_op:
        return gather_works(name, under_way)
    if limit is not None:
        submission.wait_for_all(name, under_way, limit)
    return None


def check_distinct(ops: Sequence[Op]) -> None:
    """Raise ValueError if an operation uses memory that another one writes."""
    used = [
        (number, op, buffer, writes)
        for number, op in enumerate(ops)
        for buffer, writes in _places(op)
        if buffer.size
    ]
    if are_distinct_owners([buffer for _, _, buffer, _ in used]):
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
    """Return the layouts of the arrays of an operation, each with whether it is written.

    Arrays on GPUs have their layouts there.
    """
    places = [(layout_of(buffer), writes) for buffer, writes in op.buffers()]
    if isinstance(op.finish, UploadCallback):
        places.append((op.finish.layout, True))
    return places


def fuse(ops: Sequence[Op]) -> list[Op]:
    """Fuse small operations of one name, reduction, root and dtype. Return all operations.

    A fused operation has at most 256 KiB. Broadcasts only move bytes, so their dtypes may differ.
    """
    fused: list[list[Op]] = []
    last: dict[tuple[object, ...], tuple[list[Op], int]] = {}  # operations and bytes, by kind
    for op in ops:
        buffer = op.recv
        if op.name not in _ELEMENTWISE or buffer is None or buffer.nbytes > _LARGE_BYTES:
            fused.append([op])
            continue
        # One rank may broadcast numbers that another rank receives as bytes.
        dtype = None if op.name == "broadcast" else buffer.dtype
        kind = (op.name, op.reduce, op.root, dtype)
        alike, nbytes = last.get(kind, ([], 0))
        nbytes += buffer.nbytes
        if not alike or nbytes > _MAX_FUSED_BYTES:
            alike, nbytes = [], buffer.nbytes
            fused.append(alike)
        alike.append(op)
        last[kind] = alike, nbytes
    return [_as_one(alike) for alike in fused]


def _as_one(ops: list[Op]) -> Op:
    first = ops[0]
    if len(ops) == 1:
        return first
    buffers = [op.recv for op in ops if op.recv is not None]
    if first.name == "broadcast":
        buffers = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
    together = flatten(buffers)
    receives = first.name != "broadcast" or first.group.rank != first.root
    is_copy = not np.may_share_memory(together, buffers[0])

    def finish() -> None:
        if receives and is_copy:
            unflatten_into(together, buffers)
        for op in ops:
            if op.finish is not None:
                op.finish()

    whole = Op(first.name, first.group, None, together, first.reduce, first.root, finish=finish)
    whole.outputs = [output for op in ops for output in op.outputs or ()]
    return whole
