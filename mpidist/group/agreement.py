"""Whether all members of a group make the same call, which MPI itself does not look at."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence

import numpy as np

from mpidist.arrays import Array
from mpidist.op import Op
from mpidist.reduce_op import ReduceOp
from mpidist.runtime import together

_REDUCING = frozenset(("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"))
# What is as long on all members: what they give, or what they get.
_GIVEN = frozenset(("gather", "all_gather", "all_to_all"))
_TAKEN = frozenset(("all_reduce", "broadcast", "scatter", "reduce_scatter", "scan", "exscan"))


class Question(Op):
    """A small reduction before an operation, after which all know whether it is the same for all.

    Args:
        asked: The operation, which has its number.
    """

    def __init__(self, asked: Op) -> None:
        what = _fingerprint(asked)
        number = zlib.crc32(what.encode())
        numbers = np.array([number, -number], np.int64)
        super().__init__("all_reduce", asked.group, None, numbers, ReduceOp.MIN)
        self.sequence = asked.sequence
        self._call = f"{what}{_line_of_script()}"
        self._asked = asked

    def check(self) -> None:
        """Collective. ValueError on all members if they do not, once it has been carried out."""
        assert self.recv is not None
        lowest, negative = self.recv.tolist()
        if lowest == -negative:
            return
        name, comm = self.group.name, self.group.comm
        with together(f"telling what group {name!r} calls", comm.Get_group()):
            calls = comm.allgather(self._call)
        what = f"group {name!r}, in its collective number {self.sequence},"
        raise different(what, self.group.ranks, calls)

    def describe(self) -> str:
        """Local. What is being waited for: that the others call it, too."""
        return self._asked.describe()


def different(what: str, ranks: Sequence[int], calls: Sequence[str]) -> ValueError:
    """Local. The error of members that do not call the same.

    Args:
        what: Whose members do so, and when, in words.
        ranks: Their world ranks.
        calls: What each of them calls, in words.
    """
    callers: dict[str, list[str]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        callers.setdefault(call, []).append(str(rank))
    told = [
        f"rank{'s' if len(who) > 1 else ''} {', '.join(who)} {call}"
        for call, who in callers.items()
    ]
    return ValueError(f"the members of {what} call different things: {'; '.join(told)}")


def _fingerprint(op: Op) -> str:
    """What must be the same on all members of an operation, in words."""
    words = [op.reduce.name] if op.name in _REDUCING else []
    words += [f"root {op.peer}"] if op.root >= 0 else []
    array = _common(op)
    if array is not None:
        # What is only moved may be cut into units of any size.
        exact = op.name in _REDUCING
        words.append(f"{array.dtype}[{array.size}]" if exact else f"{array.nbytes} bytes")
    return f"{op.name}({', '.join(words)})"


def _common(op: Op) -> Array | None:
    """What has the same length on all members; None if nothing does."""
    if op.send_parts or op.recv_parts or op.recv_counts:
        return None
    if op.name == "reduce":
        return op.send if op.recv is None else op.recv
    if op.name in _GIVEN:
        return op.send
    return op.recv if op.name in _TAKEN else None


def _line_of_script() -> str:
    """The line from which this package was called, as the end of a sentence."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("mpidist", "contextlib"):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
