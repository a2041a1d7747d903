"""Lists of arrays as one stretch of memory, and operations in pieces."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.buffers.lists import (
    all_direct,
    as_single_buffer,
    check_outputs,
    copy_overlapping_inputs,
    flat_output,
    flatten,
    shares_start,
)
from mpidist.buffers.packing import as_mpi_buffer
from mpidist.buffers.reduce_op import ReduceOp, to_reduce, to_reduce_into
from mpidist.group import operation as ops
from mpidist.group.operation import GroupInfo, Op, split_op

LARGE = 1 << 15  # elements of 8 bytes that are worth a look


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4))
def test_collect_and_spread(shapes):
    arrays = [np.random.default_rng(n).random(shape) for n, shape in enumerate(shapes)]
    flat = flatten(arrays)
    assert flat.tolist() == [value for array in arrays for value in array.ravel()]
    outputs = [np.zeros(shape) for shape in shapes]
    memory, finish = flat_output(outputs)
    memory[:] = flat
    if finish is not None:
        finish()
    for array, output in zip(arrays, outputs, strict=True):
        np.testing.assert_array_equal(array, output)


@pytest.mark.parametrize("kind", ["f4", "?", "c16"])
def test_rows_stay_writable_whatever_their_owner_is(kind):
    bases = [np.zeros(96, np.uint8), np.zeros((4, 24), np.uint8), np.zeros((24, 4), "u1").T.copy()]
    for base in bases:
        rows = list(base.reshape(-1).view(np.uint8)[: 2 * 48].view(kind).reshape(2, -1))
        flat = flatten(rows)
        assert np.shares_memory(flat, base)
        assert flat.flags.writeable
        for row in rows:
            row.flags.writeable = False
        assert not flatten(rows).flags.writeable


@pytest.mark.parametrize("dtype", [">f4", "<i8", "bfloat16", "float8_e4m3fn", "i2,f8", "?"])
def test_every_dtype_stays_what_it_is(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    parts = [np.ones(n, kind) for n in (3, 1, 2)]
    flat = flatten(parts)
    assert flat.dtype == kind
    assert flat.tobytes() == b"".join(part.tobytes() for part in parts)


def test_rows_of_one_array_need_no_copy():
    whole = np.zeros((3, LARGE))
    assert np.shares_memory(flatten(list(whole)), whole)
    memory, finish = flat_output(list(whole))
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
    flat = flatten(parts)
    assert not np.shares_memory(flat, whole)
    np.testing.assert_array_equal(flat, np.concatenate(parts))


def test_an_output_that_is_read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        flat_output([np.zeros(3), array])


def shared_memory(name):
    """Two or three arrays, some of which have memory in common."""
    whole = np.zeros((4, 6))
    return {
        "the same": [whole[0], whole[0]],
        "parts": [whole[1], whole[0], whole.reshape(-1)[5:8]],
        "not neighbours": [whole[0], whole[2], whole[0, 2:4]],
        "columns": [whole[:, :3], whole[:, 2:]],
        "an owner": [whole, whole[3]],
        "an owner twice": [whole, whole],
    }[name]


@pytest.mark.parametrize(
    "name", ["the same", "parts", "not neighbours", "columns", "an owner", "an owner twice"]
)
def test_outputs_that_overlap(name):
    arrays = shared_memory(name)
    for order in (arrays, arrays[::-1]):
        with pytest.raises(ValueError, match="have memory in common"):
            check_outputs(order)
        with pytest.raises(ValueError, match="have memory in common"):
            flat_output(order)


def test_outputs_that_lie_side_by_side():
    whole = np.zeros((4, 6))
    for arrays in (
        [whole[:, :3], whole[:, 3:]],
        [whole[::2], whole[1::2]],
        list(whole[::-1]),
        [whole[:0], whole[:0], whole],
        [whole.T[:2], whole.T[2:]],
    ):
        check_outputs(arrays)


@pytest.mark.parametrize("count", [1, 2])
def test_an_output_whose_elements_share_memory(count):
    base = np.zeros(12)
    tiled = np.lib.stride_tricks.as_strided
    for view in (
        tiled(base, (4, 3), (0, 8)),
        tiled(base, (5, 3), (16, 8)),
        np.lib.stride_tricks.sliding_window_view(base, 3, writeable=True),
        tiled(base, (3, 2), (8, 16)),
    ):
        with pytest.raises(ValueError, match="elements of it share memory"):
            flat_output([view] + [np.zeros(view.shape)] * (count - 1))
    for view in (base[::-1], base.reshape(3, 4).T, tiled(base, (3, 2), (16, 24)), base[:0]):
        flat_output([view])


def test_inputs_are_copied_where_they_lie_in_outputs():
    whole, other = np.arange(12.0).reshape(4, 3), np.zeros((4, 3))
    rows = list(whole)
    assert copy_overlapping_inputs(rows, list(other)) is rows
    apart = copy_overlapping_inputs(list(whole), [other[0], whole[1, 1:], other[1]])
    assert [np.shares_memory(array, whole) for array in apart] == [True, False, True, True]
    np.testing.assert_array_equal(apart, whole)
    buffers = [np.frombuffer(bytearray(24)) for _ in range(2)]
    assert np.shares_memory(copy_overlapping_inputs(buffers, [np.zeros(3)])[0], buffers[0])
    assert not np.shares_memory(copy_overlapping_inputs(buffers, [buffers[0][1:]])[0], buffers[0])


THREE = GroupInfo("three", 0, (0, 1, 2), 0, 3)


def test_parts_to_reduce_are_cut_by_columns(monkeypatch):
    monkeypatch.setattr(ops, "LARGEST_COUNT", 10)
    monkeypatch.setattr(ops, "_COLUMN_COUNT", 4)
    send, recv = np.arange(33.0).reshape(3, 11), np.zeros(11)
    pieces = split_op(Op("reduce_scatter", THREE, send, recv))
    for piece in pieces:
        piece.recv[...] = piece.send.sum(0)  # as if all three had the same
    assert len(pieces) == 3
    np.testing.assert_array_equal(recv, send.sum(0))


def test_unequal_parts_that_are_too_many(monkeypatch):
    monkeypatch.setattr(ops, "LARGEST_COUNT", 10)
    op = Op("all_gather_v", THREE, np.zeros(12), np.zeros(12))
    op.recv_counts = [4, 4, 4]
    with pytest.raises(ValueError, match="moves 12 elements, and this operation at most 10"):
        split_op(op)


def test_rows_that_need_no_care():
    whole = np.zeros((4, 2, 3))
    assert as_single_buffer(list(whole), np.zeros((2, 3)), 4) is whole
    some = as_single_buffer(list(whole[1:3]), np.zeros((2, 3)), 2)
    some[...] = 1
    assert whole.sum(axis=(1, 2)).tolist() == [0, 6, 6, 0]


OWN = np.zeros(3)
READ_ONLY = np.zeros((2, 3))
READ_ONLY.flags.writeable = False
WHOLE = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("arrays", "like", "count"),
    [
        (None, OWN, 2),
        (tuple(WHOLE), OWN, 2),
        (list(WHOLE), OWN, 3),
        (list(WHOLE), OWN.astype(np.float32), 2),
        (list(WHOLE), np.zeros(2), 2),
        (list(WHOLE[::-1]), OWN, 2),
        (list(np.zeros((2, 6))[:, ::2]), OWN, 2),
        ([np.zeros(3), np.zeros(3)], OWN, 2),
        ([WHOLE[0], [0, 0, 0]], OWN, 2),
        ([[0, 0, 0], WHOLE[1]], OWN, 2),
        (list(READ_ONLY), OWN, 2),
        (list(WHOLE), READ_ONLY[0], 2),
        (list(WHOLE), WHOLE[0], 2),
        (list(WHOLE), WHOLE.reshape(-1)[2:5], 2),
        (list(WHOLE), [0, 0, 0], 2),
        (list(WHOLE.astype(">f8")), OWN.astype(">f8"), 2),
        (list(WHOLE.astype(object)), OWN.astype(object), 2),
        (list(WHOLE), np.zeros(6)[::2], 2),
        ([], OWN, 0),
    ],
)
def test_rows_that_need_care(arrays, like, count):
    assert as_single_buffer(arrays, like, count) is None


def test_a_part_that_lies_in_its_row():
    whole = np.arange(12.0).reshape(4, 3)
    assert shares_start(whole[2], whole[2])
    assert not shares_start(whole[1], whole[2])
    assert not shares_start(whole[1, ::2], whole[1])
    assert not shares_start(whole[2, :0], whole[2])


STRETCHES = st.tuples(
    st.integers(0, 1), st.integers(0, 9), st.integers(0, 4), st.sampled_from([1, 2, -1])
)


@given(st.lists(STRETCHES, min_size=1, max_size=3), st.lists(STRETCHES, max_size=3))
def test_lists_that_need_no_care(targets, sources):
    buffers = np.zeros(14), np.zeros(14)

    def views(stretches):
        return [
            buffers[number][start : start + length][::stride]
            for number, start, length, stride in stretches
        ]

    written, read = views(targets), views(sources)
    if all_direct(read, written):
        assert all(array.flags.c_contiguous for array in (*read, *written))
        assert not [
            (one, other)
            for number, one in enumerate(written)
            for other in (*written[:number], *read)
            if np.shares_memory(one, other)
        ]


def test_lists_that_are_plain_and_apart():
    whole, other = np.zeros((4, 3)), np.zeros((4, 3))
    assert all_direct(list(whole), list(other))
    assert all_direct(list(whole[:2]), list(whole[2:]))
    assert all_direct([np.zeros(2), np.zeros(3)], [np.zeros(3), np.zeros(2)])
    assert not all_direct(list(whole), list(whole))
    assert not all_direct(list(whole), [other[:, 0]])
    assert not all_direct([other[:, 0]], list(whole))
    assert not all_direct([whole[0]], [other[0].astype(">f8")])
    assert not all_direct([whole[0]], [other.view(np.recarray)])
    other.flags.writeable = False
    assert not all_direct(list(whole), list(other))


def test_arrays_that_are_not_aligned():
    array = np.frombuffer(bytearray(65), np.uint8)[1:].view(np.float64)
    assert not array.flags.aligned
    moved, finish = as_mpi_buffer(array, write=True)
    assert moved.dtype == np.uint8
    assert finish is None
    assert np.shares_memory(moved, array)
    reduced, _, finish = to_reduce(array, ReduceOp.SUM, 2)
    assert reduced.flags.aligned
    reduced += 1
    finish()
    assert array.tolist() == [1] * 8
    target, other = np.zeros(8), array.copy()
    send, recv, _, finish = to_reduce_into(array, target, ReduceOp.SUM, 2)
    assert send.flags.aligned
    assert recv is target
    _, recv, _, finish = to_reduce_into(other, array, ReduceOp.SUM, 2)
    recv[...] = 5
    finish()
    assert array.tolist() == [5] * 8
    assert not all_direct([array], [target])
