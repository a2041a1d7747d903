"""Division of variables into parts, and the partitioners."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategy import partitioners
from strategy.protocol.partition import Part, Rows, divided, whole

FLOAT = np.dtype(np.float32)
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def divisions(draw, shape=None):
    """Draw a shape and its parts by some partitioner."""
    shape = draw(SHAPES) if shape is None else shape
    axis = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    if axis is None:
        given = draw(st.integers(1, math.prod(shape)))
    else:
        count = draw(st.integers(1, shape[axis]))
        given = [count if n == axis else 1 for n in range(len(shape))]
    return shape, divided("v", shape, FLOAT, lambda shape, dtype: given)


@given(divisions())
def test_parts_are_all_of_it_once(division):
    shape, parts = division
    array = np.arange(math.prod(shape)).reshape(shape)
    pieces = [part.of(array) for part in parts]
    assert [piece.shape for piece in pieces] == [part.shape for part in parts]
    assert all(np.shares_memory(piece, array) for piece in pieces)
    assert sorted(np.concatenate([piece.reshape(-1) for piece in pieces])) == list(
        range(array.size)
    )
    lengths = [part.stop - part.start for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_the_first_parts_are_longer():
    parts = divided("v", (13, 2), FLOAT, lambda shape, dtype: [5, 1])
    assert [part.stop - part.start for part in parts] == [3, 3, 3, 2, 2]
    assert [part.offset for part in parts] == [(0, 0), (3, 0), (6, 0), (9, 0), (11, 0)]


@given(divisions(), st.data())
def test_rows_in_parts(division, data):
    shape, parts = division
    array = np.arange(math.prod(shape)).reshape(shape)
    ids = data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=7))
    ids = np.array(ids, np.int64)
    rows = Rows(parts, ids)
    out = np.full(rows.shape, -1)
    for number, part in enumerate(parts):
        own = part.of(array)[rows.inside(number)]
        assert own.shape == rows.shape_inside(number)
        np.testing.assert_array_equal(rows.take(array[ids], number), own)
        rows.put(out, number, own)
    np.testing.assert_array_equal(out, array[ids])


@given(divisions(), st.data())
def test_what_parts_have_in_common(division, data):
    shape, saved = division
    _, wanted = data.draw(divisions(shape))
    array = np.arange(math.prod(shape)).reshape(shape)
    for part in wanted:
        sources = [source.along(part.axis) for source in saved]
        if None in sources:
            assert len(saved) > 1
            continue
        target = np.full(part.shape, -1)
        for source in sources:
            ends = max(source.start, part.start), min(source.stop, part.stop)
            if ends[0] < ends[1]:
                common = Part(shape, part.axis, *ends)
                common.within(part, target)[...] = common.within(source, source.of(array))
        np.testing.assert_array_equal(target, part.of(array))


def test_the_whole():
    part = whole((2, 3))
    assert part.is_whole
    assert part.along(1) == Part((2, 3), 1, 0, 3)
    assert Part((2, 3), 0, 0, 1).along(1) is None
    assert Part((2, 3), 0, 1, 2).along(None) == Part((2, 3), None, 3, 6)
    assert divided("v", (), FLOAT, lambda shape, dtype: 1 / 0) == [whole(())]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([2], ValueError, r"gives \[2\]: it must give a number of parts for each axis"),
        ([2, 2], ValueError, "at most one is not 1"),
        ([4, 1], ValueError, "3 cannot be divided into 4 parts"),
        ([0, 1], ValueError, "into 0 parts"),
        (7, ValueError, "6 cannot be divided into 7 parts"),
        ([2.0, 1], TypeError, "not integers"),
        ([True, 1], TypeError, "not integers"),
        (None, TypeError, "gives None, not integers"),
        (np.array(2), TypeError, "not integers"),
    ],
)
def test_what_a_partitioner_must_not_give(given, error, message):
    with pytest.raises(error, match=message) as info:
        divided("v", (3, 2), FLOAT, lambda shape, dtype: given)
    assert "'v'" in str(info.value)


@pytest.mark.parametrize(
    ("partitioner", "shape", "counts"),
    [
        (partitioners.fixed_size_partitioner(3), (10, 2), [3, 1]),
        (partitioners.fixed_size_partitioner(3, axis=1), (10, 2), [1, 2]),
        (partitioners.FixedShardsPartitioner(4), (10, 2), [4, 1]),
        (partitioners.FixedShardsPartitioner(4), (3,), [3]),
        # 16 floats of 4 bytes: as in TensorFlow's own examples.
        (partitioners.variable_axis_size_partitioner(16), (4, 4), [4, 1]),
        (partitioners.variable_axis_size_partitioner(32), (4, 4), [2, 1]),
        (partitioners.variable_axis_size_partitioner(8), (4, 4), [4, 1]),
        (partitioners.variable_axis_size_partitioner(48, axis=1), (4, 4), [1, 2]),
        (partitioners.variable_axis_size_partitioner(16, max_shards=3), (4, 4), [3, 1]),
        (partitioners.MaxSizePartitioner(32), (5, 4), [3, 1]),
        (partitioners.MaxSizePartitioner(32, max_shards=2), (5, 4), [2, 1]),
        (partitioners.MaxSizePartitioner(1 << 40), (5, 4), [1, 1]),
        (partitioners.min_max_variable_partitioner(8, min_slice_size=32), (6, 4), [3, 1]),
        (partitioners.min_max_variable_partitioner(2, min_slice_size=32), (6, 4), [2, 1]),
        (partitioners.min_max_variable_partitioner(8, 1, min_slice_size=4), (6, 4), [1, 4]),
        (partitioners.MinSizePartitioner(64, max_shards=4), (6, 4), [2, 1]),
        (partitioners.MinSizePartitioner(max_shards=4), (6, 4), [1, 1]),
        (partitioners.FlatPartitioner(4), (3, 3), 4),
        (partitioners.FlatPartitioner(40), (3, 3), 9),
        (partitioners.FixedShardsPartitioner(4), (0, 2), [1, 1]),
        (partitioners.MaxSizePartitioner(32), (0, 2), [1, 1]),
        (partitioners.FlatPartitioner(4), (0, 2), 1),
    ],
)
def test_partitioners(partitioner, shape, counts):
    assert partitioner(shape, FLOAT) == counts
    assert partitioner(shape=shape, dtype=FLOAT) == counts
    divided("v", shape, FLOAT, partitioner)


def test_partitioners_know_the_size_of_an_element():
    by_bytes = partitioners.MaxSizePartitioner(64)
    assert [by_bytes((8, 4), np.dtype(t)) for t in ("f2", "f8")] == [[1, 1], [4, 1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: partitioners.fixed_size_partitioner(0),
        lambda: partitioners.variable_axis_size_partitioner(0),
        lambda: partitioners.variable_axis_size_partitioner(1, max_shards=0),
        lambda: partitioners.variable_axis_size_partitioner(1, bytes_per_string_element=0),
        lambda: partitioners.min_max_variable_partitioner(0),
        lambda: partitioners.min_max_variable_partitioner(1, min_slice_size=0),
        lambda: partitioners.FixedShardsPartitioner(-1),
        lambda: partitioners.MinSizePartitioner(0),
        lambda: partitioners.MinSizePartitioner(max_shards=0),
        lambda: partitioners.MaxSizePartitioner(0),
        lambda: partitioners.MaxSizePartitioner(1, max_shards=-2),
        lambda: partitioners.FlatPartitioner(0),
    ],
)
def test_numbers_that_are_not_positive(make):
    with pytest.raises(ValueError, match="must be positive, not"):
        make()


def test_numbers_that_are_not_whole():
    with pytest.raises(TypeError, match=r"num_shards must be a whole number, not 2\.5"):
        partitioners.FlatPartitioner(2.5)


@pytest.mark.parametrize("axis", [2, -1])
def test_an_axis_that_is_not_there(axis):
    with pytest.raises(ValueError, match=f"has no axis {axis}"):
        partitioners.fixed_size_partitioner(2, axis)((3, 2), FLOAT)
