"""The module ``cupy.cuda.nccl`` of the stand-in for CuPy.

Queued operations progress on their own, as on a real device: a thread runs the stream up to the
operation. The ranks connect over a socket to the process that created their id. That process sends
the inputs of all ranks to each rank, and each rank computes its own result.
"""

import ctypes
import os
import socket
import sys
import threading
import time
from multiprocessing import connection

import numpy as np

available = True
async_error = []  # status of an asynchronous error of all communicators of this process
_TYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
_NAMES = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64"]
for _number, _name in enumerate(_NAMES):
    globals()[f"NCCL_{_name}"] = _number
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
_FUNCTIONS = [np.add, np.multiply, np.fmax, np.fmin]
_ID_BYTES = 128
_INVALID_USAGE, _REMOTE = 5, 6
_local = threading.local()


class NcclError(RuntimeError):
    """An error of NCCL with its status. As in CuPy, a status of 7 or more raises KeyError."""

    def __init__(self, status):
        if status > _REMOTE:
            raise KeyError(status)
        super().__init__(f"NCCL_ERROR_{status}")
        self.status = status


def get_unique_id():
    """Start the server that connects the ranks of a communicator. Return its address as an id."""
    listener = connection.Listener(f"\0stand-in-nccl-{os.getpid()}-{time.monotonic_ns()}")
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    name = listener.address
    name = name.encode() if isinstance(name, str) else name
    return name.ljust(_ID_BYTES, b"\xff")


def _serve(listener):
    lines = {}
    size = 1
    try:
        while len(lines) < size:
            line = listener.accept()
            size, rank, device = line.recv()
            lines[rank] = line, device
        devices = [device for _, device in lines.values()]
        problem = _INVALID_USAGE if len(set(devices)) < size else 0
        listener.close()
        ordered = [lines[rank][0] for rank in range(size)]
        for line in ordered:
            line.send(problem)
        while not problem:
            everything = [line.recv() for line in ordered]
            for line in ordered:
                line.send(everything)
    except (EOFError, OSError):
        for line, _ in lines.values():
            line.close()


def groupStart():
    """Start to collect calls."""
    _local.calls = []


def groupEnd():
    """Run the collected calls together."""
    calls, _local.calls = _local.calls, None
    if calls:
        comm, stream = calls[0][:2]
        comm._queue(stream, ("group", len(calls)), lambda: comm._swap([one[2:] for one in calls]))


class NcclCommunicator:
    """A communicator in one rank."""

    def __init__(self, ndev, commId, rank):
        if type(commId) is not bytes:
            raise TypeError(f"Argument 'commId' has incorrect type {type(commId)}")
        assert len(commId) == _ID_BYTES
        self._cupy = sys.modules["cupy"]
        self._size, self._rank, self._device = ndev, rank, self._cupy.Device().id
        self._failed, self._aborted = 0, False
        name = commId.rstrip(b"\xff").decode()
        self._line = connection.Client(name)
        self._line.send((ndev, rank, self._device))
        problem = self._line.recv()
        if problem:
            raise NcclError(problem)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        """Reduce in the order of the ranks, and write the result on all ranks."""
        kind = ("allReduce", count, datatype, op)
        self._queue(stream, kind, lambda: self._reduced(sendbuf, recvbuf, count, datatype, op))

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        """Reduce to the root. The output memory of other ranks is not written."""
        kind = ("reduce", count, datatype, op, root)

        def step():
            target = recvbuf if self._rank == root else 0
            self._reduced(sendbuf, target, count, datatype, op)

        self._queue(stream, kind, step)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        """Reduce, and write each rank's part of the result on that rank."""
        kind = ("reduceScatter", recvcount, datatype, op)

        def step():
            total = self._values(sendbuf, recvcount * self._size, datatype)
            parts = [np.frombuffer(one, total.dtype) for one in self._all(total.tobytes())]
            mine = slice(self._rank * recvcount, (self._rank + 1) * recvcount)
            self._write(recvbuf, _folded([part[mine] for part in parts], op))

        self._queue(stream, kind, step)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        """Broadcast the data of the root."""

        def step():
            own = self._values(sendbuff, count, datatype) if self._rank == root else None
            parts = self._all(None if own is None else own.tobytes())
            self._write(recvbuff, parts[root])

        self._queue(stream, ("broadcast", count, datatype, root), step)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        """Gather the data of all ranks on all ranks."""

        def step():
            parts = self._all(self._values(sendbuf, count, datatype).tobytes())
            self._write(recvbuf, b"".join(parts))

        self._queue(stream, ("allGather", count, datatype), step)

    def send(self, sendbuf, count, datatype, peer, stream):
        """Add a send to the group. Calls outside of a group fail."""
        _local.calls.append((self, stream, "send", sendbuf, count, datatype, peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        """Add a receive to the group. Calls outside of a group fail."""
        _local.calls.append((self, stream, "recv", recvbuf, count, datatype, peer))

    def check_async_error(self):
        """Raise the asynchronous error, if there is one."""
        if self._aborted:
            raise NcclError(4)
        if self._failed or async_error:
            raise NcclError(self._failed or async_error[0])

    def abort(self):
        """End pending operations and close the connection."""
        if self._aborted:
            return
        self._aborted = True
        # shutdown() tells the others at once: close() takes no effect while a thread waits.
        with socket.fromfd(self._line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    destroy = abort

    def _queue(self, stream, kind, step):
        assert not self._aborted, "a communicator that is no more"
        assert getattr(_local, "calls", None) is None
        assert self._cupy.Device().id == self._device, "another device is current"
        queue, done = self._cupy._streams[stream].queue, threading.Event()

        def carry_out():
            try:
                if self._aborted:
                    return
                self._kind = kind
                step()
            except (EOFError, OSError):
                if not self._aborted:
                    self._failed = _REMOTE
                    while not self._aborted:  # as a kernel that waits for a lost peer
                        time.sleep(1e-3)
            finally:
                done.set()

        def drive():
            while not done.is_set() and queue.go_on():
                pass

        queue.add(carry_out)
        threading.Thread(target=drive, daemon=True).start()

    def _all(self, mine):
        """Exchange data with all ranks and return the data of each rank."""
        self._line.send((self._kind, mine))
        while not self._line.poll(0.01):
            if self._aborted:
                raise EOFError
        kinds, parts = zip(*self._line.recv(), strict=True)
        assert len(set(kinds)) == 1, kinds
        return parts

    def _values(self, ptr, count, datatype):
        dtype = np.dtype(_TYPES[datatype])
        return np.frombuffer(ctypes.string_at(ptr, count * dtype.itemsize), dtype)

    def _write(self, ptr, values):
        data = bytes(values) if isinstance(values, bytes) else values.tobytes()
        ctypes.memmove(ptr, data, len(data))

    def _reduced(self, sendbuf, recvbuf, count, datatype, op):
        own = self._values(sendbuf, count, datatype)
        parts = [np.frombuffer(one, own.dtype) for one in self._all(own.tobytes())]
        if recvbuf:
            self._write(recvbuf, _folded(parts, op))

    def _swap(self, calls):
        mine = {
            peer: self._values(ptr, count, datatype).tobytes()
            for what, ptr, count, datatype, peer in calls
            if what == "send"
        }
        theirs = self._all(mine)
        for what, ptr, _, _, peer in calls:
            if what == "recv":
                self._write(ptr, theirs[peer][self._rank])


def _folded(parts, op):
    with np.errstate(all="ignore"):
        total = parts[0]
        for part in parts[1:]:
            total = _FUNCTIONS[op](total, part)
        return total
