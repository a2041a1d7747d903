"""One-sided memory: ranks read and write the memory of others without the help of the owner."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.copying import copy_array
from mpidist.buffers.host_view import host_view
from mpidist.buffers.packing import with_upload
from mpidist.dev_shm import SHARED_MEMORY, shared_memory_space
from mpidist.errors import FailedPreconditionError, ResourceExhaustedError
from mpidist.host_memory import free_memory
from mpidist.mpi import Backoff, fork, watched

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 32  # in flight at once; some MPI libraries fail with more than a few hundred
# Type characters of the dtypes that MPI accumulates.
_ADDED_BY_MPI = frozenset("iIlLqQfdgFDG")
# Dtypes that are added under the lock of a part. MPI has no 16-bit floats, the vector instructions
# of Open MPI saturate small integers, and accumulate takes predefined operations only.
_ADDED_UNDER_LOCK = ("int8", "uint8", "int16", "uint16", "float16", "bfloat16")
_MPI_BYTES = 1 << 16  # memory that MPI takes for itself, besides a page for each rank
# Without MAP_NORESERVE Linux refuses address space that is larger than its memory. Python names the
# flag from 3.13 on.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
# A lock word follows each rank's part. It guards additions of dtypes that MPI cannot accumulate.
_LOCK_BYTES = 64


class Window:
    """One-sided memory: each rank has a part, and all ranks read and write all parts.

    The window is locked for its whole life, so loads and stores need no other synchronization than
    :meth:`sync` (MPI 4.1, 12.7.4). When a call returns, its operation is complete, at the target
    too. Offsets are in bytes from the beginning of a rank's part.

    :meth:`get` and :meth:`put` are not atomic: a read during a write may return old and new bytes.
    :meth:`add` is atomic for each element, and :meth:`fetch_add` is atomic. Both need all
    concurrent operations on those bytes to be additions of one dtype.

    Create a window with :meth:`shared`, :meth:`rma` or :meth:`private`.

    Args:
        sizes: Size of each rank's part in bytes.
        own: Number of this rank.
        parts: The parts that this process has mapped, by rank; flat uint8.
        win: The MPI window, locked for its whole life, or None for private memory.

    Example:
        >>> import numpy as np
        >>> import mpidist as dist
        >>> window = dist.Window.private(16)  # bytes; shared() and rma() for several ranks
        >>> window.put(0, 0, np.array([1.5, 2.5]))
        >>> window.add(0, 8, np.array([10.0]))
        >>> values = np.empty(2)
        >>> window.get(0, 0, values)
        >>> values
        array([ 1.5, 12.5])
    """

    def __init__(
        self, sizes: list[int], own: int, parts: dict[int, Bytes], win: MPI.Win | None
    ) -> None:
        self._sizes, self._own, self._parts, self._win = sizes, own, parts, win
        self._freed = False
        self._adding = threading.Lock()

    @classmethod
    def shared(cls, comm: MPI.Intracomm, nbytes: int) -> Window:
        """Collective over ``comm``. Allocate shared memory, zeroed; each rank maps all parts.

        The memory is sparse: the first write to a page takes the page from /dev/shm. A process
        that writes while /dev/shm is full is killed. An Arena checks for room before it writes.

        Args:
            comm: Ranks of one node.
            nbytes: Size of this rank's part in bytes; may be 0.

        Raises:
            ResourceExhaustedError: /dev/shm has no room, or MPI cannot allocate the memory.
        """
        from mpi4py import MPI

        _check_size(nbytes)
        if comm.size == 1:  # MPICH's memory for a single rank is neither zero nor sparse
            return cls.private(nbytes)
        with watched("Window.shared", comm.Get_group()):
            sizes = comm.allgather(nbytes)
            win = _allocate_shared(comm, [_with_lock(size) for size in sizes])
            win.Lock_all(MPI.MODE_NOCHECK)
        parts = {
            rank: _as_array(win.Shared_query(rank)[0], size) for rank, size in enumerate(sizes)
        }
        return cls(sizes, comm.rank, parts, win)

    @classmethod
    def rma(cls, comm: MPI.Intracomm, nbytes: int) -> Window:
        """Collective over ``comm``. Allocate memory for MPI's one-sided operations, zeroed.

        Args:
            comm: Ranks of any nodes.
            nbytes: Size of this rank's part in bytes; may be 0.

        Raises:
            ResourceExhaustedError: MPI cannot allocate the memory.
        """
        from mpi4py import MPI

        _check_size(nbytes)
        with watched("Window.rma", comm.Get_group()):
            sizes = _sizes_with_room(comm, nbytes)
            # The order of additions does not matter, so MPI need not keep it.
            info = MPI.Info.Create({"same_disp_unit": "true", "accumulate_ordering": "none"})
            try:
                win = MPI.Win.Allocate(_with_lock(nbytes), 1, info=info, comm=comm)
            except MPI.Exception as error:
                raise ResourceExhaustedError(f"no window of {nbytes} bytes: {error}") from error
            info.Free()
            memory = _as_array(win.tomemory(), _with_lock(nbytes))
            memory[:] = 0
            win.Lock_all(MPI.MODE_NOCHECK)
            win.Sync()
            comm.Barrier()  # all lock words are zero before any rank uses the window
        return cls(sizes, comm.rank, {comm.rank: memory[:nbytes]}, win)

    @classmethod
    def private(cls, nbytes: int) -> Window:
        """Allocate memory of this process only, zeroed and sparse."""
        _check_size(nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        memory = mmap.mmap(-1, max(nbytes, 1), flags)
        return cls([nbytes], 0, {0: np.frombuffer(memory, np.uint8)[:nbytes]}, None)

    @property
    def local(self) -> Bytes:
        """This rank's part, flat uint8."""
        return self.part(self._own)

    def part(self, rank: int) -> Bytes:
        """Return the part of a rank of the window's communicator, flat uint8.

        Raises:
            FailedPreconditionError: The window was freed, or this process has not mapped the part.
            ValueError: The rank does not exist.
        """
        self._check_rank(rank)
        if rank not in self._parts:
            raise FailedPreconditionError(
                f"the memory of rank {rank} of an rma window is not mapped by rank {self._own}: "
                "use get and put"
            )
        return self._parts[rank]

    def maps(self, rank: int) -> bool:
        """Return whether this process has mapped the part of a rank; see :meth:`part`."""
        return rank in self._parts

    def sync(self) -> None:
        """Act as a memory fence for the loads and stores of this rank."""
        if self._win is not None:
            self._win.Sync()
        elif self._freed:
            self._check_rank(self._own)

    def get(self, rank: int, offset: int, out: Array) -> None:
        """Read from a rank's part.

        Args:
            rank: Rank in the window's communicator.
            offset: Offset of the first byte.
            out: Output array, C-contiguous, of any dtype and shape.

        Raises:
            FailedPreconditionError: The window was freed.
            TypeError: ``out`` is not an array of numbers.
            ValueError: The rank does not exist, the bytes exceed its part, or ``out`` is read-only
                or not C-contiguous.
        """
        view = _contiguous(out, write=True)
        target = view.reshape(-1).view(np.uint8)
        self._check(rank, offset, target.nbytes)
        if rank in self._parts:
            self.sync()
            copy_array(target, self._parts[rank][offset : offset + target.nbytes])
        else:
            assert self._win is not None
            _in_chunks(self._win, self._win.Get, rank, offset, target)
        finish = with_upload(view)
        if finish is not None:
            finish()

    def put(self, rank: int, offset: int, data: Array) -> None:
        """Write to a rank's part.

        Args:
            rank: See :meth:`get`.
            offset: See :meth:`get`.
            data: C-contiguous array of any dtype and shape.

        Raises:
            FailedPreconditionError: See :meth:`get`.
            TypeError: See :meth:`get`.
            ValueError: See :meth:`get`.
        """
        source = _contiguous(data).reshape(-1).view(np.uint8)
        self._check(rank, offset, source.nbytes)
        if rank in self._parts:
            copy_array(self._parts[rank][offset : offset + source.nbytes], source)
            self.sync()
        else:
            assert self._win is not None
            _in_chunks(self._win, self._win.Put, rank, offset, source)

    def add(self, rank: int, offset: int, data: Array) -> None:
        """Add to numbers in a rank's part, element by element; each addition is atomic.

        Integers wrap around, as in NumPy.

        Args:
            rank: See :meth:`get`.
            offset: See :meth:`get`; a multiple of the size of an element.
            data: C-contiguous array of integers, floats or complex numbers.

        Raises:
            FailedPreconditionError: See :meth:`get`.
            TypeError: See :meth:`get`; also if the dtype is not numeric, or in another byte order.
            ValueError: See :meth:`get`; also if the offset is not aligned.
        """
        source = _contiguous(data).reshape(-1)
        dtype = source.dtype
        under_lock = dtype.name in _ADDED_UNDER_LOCK
        if not dtype.isnative or not (under_lock or dtype.char in _ADDED_BY_MPI):
            raise TypeError(
                f"numbers of dtype {dtype} cannot be added in a window: use integers, floats or "
                "complex numbers in this machine's byte order"
            )
        self._check(rank, offset, source.nbytes, dtype.itemsize)
        if self._win is None:
            with self._adding:
                part = self._parts[rank][offset : offset + source.nbytes].view(dtype)
                part += source
        elif under_lock:
            with self._locked(rank):
                numbers = np.empty_like(source)
                self.get(rank, offset, numbers)
                self.put(rank, offset, numbers + source)
        else:
            _in_chunks(self._win, self._win.Accumulate, rank, offset, source)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        """Add to an int64 in a rank's part, atomically.

        Args:
            rank: See :meth:`get`.
            offset: See :meth:`get`; a multiple of 8.
            value: The number to add.

        Returns:
            The number before the addition.

        Raises:
            FailedPreconditionError: See :meth:`get`.
            OverflowError: The value exceeds 64 bits.
            TypeError: The value is not an integer.
            ValueError: See :meth:`get`; also if the offset is not aligned.
        """
        number, before = np.array([index(value)], np.int64), np.empty(1, np.int64)
        self._check(rank, offset, 8, 8)
        if self._win is None:
            with self._adding:
                counter = self._parts[rank][offset : offset + 8].view(np.int64)
                before[0] = counter[0]
                counter += number
        else:
            fork.check()
            self._win.Fetch_and_op(number, before, rank, offset)
            self._win.Flush(rank)
        return int(before[0])

    def free(self) -> None:
        """Collective. Free the memory. Views of it must not be used afterwards."""
        self._parts = {}
        self._freed = True
        if self._win is not None:
            win, self._win = self._win, None
            with watched("Window.free", win.Get_group()):
                win.Unlock_all()
                win.Free()

    def _check_rank(self, rank: int) -> None:
        if self._freed:
            raise FailedPreconditionError(
                f"the window of rank {self._own} of {len(self._sizes)} was freed: use it before "
                "free()"
            )
        if not 0 <= rank < len(self._sizes):
            raise ValueError(f"a window of {len(self._sizes)} rank(s) has no rank {rank}")

    def _check(self, rank: int, offset: int, nbytes: int, unit: int = 1) -> None:
        self._check_rank(rank)
        if offset < 0 or offset + nbytes > self._sizes[rank]:
            raise ValueError(
                f"{nbytes} bytes at offset {offset} exceed the part of rank {rank}, which has "
                f"{self._sizes[rank]} bytes"
            )
        if offset % unit:
            raise ValueError(f"offset {offset} is not a multiple of {unit}, the size of an element")

    @contextlib.contextmanager
    def _locked(self, rank: int) -> Iterator[None]:
        """Hold the lock of a rank's part, for additions of dtypes that MPI cannot accumulate."""
        backoff = Backoff()
        while self._exchange_lock(rank, 0, 1) != 0:
            backoff.pause()
        try:
            yield
        finally:
            self._exchange_lock(rank, 1, 0)

    def _exchange_lock(self, rank: int, expected: int, value: int) -> int:
        """Set the lock word if it has the expected value, and return its former value."""
        assert self._win is not None
        offset = _with_lock(self._sizes[rank]) - _LOCK_BYTES
        new, old, before = (np.array([number], np.int64) for number in (value, expected, 0))
        self._win.Compare_and_swap(new, old, before, rank, offset)
        self._win.Flush(rank)
        return int(before[0])


