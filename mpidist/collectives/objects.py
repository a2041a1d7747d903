"""The object collectives of torch.distributed, on the default group or on a given group.

Objects are pickled. Unpickling can run code, so all ranks of a group must be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.collectives.default import Group, group_if_member


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Collective. Gather an object of every rank into a list on all ranks of a group.

    A rank outside the group does nothing but warn.

    Args:
        object_list: List with one entry per rank. The objects replace the entries, in the order of
            the group ranks.
        obj: Object of this rank. It must be picklable.
        group: Process group, by default the default group.

    Raises:
        ValueError: The list does not have one entry per rank.
        DistError, ValueError: As in every collective; see :func:`mpidist.all_reduce`.

    Example:
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> counts = [None] * dist.get_world_size()
        >>> dist.all_gather_object(counts, {"batches": 14})
        >>> counts[0]
        {'batches': 14}
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.all_gather_object(object_list, obj)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Collective. Gather an object of every rank into a list on one rank of a group.

    A rank outside the group does nothing but warn.

    Args:
        obj: Object of this rank. It must be picklable.
        object_gather_list: On the destination: a list with one entry per rank. The objects replace
            the entries, in the order of the group ranks. On the other ranks: None.
        dst: World rank of the destination. The default is the first rank of the group.
        group: Process group, by default the default group.
        group_dst: Group rank of the destination, in place of ``dst``.

    Raises:
        ValueError: The list is missing on the destination, given on another rank or of another
            length, or the destination is not in the group.
        DistError, ValueError: As in every collective; see :func:`mpidist.all_reduce`.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.gather_object(obj, object_gather_list, dst, group_dst)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Collective. Copy the objects of one rank's list to the lists of all ranks of a group.

    A rank outside the group does nothing but warn.

    Args:
        object_list: List of picklable objects on the source. On the other ranks: a list of the
            same length, whose entries are replaced.
        src: World rank of the source. The default is the first rank of the group.
        group: Process group, by default the default group.
        device: Argument of torch without effect: MPI has no devices.
        group_src: Group rank of the source, in place of ``src``.

    Raises:
        ValueError: The list differs in length from the source's list, or the source is not in the
            group.
        DistError, ValueError: As in every collective; see :func:`mpidist.all_reduce`.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.broadcast_object_list(object_list, src, group_src)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Collective. Scatter a list of objects from one rank over all ranks of a group.

    A rank outside the group does nothing but warn.

    Args:
        scatter_object_output_list: List whose first entry is replaced by the object of this rank.
        scatter_object_input_list: On the source: one picklable object per rank, in the order of
            the group ranks. The other ranks ignore their list.
        src: World rank of the source. The default is the first rank of the group.
        group: Process group, by default the default group.
        group_src: Group rank of the source, in place of ``src``.

    Raises:
        ValueError: The output list is empty, the input list is missing on the source or of another
            length, or the source is not in the group.
        DistError, ValueError: As in every collective; see :func:`mpidist.all_reduce`.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, group_src
        )


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Point to point. Send a list of objects to another rank.

    A rank outside the group does nothing but warn.

    Args:
        object_list: Picklable objects.
        dst: World rank of the receiver. Give ``dst`` or ``group_dst``.
        group: Process group, by default the default group.
        device: Argument of torch without effect: MPI has no devices.
        group_dst: Group rank of the receiver.
        use_batch: Argument of torch without effect: MPI needs no batch for a first message.

    Raises:
        ValueError: The receiver is missing, not in the group, or this rank itself.
        DeadlineExceededError: The time limit of the group has passed.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.send_object_list(object_list, dst, group_dst)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Point to point. Receive the objects of a list from another rank.

    Args:
        object_list: List of the same length as the sender's list. The objects replace its entries.
        src: World rank of the sender. The default is any rank.
        group: Process group, by default the default group.
        device: Argument of torch without effect: MPI has no devices.
        group_src: Group rank of the sender, in place of ``src``.
        use_batch: Argument of torch without effect: MPI needs no batch for a first message.

    Returns:
        World rank of the sender. A rank outside the group gets -1, with a warning.

    Raises:
        ValueError: The list differs in length from the sender's list, or the sender is not in the
            group or is this rank itself.
        DeadlineExceededError: The time limit of the group has passed.
    """
    pg = group_if_member(group)
    return -1 if pg is None else pg.recv_object_list(object_list, src, group_src)
