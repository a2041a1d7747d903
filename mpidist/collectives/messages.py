"""The point-to-point functions of torch.distributed, on the default group or on a given group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from mpidist.collectives.default import Group, get_global_rank, group_if_member, group_or_default
from mpidist.group import ProcessGroup
from mpidist.work import Work


def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Point to point. Send an array to another rank.

    A rank outside the group does nothing but warn.

    Args:
        tensor: Array of any dtype without Python objects.
        dst: World rank of the receiver. Give ``dst`` or ``group_dst``.
        group: Process group, by default the default group.
        tag: Number that the receiver's call must name, too. It is not negative and not one of
            29000 to 32767, which the library uses itself. The default is 0.
        group_dst: Group rank of the receiver.

    Raises:
        ValueError: The receiver is missing, not in the group, or this rank itself, or the tag is
            not allowed.
        DeadlineExceededError: The time limit of the group has passed.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.send(tensor, dst, tag, group_dst)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Point to point. Receive an array from another rank.

    Args:
        tensor: Writable array of the sender's dtype, at least as large as the array that is sent.
            Dtypes are not compared: with another dtype the values are wrong, without an error. A
            shorter message leaves the rest as it is, except for arrays beyond 2^31 elements.
        src: World rank of the sender. The default is any rank.
        group: Process group, by default the default group.
        tag: Number that the sender's call names, as in :func:`send`. The default is 0.
        group_src: Group rank of the sender, in place of ``src``.

    Returns:
        World rank of the sender. A rank outside the group gets -1, with a warning.

    Raises:
        ValueError: The array is read-only, the sender is not in the group or is this rank itself,
            or the tag is not allowed.
        DeadlineExceededError: The time limit of the group has passed.
    """
    pg = group_if_member(group)
    return -1 if pg is None else pg.recv(tensor, src, tag, group_src)


@overload
def isend(
    tensor: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work: ...
@overload
def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None: ...
def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Point to point. Begin to send an array to another rank.

    Args:
        tensor: Array of any dtype without Python objects. It must not change before the Work ends.
        dst: World rank of the receiver. Give ``dst`` or ``group_dst``.
        group: Process group, by default the default group.
        tag: Number that the receiver's call must name, too, as in :func:`send`. The default is 0.
        group_dst: Group rank of the receiver.

    Returns:
        A Work. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The receiver is missing, not in the group, or this rank itself, or the tag is
            not allowed.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.isend(tensor, dst, tag, group_dst)


@overload
def irecv(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work: ...
@overload
def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None: ...
def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Point to point. Begin to receive an array from another rank.

    Args:
        tensor: Writable array, as in :func:`recv`. It must not be used before the Work ends.
        src: World rank of the sender. The default is any rank.
        group: Process group, by default the default group.
        tag: Number that the sender's call names, as in :func:`send`. The default is 0.
        group_src: Group rank of the sender, in place of ``src``.

    Returns:
        A Work whose result is the world rank of the sender. A rank outside the group gets None,
        with a warning.

    Raises:
        ValueError: The array is read-only, the sender is not in the group or is this rank itself,
            or the tag is not allowed.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.irecv(tensor, src, tag, group_src)


class P2POp:
    """A message of a batch, for :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv`.
        tensor: Array to send, or writable array to receive into.
        peer: World rank of the other side. Give ``peer`` or ``group_peer``.
        group: Process group, by default the default group.
        tag: Number that the other side names, too, as in :func:`send`. The default is 0.
        group_peer: Group rank of the other side.

    Attributes:
        group: Process group. It is never None.
        peer: World rank of the other side.
        group_peer: Group rank of the other side.

    Raises:
        ValueError: The function is neither isend nor irecv, the other side is missing or not in
            the group, or this rank is not in the group.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Any,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"a message of a batch is made by isend or irecv, not by {op!r}")
        self.op = op
        self.tensor = tensor
        self.group = group_or_default(group)
        self.tag = tag
        if (peer is None) == (group_peer is None):
            raise ValueError("give the world rank or the group rank of the other side")
        if group_peer is not None:
            peer = get_global_rank(group, group_peer)
        assert peer is not None
        self.peer, self.group_peer = peer, self.group.position(peer)

    def __repr__(self) -> str:
        return f"<P2POp {self.op.__name__} of group {self.group.name!r}, peer {self.peer}>"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Point to point. Begin several messages of one group. None begins if one is not valid.

    Args:
        p2p_op_list: The messages, in the order in which they begin.

    Returns:
        One Work per message, in the same order.

    Raises:
        ValueError: The list is empty, holds an object that is no P2POp, or has messages of several
            groups; or a message is not valid, as in :func:`isend` and :func:`irecv`.
    """
    if not p2p_op_list or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ValueError("batch_isend_irecv needs a list of P2POp, at least one")
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise ValueError("batch_isend_irecv needs messages of one group")
    pg = group_if_member(p2p_op_list[0].group)
    if pg is None:
        return []
    return pg.begin_messages([(op.op.__name__, op.tensor, op.peer, op.tag) for op in p2p_op_list])
