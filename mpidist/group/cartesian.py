"""A process group on a Cartesian grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from mpidist.buffers.host_view import host_view
from mpidist.buffers.packing import as_mpi_buffer, as_mpi_input, copy_if_overlapping
from mpidist.group.operation import Op
from mpidist.group.process_group import ProcessGroup
from mpidist.work import Timeout, Work

if TYPE_CHECKING:
    from mpi4py import MPI


class CartesianGroup(ProcessGroup):
    """Collective. A process group on a grid, whose neighbours exchange arrays (MPI 4.1, 8.5, 8.6).

    Made by :func:`mpidist.new_cartesian_group`.

    Each member has two neighbours along each dimension. Their order is: the previous and the next
    member along dimension 0, then along dimension 1, and so on. At the edge of a dimension that is
    not periodic a neighbour is missing, and its part of an output keeps its values.

    Args:
        comm: The communicator with its grid; the group owns it from now on.
        name: Used in messages.
        timeout: Time limit of every operation, in seconds or as a timedelta.
        device: See :class:`mpidist.ProcessGroup`.

    Attributes:
        shape: Members along each dimension.
        periodic: For each dimension, whether the last member is a neighbour of the first.
        coordinates: The coordinates of this rank.
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
        """Return the group rank of the member at some coordinates.

        Args:
            coordinates: One number for each dimension, which wraps around if that is periodic.

        Raises:
            ValueError: The coordinates are outside the grid.
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
        """Return the coordinates of a member; raise ValueError if there is no such group rank."""
        if not 0 <= group_rank < self._size:
            raise ValueError(f"group rank {group_rank} is not in a group of {self._size}")
        self._submission.check_alive()
        return tuple(int(place) for place in self._grid.Get_coords(group_rank))

    def shift(self, dimension: int, steps: int = 1) -> tuple[int | None, int | None]:
        """Return source and destination of this rank in a shift of all members (MPI 4.1, 8.5.6).

        Args:
            dimension: The dimension of the shift.
            steps: The distance; negative for the other direction.

        Returns:
            Group ranks of the source and of the destination, each None beyond an edge.

        Raises:
            ValueError: There is no such dimension.
        """
        if not 0 <= dimension < len(self.shape):
            raise ValueError(f"a grid of {self.shape} has no dimension {dimension}")
        self._submission.check_alive()
        source, destination = self._grid.Shift(dimension, steps)
        return (source if source >= 0 else None, destination if destination >= 0 else None)

    @overload
    def neighbor_all_gather(self, output: Any, input: Any, *, async_op: Literal[True]) -> Work: ...
    @overload
    def neighbor_all_gather(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None: ...
    def neighbor_all_gather(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """Collective. Send ``input`` to all neighbours, and receive theirs.

        Args:
            output: Writable, of shape ``(2 * dimensions, *input.shape)`` and the dtype of
                ``input``, with one part for each neighbour.
            input: Same shape and dtype on all members.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            ValueError: The shapes or dtypes do not fit, or the output is read-only.
        """
        target, own = host_view(output), host_view(input)
        self._check_parts("neighbor_all_gather", target.shape, own.shape)
        return self._exchange_with_neighbors("neighbor_all_gather", target, own, async_op, output)

    @overload
    def neighbor_all_to_all(self, output: Any, input: Any, *, async_op: Literal[True]) -> Work: ...
    @overload
    def neighbor_all_to_all(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None: ...
    def neighbor_all_to_all(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """Collective. Send each neighbour its part of ``input``, and receive one from each.

        If both neighbours along a dimension are one member, a part that it sends to one side
        arrives from the other side.

        Args:
            output: Writable, of the shape and dtype of ``input``, with one part for each neighbour.
            input: Shape ``(2 * dimensions, ...)``, equal on all members, with one part for each
                neighbour.
            async_op: Return a Work instead of waiting for the result.

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
        send = as_mpi_input(copy_if_overlapping(source, target))
        recv, finish = as_mpi_buffer(target, write=True)
        return self._submit(Op(name, self._info, send, recv, finish=finish), async_op, [output])
