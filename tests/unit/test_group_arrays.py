"""Lists of arrays as one stretch of memory, and operations in pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import op as ops
from mpidist.arrays import collect, spread
from mpidist.op import Op, in_pieces

LARGE = 1 << 15  # elements of 8 bytes that are worth a look


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4))
def test_collect_and_spread(shapes):
    arrays = [np.random.default_rng(n).random(shape) for n, shape in enumerate(shapes)]
    flat = collect(arrays)
    assert flat.tolist() == [value for array in arrays for value in array.ravel()]
    outputs = [np.zeros(shape) for shape in shapes]
    memory, finish = spread(outputs)
    memory[:] = flat
    if finish is not None:
        finish()
    for array, output in zip(arrays, outputs, strict=True):
        np.testing.assert_array_equal(array, output)


def test_rows_of_one_array_need_no_copy():
    whole = np.zeros((3, LARGE))
    assert np.shares_memory(collect(list(whole)), whole)
    memory, finish = spread(list(whole))
    memory[:] = np.arange(3 * LARGE)
    assert finish is None
    assert (whole.ravel() == np.arange(3 * LARGE)).all()


@pytest.mark.parametrize(
    "arrays",
    [
        lambda w: [w[0], w[2]],
        lambda w: [w[1], w[0]],
        lambda w: [w[0], w[0]],
        lambda w: [w[0, ::2], w[1]],
        lambda w: [w[0], w[1].copy()],
        lambda w: [w.copy()[0], w.copy()[1]],
    ],
)
def test_what_is_not_one_stretch(arrays):
    whole = np.random.default_rng(0).random((3, LARGE))
    parts = arrays(whole)
    flat = collect(parts)
    assert not np.shares_memory(flat, whole)
    np.testing.assert_array_equal(flat, np.concatenate(parts))


def test_an_output_that_is_read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        spread([np.zeros(3), array])


class Three:
    """A group of three."""

    name = "three"

    def size(self):
        return 3


def carried_out(op, whole):
    """What the pieces of an all_gather or all_to_all leave, if MPI does what it should."""
    for piece in in_pieces(op):
        piece.recv[...] = whole(piece)
        if piece.finish is not None:
            piece.finish()


def test_parts_are_cut_by_columns(monkeypatch):
    monkeypatch.setattr(ops, "LARGEST_COUNT", 10)
    monkeypatch.setattr(ops, "_COLUMN_COUNT", 4)
    send, recv = np.arange(25.0), np.zeros((3, 25))
    carried_out(Op("all_gather", Three(), send, recv), lambda p: np.tile(p.send, (3, 1)))
    np.testing.assert_array_equal(recv, np.tile(send, (3, 1)))
    send, recv = np.arange(33.0), np.zeros(33)
    op = Op("all_to_all", Three(), send, recv)
    carried_out(op, lambda p: p.send)
    np.testing.assert_array_equal(recv, send)
    assert len(in_pieces(op)) == 3


def test_unequal_parts_that_are_too_many(monkeypatch):
    monkeypatch.setattr(ops, "LARGEST_COUNT", 10)
    op = Op("all_to_all_v", Three(), np.zeros(12), np.zeros(12))
    op.send_counts = op.recv_counts = [4, 4, 4]
    with pytest.raises(ValueError, match="12 elements in unequal parts"):
        in_pieces(op)
