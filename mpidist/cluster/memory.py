"""The memory of ps tasks, as far as this process can reach it."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from mpidist.arena import arena_bytes
from mpidist.cluster.members import Members
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.config import config as settings
from mpidist.dev_shm import REMEDY, SHARED_MEMORY, shared_memory_space
from mpidist.errors import DeadlineExceededError, ResourceExhaustedError
from mpidist.runtime import world
from mpidist.window import Bytes, Window

logger = logging.getLogger(__name__)

# Tags of the communicators of further segments; those of other groups have tag 0.
_FIRST_TAG = 1
_TAGS = 32000


class Memory:
    """The segments of the ps tasks, as far as this process reaches them.

    Each ps has a first one, which all tasks of its node map when they start, and further ones,
    which the ps and some workers make on demand: shared ones, for workers of its node, or
    one-sided ones, which workers of any node reach by MPI's Get and Put.

    Args:
        spec: The cluster.
        own: Index of this process's ps task, or None.

    Attributes:
        sync: Local. Orders loads and stores to all segments before the call against those after it.
            Pulls call it twice: with one window, it is that window's.
    """

    def __init__(self, spec: ClusterSpec, own: int | None) -> None:
        self._spec = spec
        self._own = own
        self._members: Members | None = None
        self._first: Window | None = None
        self._windows: dict[tuple[int, int], Window] = {}
        self._distinct: list[Window] = []
        self.sync: Callable[[], None] = self._sync_all
        self._parts: dict[tuple[int, int], Bytes] = {}
        self._changed = threading.Condition()
        self._warned = False

    def open_alone(self) -> None:
        """Local. Make the first segments of a cluster whose tasks all live in this process."""
        if self._own is not None:
            self._add(self._own, 0, Window.private(settings.arena_bytes), 0)

    def open_in_world(self, members: Members) -> None:
        """Collective over the tasks of the cluster. Make the first segments of this node.

        Where there is no shared memory, that of an own ps is private, and a warning says so.
        """
        from mpi4py import MPI

        self._members = members
        here = world()
        comm = here.comm.Create_group(here.comm.Get_group().Incl(members.ranks()))
        split = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        node = cast("MPI.Intracomm", split)
        comm.Free()  # there are some two thousand; each Server that is started takes them
        ranks = [int(r) for r in node.Get_group().Translate_ranks(None, here.comm.Get_group())]
        owners = {
            index: members.rank_of(("ps", index))
            for job, index in self._spec.tasks()
            if job == "ps" and members.rank_of(("ps", index)) in ranks
        }
        here.at_leave.append(self._free)
        nbytes = arena_bytes(settings.arena_bytes, max(len(owners), 1))
        try:
            window = Window.shared(node, nbytes if self._own is not None else 0)
        except ResourceExhaustedError as error:
            if self._own is not None:
                self._add(self._own, 0, Window.private(settings.arena_bytes), 0)
                self.warn_unshared(error.message)
            return
        finally:
            node.Free()  # the window has its own
        self._first = window
        for index, rank in owners.items():
            self._add(index, 0, window, ranks.index(rank))

    def part(self, index: int, segment: int = 0) -> Bytes | None:
        """Local. A segment of a ps task, or None if this process cannot reach its first one.

        Args:
            index: Of the ps task.
            segment: The first, or one that :meth:`grow` has made.

        Raises:
            DeadlineExceededError: Another thread was about to map it, and has not.
            ValueError: There is no such task.
        """
        self._spec.task_address("ps", index)
        if (index, 0) not in self._parts:
            return None
        key = (index, segment)
        self._wait_for(key, lambda: key in self._parts)
        return self._parts[key]

    def own(self, segment: int = 0) -> Bytes:
        """Local. A segment of this process's ps task; empty if there is no such task."""
        if self._own is None:
            return np.empty(0, np.uint8)
        return self._parts[self._own, segment]

    def window(self, index: int, segment: int) -> tuple[Window, int]:
        """Local. The window of a segment of a ps task, and the rank of the ps in it.

        Raises:
            DeadlineExceededError: Another thread was about to make it, and has not.
        """
        key = (index, segment)
        self._wait_for(key, lambda: key in self._windows)
        return self._windows[key], 0

    def mates(self, index: int, one_sided: bool = False) -> list[Task]:
        """Local. The tasks in other processes that share memory with a ps task.

        Args:
            index: Of the ps task.
            one_sided: Give those that could share a one-sided segment: all in other processes.
        """
        if self._members is None or (self._first is None and not one_sided):
            return []
        rank = self._members.rank_of(("ps", index))
        nodes, ranks = world().nodes, {t: self._members.rank_of(t) for t in self._spec.tasks()}
        mates = [
            t for t, r in ranks.items() if r != rank and (one_sided or nodes[r] == nodes[rank])
        ]
        return [task for task in mates if task not in self._members.guests]

    def growth_bytes(self, index: int, needed: int, wanted: int) -> int:
        """Local. How long a further segment of an own ps can be.

        Args:
            index: Of the ps task.
            needed: Bytes without which it is of no use.
            wanted: Bytes that it would better have.

        Returns:
            Its length in bytes; 0 if there cannot be one.
        """
        if not self.mates(index):
            return wanted  # private memory: pages come with the first write
        free, _ = shared_memory_space()
        limit = free - free // 4  # others of this node need some too
        return min(wanted, limit) // mmap.PAGESIZE * mmap.PAGESIZE if needed < limit else 0

    def grow(
        self,
        index: int,
        segment: int,
        nbytes: int,
        tasks: Iterable[Task],
        one_sided: bool = False,
    ) -> None:
        """Collective over the processes of a ps task and of some others. Make a further segment.

        One thread of each process calls it; several ps tasks may grow at once, on several threads.

        Args:
            index: Of the ps task.
            segment: Its number; each is made once.
            nbytes: Its length.
            tasks: The others, the same on all; of the same node, unless it is one-sided.
            one_sided: Whether the others reach it by MPI's Get and Put.

        Raises:
            ResourceExhaustedError: There is no room for it; raised on all.
        """
        others = list(tasks)
        if self._members is None or not others:
            self._add(index, segment, Window.private(nbytes), 0)
            return
        comm = world().comm
        owner = self._members.rank_of(("ps", index))
        ranks = list(dict.fromkeys([owner, *(self._members.rank_of(task) for task in others)]))
        # Threads of a process may be in the growth of several ps tasks at once.
        tag = _FIRST_TAG + (index * 257 + segment) % _TAGS
        group = comm.Create_group(comm.Get_group().Incl(ranks), tag)
        make = Window.rma if one_sided else Window.shared
        self._add(index, segment, make(group, nbytes if self._own == index else 0), 0)

    def warn_unshared(self, reason: str) -> None:
        """Local. Say, once, that variables of this process's ps task cannot be shared."""
        if self._warned:
            return
        self._warned = True
        free, total = shared_memory_space()
        host = world().host if self._members is not None else "this host"
        logger.warning(
            "ps %s on %s has no room in shared memory (%s has %d MiB free of %d): variables that "
            "do not fit are pulled and pushed by messages, which is slower; %s [%s]",
            self._own,
            host,
            SHARED_MEMORY,
            free >> 20,
            total >> 20,
            REMEDY,
            reason,
        )

    def _wait_for(self, key: tuple[int, int], is_there: Callable[[], bool]) -> None:
        limit_s = min(settings.call_timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            if self._changed.wait_for(is_there, limit_s):
                return
        raise DeadlineExceededError(
            f"segment {key[1]} of the memory of ps {key[0]} has not been made within {limit_s:g} s "
            "(MPIDIST_CALL_TIMEOUT_S sets the limit)"
        )

    def _sync_all(self) -> None:
        for window in self._distinct:
            window.sync()

    def _add(self, index: int, segment: int, window: Window, rank: int) -> None:
        with self._changed:
            # Other threads read them without the lock.
            self._windows = {**self._windows, (index, segment): window}
            self._distinct = list(dict.fromkeys(self._windows.values()))
            self.sync = self._distinct[0].sync if len(self._distinct) == 1 else self._sync_all
            if window.maps(rank):
                self._parts = {**self._parts, (index, segment): window.part(rank)}
            self._changed.notify_all()

    def _free(self) -> None:
        """Collective over the ranks, which all free the windows that they have in this order."""
        further = sorted(key for key in self._windows if key[1])
        for key in further:
            self._windows[key].free()
        if self._first is not None:
            self._first.free()
