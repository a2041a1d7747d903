"""Groups made from other groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.errors import DistBackendError
from mpidist.group.process_group import ProcessGroup
from mpidist.mpi import watched
from mpidist.work import Timeout, seconds

if TYPE_CHECKING:
    from mpi4py import MPI


def make_group(
    parent: ProcessGroup, ranks: Sequence[int], name: str, timeout: Timeout = None
) -> ProcessGroup | None:
    """Collective over the new members. Return a group of some members of another (MPI 4.1, 7.4.2).

    A rank has the same GPU in both groups.

    Args:
        parent: The group that has the members.
        ranks: World ranks, in the order of their group ranks; equal on all members.
        name: Name of the new group, for messages.
        timeout: Time limit of every operation, and of this call. After it, the job is ended.

    Returns:
        The group. Other ranks get None at once.

    Raises:
        ValueError: A rank is there twice, or is not a member of the parent.
    """
    positions = [parent.position(rank) for rank in ranks]
    if len(set(positions)) != len(positions) or not positions:
        raise ValueError(f"a group needs distinct ranks, at least one, not {list(ranks)}")
    if parent.rank() not in positions:
        return None
    return group_of(parent.comm, positions, name, timeout, parent.device)


def group_of(
    comm: MPI.Intracomm,
    positions: Sequence[int],
    name: str,
    timeout: Timeout = None,
    device: int | None = None,
) -> ProcessGroup:
    """Collective over the new members. Return a group of some ranks of a communicator.

    Args:
        comm: The communicator.
        positions: Ranks in the communicator, this rank among them; equal on all members.
        name: Name of the new group, for messages.
        timeout: Time limit of every operation, and of this call. After it, the job is ended.
        device: Index of the GPU of this rank, or None.
    """
    from mpi4py import MPI

    whole = comm.Get_group()
    members = whole.Incl(positions)
    with watched(f"the creation of group {name!r}", members.Dup(), seconds(timeout)):
        try:
            made = comm.Create_group(members)
        except MPI.Exception as error:
            raise DistBackendError(
                f"MPI cannot make group {name!r} ({error}); if there are some two thousand, "
                "destroy those that are not needed"
            ) from error
        finally:
            members.Free()
            whole.Free()
    return ProcessGroup(made, name, timeout, device)
