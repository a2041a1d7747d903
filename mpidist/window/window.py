"""One-sided memory: allocated once, read and written by others without the owner's help."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.copying import copy_array
from mpidist.buffers.host_view import host_view
from mpidist.buffers.packing import with_upload
from mpidist.errors import FailedPreconditionError
from mpidist.runtime import Backoff, fork, together
from mpidist.window import memory
from mpidist.window.memory import Bytes, Memory

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]

CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 32  # under way at once; some MPI libraries fail with more than some hundred
# Type characters of the numbers that MPI adds by itself.
_ADDED_BY_MPI = frozenset("iIlLqQfdgFDG")
# Numbers that are added under the lock of a part: MPI does not know halves, and the vector
# instructions of Open MPI saturate small integers. MPI allows no operations of ours here.
_ADDED_UNDER_LOCK = ("int8", "uint8", "int16", "uint16", "float16", "bfloat16")


class Window:
    """Memory of several ranks that each of them reads and writes.

    The window is locked for its whole life, so that nothing but :meth:`sync` is needed between
    loads and stores (MPI 4.1, 12.7.4). When a call returns, its operation is complete, at the
    target too. Offsets are in bytes from the beginning of a rank's part.

    :meth:`get` and :meth:`put` are not atomic: what one rank writes while another reads it may
    arrive in parts. :meth:`add` is atomic for each element, and :meth:`fetch_add` as a whole, as
    long as those bytes are used with one dtype and with nothing else at the same time.

    Make one by :meth:`shared`, :meth:`rma` or :meth:`private`.

    Args:
        parts: The memory.
    """

    def __init__(self, parts: Memory) -> None:
        self._sizes, self._own, self._parts, self._win = parts
        self._freed = False
        self._adding = threading.Lock()

    @classmethod
    def shared(cls, comm: MPI.Intracomm, nbytes: int) -> Window:
        """Collective over ``comm``. Map the memory of all its ranks; it is zero.

        The memory is sparse: a page is taken from /dev/shm when it is first written, and a process
        that writes when there is none left is killed. An Arena over it asks first.

        Args:
            comm: Ranks of one node.
            nbytes: Size of this rank's part; may be 0.

        Returns:
            The window.

        Raises:
            ResourceExhaustedError: /dev/shm has no room for it, or MPI cannot allocate it.
        """
        return cls(memory.shared(comm, nbytes))

    @classmethod
    def rma(cls, comm: MPI.Intracomm, nbytes: int) -> Window:
        """Collective over ``comm``. Memory that others reach by MPI's one-sided operations; zero.

        Args:
            comm: Any ranks.
            nbytes: Size of this rank's part; may be 0.

        Returns:
            The window.

        Raises:
            ResourceExhaustedError: MPI cannot allocate it.
        """
        return cls(memory.rma(comm, nbytes))

    @classmethod
    def private(cls, nbytes: int) -> Window:
        """Local. Memory that only threads of this process share; just as sparse."""
        return cls(memory.private(nbytes))

    @property
    def local(self) -> Bytes:
        """This rank's part, flat uint8."""
        return self.part(self._own)

    def part(self, rank: int) -> Bytes:
        """Local. The part of a rank of the window's communicator, flat uint8.

        Raises:
            FailedPreconditionError: The window was freed, or the part is not mapped here.
            ValueError: There is no such rank.
        """
        self._check_rank(rank)
        if rank not in self._parts:
            raise FailedPreconditionError(
                f"the memory of rank {rank} of an rma window is not mapped by rank {self._own}: "
                "use get and put"
            )
        return self._parts[rank]

    def maps(self, rank: int) -> bool:
        """Local. Whether the part of a rank is mapped here; see :meth:`part`."""
        return rank in self._parts

    def sync(self) -> None:
        """Local. Order this rank's loads and stores before the call against those after it."""
        if self._win is not None:
            self._win.Sync()
        elif self._freed:
            self._check_rank(self._own)

    def get(self, rank: int, offset: int, out: Array) -> None:
        """Local. Read from a rank's part.

        Args:
            rank: Of the window's communicator.
            offset: Where to begin, in bytes.
            out: C-contiguous array, any dtype and shape; receives its bytes.

        Raises:
            FailedPreconditionError: The window was freed.
            TypeError: ``out`` is not an array, or not one that can be moved.
            ValueError: There is no such rank, the bytes do not lie in its part, or ``out`` is
                read-only or not C-contiguous.
        """
        view = _contiguous(out, write=True)
        target = view.reshape(-1).view(np.uint8)
        self._check(rank, offset, target.nbytes)
        if rank in self._parts:
            self.sync()
            copy_array(target, self._parts[rank][offset : offset + target.nbytes])
        else:
            assert self._win is not None
            self._in_chunks(self._win.Get, rank, offset, target)
        finish = with_upload(view)
        if finish is not None:
            finish()

    def put(self, rank: int, offset: int, data: Array) -> None:
        """Local. Write to a rank's part.

        Args:
            rank: See :meth:`get`.
            offset: See :meth:`get`.
            data: C-contiguous array, any dtype and shape.

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
            self._in_chunks(self._win.Put, rank, offset, source)

    def add(self, rank: int, offset: int, data: Array) -> None:
        """Add to numbers in a rank's part, element by element; each addition is atomic.

        Integers wrap around, as NumPy's do.

        Args:
            rank: See :meth:`get`.
            offset: See :meth:`get`; a multiple of the size of an element.
            data: C-contiguous array, of integers, floats or complex numbers.

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
                _add_to(self._parts[rank][offset : offset + source.nbytes], source)
        elif under_lock:
            with self._locked(rank):
                numbers = np.empty_like(source)
                self.get(rank, offset, numbers)
                self.put(rank, offset, numbers + source)
        else:
            self._in_chunks(self._win.Accumulate, rank, offset, source)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        """Local. Add to an int64 in a rank's part, atomically.

        Args:
            rank: See :meth:`get`.
            offset: See :meth:`get`; a multiple of 8.
            value: What to add.

        Returns:
            What the number was before.

        Raises:
            FailedPreconditionError: See :meth:`get`.
            OverflowError: The value does not fit.
            TypeError: It is no integer.
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
        """Collective. Give the memory back; no view of it may be used afterwards."""
        self._parts = {}
        self._freed = True
        if self._win is not None:
            win, self._win = self._win, None
            with together("Window.free", win.Get_group()):
                win.Unlock_all()
                win.Free()

    def _check_rank(self, rank: int) -> None:
        if self._freed:
            raise FailedPreconditionError(
                f"the window of rank {self._own} of {len(self._sizes)} was freed: use it before"
            )
        if not 0 <= rank < len(self._sizes):
            raise ValueError(f"a window of {len(self._sizes)} rank(s) has no rank {rank}")

    def _check(self, rank: int, offset: int, nbytes: int, unit: int = 1) -> None:
        self._check_rank(rank)
        if offset < 0 or offset + nbytes > self._sizes[rank]:
            raise ValueError(
                f"{nbytes} bytes at offset {offset} do not lie in the part of rank {rank}, which "
                f"has {self._sizes[rank]} bytes"
            )
        if offset % unit:
            raise ValueError(f"offset {offset} is not a multiple of {unit}, the size of an element")

    def _in_chunks(self, move: Callable[..., None], rank: int, offset: int, flat: Array) -> None:
        """Move an array piece by piece, of which a limited number are under way at once."""
        fork.check()
        assert self._win is not None
        step = CHUNK_BYTES // flat.itemsize
        for number, start in enumerate(range(0, flat.size, step), 1):
            piece = flat[start : start + step]
            move(piece, rank, offset + start * flat.itemsize)
            if number % _MOST_CHUNKS == 0:
                self._win.Flush(rank)
        self._win.Flush(rank)

    @contextlib.contextmanager
    def _locked(self, rank: int) -> Iterator[None]:
        """Hold the lock of a rank's part, for additions that MPI does not do by itself."""
        backoff = Backoff()
        while self._exchange_lock(rank, 0, 1) != 0:
            backoff.pause()
        try:
            yield
        finally:
            self._exchange_lock(rank, 1, 0)

    def _exchange_lock(self, rank: int, expected: int, value: int) -> int:
        """Set the lock word if it is as expected; gives what it was."""
        assert self._win is not None
        place = memory.lock_place(self._sizes[rank])
        new, old, before = (np.array([number], np.int64) for number in (value, expected, 0))
        self._win.Compare_and_swap(new, old, before, rank, place)
        self._win.Flush(rank)
        return int(before[0])


def _contiguous(array: Array, *, write: bool = False) -> Array:
    view = host_view(array, read=not write)
    if not view.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {view.shape} and strides {view.strides} is not C-contiguous: pass "
            "numpy.ascontiguousarray(array), and copy back what is read"
        )
    if view.dtype.hasobject:
        raise TypeError(f"dtype {view.dtype} holds Python objects; only numbers can be moved")
    if write and not view.flags.writeable:
        raise ValueError("the array receives a result but is read-only; pass a writable one")
    return view


def _add_to(part: Bytes, source: Array) -> None:
    numbers = part.view(source.dtype)
    numbers += source
