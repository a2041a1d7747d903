"""Messages between two members of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays import host_view, to_move
from mpidist.executor import RequestWork
from mpidist.group.core import Core
from mpidist.op import RESERVED_TAGS, Op
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
            array: Writable, of the dtype of what is sent, and as large; of a shorter message the
                rest stays as it is (not of arrays beyond 2^31 elements, which come in pieces).
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
        record = self._recv_op(array, src, tag, group_src, timeout)
        return self.ranks[self._carry_out(record)]

    def isend(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Work:
        """Point to point. Begin :meth:`send`.

        Args:
            array: The data; it must stay unchanged until the Work ends.
            dst: World rank of the receiver.
            tag: Matched by the receiver's.
            group_dst: Group rank of the receiver, in place of ``dst``.

        Returns:
            A Work. Raises as :meth:`send`.
        """
        return self._begin_message(self._send_op(array, dst, tag, group_dst))

    def irecv(
        self, array: Any, src: int | None = None, tag: int = 0, group_src: int | None = None
    ) -> Work:
        """Point to point. Begin :meth:`recv`.

        Args:
            array: Writable, as for :meth:`recv`; to be left alone until the Work ends.
            src: World rank of the sender; without it, and without ``group_src``, any member.
            tag: Matched to the sender's.
            group_src: Group rank of the sender.

        Returns:
            A Work, whose result is the sender's world rank. Raises as :meth:`recv`.
        """
        return self._begin_message(self._recv_op(array, src, tag, group_src))

    def begin_messages(self, messages: Sequence[tuple[str, Any, int, int]]) -> list[Work]:
        """Point to point. Begin several messages, or none if one of them cannot be.

        Args:
            messages: ``"isend"`` or ``"irecv"``, the array, the other side's world rank, the tag.

        Returns:
            A Work for each. Raises as :meth:`send` and :meth:`recv`.
        """
        made = [
            (self._send_op if name == "isend" else self._recv_op)(array, peer, tag)
            for name, array, peer, tag in messages
        ]
        return [self._begin_message(op) for op in made]

    # Inside

    def _message(self, op: Op, async_op: bool) -> RequestWork | None:
        if async_op:
            return self._begin_message(op)
        self._carry_out(op)
        return None

    def _begin_message(self, op: Op) -> RequestWork:
        self._sweep()
        work = self._begin(op)
        work.limit = self._timeout if op.limit is None else op.limit
        return work

    def _send_op(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Op:
        peer = self._peer("dst", dst, group_dst)
        self._not_self(peer, "send to")
        self._check_tag(tag)
        buffer, _ = to_move(array, write=False)
        return Op("send", self, buffer, None, root=peer, tag=tag)

    def _recv_op(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> Op:
        peer = self._peer("src", src, group_src, default=-1)
        self._not_self(peer, "receive from")
        self._check_tag(tag)
        # Of what is longer than the message, the rest stays as it is.
        buffer, finish = to_move(host_view(array), write=True)
        record = Op("recv", self, None, buffer, root=peer, tag=tag, finish=finish)
        record.limit = seconds(timeout)
        return record

    @staticmethod
    def _check_tag(tag: int) -> None:
        if tag < 0 or tag in RESERVED_TAGS:
            raise ValueError(
                f"tag {tag} cannot be used: negative ones have no meaning, and those from "
                f"{RESERVED_TAGS[0]} to {RESERVED_TAGS[-1]} are the library's own"
            )

    def _not_self(self, peer: int, verb: str) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {self.ranks[peer]} cannot {verb} itself")
