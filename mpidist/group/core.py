"""What a process group is, and how its operations are carried out."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mpidist.config import config
from mpidist.errors import DeadlineExceededError, GroupBrokenError
from mpidist.executor import HostExecutor, RequestWork, backend_error
from mpidist.group.agreement import Question
from mpidist.op import Op
from mpidist.runtime import Waits, World, exits, fork, together, world
from mpidist.work import Timeout, Work, gather_works, seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_counter = itertools.count()
_SWEPT = 4  # works that nobody waits for are looked after in each call


class Core:
    """The members of a group, their communicator, and the way of every operation.

    Arguments and attributes as :class:`mpidist.ProcessGroup`, which has the operations.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: Timeout = None) -> None:
        from mpi4py import MPI

        if comm == MPI.COMM_NULL or comm.Is_inter():
            raise ValueError(
                f"group {name!r} needs a communicator of which this rank is a member, and of one "
                "group: not COMM_NULL, nor an intercommunicator"
            )
        here: World = world()
        self._comm = comm
        self._mpi_error = MPI.Exception
        self._executor = HostExecutor(comm)
        self._waits: Waits = exits().waits
        self._counts, self._current = self._waits.counts, self._waits.current
        self._timeout = seconds(timeout)
        self._sequence = 0
        self._refusing = False  # for one of the three reasons below
        self._freed = False
        self._torn: Op | None = None
        self._late: Work | None = None
        # MPI works on their arrays, whether or not somebody keeps their handles.
        self._begun: OrderedDict[int, RequestWork] = OrderedDict()
        # MPI wants the collectives of a group one after the other, whichever thread calls them.
        self._turn = threading.Lock()
        self._collecting: dict[int, list[Op]] = {}  # by thread
        self._rank, self._size = comm.rank, comm.size
        self.name = name
        with together(f"making group {name!r}", comm.Get_group()):
            self.number: int = comm.bcast(next(_counter) * here.size + here.rank)
            self._compares: bool = comm.bcast(config.debug == "detail")
        group = comm.Get_group()
        translated = group.Translate_ranks(list(range(comm.size)), here.comm.Get_group())
        self.ranks = tuple(int(rank) for rank in translated)
        group.Free()
        self._position = {rank: position for position, rank in enumerate(self.ranks)}

    def __repr__(self) -> str:
        state = ", destroyed" if self._freed else ""
        return f"<{type(self).__name__} {self.name!r}: rank {self._rank} of {self._size}{state}>"

    def rank(self) -> int:
        """Local. Rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Local. Number of members."""
        return self._size

    @property
    def freed(self) -> bool:
        """Local. Whether the group was destroyed."""
        return self._freed

    def position(self, rank: int) -> int:
        """Local. Group rank of a rank of the world; ValueError if it is not a member."""
        return self._peer("rank", rank, None)

    def set_timeout(self, timeout: Timeout) -> None:
        """Local. Time limit of every later operation, seconds or a timedelta; None for none."""
        self._timeout = seconds(timeout)

    @property
    def comm(self) -> MPI.Intracomm:
        """Local. The group's mpi4py communicator, for operations of MPI beside the group's.

        Messages must name their tag: what is received with ANY_TAG may be a part of an operation
        of the group, whose tags are 29000 to 32767.

        Raises:
            ValueError: The group was destroyed.
        """
        self._check_alive()
        return self._comm

    def free(self) -> None:
        """Collective. Give the communicator back; every later operation is a ValueError.

        A rank on which operations have not ended keeps it: Open MPI would use its number again,
        and take what still comes for the messages of another group.

        Raises:
            ValueError: That has been done.
        """
        self._check_alive()
        pending = [work for work in list(self._begun.values()) if not work.is_completed()]
        self._freed = self._refusing = True
        with together(f"freeing group {self.name!r}", self._comm.Get_group()):
            if not pending and self._torn is None:
                self._comm.Free()

    def submit(
        self, op: Op, async_op: bool, outputs: Sequence[Any] | None = None
    ) -> RequestWork | None:
        """Collective. Carry out an operation, in the order in which threads submit them.

        Args:
            op: The operation.
            async_op: Return at once.
            outputs: The arrays that ``result()`` of the Work returns, as a list; by default those
                that the operation has.

        Returns:
            A Work if ``async_op``, and nothing is being collected; else None.

        Raises:
            DeadlineExceededError: The time limit passed.
            DistBackendError: MPI failed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        if self._collecting and self._collect(op, outputs):
            return None
        limit = self._timeout if op.limit is None else op.limit
        if fork.unusable:  # the lock of a forked child may be locked for ever
            fork.check_mpi()
        if self._begun:  # not within the turn: callbacks of what has ended may want theirs
            self._sweep()
        if not self._turn.acquire(blocking=False):
            limit = self._wait_for_turn(op, limit)
        try:
            if self._refusing:
                self._check_usable()
            self._sequence = op.sequence = self._sequence + 1
            self._counts[self.number] = op.sequence
            if self._compares:
                self._compare(op, limit)
            if async_op:
                if outputs is not None:
                    op.outputs = list(outputs)
                work = self._begin(op)
                work.limit = limit
                return work
            if limit is None:
                self._run(op)
                return None
            work = self._begin(op)
        finally:
            self._turn.release()
        self._wait_within(op, work, limit)
        return None

    def wait_for_all(self, name: str, works: Sequence[Work], limit: float) -> None:
        """Local. Wait for collectives that have begun, within one time limit.

        Args:
            name: What they are together, for messages.
            works: Theirs.
            limit: In seconds.

        Raises:
            DeadlineExceededError: It passed; the group refuses others until they have ended.
        """
        whole = gather_works(name, list(works))
        whole.block(time.monotonic() + limit)
        if not whole.is_completed():
            self._late, self._refusing = whole, True
            raise self._past_its_limit(name, limit)
        whole.wait()

    @property
    def timeout(self) -> float | None:
        """Local. Time limit of every operation, in seconds; None for none."""
        return self._timeout

    @contextmanager
    def collecting(self) -> Iterator[list[Op]]:
        """Local. Collect the collectives that this thread calls in the block; none begins."""
        thread = threading.get_ident()
        outer = self._collecting.get(thread)
        ops: list[Op] = []
        self._collecting[thread] = ops
        try:
            yield ops
        finally:
            del self._collecting[thread]
            if outer is not None:
                self._collecting[thread] = outer

    # Inside

    def _wait_for_turn(self, op: Op, limit: float | None) -> float | None:
        """Wait for another thread, which is in an operation; what is left of the limit."""
        if limit is None:
            self._turn.acquire()
            return None
        began = time.monotonic()
        if not self._turn.acquire(timeout=min(max(limit, 0.0), threading.TIMEOUT_MAX)):
            raise DeadlineExceededError(
                f"{op.name} of group {self.name!r} has not begun within {limit:g} s on rank "
                f"{self.ranks[self._rank]}: another thread's operation is under way"
            )
        return max(limit - (time.monotonic() - began), 0.0)

    def _compare(self, op: Op, limit: float | None) -> None:
        """Raise ValueError on all members if they do not call the same operation."""
        question = Question(op)
        try:
            if limit is None:
                self._run(question)
            else:
                self._wait_within(question, self._begin(question), limit)
        except BaseException:
            self._tear(op)  # others may go on to the operation itself
            raise
        question.check()

    def _at_once(self, op: Op, *, later: bool = False) -> None:
        """Carry out a collective of which the caller needs the result.

        Args:
            op: The collective.
            later: Whether others before it are a part of the same operation.
        """
        if self._is_collecting():
            raise ValueError(
                f"{op.name} of objects or of unequal parts needs its result at once: group "
                f"{self.name!r} cannot collect it for later"
            )
        try:
            self.submit(op, False)
        except ValueError:  # on all members alike
            raise
        except BaseException:
            if op.sequence or later:  # else nothing has begun
                self._tear(op)
            raise

    def _follow(self, op: Op) -> None:
        """Carry a message out that is a part of a collective."""
        try:
            self._carry_out(op)
        except BaseException:
            self._tear(op)
            raise

    def _tear(self, op: Op) -> None:
        # Others go on with further steps, which this rank will never begin.
        self._torn, self._refusing = op, True

    def _is_collecting(self) -> bool:
        return bool(self._collecting) and threading.get_ident() in self._collecting

    def _collect(self, op: Op, outputs: Sequence[Any] | None) -> bool:
        ops = self._collecting.get(threading.get_ident())
        if ops is None:
            return False
        if outputs is not None:
            op.outputs = list(outputs)
        ops.append(op)
        return True

    def _carry_out(self, op: Op) -> int:
        """Carry a message out; group rank of the other side."""
        fork.check_mpi()
        self._check_alive()
        limit = self._timeout if op.limit is None else op.limit
        if limit is None:
            return self._run(op)
        return self._wait_within(op, self._begin(op), limit)

    def _run(self, op: Op) -> int:
        key = id(op)
        self._current[key] = op
        try:
            self._executor.run(op)
        except self._mpi_error as error:
            self._check_alive()
            if op.halfway and op.sequence:
                self._tear(op)
            raise backend_error(op, error) from error
        except BaseException:  # what a signal's handler has raised, between two messages
            if op.halfway and op.sequence:
                self._tear(op)
            raise
        finally:
            self._current.pop(key, None)
        if op.finish is not None:
            op.finish()
        return op.root

    def _wait_within(self, op: Op, work: RequestWork, limit: float) -> int:
        try:
            work.wait(limit)
        except DeadlineExceededError:
            if op.sequence:
                self._late, self._refusing = work, True
            else:
                op.late = work
            raise self._past_its_limit(op.describe(), limit) from None
        sender = work.result()
        return op.root if sender is None else self._position[sender]

    def _past_its_limit(self, what: str, limit: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{what} has not completed within {limit:g} s on rank {self.ranks[self._rank]}; it "
            "stays pending, and its arrays must not be used"
        )

    def _begin(self, op: Op) -> RequestWork:
        fork.check_mpi()
        self._check_alive()  # Open MPI's nonblocking calls may crash where blocking ones fail
        try:
            work = RequestWork(op, self._executor.start(op), self._waits, self._begun)
        except self._mpi_error as error:
            raise backend_error(op, error) from error
        self._begun[id(work)] = work
        return work

    def _sweep(self) -> None:
        """Look after some of the works that nobody waits for; those under way in turn."""
        if self._late is not None:
            self._late.is_completed()
        for key, work in list(itertools.islice(self._begun.items(), _SWEPT)):
            if not work.is_completed():
                # Behind the others; it may end meanwhile, on another thread. It is never out of
                # here before: MPI uses its arrays.
                with suppress(KeyError):
                    self._begun.move_to_end(key)

    def _check_alive(self) -> None:
        if self._freed:
            raise ValueError(f"group {self.name!r} was destroyed and cannot be used any more")

    def _check_usable(self) -> None:
        self._check_alive()
        here = f"group {self.name!r} takes no collective on rank {self.ranks[self._rank]}: "
        if self._torn is not None:
            raise GroupBrokenError(
                f"{here}its {self._torn.name} was left halfway by its time limit, an error or an "
                "interrupt, and the others may have gone on; make a new group"
            )
        if self._late is not None and not self._late.is_completed():
            raise GroupBrokenError(
                f"{here}its {self._late.name} is past its time limit and still pending; wait until "
                "the missing ranks have joined it, or make a new group of those that answer"
            )
        self._late, self._refusing = None, False

    def _peer(
        self, name: str, rank: int | None, group_rank: int | None, default: int | None = None
    ) -> int:
        """Group rank of the other side, from either argument that names it."""
        if rank is not None and group_rank is not None:
            raise ValueError(f"give {name}, a world rank, or group_{name}, a group rank, not both")
        if rank is not None:
            position = self._position.get(rank, -1)
        elif group_rank is not None:
            position = group_rank if 0 <= group_rank < self._size else -1
        elif default is not None:
            return default
        else:
            raise ValueError(
                f"{name}, the rank of the other side, is missing: give {name} or group_{name}"
            )
        if position < 0:
            given = f"world rank {rank!r}" if rank is not None else f"group rank {group_rank!r}"
            raise ValueError(
                f"{name}: {given} is not in group {self.name!r}, whose ranks are {self.ranks}"
            )
        return position
