"""CUDA IPC: ranks of one node that read each other's arrays where they lie.

The host waits: for what the arrays' streams have to do before ranks tell each other where the
arrays lie, and for its own work before they meet. Events that processes share would spare that, but
a kernel that never ends would hang ranks that nobody hears of; and the ranks meet on the host
anyway.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.cuda.library import cupy, on_device
from mpidist.cuda.streams import used
from mpidist.cuda.ways.ipc import HANDLE_BYTES, MOST_OPEN, Exports, Imports, Place
from mpidist.cuda.ways.own_stream import OwnStream
from mpidist.cuda.ways.reductions import MOST, can_reduce, combine, numbers, numbers_at, stored_as
from mpidist.cuda.ways.way import NotDirectError, Way
from mpidist.errors import DistBackendError, FailedPreconditionError

if TYPE_CHECKING:
    from mpidist.cuda.device_array import DeviceArray

_GONE = 8  # numbers in a record; more wait for the next
_RECORD = struct.Struct(f"<??2xIQQ{HANDLE_BYTES}s{_GONE}Q")
_MOMENTARY = (2, 208)  # short of memory; another allocation is open here, at its address there
_ALIGNED = 64  # elements: where parts of an array begin


class Ipc(Way):
    """Local. The ranks of a group on one node, which may share devices.

    The arrays of one rank all lie on the same device.

    Args:
        size: How many ranks there are.
        rank: Of this process.
        device: The number of this rank's.
        exchange: Gives every rank the records of all, in order of rank; they are equally long.
        meet: Returns when all ranks have called it, whether all have given True.

    Raises:
        FailedPreconditionError: There is no CuPy, or no library of the driver.
        DistBackendError: There is no such device.
    """

    name = "ipc"

    def __init__(
        self,
        size: int,
        rank: int,
        device: int,
        exchange: Callable[[bytes], list[bytes]],
        meet: Callable[[bool], bool],
    ) -> None:
        self._size, self._rank, self._device = size, rank, device
        self._where = f"CUDA IPC, rank {rank} of {size}, GPU {device}"
        self._exchange, self._meet = exchange, meet
        self._exports = Exports(device)
        self._imports = Imports(rank, device, max(MOST_OPEN, size))
        self._own = OwnStream(device)
        self._broken: BaseException | None = None
        self._is_meeting = False
        self._closed = False

    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """Local. See :class:`Way`."""
        return self._size <= MOST and can_reduce(dtype, op)

    def opened(self) -> int:
        """Local. How many allocations of other ranks are open here."""
        return len(self._imports)

    def all_reduce(self, array: DeviceArray, op: str) -> None:
        """Collective. See :class:`Way`; each rank reduces a part, and fetches the others."""
        if not array.nbytes:
            return
        with self._operation("all_reduce", array, op, range(self._size)) as addresses:
            width = stored_as(array.dtype).itemsize
            items = -(-array.nbytes // (width * self._size))
            length = -(-items // _ALIGNED) * _ALIGNED * width
            starts = [min(rank * length, array.nbytes) for rank in range(self._size + 1)]
            start, end = starts[self._rank : self._rank + 2]
            if end > start:
                parts = self._numbers(addresses, start, end - start, array.dtype)
                combine(parts, parts[self._rank], array.dtype, op)
            self._end_part(f"all_reduce of {array}")
            for rank in self._others():
                start, end = starts[rank : rank + 2]
                self._copy(array.pointer + start, addresses[rank] + start, end - start)

    def reduce(self, array: DeviceArray, op: str, root: int) -> None:
        """Collective. See :class:`Way`; the root does all of it."""
        if not array.nbytes:
            return
        with self._operation(f"reduce to {root}", array, op, range(self._size)) as addresses:
            if self._rank == root:
                parts = self._numbers(addresses, 0, array.nbytes, array.dtype)
                combine(parts, parts[root], array.dtype, op)

    def broadcast(self, array: DeviceArray, root: int) -> None:
        """Collective. See :class:`Way`."""
        if not array.nbytes:
            return
        with self._operation(f"broadcast of {root}", array, "", [root]) as addresses:
            if self._rank != root:
                self._copy(array.pointer, addresses[root], array.nbytes)

    def all_gather(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. See :class:`Way`."""
        self._check_parts("all_gather", recv, send, self._size)
        if not send.nbytes:
            return
        with self._operation("all_gather", send, "", range(self._size), recv) as addresses:
            for rank in (self._rank, *self._others()):
                self._copy(recv.pointer + rank * send.nbytes, addresses[rank], send.nbytes)

    def reduce_scatter(self, send: DeviceArray, recv: DeviceArray, op: str) -> None:
        """Collective. See :class:`Way`."""
        self._check_parts("reduce_scatter", send, recv, self._size)
        if not send.nbytes:
            return
        with self._operation("reduce_scatter", send, op, range(self._size), recv) as addresses:
            start = self._rank * recv.nbytes
            parts = self._numbers(addresses, start, recv.nbytes, recv.dtype)
            combine(parts, numbers(recv), recv.dtype, op)

    def all_to_all(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. See :class:`Way`."""
        self._check_parts("all_to_all", send, recv, 1)
        if not send.nbytes:
            return
        part = send.nbytes // self._size
        with self._operation("all_to_all", send, "", range(self._size), recv) as addresses:
            for rank in (self._rank, *self._others()):
                source = addresses[rank] + self._rank * part
                self._copy(recv.pointer + rank * part, source, part)

    def close(self) -> None:
        """Collective. Close the others' memory; they may free theirs once all have.

        Raises:
            DistBackendError: CUDA failed.
        """
        if self._closed:
            return
        self._closed = True
        with on_device(self._device, "closing memory of other ranks"):
            self._imports.close()
        if self._broken is None:
            self._meet(True)

    def abandon(self) -> None:
        """Local. See :class:`Way`."""
        self._closed = True
        with on_device(self._device, "closing memory of other ranks"):
            self._imports.close()

    @contextmanager
    def _operation(
        self, name: str, array: DeviceArray, op: str, read: Iterable[int], *more: DeviceArray
    ) -> Iterator[dict[int, int]]:
        """Begin and end one: the addresses, by rank, of arrays that may be read in the block."""
        if self._closed or self._broken is not None:
            raise FailedPreconditionError(
                f"{self._where}: {name} of {array} after it was closed or has failed: "
                f"{self._broken!r}"
            ) from self._broken
        if op and not self.reduces(array.dtype, op):
            raise TypeError(f"{self._where}: {name} of {array} cannot be made by {op}")
        doing = f"{name} of {array} (rank {self._rank} of {self._size})"
        try:
            with on_device(self._device, doing):
                here = [one for one in (array, *more) if one.number == self._device]
                self._own.catch_up(here, doing)
                addresses = self._addresses(f"{name} {op}", array, read, *more)
                with self._failures_told(), used(self._own.stream):
                    yield addresses
                    self._end_part(f"{name} of {array}")
        except NotDirectError:
            raise
        except BaseException as error:  # the others wait where this rank will not come
            self._broken = error
            raise

    def _end_part(self, doing: str) -> None:
        """Wait for one's own work, and for that of the others."""
        self._own.finish(f"{doing} (rank {self._rank} of {self._size})")
        self._is_meeting = True
        all_well = self._meet(True)
        if not all_well:
            raise DistBackendError(f"{self._where}: another rank has failed half-way in {doing}")
        self._is_meeting = False

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Have the others learn of a failure when they meet, where they wait for this rank."""
        self._is_meeting = False
        try:
            yield
        except BaseException:
            if not self._is_meeting:
                self._meet(False)
            raise

    def _addresses(
        self, name: str, array: DeviceArray, read: Iterable[int], *more: DeviceArray
    ) -> dict[int, int]:
        """Where arrays of ranks lie in this process; raises on all ranks, or on none."""
        call = zlib.crc32(f"{name} {array.dtype} {array.nbytes}".encode())
        records = self._exchange(self._record(call, array, *more))
        places: list[Place | str] = []
        for rank, record in enumerate(records):
            direct, _, theirs, number, offset, handle, *_ = _RECORD.unpack(record)
            if theirs != call:
                raise DistBackendError(
                    f"{self._where}: ranks must make the same calls; rank {rank} makes another "
                    f"than {name} of {array}"
                )
            places.append(
                Place(handle, number, offset) if direct else handle.rstrip(b"\0").decode()
            )
        self._forget_gone(records)
        for rank, place in enumerate(places):
            if isinstance(place, str):
                raise NotDirectError(f"{name}: the memory of rank {rank} has no handle: {place}")
        wanted = {rank: one for rank in read if isinstance(one := places[rank], Place)}
        fresh = {r: place for r, place in wanted.items() if not self._imports.knows(r, place)}
        if fresh:
            self._open(name, fresh)
        self._imports.trim()
        return {
            rank: array.pointer if rank == self._rank else self._imports.address(rank, place)
            for rank, place in wanted.items()
        }

    def _record(self, call: int, array: DeviceArray, *more: DeviceArray) -> bytes:
        place = self._exports.describe(array)
        for other in more:
            if other.number != self._device or not other.is_contiguous:
                place = f"{other} is strided, or on another GPU"
        if isinstance(place, Place):
            return self._packed(True, call, place.number, place.offset, place.handle)
        return self._packed(False, call, 0, 0, place.encode("ascii", "replace")[:HANDLE_BYTES])

    def _packed(self, direct: bool, call: int, number: int, offset: int, handle: bytes) -> bytes:
        gone, more = self._exports.gone(_GONE)
        gone += [0] * (_GONE - len(gone))
        return _RECORD.pack(direct, more, call, number, offset, handle, *gone)

    def _forget_gone(self, records: list[bytes]) -> None:
        """Close what is no more, before what lies there now is opened."""
        more = False
        for rank, record in enumerate(records):
            _, has_more, _, _, _, _, *gone = _RECORD.unpack(record)
            self._imports.forget(rank, filter(None, gone), are_gone=True)
            more = more or has_more
        if more:
            self._forget_gone(self._exchange(self._packed(False, 0, 0, 0, b"")))

    def _open(self, name: str, fresh: dict[int, Place]) -> None:
        """Open memory that was not used before; all ranks know whether all could."""
        problem, lasting = "", False
        runtime = cupy().cuda.runtime
        try:
            for rank, place in fresh.items():
                self._imports.open(rank, place)
        except runtime.CUDARuntimeError as error:
            problem = f"GPU {self._device} cannot open the memory of rank {rank}: {error}"
            lasting = error.status not in _MOMENTARY
        told = bytes([lasting]) + problem.encode("ascii", "replace")[: _RECORD.size - 1]
        answers = self._exchange(told.ljust(_RECORD.size, b"\0"))
        problems = [one[1:].rstrip(b"\0").decode() for one in answers]
        if any(problems):
            for rank, place in fresh.items():
                self._imports.forget(rank, [place.number], are_gone=False)
            first = next(rank for rank, one in enumerate(problems) if one)
            lasting = any(one[0] for one in answers)
            raise NotDirectError(f"{name}: rank {first}: {problems[first]}", lasting=lasting)

    def _others(self) -> list[int]:
        """The other ranks; each begins with another."""
        return [(self._rank + distance) % self._size for distance in range(1, self._size)]

    def _numbers(
        self, addresses: dict[int, int], start: int, nbytes: int, dtype: np.dtype[Any]
    ) -> list[Any]:
        """The same stretch of the arrays of all ranks, for kernels."""
        device = self._device
        return [numbers_at(one + start, nbytes, dtype, device) for one in addresses.values()]

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self._own.copy(target, source, nbytes)

    def _check_parts(self, name: str, whole: DeviceArray, part: DeviceArray, times: int) -> None:
        if whole.nbytes != times * part.nbytes or whole.nbytes % self._size:
            raise ValueError(
                f"{self._where}: {name} with {whole} and {part}, which are not "
                f"{self._size} equal parts"
            )
