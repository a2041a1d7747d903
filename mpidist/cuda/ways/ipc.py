"""Memory on GPUs that the processes of one node let each other see, by CUDA IPC.

A handle is of a whole allocation, in which arrays lie anywhere: CuPy's pool cuts large ones up.
Memory of a pool that is freed and allocated again may have its old address, so allocations are told
apart by CUDA's own numbers for them. What a process has freed while others have it open stays
theirs, as it was, until they close it: owners tell others what has gone, and they close it then.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mpidist.cuda.library import cupy, on_device
from mpidist.errors import FailedPreconditionError

if TYPE_CHECKING:
    from mpidist.cuda.device_array import DeviceArray

HANDLE_BYTES = 64
_BUFFER_ID, _IS_MANAGED, _IS_IPC_CAPABLE = 7, 8, 10  # attributes of pointers, for the driver
_NO_HANDLE = (1, 205, 801)  # invalid value, cannot be mapped, not supported
MOST_OPEN = 256  # allocations, of all ranks together
_LOOKS = 16


Key = tuple[bytes, int]
"""Handle and number of an allocation: another one may have its handle, but never its number."""


@cache
def libcuda() -> Any:
    """Local. The driver's library; CuPy has no way to ask it these questions.

    Raises:
        OSError: It cannot be loaded.
    """
    library = ctypes.CDLL("libcuda.so.1")
    number = ctypes.POINTER(ctypes.c_uint64)
    library.cuMemGetAddressRange_v2.argtypes = [number, number, ctypes.c_uint64]
    library.cuPointerGetAttribute.argtypes = [number, ctypes.c_int, ctypes.c_uint64]
    return library


@dataclass(frozen=True)
class Place:
    """Where an array lies, for other processes.

    Attributes:
        handle: Of the allocation.
        number: Of the allocation, in its process.
        offset: Of the array's first element in it, in bytes.
    """

    handle: bytes
    number: int
    offset: int


class Exports:
    """Local. The allocations of this process that others have been told of.

    Args:
        number: Of the device they lie on.

    Raises:
        FailedPreconditionError: The driver's library cannot be loaded.
    """

    def __init__(self, number: int) -> None:
        try:
            libcuda()
        except OSError as error:
            raise FailedPreconditionError(
                f"memory of GPUs cannot be shared with other processes: {error}"
            ) from error
        self._number = number
        # By number: addresses, lengths, handles; those that were looked at longest ago come first.
        self._told: OrderedDict[int, tuple[int, int, bytes]] = OrderedDict()
        self._gone: list[int] = []

    def describe(self, array: DeviceArray) -> Place | str:
        """Local. Where an array lies; or why others cannot open the memory, in few words.

        Raises:
            DistBackendError: CUDA failed.
        """
        if array.number != self._number:
            return f"it lies on GPU {array.number}, not on {self._number}"
        if not array.is_contiguous:
            return "it is strided"
        with on_device(self._number, f"asking where {array} lies") as package:
            package.cuda.Event(disable_timing=True)  # gives this thread the context, for the driver
            return self._place(package, array.pointer, array.nbytes)

    def gone(self, most: int) -> tuple[list[int], bool]:
        """Local. Numbers of allocations that were described and are no more, each told once.

        Args:
            most: How many; there may be more then.

        Returns:
            They, and whether there are more.
        """
        self._look_for_gone(_LOOKS)
        told, self._gone = self._gone[:most], self._gone[most:]
        return told, bool(self._gone)

    def _place(self, package: Any, pointer: int, nbytes: int) -> Place | str:
        number = _asked(pointer, _BUFFER_ID)
        if number is None:
            return "CUDA does not know its memory"
        if number not in self._told:
            told = self._new(package, pointer)
            if isinstance(told, str):
                return told
            self._look_for_gone(len(self._told))  # it may lie where others have been
            self._told[number] = told
        base, length, handle = self._told[number]
        offset = pointer - base
        if offset + nbytes > length:
            return "it lies in several allocations"
        return Place(handle, number, offset)

    def _new(self, package: Any, pointer: int) -> tuple[int, int, bytes] | str:
        """Address, length and handle of an allocation; or why there is none."""
        if _asked(pointer, _IS_MANAGED):
            return "managed memory"
        if not _asked(pointer, _IS_IPC_CAPABLE):
            return "not of cudaMalloc (async, or virtual memory)"
        base, length = ctypes.c_uint64(), ctypes.c_uint64()
        place = ctypes.byref(base), ctypes.byref(length)
        if libcuda().cuMemGetAddressRange_v2(*place, pointer):
            return "CUDA does not know its allocation"
        runtime = package.cuda.runtime
        try:
            return base.value, length.value, bytes(runtime.ipcGetMemHandle(base.value))
        except runtime.CUDARuntimeError as error:
            if error.status not in _NO_HANDLE:
                raise
            return f"CUDA has no handle for it: {error}"

    def _look_for_gone(self, count: int) -> None:
        for number in list(itertools.islice(self._told, count)):
            if _asked(self._told[number][0], _BUFFER_ID) == number:
                self._told.move_to_end(number)
            else:
                del self._told[number]
                self._gone.append(number)


class Opened:
    """Allocations of other processes that are open in this one, each once, for all groups.

    CUDA opens an allocation that has the address of one before it only once that has been closed by
    all who have it open here.
    """

    def __init__(self) -> None:
        self._bases: dict[Key, list[int]] = {}  # addresses, and how many have it open
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._bases)

    def open(self, key: Key) -> int:
        """Local. Where an allocation lies here; raises CUDARuntimeError if it cannot be opened."""
        with self._lock:
            if key not in self._bases:
                runtime = cupy().cuda.runtime
                flags = runtime.cudaIpcMemLazyEnablePeerAccess
                self._bases[key] = [int(runtime.ipcOpenMemHandle(key[0], flags)), 0]
            self._bases[key][1] += 1
            return self._bases[key][0]

    def close(self, key: Key, *, is_gone: bool) -> None:
        """Local. Close an allocation if nobody else has it open, or its owner has freed it."""
        with self._lock:
            if key not in self._bases:
                return
            self._bases[key][1] -= 1
            if is_gone or not self._bases[key][1]:
                cupy().cuda.runtime.ipcCloseMemHandle(self._bases.pop(key)[0])


opened = Opened()
"""Of this process."""


class Imports:
    """Local. The allocations of all ranks that were used, and those of others as they are here.

    It is the same on all ranks, if they are told the same in the same order: so each knows what the
    others have open.

    Args:
        rank: Of this process; its own allocations are counted, but not opened.
        number: Of the device that works with them.
        most: How many are kept; those that were not used for longest are closed first.
        process: What this process has open.
    """

    def __init__(self, rank: int, number: int, most: int, process: Opened = opened) -> None:
        self._rank = rank
        self._number = number
        self._most = most
        self._process = process
        self._known: OrderedDict[tuple[int, int], tuple[Key, int]] = OrderedDict()

    def __len__(self) -> int:
        return sum(1 for rank, _ in self._known if rank != self._rank)

    def knows(self, rank: int, place: Place) -> bool:
        """Local. Whether an allocation was used before; it then counts as used last."""
        known = (rank, place.number) in self._known
        if known:
            self._known.move_to_end((rank, place.number))
        return known

    def open(self, rank: int, place: Place) -> None:
        """Local. Open an allocation of a rank.

        Raises:
            CUDARuntimeError: It cannot be opened.
        """
        key = place.handle, place.number
        self._known[rank, place.number] = key, 0 if rank == self._rank else self._process.open(key)

    def address(self, rank: int, place: Place) -> int:
        """Local. Where another rank's array lies in this process."""
        return self._known[rank, place.number][1] + place.offset

    def trim(self) -> None:
        """Local. Close what is too many; nothing may be at work with it."""
        while len(self._known) > self._most:
            self._close([next(iter(self._known))])

    def forget(self, rank: int, numbers: Iterable[int], *, are_gone: bool) -> None:
        """Local. Close allocations, where they are open; all groups do, if they are no more."""
        places = [(rank, number) for number in numbers if (rank, number) in self._known]
        self._close(places, are_gone=are_gone)

    def close(self) -> None:
        """Local. Close all."""
        self._close(list(self._known))

    def _close(self, places: list[tuple[int, int]], *, are_gone: bool = False) -> None:
        keys = [self._known.pop(place)[0] for place in places if place[0] != self._rank]
        for place in places:
            self._known.pop(place, None)
        failed: Exception | None = None
        for key in keys:
            try:
                self._process.close(key, is_gone=are_gone)
            except cupy().cuda.runtime.CUDARuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def _asked(pointer: int, attribute: int) -> int | None:
    """What the driver says of an address; None if it knows nothing of it."""
    answer = ctypes.c_uint64()  # longer than some answers; what they leave is 0
    if libcuda().cuPointerGetAttribute(ctypes.byref(answer), attribute, pointer):
        return None
    return answer.value
