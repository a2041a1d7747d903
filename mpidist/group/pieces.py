"""The way between GPUs through the host in pieces, so that copies and messages overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import Array
from mpidist.cuda import (
    DeviceArray,
    OwnStream,
    Way,
    copy,
    on_device,
    pinned_bytes,
    pinned_pool,
    wait_for,
)
from mpidist.group.operation import Op
from mpidist.reduce_op import ReduceOp, is_direct

if TYPE_CHECKING:
    from mpidist.group.process_group import ProcessGroup

PIECE_BYTES = 4 << 20
_AHEAD = 2


class Pieces(Way):
    """See :class:`mpidist.cuda.Way`. While MPI has one piece, others are copied, both ways.

    Only operations that are elementwise over the array can be cut into pieces.

    Args:
        group: Whose.
        number: Of the GPU of this member.
    """

    name = "pieces"
    carries = frozenset(("all_reduce", "reduce", "broadcast"))

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self._group = group
        self._number = number
        self._down, self._up = OwnStream(number), OwnStream(number)

    def close(self) -> None:
        """Local. Nothing is left to do: the streams go with their last event."""

    def abandon(self) -> None:
        """Local. Nothing is left to do."""

    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """Local. What MPI reduces as it is; of others whole arrays are converted."""
        if op == "AVG":
            return dtype.kind == "f" and is_direct(dtype, ReduceOp.SUM)
        return op in ReduceOp.__members__ and is_direct(dtype, ReduceOp[op])

    def all_reduce(self, array: DeviceArray, op: str) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""

        def move(piece: Array) -> None:
            self._group._submit(Op("all_reduce", self._group._info, None, piece, reduction), False)
            if op == "AVG":
                np.divide(piece, self._group.size(), out=piece)

        reduction = _sum_or(op)
        self._carry(array, move, reads=True, writes=True)

    def reduce(self, array: DeviceArray, op: str, root: int) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""

        def move(piece: Array) -> None:
            send, recv = (None, piece) if is_root else (piece, None)
            self._group._submit(Op("reduce", self._group._info, send, recv, reduction, root), False)
            if op == "AVG" and is_root:
                np.divide(piece, self._group.size(), out=piece)

        is_root, reduction = self._group.rank() == root, _sum_or(op)
        self._carry(array, move, reads=True, writes=is_root)

    def broadcast(self, array: DeviceArray, root: int) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""

        def move(piece: Array) -> None:
            as_bytes = piece.view(np.uint8)  # MPI does not know all dtypes
            self._group._submit(
                Op("broadcast", self._group._info, None, as_bytes, root=root), False
            )

        is_root = self._group.rank() == root
        self._carry(array, move, reads=is_root, writes=not is_root)

    def _carry(
        self, array: DeviceArray, move: Callable[[Array], None], reads: bool, writes: bool
    ) -> None:
        """Have every piece of an array come to the host, be moved there, and go back.

        Args:
            array: Which.
            move: Called with one piece after the other.
            reads: Whether its values are of use.
            writes: Whether what is moved goes back.
        """
        width = array.dtype.itemsize
        doing = f"copying {array} to the host, in pieces"

        def fetch(start: int) -> tuple[int, Any, Any]:
            there = array.pointer + start
            length = min(PIECE_BYTES // width * width, array.nbytes - start)
            memory, block = pinned_bytes(pinned_pool(), length)
            if reads:
                here, kind = memory.ctypes.data, "memcpyDeviceToHost"
                copy(here, there, length, kind, self._down.stream, block)
            return there, memory, block

        with (
            on_device(self._number, doing),
            self._down.behind([array]),
            self._up.behind([array]),
        ):
            begun = map(fetch, range(0, array.nbytes, PIECE_BYTES // width * width))
            waiting = deque(islice(begun, _AHEAD))
            while waiting:
                there, memory, block = waiting.popleft()
                if reads:
                    wait_for(block.event, doing)
                move(memory.view(array.dtype))
                if writes:
                    here, kind = memory.ctypes.data, "memcpyHostToDevice"
                    copy(there, here, memory.nbytes, kind, self._up.stream, block)
                waiting.extend(islice(begun, 1))


def _sum_or(op: str) -> ReduceOp:
    """What MPI reduces by: means are sums that are divided."""
    return ReduceOp.SUM if op == "AVG" else ReduceOp[op]
