"""Messages between two members of a group."""

from __future__ import annotations

from typing import Any

from mpidist.arrays import to_move
from mpidist.group.core import Core
from mpidist.op import Op
from mpidist.work import Timeout, Work, seconds


class Messages(Core):
    """Sending and receiving."""

    def send(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> None:
        """Point to point. Send ``array`` to a member.

        Args:
            array: The data.
            dst: World rank of the receiver.
            tag: Matched by the receiver's.
            group_dst: Group rank of the receiver, in place of ``dst``.

        Raises:
            ValueError: The receiver is missing, not a member, or this rank itself.
            DeadlineExceededError: The group's time limit passed.
        """
        self._carry_out(self._send_op(array, dst, tag, group_dst))

    def recv(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> int:
        """Point to point. Receive into ``array``.

        Args:
            array: Writable, as large as what is sent.
            src: World rank of the sender; without it, and without ``group_src``, any member.
            tag: Matched to the sender's.
            group_src: Group rank of the sender.
            timeout: Time limit of this call, in seconds or as a timedelta.

        Returns:
            World rank of the sender.

        Raises:
            ValueError: The array is read-only, or the sender not a member, or this rank itself.
            DeadlineExceededError: The time limit passed.
        """
        record = self._recv_op(array, src, tag, group_src)
        return self.ranks[self._carry_out(record, seconds(timeout))]

    def isend(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Work:
        """Point to point. Begin :meth:`send`; ``array`` must stay unchanged until the Work ends."""
        return self._begin(self._send_op(array, dst, tag, group_dst))

    def irecv(
        self, array: Any, src: int | None = None, tag: int = 0, group_src: int | None = None
    ) -> Work:
        """Point to point. Begin :meth:`recv`; the Work's result is the sender's world rank."""
        return self._begin(self._recv_op(array, src, tag, group_src))

    # Inside

    def _send_op(self, array: Any, dst: int | None, tag: int, group_dst: int | None) -> Op:
        peer = self._peer(dst, group_dst)
        self._not_self(peer, "send to")
        self._check_tag(tag)
        buffer, _ = to_move(array, write=False)
        return Op("send", self, buffer, None, root=peer, tag=tag)

    def _recv_op(self, array: Any, src: int | None, tag: int, group_src: int | None) -> Op:
        peer = self._peer(src, group_src, default=-1)
        self._not_self(peer, "receive from")
        self._check_tag(tag)
        buffer, finish = to_move(array, write=True)
        return Op("recv", self, None, buffer, root=peer, tag=tag, finish=finish)

    @staticmethod
    def _check_tag(tag: int) -> None:
        if tag < 0:
            raise ValueError(f"a tag cannot be negative: {tag}")

    def _not_self(self, peer: int, verb: str) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {self.ranks[peer]} cannot {verb} itself")
