"""A group whose members stand on a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import apart, host_view, movable, to_move
from mpidist.group.operation import Op
from mpidist.group.process_group import ProcessGroup
from mpidist.runtime import together
from mpidist.work import Timeout, Work

if TYPE_CHECKING:
    from mpi4py import MPI


class CartesianGroup(ProcessGroup):
    """Collective. A process group on a grid, whose neighbours exchange arrays (MPI 4.1, 8.5, 8.6).

    Each member has two neighbours along each dimension: in order, the one before and the one
    behind it along dimension 0, those along dimension 1, and so on. At the edge of a dimension
    that is not periodic one is missing: its part of an output stays as it is.

    Args:
        comm: The communicator, with its grid; the group owns it from now on.
        name: For messages.
        timeout: Time limit of every operation, in seconds or as a timedelta.

    Attributes:
        shape: Members along each dimension.
        periodic: Whether the last along each dimension is a neighbour of the first.
        coordinates: This rank's place.
    """

    repeatable = (*ProcessGroup.repeatable, "neighbor_all_gather", "neighbor_all_to_all")

    def __init__(
        self,
        comm: MPI.Cartcomm,
        name: str,
        timeout: Timeout = None,
        device: int | None = None,
    ) -> None:
        super().__init__(comm, name, timeout, device)
        self._grid = comm
        shape, periodic, coordinates = comm.Get_topo()
        self.shape = tuple(int(length) for length in shape)
        self.periodic = tuple(bool(around) for around in periodic)
        self.coordinates = tuple(int(place) for place in coordinates)

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """Local. Group rank of the member at a place.

        Args:
            coordinates: One number a dimension; along periodic ones any.

        Raises:
            ValueError: There is no such place.
        """
        places = [int(place) for place in coordinates]
        inside = len(places) == len(self.shape) and all(
            around or 0 <= place < length
            for place, length, around in zip(places, self.shape, self.periodic, strict=True)
        )
        if not inside:
            raise ValueError(f"a grid of {self.shape} has no place {tuple(places)}")
        self._submission.check_alive()
        return int(self._grid.Get_cart_rank(places))

    def coordinates_of(self, group_rank: int) -> tuple[int, ...]:
        """Local. The place of a member; ValueError if there is no such group rank."""
        if not 0 <= group_rank < self._size:
            raise ValueError(f"group rank {group_rank} is not in a group of {self._size}")
        self._submission.check_alive()
        return tuple(int(place) for place in self._grid.Get_coords(group_rank))

    def shift(self, dimension: int, steps: int = 1) -> tuple[int | None, int | None]:
        """Local. Who sends to this rank, and to whom it sends, if all send so many steps on.

        Args:
            dimension: Along which they send.
            steps: How far; negative ones go back.

        Returns:
            Group ranks of the source and of the destination; None beyond an edge.

        Raises:
            ValueError: There is no such dimension.
        """
        if not 0 <= dimension < len(self.shape):
            raise ValueError(f"a grid of {self.shape} has no dimension {dimension}")
        self._submission.check_alive()
        source, destination = self._grid.Shift(dimension, steps)
        return (source if source >= 0 else None, destination if destination >= 0 else None)

    def neighbor_all_gather(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """Collective. Send ``input`` to all neighbours, and receive theirs.

        Args:
            output: Writable, of shape ``(2 * dimensions, *input.shape)`` and the dtype of
                ``input``; one part a neighbour.
            input: Same shape and dtype on all members.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            ValueError: The shapes or dtypes do not fit, or the output is read-only.
        """
        target, own = host_view(output), host_view(input)
        self._check_parts("neighbor_all_gather", target.shape, own.shape)
        return self._exchange_with_neighbors("neighbor_all_gather", target, own, async_op, output)

    def neighbor_all_to_all(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """Collective. Send each neighbour its part of ``input``, and receive one from each.

        Where both neighbours along a dimension are the same member, what it sends to the one side
        arrives from the other.

        Args:
            output: Writable, of the shape and dtype of ``input``; one part a neighbour.
            input: Of shape ``(2 * dimensions, ...)``, the same on all members; one part a
                neighbour.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`neighbor_all_gather`.
        """
        target, parts = host_view(output), host_view(input)
        self._check_parts("neighbor_all_to_all", target.shape, parts.shape[1:])
        self._check_parts("neighbor_all_to_all", parts.shape, parts.shape[1:])
        return self._exchange_with_neighbors("neighbor_all_to_all", target, parts, async_op, output)

    # Inside

    def _check_parts(self, name: str, shape: tuple[int, ...], part: tuple[int, ...]) -> None:
        if shape != (2 * len(self.shape), *part):
            raise ValueError(
                f"{name} on a grid of {self.shape} needs one part of {part} for each of "
                f"{2 * len(self.shape)} neighbours, not an array of {shape}"
            )

    def _exchange_with_neighbors(
        self, name: str, target: Any, source: Any, async_op: bool, output: Any
    ) -> Work | None:
        if target.dtype != source.dtype:
            raise ValueError(f"{name} needs one dtype, not {target.dtype} and {source.dtype}")
        recv, finish = to_move(target, write=True)
        return self._submit(
            Op(name, self._info, movable(apart(source, target)), recv, finish=finish),
            async_op,
            [output],
        )


def make_cartesian(
    parent: ProcessGroup,
    shape: Sequence[int],
    periodic: bool | Sequence[bool],
    reorder: bool,
    name: str,
    timeout: Timeout = None,
) -> CartesianGroup:
    """Collective over the parent. A group of all its members on a grid.

    Args:
        parent: Whose members.
        shape: Members along each dimension; their product is the parent's size.
        periodic: Whether the last along a dimension is a neighbour of the first; one answer for
            all dimensions, or one each.
        reorder: Let MPI give other ranks to the members, so that neighbours are close.
        name: For messages.
        timeout: Time limit of every operation.

    Raises:
        ValueError: The shape does not fit the parent's size.
    """
    lengths = tuple(index(length) for length in shape)
    single = isinstance(periodic, bool | np.bool_)
    around = [bool(periodic)] * len(lengths) if single else list(periodic)  # type: ignore[arg-type]
    if not lengths or min(lengths) < 1 or math.prod(lengths) != parent.size():
        raise ValueError(
            f"the {parent.size()} members of group {parent.name!r} do not fill a grid of {lengths}"
        )
    if len(around) != len(lengths):
        raise ValueError(f"periodic={around} does not fit a grid of {lengths}: one answer each")
    with together(f"making group {name!r}", parent.comm.Get_group()):
        comm = parent.comm.Create_cart(lengths, around, reorder)
    return CartesianGroup(comm, name, timeout, parent.device)
