"""Arenas, how large one may be, and whether its pages are there."""

import ctypes
import errno
import itertools
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpidist import arena as arenas
from mpidist.arena import Arena, commit
from mpidist.errors import ResourceExhaustedError

ARENA = 64 * 40 + 10  # the last bytes are too few for a piece


def padded(nbytes):
    return max(-(-nbytes // 64), 1) * 64


class Arenas(RuleBasedStateMachine):
    """Pieces come and go; a set of bytes keeps account of them."""

    def __init__(self):
        super().__init__()
        self.arena = Arena(ARENA)
        self.pieces = {}

    def runs(self):
        """Lengths of the stretches between the pieces."""
        edges = [(0, 0), *sorted((s, s + n) for s, n in self.pieces.items()), (ARENA, ARENA)]
        return [after[0] - before[1] for before, after in itertools.pairwise(edges)]

    @rule(nbytes=st.integers(0, 700))
    def carve(self, nbytes):
        length = padded(nbytes)
        if max(self.runs()) >= length:
            offset = self.arena.carve(nbytes)
            assert offset % 64 == 0
            assert offset not in self.pieces
            self.pieces[offset] = length
        else:
            with pytest.raises(ResourceExhaustedError, match=f"no room for {nbytes} bytes"):
                self.arena.carve(nbytes)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.pieces)))
        self.arena.free(offset)
        del self.pieces[offset]
        with pytest.raises(KeyError):
            self.arena.free(offset)

    @precondition(lambda self: self.pieces)
    @rule(off=st.integers(1, 63))
    def free_what_is_no_piece(self, off):
        with pytest.raises(KeyError):
            self.arena.free(max(self.pieces) + off)

    @invariant()
    def pieces_lie_apart_and_inside(self):
        assert min(self.runs()) >= 0


TestArenas = Arenas.TestCase
TestArenas.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)


@given(st.permutations(range(8)))
def test_freed_pieces_join_again(order):
    arena = Arena(8 * 64)
    pieces = [arena.carve(64) for _ in range(8)]
    assert pieces == [64 * n for n in range(8)]
    for n in order:
        arena.free(pieces[n])
    assert arena.carve(8 * 64) == 0


def test_the_first_piece_that_fits_is_taken():
    arena = Arena(10 * 64)
    pieces = [arena.carve(n * 64) for n in (1, 2, 1, 3, 1)]
    arena.free(pieces[1])
    arena.free(pieces[3])
    assert arena.carve(129) == pieces[3]
    assert arena.carve(1) == pieces[1]


def test_an_arena_that_is_full():
    arena = Arena(128)
    arena.carve(0)
    with pytest.raises(
        ResourceExhaustedError,
        match=r"no room for 65 bytes in an arena of 128, of which 64 are free",
    ):
        arena.carve(65)
    with pytest.raises(MemoryError):
        Arena(0).carve(1)


class Short:
    """Five pages of shared memory whose file has three: touching the others would be fatal.

    An object, so that pytest does not print the memory.
    """

    def __init__(self):
        self.handle = os.memfd_create("short")
        os.ftruncate(self.handle, 3 * mmap.PAGESIZE)
        mapping = mmap.mmap(-1, 5 * mmap.PAGESIZE)  # reserves the addresses
        self.memory = np.frombuffer(mapping, np.uint8)
        address = self.memory.ctypes.data
        assert _map_over(address, 5 * mmap.PAGESIZE, self.handle) == address

    def committed(self):
        """Bytes that the file has pages for."""
        return os.fstat(self.handle).st_blocks * 512


@pytest.fixture
def short():
    short = Short()
    yield short
    os.close(short.handle)


def _map_over(address, nbytes, handle):
    fixed, shared = 0x10, 0x01
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, fixed | shared, handle, 0)


def test_pages_that_there_are_not_are_an_error(short):
    memory = short.memory
    with pytest.raises(ResourceExhaustedError, match=r"no 20480 bytes of memory left"):
        commit(memory)
    assert short.committed() == 0  # those that there were have been given back
    commit(memory[: 2 * mmap.PAGESIZE + 1])
    assert short.committed() == 3 * mmap.PAGESIZE
    memory[: 3 * mmap.PAGESIZE] = 7
    with pytest.raises(ResourceExhaustedError):
        commit(memory[2 * mmap.PAGESIZE + 1 :])
    assert (memory[: 3 * mmap.PAGESIZE] == 7).all()  # a page that was in use is not given back
    commit(memory[:0])


def test_a_piece_without_pages_is_not_carved(short):
    memory = short.memory
    arena = Arena(memory.nbytes, memory)
    first = arena.carve(2 * mmap.PAGESIZE)
    memory[first : first + 2 * mmap.PAGESIZE] = 1
    for _ in range(2):
        with pytest.raises(ResourceExhaustedError, match="has no 12288 bytes of memory"):
            arena.carve(3 * mmap.PAGESIZE)
    assert arena.carve(mmap.PAGESIZE) == 2 * mmap.PAGESIZE
    assert short.committed() == 3 * mmap.PAGESIZE
    with pytest.raises(ResourceExhaustedError, match="no room for"):
        arena.carve(3 * mmap.PAGESIZE)


def test_private_memory_is_committed_too():
    mapping = mmap.mmap(-1, 1 << 20)
    memory = np.frombuffer(mapping, np.uint8)
    arena = Arena(memory.nbytes, memory)
    assert arena.carve(1 << 19) == 0
    assert not memory.any()


def test_a_kernel_that_cannot_commit_pages(monkeypatch):
    monkeypatch.setattr(arenas, "_madvise", lambda address, nbytes, advice: errno.EINVAL)
    assert Arena(1000, np.zeros(1000, np.uint8)).carve(100) == 0


def test_other_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr(arenas, "_madvise", lambda address, nbytes, advice: errno.EPERM)
    with pytest.raises(PermissionError, match="cannot commit memory"):
        commit(np.zeros(10, np.uint8))
