"""The memory of ps tasks, which other tasks read without their help."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from mpidist.memfd import SharedMemfd, open_memfd
from mpidist.mpi import world
from mpidist.proto.mpidist_pb2 import Memory
from mpidist.window import Array, Bytes, DynamicWindow, Window

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """Memory that a ps task has allocated.

    Attributes:
        memory: Flat uint8, zeroed and sparse: the first write to a page allocates it.
        reference: The argument of :meth:`PsMemory.map`; empty if no other process can map it.
    """

    memory: Bytes
    reference: bytes


class PsMemory:
    """Memory segments of ps tasks.

    A ps task allocates a segment when it needs one. Tasks on its node map the segment. Tasks on
    any node read it by MPI's Get, after the ps task has attached it to a dynamic window, which all
    tasks make at the start. Nothing else is collective.

    Args:
        ranks: World ranks of all tasks, in one order everywhere. Empty if all tasks live in this
            process. Collective over these ranks.
        owners: World rank of each ps task, by index.

    Attributes:
        sync: Memory fence for loads and stores to all segments. The tasks of one process need none,
            because they take turns by the lock of the interpreter.
    """

    def __init__(self, ranks: Sequence[int] = (), owners: Mapping[int, int] | None = None) -> None:
        self._owners = owners or {}
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._own: list[SharedMemfd] = []
        self._mapped: dict[bytes, Bytes | None] = {}
        self._numbers = count()
        self._window: DynamicWindow | None = None
        self.sync: Callable[[], None] = _no_fence
        if ranks:
            here = world()
            comm = here.comm.Create_group(here.comm.Get_group().Incl(list(ranks)))
            self._window = DynamicWindow(comm)
            # MPI has about two thousand communicators, and each start of a Server takes one.
            comm.Free()
            here.shutdown.at_leave.append(self._window.free)
            self.sync = self._window.sync

    def is_near(self, index: int) -> bool:
        """Return whether a ps task is on the node of this process."""
        if self._window is None:
            return True
        here = world()
        return here.nodes[here.rank] == here.nodes[self._owners[index]]

    def allocate(self, nbytes: int) -> Segment:
        """Allocate a segment of this process.

        Without shared memory the segment is private, and a warning is logged.

        Raises:
            OSError: The process cannot have so much address space.
        """
        if self._window is None:
            memory = Window.private(nbytes).local
            reference = b"%d" % next(self._numbers)
        else:
            try:
                shared = SharedMemfd(nbytes)
            except OSError as error:
                memory = Window.private(nbytes).local
                logger.warning(
                    "rank %d cannot share memory, so pulls from it take messages, which is slower: "
                    "%s",
                    world().rank,
                    error,
                )
                return Segment(memory, b"")
            self._own.append(shared)
            memory, reference = shared.memory[:nbytes], shared.reference.SerializeToString()
        self._mapped[reference] = memory
        return Segment(memory, reference)

    def map(self, index: int, reference: bytes) -> Bytes | None:
        """Return a segment of a ps task, or None if this process cannot map it.

        Args:
            index: Index of the ps task.
            reference: The reference of the segment.
        """
        if not reference or not self.is_near(index):
            return None
        if reference not in self._mapped:
            try:
                self._mapped[reference] = open_memfd(Memory.FromString(reference))
            except OSError as error:
                logger.warning(
                    "pulls from ps %d take messages, which is slower: rank %d cannot map its "
                    "memory: %s",
                    index,
                    world().rank,
                    error,
                )
                self._mapped[reference] = None
        return self._mapped[reference]

    def attach(self, segment: Segment) -> int:
        """Let other tasks read a segment of this process by MPI's Get. Return its address."""
        return 0 if self._window is None else self._window.attach(segment.memory)

    def get(self, index: int, address: int, out: Array) -> None:
        """Read memory of a ps task by MPI's Get; see :meth:`mpidist.window.DynamicWindow.get`."""
        assert self._window is not None
        self._window.get(self._places[self._owners[index]], address, out)

    def discard(self) -> None:
        """Give back the pages of all segments, also of those with views. Nothing may use them.

        Only for tasks that all live in this process, whose segments are private.
        """
        assert self._window is None
        for memory in self._mapped.values():
            assert memory is not None
            begin = ctypes.c_void_p(memory.ctypes.data)
            ctypes.CDLL(None).madvise(begin, ctypes.c_size_t(memory.nbytes), mmap.MADV_DONTNEED)
        self._mapped.clear()


def _no_fence() -> None:
    pass
