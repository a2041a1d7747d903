"""Memory that processes share: only the right memfd is opened, and it stays as it is."""

import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from mpidist.memfd import SharedMemfd, open_memfd
from mpidist.proto.mpidist_pb2 import Memory

NBYTES = 1 << 20


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_both_see_the_same():
    shared = SharedMemfd(NBYTES)
    opened = open_memfd(shared.reference)
    assert shared.memory.nbytes == opened.nbytes == NBYTES
    assert not shared.memory.any()
    shared.memory[:3] = [1, 2, 3]
    opened[-2:] = [4, 5]
    assert opened[:4].tolist() == [1, 2, 3, 0]
    assert shared.memory[-2:].tolist() == [4, 5]


def test_descriptors_are_given_back():
    """A mapping has a descriptor of its own."""
    gc.collect()  # of earlier tests
    before = descriptors()
    shared = SharedMemfd(NBYTES)
    assert descriptors() == before + 2
    opened = open_memfd(shared.reference)
    assert descriptors() == before + 3
    shared.close()
    shared.close()
    assert descriptors() == before + 2
    with pytest.raises(FileNotFoundError):
        open_memfd(shared.reference)
    shared.memory[0] = 7
    assert opened[0] == 7
    view = opened[5:10]
    del shared, opened
    for _ in range(100):
        SharedMemfd(NBYTES)
    gc.collect()
    assert descriptors() == before + 1
    del view
    assert descriptors() == before


OPENER = """
import sys
from mpidist.memfd import SharedMemfd, open_memfd
from mpidist.proto.mpidist_pb2 import Memory
theirs = open_memfd(Memory.FromString(bytes.fromhex(sys.argv[1])))
own = SharedMemfd(5000)
own.memory[:] = 9
theirs[:5] = list(b"hello")
print(own.reference.SerializeToString().hex(), flush=True)
sys.stdin.read(1)
"""


def test_memory_outlives_its_creator():
    shared = SharedMemfd(NBYTES)
    command = [sys.executable, "-c", OPENER, shared.reference.SerializeToString().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        reference = Memory.FromString(bytes.fromhex(other.stdout.readline().decode()))
        theirs = open_memfd(reference)
        assert bytes(shared.memory[:5]) == b"hello"
        other.kill()
    assert theirs.nbytes == 2 * mmap.PAGESIZE
    assert (theirs[:5000] == 9).all()
    with pytest.raises(FileNotFoundError):
        open_memfd(reference)


def named(reference, **changes):
    changed = Memory()
    changed.CopyFrom(reference)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def test_other_files_and_wrong_references(tmp_path):
    shared = SharedMemfd(NBYTES)
    token = shared.reference.token
    with (tmp_path / "file").open("wb+") as file:
        file.write(token + bytes(NBYTES))
        file.flush()
        growing = os.memfd_create("mpidist-shared", os.MFD_ALLOW_SEALING)
        other = os.memfd_create("others", os.MFD_ALLOW_SEALING)
        short = os.memfd_create("mpidist-shared", os.MFD_ALLOW_SEALING)
        for made, length in ((growing, NBYTES), (other, NBYTES), (short, 100)):
            os.write(made, token)
            os.ftruncate(made, length)
        for made in (other, short):
            fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        receiving, sending = os.pipe()
        before = descriptors()
        references = [
            *(named(shared.reference, descriptor=made) for made in (growing, other, short)),
            *(
                named(shared.reference, descriptor=made)
                for made in (file.fileno(), receiving, 10**6, -1)
            ),
            named(shared.reference, token=bytes(16)),
            named(shared.reference, token=token[:-1]),
            named(shared.reference, pid=os.getppid()),
            named(shared.reference, pid=-1),
            Memory(),
        ]
        for reference in references:
            with pytest.raises(OSError):  # noqa: PT011 - the system's, or ours
                open_memfd(reference)
        assert descriptors() == before
        for made in (growing, other, short, receiving, sending):
            os.close(made)
    assert open_memfd(shared.reference) is not None


def test_descriptors_are_left_for_connections(monkeypatch):
    shared = SharedMemfd(NBYTES)
    before = descriptors()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2 * shared.reference.descriptor, 4096))
    with pytest.raises(OSError, match="more than half of"):
        SharedMemfd(NBYTES)
    with pytest.raises(OSError, match="more than half of"):
        open_memfd(shared.reference)
    assert descriptors() == before


def test_sizes_that_cannot_be():
    with pytest.raises(OSError, match="bytes can be shared"):
        SharedMemfd(1 << 70)


def test_its_size_stays_what_it_is():
    shared = SharedMemfd(NBYTES)
    path = f"/proc/self/fd/{shared.reference.descriptor}"
    with open(path, "rb+") as file, pytest.raises(PermissionError):
        file.truncate(10)


def test_only_what_is_written_takes_room():
    shared = SharedMemfd(1 << 40)
    assert os.stat(f"/proc/self/fd/{shared.reference.descriptor}").st_blocks <= 8
    assert shared.memory[-1] == 0
    assert np.shares_memory(shared.memory, shared.memory[5:])
