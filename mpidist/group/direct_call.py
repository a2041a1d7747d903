"""An operation that may go from GPU to GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.cuda import DeviceArray, Way, lies_on_gpu
from mpidist.errors import FailedPreconditionError


@dataclass(frozen=True)
class Call:
    """An operation that may go directly.

    Attributes:
        name: Of the method of the group.
        arrays: What receives, and what is read, if that is another; None if one is not on a GPU.
        reduction: Its name; "" if there is none.
        root: Group rank of the root; -1 if there is none.
    """

    name: str
    arrays: Sequence[DeviceArray] | None
    reduction: str = ""
    root: int = -1

    @property
    def number(self) -> int:
        """Local. Of the GPU of what receives, which lies on one."""
        assert self.arrays is not None
        return self.arrays[0].number

    def go(self, way: Way) -> None:
        """Collective. Carry it out by a way."""
        assert self.arrays is not None
        result, source = self.arrays[0], self.arrays[-1]
        match self.name:
            case "all_reduce":
                way.all_reduce(result, self.reduction)
            case "reduce":
                way.reduce(result, self.reduction, self.root)
            case "broadcast":
                way.broadcast(result, self.root)
            case "all_gather_into_tensor":
                way.all_gather(source, result)
            case "reduce_scatter_tensor":
                way.reduce_scatter(source, result, self.reduction)
            case "all_to_all_single":
                way.all_to_all(source, result)

    def __str__(self) -> str:
        words = [f"op {self.reduction}"] if self.reduction else []
        words += [f"root {self.root}"] if self.root >= 0 else []
        return f"{self.name}({', '.join(words)})"

    def fits(self, rank: int, size: int, number: int) -> bool:
        """Local. Whether its arrays are such that a way can take them; if not, the host's tells.

        Args:
            rank: Of this member in the group.
            size: How many members there are.
            number: Of the GPU on which all must lie.
        """
        arrays = self.arrays
        if arrays is None:
            return False
        result, source = arrays[0], arrays[-1]
        if not all(a.number == number and a.dtype == result.dtype for a in arrays):
            return False
        if not all(array.is_contiguous for array in arrays):
            return False
        if source is not result and np.may_share_memory(source.header, result.header):
            return False
        reads = (self.name, self.root == rank) in (("broadcast", True), ("reduce", False))
        return (result.writeable or reads) and _as_much(self.name, result, source, size)


def on_gpus(arrays: Sequence[Any]) -> list[DeviceArray] | None:
    """Local. Arrays on GPUs; None if one is not, or cannot be used, as the host's way tells."""
    if not all(array.__class__ is not np.ndarray and lies_on_gpu(array) for array in arrays):
        return None
    try:
        return [DeviceArray(array) for array in arrays]
    except (FailedPreconditionError, TypeError, ValueError):
        return None


def _as_much(name: str, result: DeviceArray, source: DeviceArray, members: int) -> bool:
    """Whether as much arrives as is given; if not, the way through the host tells of it."""
    taken, given = result.nbytes, source.nbytes
    if name == "all_gather_into_tensor":
        return taken == members * given
    if name == "reduce_scatter_tensor":
        return given == members * taken
    if name == "all_to_all_single":
        rows = (array.shape[0] if array.shape else 1 for array in (result, source))
        return taken == given and not any(row % members for row in rows)
    return True
