"""Groups made from other groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.errors import DistBackendError
from mpidist.group.direct import DirectGroup
from mpidist.group.process_group import ProcessGroup
from mpidist.runtime import together
from mpidist.work import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI


def make_group(
    parent: ProcessGroup, ranks: Sequence[int], name: str, timeout: Timeout = None
) -> ProcessGroup | None:
    """Collective over the new members. A group of some members of another (MPI 4.1, 7.4.2).

    That of a :class:`DirectGroup` is one, too.

    Args:
        parent: Whose members they are.
        ranks: World ranks, in the order of their group ranks; the same on all.
        name: For messages.
        timeout: Time limit of every operation.

    Returns:
        The group; None, at once, on a rank that is not among them.

    Raises:
        ValueError: A rank is there twice, or is not a member of the parent.
    """
    positions = [parent.position(rank) for rank in ranks]
    if len(set(positions)) != len(positions) or not positions:
        raise ValueError(f"a group needs distinct ranks, at least one, not {list(ranks)}")
    if parent.rank() not in positions:
        return None
    kind = DirectGroup if isinstance(parent, DirectGroup) else ProcessGroup
    return group_of(parent.comm, positions, name, timeout, kind)


def group_of(
    comm: MPI.Intracomm,
    positions: Sequence[int],
    name: str,
    timeout: Timeout = None,
    kind: type[ProcessGroup] = ProcessGroup,
) -> ProcessGroup:
    """Collective over the new members. A group of some ranks of a communicator.

    Args:
        comm: The communicator.
        positions: Ranks in it, this one among them; the same on all.
        name: For messages.
        timeout: Time limit of every operation.
        kind: Of group.
    """
    from mpi4py import MPI

    whole = comm.Get_group()
    members = whole.Incl(positions)
    with together(f"making group {name!r}", members.Dup()):
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
    return kind(made, name, timeout)


def split(
    parent: ProcessGroup, lists: Sequence[Sequence[int]], name: str, timeout: Timeout = None
) -> list[ProcessGroup | None]:
    """Collective over the members of the lists. A group for each list of world ranks.

    Returns:
        For each list its group, or None where this rank is not in it.

    Raises:
        ValueError: A rank is in two lists, twice in one, or is not a member of the parent.
    """
    seen: set[int] = set()
    for ranks in lists:
        both = seen.intersection(ranks)
        if both:
            raise ValueError(f"rank(s) {sorted(both)} are in more than one list: {list(lists)}")
        seen.update(ranks)
    return [
        make_group(parent, ranks, f"{name}/{number}", timeout) for number, ranks in enumerate(lists)
    ]
