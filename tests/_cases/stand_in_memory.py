"""Memory of the stand-in's devices: what other processes can open, and what pointers tell.

It is anonymous memory of the host, until somebody wants a handle: then a memfd takes its place,
with what it held, which another process opens by its name under /proc. Memory that nobody holds any
more can be freed, as CuPy's pool does on demand; memory of the same length then lies there again.
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
opened = {}  # by handle: what others let this process see, and how often it was opened
_free = {}  # by length
_numbers = itertools.count(1)


class Allocation:
    """Memory that was asked for at once.

    Attributes:
        start: Its address.
        nbytes: How much was asked for.
        device: Whose.
        kind: "device", "async", "managed", or "opened" if it is another process's.
        number: None other in this process had it or will have it.
        holder: Who dies when nobody uses it; a weak reference.
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
        """Whoever is gone when it may be freed."""
        self.holder = weakref.ref(holder)

    def handle(self):
        """For other processes."""
        length = len(self.memory)
        if self.file is None:
            self.file = os.memfd_create("stand-in")
            os.ftruncate(self.file, length)
            os.pwrite(self.file, self.memory, 0)
            self._map(mmap.MAP_SHARED, self.file)
        return _HANDLE.pack(os.getpid(), self.file, self.device, self.number, length)

    def free(self):
        """Give it back; memory of this length has its address again."""
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
    """Memory full of garbage."""
    length = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    again = _free.get(length)
    memory = again.pop() if again else mmap.mmap(-1, length)
    allocation = Allocation(memory, max(size, 1), device, kind)
    ctypes.memset(allocation.start, GARBAGE, length)
    allocated.append(allocation)
    return allocation


def find(ptr):
    """What an address lies in, or None."""
    return next((one for one in allocated if ptr in one), None)


def free_unused():
    """Free what nobody holds."""
    for one in [one for one in allocated if one.holder is not None and one.holder() is None]:
        one.free()


def open_handle(handle):
    """Memory of another process.

    Raises:
        OSError: It has been freed, or the process has ended.
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
    """Give up what was opened; False if it was not."""
    for handle, entry in opened.items():
        if entry[0].start == ptr:
            entry[1] -= 1
            if not entry[1]:
                del opened[handle]
                allocated.remove(entry[0])
            return True
    return False


def device_of_handle(handle):
    """Whose memory it is, by process and device."""
    process, _, device, _, _ = _HANDLE.unpack(handle)
    return process, device
