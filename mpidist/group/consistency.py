"""Checks that all members of a group call the same collectives. MPI does not check this.

Every collective leaves a signature in a log. A comparison is an all-reduce with MIN of two
integers: the checksum of the log with the rank, and the complement of the checksum with the rank.
The first result contains the lowest checksum, the second the highest. If they differ, these two
ranks send their logs to all members, and every member raises an error that shows both calls.
"""

from __future__ import annotations

import marshal
import pickle
import time
import zlib
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from mpidist.buffers.host_view import Array
from mpidist.buffers.reduce_op import ReduceOp
from mpidist.group.gpu_operation import GpuOp
from mpidist.group.operation import RESERVED_TAGS, Op, Signature, in_words
from mpidist.mpi import Backoff
from mpidist.recorder import script_frame

if TYPE_CHECKING:
    from mpi4py import MPI

COMPARED_AT_FIRST = 100
"""The number of collectives of a group, from the first, that are each compared.

Blocking ones are compared before they run. Asynchronous ones may start before the comparison ends.
"""
ASYNC_WAIT_S = 0.01
"""Seconds that an asynchronous start waits for its comparison, in the first collectives.

If the ranks are in step, the comparison ends in this time, and a mismatched call that could abort
MPI is not started. A longer wait could block a program whose other ranks need messages of this rank
first.
"""
PERIOD = 256
"""Later, one collective in this number is compared, with all since the last comparison."""
_TAG = RESERVED_TAGS[970]
_RANK_BITS = 20
_CHECKSUM_MASK = 0xFFFFFFFF
# Seconds to wait for the logs of the two ranks that differ. A rank sends its log when it tests its
# comparison, so a rank that computes, or is blocked in MPI, sends late.
_LOGS_S = 3.0
# Some dtypes have two type characters: int64 has l and q on Linux. Signatures must have one.
_SAME_KIND = {
    one: other
    for one, other in (("q", "l"), ("Q", "L"), ("i", "l"), ("I", "L"), ("g", "d"), ("G", "D"))
    if np.dtype(one).itemsize == np.dtype(other).itemsize
}


def signature_of(op: Op, nonblocking: bool) -> Signature:
    """Return the signature of a collective that is not in ``SHAPED`` or ``SIZED``, or has parts.

    Ragged operations get the size -1, because their sizes differ between members.
    """
    if isinstance(op, GpuOp):
        assert op.signature is not None
        return op.signature
    array: Array | None = None
    kind = ""
    if op.name == "reduce_scatter":
        array = op.recv
        kind = "" if array is None else array.dtype.char
    elif op.name == "scatter":
        array = op.recv_parts.get(op.root) if op.recv is None else op.recv
    elif op.name == "gather":
        array = op.send_parts.get(op.root)
    elif op.name == "all_gather" and op.recv_counts is None:
        array = op.send_parts.get(op.group.rank)
    size = -1 if array is None else array.size if kind else array.nbytes
    return op.name, +op.reduce if kind else 0, op.root, size, kind, nonblocking


def checksum_of(log: list[Signature]) -> tuple[list[Signature], int]:
    """Return a log with one type character for each dtype, and its checksum."""
    if not _SAME_KIND.keys().isdisjoint(map(itemgetter(4), log)):
        log = [
            (*one[:4], _SAME_KIND[one[4]], one[5]) if one[4] in _SAME_KIND else one for one in log
        ]
    return log, zlib.crc32(marshal.dumps(log, 2))  # later versions depend on shared references


