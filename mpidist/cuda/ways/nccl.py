"""NCCL through CuPy: ranks that have a device each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.cuda.library import cupy, on_device
from mpidist.cuda.streams import mark
from mpidist.cuda.ways.nccl_library import connected, nccl_errors, unique_id, usable, why_not
from mpidist.cuda.ways.own_stream import OwnStream
from mpidist.cuda.ways.reductions import can_reduce, divided, is_half, numbers, widened
from mpidist.cuda.ways.tail import Tail
from mpidist.cuda.ways.way import Way
from mpidist.errors import DistBackendError, FailedPreconditionError

__all__ = ["Nccl", "unique_id", "why_not"]

if TYPE_CHECKING:
    from mpidist.cuda.device_array import DeviceArray

_TYPES = {
    "i1": "NCCL_INT8",
    "u1": "NCCL_UINT8",
    "i4": "NCCL_INT32",
    "u4": "NCCL_UINT32",
    "i8": "NCCL_INT64",
    "u8": "NCCL_UINT64",
    "f4": "NCCL_FLOAT32",
    "f8": "NCCL_FLOAT64",
}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_PATIENCE_S = 0.1
_LOGICAL = {"SUM": "MAX", "PRODUCT": "MIN"}


class Nccl(Way):
    """Collective. The ranks of a group, each with a device of its own, by NCCL.

    Operations are queued on a stream of its own, and the host does not wait. What does not end is
    told after ``MPIDIST_STALL_S``; after ``MPIDIST_STALL_ABORT_S`` it is given up, which ends the
    job.

    Args:
        size: How many ranks there are.
        rank: Of this process.
        unique: What :func:`unique_id` gave to one of them.
        device: The number of this rank's.

    Raises:
        FailedPreconditionError: See :func:`why_not`.
        DeadlineExceededError: Not all ranks came before ``MPIDIST_STALL_ABORT_S``.
        DistBackendError: NCCL or CUDA failed; ranks that share a device, for instance.
    """

    name = "nccl"

    def __init__(self, size: int, rank: int, unique: bytes, device: int) -> None:
        self._nccl = usable()
        self._size, self._rank, self._device = size, rank, device
        self._where = f"NCCL, rank {rank} of {size}, GPU {device}"
        self._own = OwnStream(device)
        self._comm = connected(size, unique, rank, device, self._where)
        self._tail = Tail(self._where, device, self._look, self._abort)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._over = False  # the communicator must not be touched any more
        self._closed = False

    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """Local. See :class:`Way`; not integers of 16 bits."""
        return can_reduce(dtype, op) and (dtype.kind not in "iu" or dtype.itemsize != 2)

    def pending(self) -> str | None:
        """Local. The first operation that has not ended on the device, in words, or None."""
        return self._tail.pending()

    def all_reduce(self, array: DeviceArray, op: str) -> None:
        """Collective. See :class:`Way`."""
        if not array.nbytes:
            return
        self._check_op("all_reduce", array, op)
        with self._operation("all_reduce", array):
            values, count, kind = self._reducible(array)
            pointer, number = values.data.ptr, self._op(array.dtype, op)
            self._comm.allReduce(pointer, pointer, count, kind, number, self._own.stream.ptr)
            self._store(values, array, op)

    def reduce(self, array: DeviceArray, op: str, root: int) -> None:
        """Collective. See :class:`Way`."""
        if not array.nbytes:
            return
        self._check_op("reduce", array, op)
        with self._operation("reduce", array):
            values, count, kind = self._reducible(array)
            pointer, number = values.data.ptr, self._op(array.dtype, op)
            stream = self._own.stream.ptr
            self._comm.reduce(pointer, pointer, count, kind, number, root, stream)
            if self._rank == root:
                self._store(values, array, op)

    def broadcast(self, array: DeviceArray, root: int) -> None:
        """Collective. See :class:`Way`."""
        if not array.nbytes:
            return
        with self._operation("broadcast", array):
            pointer, nbytes = array.pointer, array.nbytes
            byte, stream = self._nccl.NCCL_UINT8, self._own.stream.ptr
            self._comm.broadcast(pointer, pointer, nbytes, byte, root, stream)

    def all_gather(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. See :class:`Way`."""
        self._check_parts("all_gather", recv, send, self._size)
        if not send.nbytes:
            return
        with self._operation("all_gather", send, recv):
            byte, stream = self._nccl.NCCL_UINT8, self._own.stream.ptr
            self._comm.allGather(send.pointer, recv.pointer, send.nbytes, byte, stream)

    def reduce_scatter(self, send: DeviceArray, recv: DeviceArray, op: str) -> None:
        """Collective. See :class:`Way`."""
        self._check_parts("reduce_scatter", send, recv, self._size)
        if not recv.nbytes:
            return
        self._check_op("reduce_scatter", send, op)
        with self._operation("reduce_scatter", send, recv):
            values, _, kind = self._reducible(send)
            into = numbers(recv)
            if is_half(recv.dtype):
                into = cupy().empty(into.shape, values.dtype)
            pointer, number = into.data.ptr, self._op(recv.dtype, op)
            stream = self._own.stream.ptr
            self._comm.reduceScatter(values.data.ptr, pointer, into.size, kind, number, stream)
            self._store(into, recv, op)

    def all_to_all(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. See :class:`Way`."""
        self._check_parts("all_to_all", send, recv, 1)
        if not recv.nbytes:
            return
        part = send.nbytes // self._size
        with self._operation("all_to_all", send, recv):
            own = self._rank * part
            self._own.copy(recv.pointer + own, send.pointer + own, part)
            if self._size > 1:
                self._exchange(send.pointer, recv.pointer, part)

    def close(self) -> None:
        """Collective. Wait for what is under way, and give the communicator up.

        Raises:
            DistBackendError: An operation has failed, or was given up.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._tail.finish()
        except DistBackendError:
            self._abort()
            raise
        else:
            with self._tail.calling("closing"), on_device(self._device, "closing NCCL"):
                with self._looking:
                    self._over = True
                self._comm.destroy()
        finally:
            self._tail.stop()

    def abandon(self) -> None:
        """Local. See :class:`Way`."""
        self._closed = True
        self._abort()
        self._tail.stop()

    @contextmanager
    def _operation(self, name: str, *arrays: DeviceArray) -> Iterator[None]:
        for array in arrays:
            self._check(name, array)
        doing = f"{name} of {arrays[0]} (rank {self._rank} of {self._size})"
        with self._lock, on_device(self._device, doing), self._tail.calling(doing):
            try:
                self._comm.check_async_error()
                with self._own.behind(arrays):
                    yield
                event = mark(self._own.stream)
            except BaseException as error:  # ranks that go on would wait for what never comes
                failed = self._tail.fail(f"{doing} has failed: {error!r}")
                if isinstance(error, nccl_errors(self._nccl)):
                    raise failed from error
                raise
            self._tail.append(doing, event)

    def _check(self, name: str, array: DeviceArray) -> None:
        if self._closed:
            raise FailedPreconditionError(f"{self._where}: {name} after it was closed")
        if array.number != self._device or not array.is_contiguous:
            raise ValueError(
                f"{self._where}: {name} of {array}; arrays must lie on that GPU, and be contiguous"
            )

    def _check_parts(self, name: str, whole: DeviceArray, part: DeviceArray, times: int) -> None:
        if whole.nbytes != times * part.nbytes or whole.nbytes % self._size:
            raise ValueError(
                f"{self._where}: {name} with {whole} and {part}, which are not "
                f"{self._size} equal parts"
            )

    def _check_op(self, name: str, array: DeviceArray, op: str) -> None:
        if not self.reduces(array.dtype, op):
            raise TypeError(f"{self._where}: {name} of {array} cannot be made by {op}")

    def _reducible(self, array: DeviceArray) -> tuple[Any, int, int]:
        """What NCCL reduces instead of an array, on its own stream: values, number, and type."""
        values = numbers(array)
        if is_half(array.dtype):
            values = widened(values, array.dtype)
        dtype: np.dtype[Any] = values.dtype
        kind = getattr(self._nccl, _TYPES[f"{dtype.kind}{dtype.itemsize}"])
        return values, int(values.size), int(kind)

    def _op(self, dtype: np.dtype[Any], op: str) -> int:
        if dtype.char == "?":
            op = _LOGICAL.get(op, op)
        return int(getattr(self._nccl, f"NCCL_{_OPS[op]}"))

    def _store(self, values: Any, array: DeviceArray, op: str) -> None:
        """What is left to do behind NCCL: divide, as the host does, and back to halves."""
        count = self._size if op == "AVG" else 1
        if is_half(array.dtype):
            divided(values, numbers(array), array.dtype, count)
        elif count > 1:
            divided(values, values, array.dtype, count)

    def _exchange(self, source: int, target: int, part: int) -> None:
        byte, stream = self._nccl.NCCL_UINT8, self._own.stream.ptr
        self._nccl.groupStart()
        try:
            for peer in range(self._size):
                if peer != self._rank:
                    place = peer * part
                    self._comm.send(source + place, part, byte, peer, stream)
                    self._comm.recv(target + place, part, byte, peer, stream)
        finally:
            self._nccl.groupEnd()

    def _look(self) -> None:
        with self._looking:
            if not self._over:
                self._comm.check_async_error()

    def _abort(self) -> None:
        # A call that is under way has the lock, and may need this to end; others must not begin.
        mine = self._lock.acquire(timeout=_PATIENCE_S)
        try:
            with self._looking:
                over, self._over = self._over, True
            if not over:
                self._comm.abort()
        finally:
            if mine:
                self._lock.release()
