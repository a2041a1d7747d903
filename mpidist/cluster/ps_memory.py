"""The shared and one-sided memory of ps tasks."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from mpidist.arena import arena_bytes
from mpidist.cluster.membership import Membership
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.config import config as settings
from mpidist.dev_shm import REMEDY, SHARED_MEMORY, shared_memory_space
from mpidist.errors import DeadlineExceededError, ResourceExhaustedError
from mpidist.mpi import world
from mpidist.window import Bytes, Window

logger = logging.getLogger(__name__)

# Tags of the communicators of further segments. Process groups use tag 0.
_FIRST_TAG = 1
_TAGS = 32000


class PsMemory:
    """The memory segments of the ps tasks that this process can access.

    Each ps task has a first segment, which all tasks of its node map at the start. A ps task and
    some workers can create further segments: shared segments for workers of its node, or one-sided
    segments, which workers of any node access by MPI's Get and Put.

    Creation is collective over the tasks, if they are ranks of a world. Without room in shared
    memory, the first segment of this process's ps task is private, and the process logs a warning.

    Args:
        spec: The cluster.
        own: Index of the ps task of this process, or None.
        membership: The tasks of the cluster; None if all live in this process.

    Attributes:
        sync: Memory fence for loads and stores to all segments. Each pull calls it twice. With one
            window it is the method of that window, which saves a call.
    """

    def __init__(self, spec: ClusterSpec, own: int | None, membership: Membership | None) -> None:
        self._spec = spec
        self._own = own
        self._membership = membership
        self._first: Window | None = None
        self._windows: dict[tuple[int, int], Window] = {}
        self._distinct: list[Window] = []
        self.sync: Callable[[], None] = self._sync_all
        self._parts: dict[tuple[int, int], Bytes] = {}
        self._changed = threading.Condition()
        self._warned = False
        if membership is not None:
            self._share(membership)
        elif own is not None:
            self._add(own, 0, Window.private(settings.arena_bytes), 0)

    def _share(self, membership: Membership) -> None:
        """Create the first segments of this node."""
        from mpi4py import MPI

        here = world()
        comm = here.comm.Create_group(here.comm.Get_group().Incl(membership.ranks()))
        split = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        node = cast("MPI.Intracomm", split)
        # MPI has about two thousand communicators, and each start of a Server takes one.
        comm.Free()
        ranks = [int(r) for r in node.Get_group().Translate_ranks(None, here.comm.Get_group())]
        owners = {
            index: membership.rank_of(("ps", index))
            for job, index in self._spec.tasks()
            if job == "ps" and membership.rank_of(("ps", index)) in ranks
        }
        here.shutdown.at_leave.append(self._free)
        nbytes = arena_bytes(settings.arena_bytes, max(len(owners), 1))
        try:
            window = Window.shared(node, nbytes if self._own is not None else 0)
        except ResourceExhaustedError as error:
            if self._own is not None:
                self._add(self._own, 0, Window.private(settings.arena_bytes), 0)
                self.warn_unshared(error.message)
            return
        finally:
            node.Free()  # the window has a duplicate
        self._first = window
        for index, rank in owners.items():
            self._add(index, 0, window, ranks.index(rank))

    def part(self, index: int, segment: int = 0) -> Bytes | None:
        """Return a segment of a ps task, or None if this process cannot map its first segment.

        Args:
            index: Index of the ps task.
            segment: 0, or the number of a segment that :meth:`grow` creates.

        Raises:
            DeadlineExceededError: Another thread has not created the segment in time.
            ValueError: The task does not exist.
        """
        self._spec.task_address("ps", index)
        if (index, 0) not in self._parts:
            return None
        key = (index, segment)
        self._wait_for(key, lambda: key in self._parts)
        return self._parts[key]

    def own(self, segment: int = 0) -> Bytes:
        """Return a segment of this process's ps task, or an empty array without such a task."""
        if self._own is None:
            return np.empty(0, np.uint8)
        return self._parts[self._own, segment]

    def window(self, index: int, segment: int) -> tuple[Window, int]:
        """Return the window of a further segment, and the rank of the ps task in the window.

        Raises:
            DeadlineExceededError: Another thread has not created the segment in time.
        """
        key = (index, segment)
        self._wait_for(key, lambda: key in self._windows)
        return self._windows[key], 0

    def mates(self, index: int, one_sided: bool = False) -> list[Task]:
        """Return the tasks in other processes that can share memory with a ps task.

        Args:
            index: Index of the ps task.
            one_sided: Whether the memory is one-sided, so that tasks on all nodes can share it.
        """
        if self._membership is None or (self._first is None and not one_sided):
            return []
        rank = self._membership.rank_of(("ps", index))
        nodes, ranks = world().nodes, {t: self._membership.rank_of(t) for t in self._spec.tasks()}
        mates = [
            t for t, r in ranks.items() if r != rank and (one_sided or nodes[r] == nodes[rank])
        ]
        return [task for task in mates if task not in self._membership.placement.colocated]

    def growth_bytes(self, index: int, needed: int, wanted: int) -> int:
        """Return the possible size of a further segment of this process's ps task.

        Args:
            index: Index of the ps task.
            needed: Smallest useful size in bytes.
            wanted: Preferred size in bytes.

        Returns:
            The size in bytes, or 0 if there is no room for a segment.
        """
        if not self.mates(index):
            return wanted  # private memory: the first write to a page allocates it
        free, _ = shared_memory_space()
        limit = free - free // 4  # leave room for the other processes of this node
        return min(wanted, limit) // mmap.PAGESIZE * mmap.PAGESIZE if needed < limit else 0

    def grow(
        self,
        index: int,
        segment: int,
        nbytes: int,
        tasks: Iterable[Task],
        one_sided: bool = False,
    ) -> None:
        """Collective over a ps task and some other tasks. Create a further segment.

        One thread of each process makes the call. Several ps tasks may grow at once, each on a
        thread of its own.

        Args:
            index: Index of the ps task.
            segment: Number of the segment. Each number is used once.
            nbytes: Size in bytes.
            tasks: The other tasks, in the same order everywhere. A shared segment needs tasks of
                the same node.
            one_sided: Whether the other tasks access the segment by MPI's Get and Put.

        Raises:
            ResourceExhaustedError: There is no room for the segment. Raised on all tasks.
        """
        others = list(tasks)
        if self._membership is None or not others:
            self._add(index, segment, Window.private(nbytes), 0)
            return
        comm = world().comm
        owner = self._membership.rank_of(("ps", index))
        ranks = list(dict.fromkeys([owner, *(self._membership.rank_of(task) for task in others)]))
        # Several threads of a process may grow several ps tasks at once, so tags differ.
        tag = _FIRST_TAG + (index * 257 + segment) % _TAGS
        group = comm.Create_group(comm.Get_group().Incl(ranks), tag)
        make = Window.rma if one_sided else Window.shared
        self._add(index, segment, make(group, nbytes if self._own == index else 0), 0)

    def warn_unshared(self, reason: str) -> None:
        """Log once that variables of this process's ps task cannot be in shared memory."""
        if self._warned:
            return
        self._warned = True
        free, total = shared_memory_space()
        host = world().host if self._membership is not None else "this host"
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

    def _wait_for(self, key: tuple[int, int], exists: Callable[[], bool]) -> None:
        limit_s = min(settings.call_timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            if self._changed.wait_for(exists, limit_s):
                return
        raise DeadlineExceededError(
            f"segment {key[1]} of the memory of ps {key[0]} has not been created within "
            f"{limit_s:g} s (MPIDIST_CALL_TIMEOUT_S sets the limit)"
        )

    def _sync_all(self) -> None:
        for window in self._distinct:
            window.sync()

    def _add(self, index: int, segment: int, window: Window, rank: int) -> None:
        with self._changed:
            # Other threads read the dicts without the lock, so they are replaced, not changed.
            self._windows = {**self._windows, (index, segment): window}
            self._distinct = list(dict.fromkeys(self._windows.values()))
            self.sync = self._distinct[0].sync if len(self._distinct) == 1 else self._sync_all
            if window.maps(rank):
                self._parts = {**self._parts, (index, segment): window.part(rank)}
            self._changed.notify_all()

    def _free(self) -> None:
        """Collective over the ranks of each window. All ranks free windows in the same order."""
        further = sorted(key for key in self._windows if key[1])
        for key in further:
            self._windows[key].free()
        if self._first is not None:
            self._first.free()