class DynamicWindow:
    """One-sided reads of memory that its owner attaches at any time, without the other ranks.

    The window is locked for its whole life, as :class:`Window` is.

    Args:
        comm: Ranks of any nodes. Making the window is collective over them.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        with watched("DynamicWindow", comm.Get_group()):
            win = MPI.Win.Create_dynamic(comm=comm)
            win.Lock_all(MPI.MODE_NOCHECK)
        self._win: MPI.Win | None = win
        self._attached: list[Bytes] = []  # stays allocated as long as it is attached

    def attach(self, memory: Bytes) -> int:
        """Attach memory of this rank, for the life of the window. Return its address."""
        from mpi4py import MPI

        self._open().Attach(memory)
        self._attached.append(memory)
        return int(MPI.Get_address(memory))

    def get(self, rank: int, address: int, out: Array) -> None:
        """Read attached memory of a rank; complete when the call returns.

        Args:
            rank: Rank in the window's communicator.
            address: Address in the memory of that rank.
            out: Output array, C-contiguous, of any dtype and shape.

        Raises:
            FailedPreconditionError: The window was freed.
            ValueError: ``out`` is read-only or not C-contiguous.
        """
        target = _contiguous(out, write=True).reshape(-1).view(np.uint8)
        win = self._open()
        _in_chunks(win, win.Get, rank, address, target)

    def sync(self) -> None:
        """Act as a memory fence for the loads and stores of this rank."""
        if self._win is not None:
            self._win.Sync()

    def free(self) -> None:
        """Collective. Free the window; the attached memory stays with its owners."""
        win, self._win = self._open(), None
        with watched("DynamicWindow.free", win.Get_group()):
            win.Unlock_all()
            win.Free()
        self._attached.clear()

    def _open(self) -> MPI.Win:
        if self._win is None:
            raise FailedPreconditionError("the dynamic window of this rank was freed")
        return self._win


def _in_chunks(
    win: MPI.Win, move: Callable[..., None], rank: int, offset: int, flat: Array
) -> None:
    """Transfer an array in chunks, with a limited number in flight."""
    fork.check()
    step = CHUNK_BYTES // flat.itemsize
    for number, start in enumerate(range(0, flat.size, step), 1):
        move(flat[start : start + step], rank, offset + start * flat.itemsize)
        if number % _MOST_CHUNKS == 0:
            win.Flush(rank)
    win.Flush(rank)


def _contiguous(array: Array, *, write: bool = False) -> Array:
    view = host_view(array, read=not write)
    if not view.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {view.shape} and strides {view.strides} is not C-contiguous: pass "
            "numpy.ascontiguousarray(array), and copy back what is read"
        )
    if view.dtype.hasobject:
        raise TypeError(f"dtype {view.dtype} holds Python objects; a window holds numbers only")
    if write and not view.flags.writeable:
        raise ValueError("the array receives a result but is read-only; pass a writable one")
    return view


def _allocate_shared(comm: MPI.Intracomm, parts_bytes: list[int]) -> MPI.Win:
    """Allocate the MPI window, or raise the same error on all ranks."""
    from mpi4py import MPI

    needed = sum(parts_bytes) + _MPI_BYTES + comm.size * mmap.PAGESIZE
    free, total = comm.bcast(shared_memory_space())
    win, problem = None, None
    if free < needed:  # Open MPI would fail on one rank while the others wait for ever
        problem = f"{SHARED_MEMORY} has {free >> 10} KiB free of {total >> 10}"
    else:
        try:
            win = MPI.Win.Allocate_shared(parts_bytes[comm.rank], 1, comm=comm)
        except MPI.Exception as error:
            problem = str(error)
    problems = [text for text in comm.allgather(problem) if text is not None]
    if problems:  # windows that other ranks have got leak, because freeing takes all ranks
        raise ResourceExhaustedError(
            f"no {needed} bytes of shared memory for {comm.size} rank(s) of a node: {problems[0]}"
        )
    assert win is not None
    return win


def _sizes_with_room(comm: MPI.Intracomm, nbytes: int) -> list[int]:
    """Return the size of every rank's part, if each host has enough memory.

    Open MPI would fail on the rank without memory while the others wait for ever.
    """
    sizes = comm.allgather((nbytes, free_memory()))
    for rank, (wanted, (left, owner)) in enumerate(sizes):
        if wanted > left:
            raise ResourceExhaustedError(
                f"no window of {wanted} bytes for rank {rank}: its {owner} has {left >> 20} MiB "
                "of memory left"
            )
    return [wanted for wanted, _ in sizes]


def _check_size(nbytes: int) -> None:
    if index(nbytes) < 0:
        raise ValueError(f"a window cannot have {nbytes} bytes")


def _with_lock(nbytes: int) -> int:
    """Return the size of a part with its lock word. An empty part has no lock word."""
    return (-(-nbytes // _LOCK_BYTES) + 1) * _LOCK_BYTES if nbytes else 0


def _as_array(buffer: Any, nbytes: int) -> Bytes:
    return np.frombuffer(buffer, np.uint8)[:nbytes] if nbytes else np.empty(0, np.uint8)
