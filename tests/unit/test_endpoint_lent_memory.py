"""Memory that a process lends to another one: who can have it, and who cannot."""

import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from mpidist.endpoint.frames import BadFrameError
from mpidist.endpoint.lent_memory import Lent, borrow
from mpidist.endpoint.tcp_shelves import Shelves
from mpidist.proto.mpidist_pb2 import Hello, Memory

NBYTES = 1 << 20


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_both_see_the_same():
    lent = Lent(NBYTES)
    borrowed = borrow(lent.offer)
    assert lent.memory.nbytes == borrowed.nbytes == NBYTES
    assert not lent.memory.any()
    lent.memory[:3] = [1, 2, 3]
    borrowed[-2:] = [4, 5]
    assert borrowed[:4].tolist() == [1, 2, 3, 0]
    assert lent.memory[-2:].tolist() == [4, 5]


def test_descriptors_are_given_back():
    """A mapping has a descriptor of its own."""
    before = descriptors()
    lent = Lent(NBYTES)
    assert descriptors() == before + 2
    borrowed = borrow(lent.offer)
    assert descriptors() == before + 3
    lent.close()
    lent.close()
    assert descriptors() == before + 2
    assert borrow(lent.offer) is None
    lent.memory[0] = 7
    assert borrowed[0] == 7
    view = borrowed[5:10]
    del lent, borrowed
    for _ in range(100):
        Lent(NBYTES)
    gc.collect()
    assert descriptors() == before + 1
    del view
    assert descriptors() == before


BORROWER = """
import sys
from mpidist.endpoint.lent_memory import Lent, borrow
from mpidist.proto.mpidist_pb2 import Memory
theirs = borrow(Memory.FromString(bytes.fromhex(sys.argv[1])))
own = Lent(5000)
own.memory[:] = 9
theirs[:5] = list(b"hello")
print(own.offer.SerializeToString().hex(), flush=True)
sys.stdin.read(1)
"""


def test_memory_outlives_the_process_that_lent_it():
    lent = Lent(NBYTES)
    command = [sys.executable, "-c", BORROWER, lent.offer.SerializeToString().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        offer = Memory.FromString(bytes.fromhex(other.stdout.readline().decode()))
        theirs = borrow(offer)
        assert bytes(lent.memory[:5]) == b"hello"
        other.kill()
    assert theirs.nbytes == 2 * mmap.PAGESIZE
    assert (theirs[:5000] == 9).all()
    assert borrow(offer) is None


def named(offer, **changes):
    changed = Memory()
    changed.CopyFrom(offer)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def test_what_was_not_lent(tmp_path):
    lent = Lent(NBYTES)
    token = lent.offer.token
    with (tmp_path / "file").open("wb+") as file:
        file.write(token + bytes(NBYTES))
        file.flush()
        growing = os.memfd_create("mpidist-shelf", os.MFD_ALLOW_SEALING)
        other = os.memfd_create("others", os.MFD_ALLOW_SEALING)
        short = os.memfd_create("mpidist-shelf", os.MFD_ALLOW_SEALING)
        for made, length in ((growing, NBYTES), (other, NBYTES), (short, 100)):
            os.write(made, token)
            os.ftruncate(made, length)
        for made in (other, short):
            fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        receiving, sending = os.pipe()
        before = descriptors()
        offers = [
            *(named(lent.offer, descriptor=made) for made in (growing, other, short)),
            *(named(lent.offer, descriptor=made) for made in (file.fileno(), receiving, 10**6, -1)),
            named(lent.offer, token=bytes(16)),
            named(lent.offer, token=token[:-1]),
            named(lent.offer, pid=os.getppid()),
            named(lent.offer, pid=-1),
            Memory(),
        ]
        assert [borrow(offer) for offer in offers] == [None] * len(offers)
        assert descriptors() == before
        for made in (growing, other, short, receiving, sending):
            os.close(made)
    assert borrow(lent.offer) is not None


def test_descriptors_are_left_for_connections(monkeypatch):
    lent = Lent(NBYTES)
    before = descriptors()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2 * lent.offer.descriptor, 4096))
    with pytest.raises(OSError, match="more than half of"):
        Lent(NBYTES)
    assert borrow(lent.offer) is None
    assert Shelves(NBYTES).offer() is None
    assert descriptors() == before


def test_an_answer_to_an_earlier_offer():
    ours, theirs = Shelves(NBYTES), Shelves(NBYTES)
    stale = ours.offer()
    offer = Memory()
    offer.CopyFrom(ours.offer())
    for answer in (Hello(offered=stale.token, borrowed=True), Hello(borrowed=True), Hello()):
        ours.settle(answer)
        assert ours.put is None
    assert theirs.accept(offer)
    ours.settle(Hello(offered=offer.token, borrowed=True))
    place = ours.put([np.arange(5)])
    assert theirs.take(place, [40])[0].view("i8").tolist() == [0, 1, 2, 3, 4]
    ours.offer()
    assert ours.put is None
    theirs.accept(Memory())
    with pytest.raises(BadFrameError, match="there is none"):
        theirs.take(place, [40])


def test_sizes_that_cannot_be():
    assert Shelves(1 << 70).offer() is None


def test_its_size_stays_what_it_is():
    lent = Lent(NBYTES)
    path = f"/proc/self/fd/{lent.offer.descriptor}"
    with open(path, "rb+") as file, pytest.raises(PermissionError):
        file.truncate(10)


def test_only_what_is_written_takes_room():
    lent = Lent(1 << 40)
    assert os.stat(f"/proc/self/fd/{lent.offer.descriptor}").st_blocks <= 8
    assert lent.memory[-1] == 0
    assert np.shares_memory(lent.memory, lent.memory[5:])
