"""Messages of torch.distributed; each is a method of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.collectives.default import Group, acting, get_global_rank, given
from mpidist.collectives.documentation import as_method
from mpidist.work import Work


@as_method
def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Point to point. See :meth:`ProcessGroup.send`."""
    acts = acting(group)
    if acts is not None:
        acts.send(tensor, dst, tag, group_dst)


@as_method
def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Point to point. See :meth:`ProcessGroup.recv`."""
    acts = acting(group)
    return -1 if acts is None else acts.recv(tensor, src, tag, group_src)


@as_method
def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Point to point. See :meth:`ProcessGroup.isend`."""
    acts = acting(group)
    return None if acts is None else acts.isend(tensor, dst, tag, group_dst)


@as_method
def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Point to point. See :meth:`ProcessGroup.irecv`."""
    acts = acting(group)
    return None if acts is None else acts.irecv(tensor, src, tag, group_src)


class P2POp:
    """One message of a batch.

    Args:
        op: :func:`isend` or :func:`irecv`.
        tensor: What is sent, or receives.
        peer: World rank of the other side.
        group: The group.
        tag: Matched by the other side's.
        group_peer: Group rank of the other side, in place of ``peer``.

    Raises:
        ValueError: Another function is given, or the other side is missing or not a member.
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
        self.group = given(group)
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
    """Point to point. Begin several messages of one group; a Work for each, in order.

    Raises:
        ValueError: The list is empty, holds something else, or messages of several groups.
    """
    if not p2p_op_list or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ValueError("batch_isend_irecv needs a list of P2POp, at least one")
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise ValueError("batch_isend_irecv needs messages of one group")
    acts = acting(p2p_op_list[0].group)
    if acts is None:
        return []
    return acts.begin_messages([(op.op.__name__, op.tensor, op.peer, op.tag) for op in p2p_op_list])
