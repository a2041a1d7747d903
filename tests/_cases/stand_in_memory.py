"""Memory of the stand-in's devices, with handles for other processes and look-up by pointer.

Device memory is anonymous memory of the host until the first request for a handle. Then a memfd
with the same content takes its place, and another process opens the memfd under /proc. Unused
memory can be freed on demand, as in CuPy's pool. Later memory of the same length then reuses the
address.
"""

import ctypes
import itertools
import mmap
import os
import struct
import weakref

GARBAGE = 0xAB
_HANDLE = struct.Struct("<QQQQQ24x")  # process, file, device, number, length
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED = 0x10

allocated = []
opened = {}  # by handle: the memory of another process, and the number of opens
_free = {}  # free memory, by length
_numbers = itertools.count(1)


class Allocation:
    """An allocation of device memory.

    Attributes:
        start: Its address.
        nbytes: Requested size in bytes.
        device: Index of the device.
        kind: "device", "async", "managed", or "opened" for memory of another process.
        number: Number of the allocation, unique in this process.
        holder: Weak reference to the user of the memory, or None.
    """

    def __init__(self, memory, nbytes, device, kind):
        self.memory, self.nbytes, self.device, self.kind = memory, nbytes, device, kind
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.number = next(_numbers)
        self.holder = None
        self.file = None

    def __contains__(self, ptr):
        return self.start <= ptr < self.start + self.nbytes

    def held_by(self, holder):
        """Set the object that keeps the memory in use."""
        self.holder = weakref.ref(holder)

    def handle(self):
        """Return a handle for other processes."""
        length = len(self.memory)
        if self.file is None:
            self.file = os.memfd_create("stand-in")
            os.ftruncate(self.file, length)
            os.pwrite(self.file, self.memory, 0)
            self._map(mmap.MAP_SHARED, self.file)
        return _HANDLE.pack(os.getpid(), self.file, self.device, self.number, length)

    def free(self):
        """Free the memory. A later allocation of this length reuses the address."""
        allocated.remove(self)
        if self.file is not None:
            self._map(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            os.close(self.file)
        _free.setdefault(len(self.memory), []).append(self.memory)

    def _map(self, flags, file):
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        flags |= _MAP_FIXED
        place = _libc.mmap(self.start, len(self.memory), rights, flags, file, 0)
        assert place == self.start, os.strerror(ctypes.get_errno())


def allocate(size, device, kind="device"):
    """Allocate memory and fill it with garbage."""
    length = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    again = _free.get(length)
    memory = again.pop() if again else mmap.mmap(-1, length)
    allocation = Allocation(memory, max(size, 1), device, kind)
    ctypes.memset(allocation.start, GARBAGE, length)
    allocated.append(allocation)
    return allocation


def find(ptr):
    """Return the allocation that contains an address, or None."""
    return next((one for one in allocated if ptr in one), None)


def free_unused():
    """Free the allocations with a holder that no longer exists."""
    for one in [one for one in allocated if one.holder is not None and one.holder() is None]:
        one.free()


def open_handle(handle):
    """Open memory of another process.

    Raises:
        OSError: The memory has been freed, or the process has ended.
    """
    process, file, device, _, length = _HANDLE.unpack(handle)
    if handle not in opened:
        other = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            memory = mmap.mmap(other, length)
        finally:
            os.close(other)
        allocation = Allocation(memory, length, device, "opened")
        allocated.append(allocation)
        opened[handle] = [allocation, 0]
    opened[handle][1] += 1
    return opened[handle][0]


def close_handle(ptr):
    """Close opened memory once. Return False if no opened memory begins at the address."""
    for handle, entry in opened.items():
        if entry[0].start == ptr:
            entry[1] -= 1
            if not entry[1]:
                del opened[handle]
                allocated.remove(entry[0])
            return True
    return False


def device_of_handle(handle):
    """Return the process and the device of a handle."""
    process, _, device, _, _ = _HANDLE.unpack(handle)
    return process, device
