"""Direct ways between GPUs: what can move and reduce a group's arrays without the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpidist.errors import DistBackendError, UnimplementedError

if TYPE_CHECKING:
    from mpidist.cuda.device_array import DeviceArray


class NotDirectError(DistBackendError):
    """A way cannot take these arrays; every rank gets this, before anything has been changed.

    Args:
        message: Which rank's array, and why.
        lasting: Whether it lies in the processes and devices, not in this memory alone, so that
            the way is of no use to the group.

    Attributes:
        lasting: The same.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class Way(ABC):
    """How the ranks of a group move and reduce arrays between their GPUs.

    Arrays are C-contiguous, as many elements of the same dtype on all ranks; those an operation
    reads and those it writes do not overlap. It begins behind what the streams of its arrays have
    to do, and they have the result for what follows. Ranks make the same calls in the same order.

    Reductions have the names of :class:`mpidist.ReduceOp`: SUM, AVG, PRODUCT, MIN and MAX. Halves
    are reduced in float32, bools by logic: SUM and MAX as "any", PRODUCT and MIN as "all".

    Attributes:
        name: Short, for messages and tables: ``"nccl"``, ``"ipc"``.
        carries: The methods of :class:`mpidist.ProcessGroup` that can go this way, by name.
    """

    name: ClassVar[str]
    carries: ClassVar[frozenset[str]] = frozenset(
        (
            "all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor",
            "all_to_all_single",
        )
    )  # fmt: skip

    @abstractmethod
    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """Local. Whether it can reduce arrays of a dtype so; it moves those of any."""

    @abstractmethod
    def all_reduce(self, array: DeviceArray, op: str) -> None:
        """Collective. Reduce in place, the same on all ranks.

        Raises:
            NotDirectError: On all ranks, with nothing changed.
            DistBackendError: CUDA or the way failed; it is of no use any more.
            DeadlineExceededError: What was queued has not ended after ``MPIDIST_STALL_ABORT_S``.
        """

    def reduce(self, array: DeviceArray, op: str, root: int) -> None:
        """Collective. Reduce into the array of one rank; the others keep theirs."""
        raise self._not_carried("reduce")

    @abstractmethod
    def broadcast(self, array: DeviceArray, root: int) -> None:
        """Collective. Give all the array of one rank."""

    def all_gather(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. Give all the arrays of all, one after the other in order of rank."""
        raise self._not_carried("all_gather")

    def reduce_scatter(self, send: DeviceArray, recv: DeviceArray, op: str) -> None:
        """Collective. Reduce, and give each rank its part, in order of rank."""
        raise self._not_carried("reduce_scatter")

    def all_to_all(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. Give each rank its part of one's array; equal parts, in order of rank."""
        raise self._not_carried("all_to_all")

    @abstractmethod
    def close(self) -> None:
        """Collective. Wait for what is under way, and give up what is held for the group."""

    @abstractmethod
    def abandon(self) -> None:
        """Local. Give up what is held, where other members could not make the way."""

    def _not_carried(self, name: str) -> UnimplementedError:
        return UnimplementedError(f"{self.name} does not carry {name}: see what it carries")
