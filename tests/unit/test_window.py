"""Arenas, private windows, and how large an arena may be."""

import itertools
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpidist import Arena, Window
from mpidist.errors import ResourceExhaustedError
from mpidist.window import arena_bytes

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
        match=r"no room for 65 bytes in an arena of 128, of which 64 are free.*MPIDIST_ARENA_BYTES",
    ):
        arena.carve(65)
    with pytest.raises(MemoryError):
        Arena(0).carve(1)


def test_private_memory():
    window = Window.private(1000)
    assert window.local.dtype == np.uint8
    assert window.local.shape == (1000,)
    assert not window.local.any()
    window.local[5] = 9
    assert window.part(0)[5] == 9
    window.sync()
    window.free()
    window.free()


def test_empty_private_memory():
    assert Window.private(0).local.shape == (0,)


def test_private_memory_is_only_address_space_until_it_is_written():
    window = Window.private(1 << 42)  # more than any machine of ours has
    window.local[-1] = 3
    assert window.local[-1] == 3
    assert window.local[1 << 41] == 0


@given(
    free=st.integers(0, 1 << 50),
    block=st.sampled_from([512, 4096, 1 << 16]),
    wanted=st.integers(0, 1 << 50),
    owners=st.integers(1, 64),
)
def test_arenas_take_at_most_half_of_what_is_free(free, block, wanted, owners):
    with pytest.MonkeyPatch.context() as patch:
        stat = SimpleNamespace(f_bavail=free // block, f_frsize=block)
        patch.setattr("mpidist.window.os.statvfs", lambda path: stat)
        nbytes = arena_bytes(wanted, owners)
    limit = free // block * block // 2 // owners
    assert nbytes % mmap.PAGESIZE == 0
    assert nbytes <= min(wanted, limit)
    assert min(wanted, limit) - nbytes < mmap.PAGESIZE


def test_a_cut_is_logged(caplog, tmp_path):
    with caplog.at_level("INFO"):
        arena_bytes(1 << 20, 1, str(tmp_path))
        assert "arena" not in caplog.text
        nbytes = arena_bytes(1 << 60, 2, str(tmp_path))
    assert f"arena of {nbytes >> 20} MiB in place of {1 << 40}" in caplog.text
    assert "2 ps task(s) of this node" in caplog.text