class Comparison(Op):
    """An all-reduce that detects different collectives.

    Args:
        op: The collective that is about to run.
        log: The signatures since the last comparison; that of ``op`` is the last.
        comm: The communicator of the group.
    """

    def __init__(self, op: Op, log: list[Signature], comm: MPI.Intracomm) -> None:
        log, checksum = checksum_of(log)
        rank = op.group.rank
        self._keys = np.array(
            [
                checksum << _RANK_BITS | rank,
                (checksum ^ _CHECKSUM_MASK) << _RANK_BITS | rank,
            ],
            np.int64,
        )
        super().__init__(
            "all_reduce", op.group, None, self._keys, ReduceOp.MIN, finish=self._raise_if_different
        )
        self.sequence, self.signature, self.slot = op.sequence, op.signature, op.slot
        self._description = op.describe()  # the Op itself would keep its arrays
        self._comm = comm
        self._log = log
        frame = script_frame(1)
        self._line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"

    def describe(self) -> str:
        """Return the collective that is compared, since other ranks must call it, too."""
        return self._description

    def _raise_if_different(self) -> None:
        lowest, highest = self._keys.tolist()
        if lowest >> _RANK_BITS == (highest >> _RANK_BITS) ^ _CHECKSUM_MASK:
            self._log = []  # this Op lives until the garbage collector runs
            return
        mask = (1 << _RANK_BITS) - 1
        raise self._difference(lowest & mask, highest & mask)

    def _difference(self, one: int, other: int) -> ValueError:
        """Exchange the logs, and return the error to raise.

        Args:
            one: Group rank of a member with the lowest checksum.
            other: Group rank of a member with the highest checksum.
        """
        first, second = min(one, other), max(one, other)
        group, logs = self.group, self._exchange_logs(first, second)
        own = self._log, self._line
        (log, line), (log_too, line_too) = (logs.get(rank, ([], "")) for rank in (first, second))
        here = f"group {group.name!r}"
        if not log or not log_too:
            return ValueError(
                f"the members of {here} call different collectives; rank {group.ranks[group.rank]} "
                f"calls {in_words(own[0][-1], group)}{own[1]} as number {self.sequence}; the calls "
                f"of the other ranks did not arrive within {_LOGS_S:g} s"
            )
        equal = 0
        while equal < min(len(log), len(log_too)) and log[equal] == log_too[equal]:
            equal += 1
        if equal == min(len(log), len(log_too)):  # equal values of different types
            equal -= 1
        number = self.sequence - len(log) + 1 + equal
        calls = (
            f"rank {group.ranks[rank]} calls {in_words(entries[equal], group)}"
            f"{place if equal == len(entries) - 1 else ''}"
            for rank, entries, place in ((first, log, line), (second, log_too, line_too))
        )
        text = f"the members of {here} call different collectives as collective number {number}: "
        text += "; ".join(calls)
        if number < self.sequence:
            text += (
                f". The difference was found at number {self.sequence}{self._line}; results since "
                f"number {number} are wrong. Set MPIDIST_DEBUG=detail to get the error at the call"
            )
        return ValueError(text)

    def _exchange_logs(self, first: int, second: int) -> dict[int, tuple[list[Signature], str]]:
        """Send the log of this rank to all members if it is one of the two. Receive both logs.

        Returns:
            Log and line of the script, by group rank. Logs that came too late are missing.
        """
        comm, group, rank = self._comm, self.group, self.group.rank
        own = (self.sequence, self._log, self._line)
        logs = {}
        if rank in (first, second):
            logs[rank] = own[1:]
            data = np.frombuffer(pickle.dumps(own), np.uint8)
            peers = [peer for peer in range(group.size) if peer != rank]
            _sent.extend((comm.Isend(data, peer, _TAG), data) for peer in peers)
            _sent[:] = [entry for entry in _sent if not entry[0].Test()]
        wanted = {(group.number, self.sequence, peer) for peer in {first, second} - {rank}}
        backoff, deadline = Backoff(), time.monotonic() + _LOGS_S
        while not wanted <= _arrived.keys() and time.monotonic() < deadline:
            _receive_logs(comm, group.number)
            backoff.pause()
        for key in wanted & _arrived.keys():
            logs[key[2]] = _arrived.pop(key)
        return logs


# Logs that MPI is still sending.
_sent: list[tuple[MPI.Request, Array]] = []
# Log and line of the script, by number of the group, number of the collective and group rank.
_arrived: dict[tuple[int, int, int], tuple[list[Signature], str]] = {}


def _receive_logs(comm: MPI.Intracomm, group: int) -> None:
    """Receive the logs that have arrived."""
    from mpi4py import MPI

    status = MPI.Status()
    while (message := comm.Improbe(tag=_TAG, status=status)) is not None:
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        message.Recv([data, MPI.BYTE])
        sequence, log, line = pickle.loads(data.data)
        _arrived[group, sequence, status.source] = log, line
