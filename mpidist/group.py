"""Process groups: ranks that act together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import ReduceOp, host_view, to_move, to_reduce
from mpidist.errors import DeadlineExceededError, GroupBrokenError
from mpidist.executor import HostExecutor, RequestWork, backend_error
from mpidist.op import Op
from mpidist.runtime import Waits, World, exits, world
from mpidist.work import Timeout, Work, seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_counter = itertools.count()


class ProcessGroup:
    """Collective. Ranks that act together, over one communicator of their own.

    Methods have the names and the meaning of torch.distributed's functions: ``src`` and ``dst``
    are ranks of the world, ``group_src`` and ``group_dst`` ranks of the group; results are written
    into the arrays given. Arrays are NumPy arrays, or anything in host memory with DLPack or the
    buffer protocol; any strides.

    Without a time limit an operation blocks inside MPI, and the watchdog reports a stall. With
    one, it polls, and raises DeadlineExceededError when the limit passes; the operation then
    stays pending, and the group takes no other until it has completed. All members must make the
    same choice, of ``async_op`` too: MPI does not match blocking calls with others (MPI 4.1, 6.12).

    Args:
        comm: The communicator; the group owns it from now on.
        name: For messages.
        timeout: Time limit of every operation, in seconds or as a timedelta; None for none.

    Attributes:
        name: For messages.
        number: Unique, and equal on all members.
        ranks: World rank of each member.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: Timeout = None) -> None:
        from mpi4py import MPI

        here: World = world()
        self._comm = comm
        self._mpi_error = MPI.Exception
        self._executor = HostExecutor(comm)
        self._waits: Waits = exits().waits
        self._timeout = seconds(timeout)
        self._sequence = 0
        self._late: RequestWork | None = None
        self._abandoned: list[RequestWork] = []
        self._rank, self._size = comm.rank, comm.size
        self.name = name
        self.number: int = comm.bcast(next(_counter) * here.size + here.rank)
        group = comm.Get_group()
        translated = group.Translate_ranks(list(range(comm.size)), here.comm.Get_group())
        self.ranks = tuple(int(rank) for rank in translated)
        group.Free()
        self._position = {rank: position for position, rank in enumerate(self.ranks)}

    def rank(self) -> int:
        """Local. Rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Local. Number of members."""
        return self._size

    def set_timeout(self, timeout: Timeout) -> None:
        """Local. Time limit of every later operation, seconds or a timedelta; None for none."""
        self._timeout = seconds(timeout)

    def free(self) -> None:
        """Collective. Give the communicator back; the group must not be used afterwards."""
        self._comm.Free()

    # Collectives

    def all_reduce(
        self, array: Any, op: ReduceOp | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce ``array`` over all members, in place on each.

        Args:
            array: Same shape and dtype on all members; float16 and bfloat16 reduce in float32,
                bool by logic.
            op: The reduction; AVG needs a floating or complex dtype.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            TypeError: The dtype cannot be reduced so.
            ValueError: The array is read-only.
            DeadlineExceededError: The group's time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        buffer, mpi_op, finish = to_reduce(array, ReduceOp.of(op), self._size)
        record = Op("all_reduce", self, None, buffer, mpi_op, finish=finish)
        return self._collective(record, async_op)

    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: ReduceOp | str = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Reduce ``array`` over all members into the root's; the others keep theirs.

        Args:
            array: See :meth:`all_reduce`; need not be writable but on the root.
            dst: World rank of the root; without it, and without ``group_dst``, the first member.
            op: The reduction.
            async_op: Return at once.
            group_dst: Group rank of the root.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`all_reduce`.
        """
        root = self._peer(dst, group_dst, default=0)
        is_root = self._rank == root
        buffer, mpi_op, finish = to_reduce(array, ReduceOp.of(op), self._size, write=is_root)
        send, recv = (None, buffer) if is_root else (buffer, None)
        return self._collective(Op("reduce", self, send, recv, mpi_op, root, 0, finish), async_op)

    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. Copy the root's ``array`` into every member's.

        Args:
            array: Same shape and dtype on all members; writable but on the root.
            src: World rank of the root; without it, and without ``group_src``, the first member.
            async_op: Return at once.
            group_src: Group rank of the root.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            ValueError: The array receives but is read-only, or the root is not a member.
            DeadlineExceededError: The group's time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        root = self._peer(src, group_src, default=0)
        buffer, finish = to_move(array, write=self._rank != root)
        record = Op("broadcast", self, None, buffer, root=root, finish=finish)
        return self._collective(record, async_op)

    def all_gather(
        self, array_list: Sequence[Any], array: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Collect every member's ``array`` in ``array_list``, by group rank.

        Args:
            array_list: One writable array a member, of the shape and dtype of ``array``.
            array: Same shape and dtype on all members.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            ValueError: The list has another length, or an array another shape or dtype.
            DeadlineExceededError: The group's time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        outputs = [host_view(output) for output in array_list]
        own = host_view(array)
        if len(outputs) != self._size:
            raise ValueError(
                f"all_gather of group {self.name!r} needs {self._size} arrays, not {len(outputs)}"
            )
        for output in outputs:
            if output.shape != own.shape or output.dtype != own.dtype:
                raise ValueError(
                    f"all_gather of {own.dtype}{list(own.shape)} cannot write into "
                    f"{output.dtype}{list(output.shape)}"
                )
        part, _ = to_move(own, write=False)
        gathered = np.empty((self._size, *part.shape), part.dtype)

        def finish() -> None:
            for output, data in zip(outputs, gathered, strict=True):
                np.copyto(output, data.reshape(-1).view(own.dtype).reshape(own.shape))

        return self._collective(Op("all_gather", self, part, gathered, finish=finish), async_op)

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Collective. Return once all members have entered.

        Args:
            async_op: Return at once.
            timeout: Time limit of this barrier, in seconds or as a timedelta.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            DeadlineExceededError: The time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        return self._collective(Op("barrier", self), async_op, seconds(timeout))

    # Point to point

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

    def _collective(
        self, op: Op, async_op: bool, timeout: float | None = None
    ) -> RequestWork | None:
        if self._late is not None:
            self._check_late()
        self._sequence = op.sequence = self._sequence + 1
        self._waits.counts[self.number] = op.sequence
        if async_op:
            return self._begin(op)
        self._carry_out(op, timeout)
        return None

    def _carry_out(self, op: Op, timeout: float | None = None) -> int:
        """Carry an Op out; group rank of the other side of a message."""
        limit = self._timeout if timeout is None else timeout
        if limit is not None:
            return self._carry_out_within(op, limit)
        current = self._waits.current
        current[id(op)] = op
        try:
            self._executor.run(op)
        except self._mpi_error as error:
            raise backend_error(op, error) from error
        finally:
            del current[id(op)]
        if op.finish is not None:
            op.finish()
        return op.root

    def _carry_out_within(self, op: Op, limit: float) -> int:
        work = self._begin(op)
        try:
            work.wait(limit)
        except DeadlineExceededError:
            if op.sequence:
                self._late = work
            else:
                self._abandoned = [w for w in self._abandoned if not w.is_completed()] + [work]
            raise DeadlineExceededError(
                f"{op.describe()} has not completed within {limit:g} s on rank "
                f"{self.ranks[self._rank]}; it stays pending, and its arrays must not be used"
            ) from None
        sender = work.result()
        return op.root if sender is None else self._position[sender]

    def _begin(self, op: Op) -> RequestWork:
        try:
            return RequestWork(op, self._executor.start(op), self._waits)
        except self._mpi_error as error:
            raise backend_error(op, error) from error

    def _check_late(self) -> None:
        if self._late is not None and not self._late.is_completed():
            raise GroupBrokenError(
                f"group {self.name!r} takes no collective on rank {self.ranks[self._rank]}: its "
                f"{self._late.name} is past its time limit and still pending; wait until the "
                "missing ranks have joined it, or make a new group of those that answer"
            )
        self._late = None

    def _peer(self, rank: int | None, group_rank: int | None, default: int | None = None) -> int:
        """Group rank of the other side, from either way to name it."""
        if rank is not None and group_rank is not None:
            raise ValueError("give the world rank or the group rank of the other side, not both")
        if rank is not None:
            position = self._position.get(rank, -1)
        elif group_rank is not None:
            position = group_rank if 0 <= group_rank < self._size else -1
        elif default is not None:
            return default
        else:
            raise ValueError("the rank of the other side is missing")
        if position < 0:
            named = f"world rank {rank}" if rank is not None else f"group rank {group_rank}"
            raise ValueError(f"{named} is not in group {self.name!r}, whose ranks are {self.ranks}")
        return position

    def _send_op(self, array: Any, dst: int | None, tag: int, group_dst: int | None) -> Op:
        peer = self._peer(dst, group_dst)
        self._not_self(peer, "send to")
        buffer, _ = to_move(array, write=False)
        return Op("send", self, buffer, None, root=peer, tag=tag)

    def _recv_op(self, array: Any, src: int | None, tag: int, group_src: int | None) -> Op:
        peer = self._peer(src, group_src, default=-1)
        self._not_self(peer, "receive from")
        buffer, finish = to_move(array, write=True)
        return Op("recv", self, None, buffer, root=peer, tag=tag, finish=finish)

    def _not_self(self, peer: int, verb: str) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {self.ranks[peer]} cannot {verb} itself")
