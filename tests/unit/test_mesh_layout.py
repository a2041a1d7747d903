"""Where the ranks of a mesh stand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.layout import layout_of_ranks, layout_of_shape


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_rows_and_places(shape, random):
    ranks = list(range(np.prod(shape)))
    random.shuffle(ranks)
    mesh = np.array(ranks).reshape(shape)
    names = [f"d{axis}" for axis in range(len(shape))]
    layout = layout_of_ranks("cpu", mesh.tolist(), names, len(ranks))
    np.testing.assert_array_equal(layout.mesh, mesh)
    assert not layout.mesh.flags.writeable
    for axis, name in enumerate(names):
        assert layout.axis(name) == layout.axis(axis) == layout.axis(axis - len(shape)) == axis
        rows = layout.rows(axis)
        assert sorted(itertools.chain(*rows)) == list(range(len(ranks)))
        for rank in ranks:
            place = layout.coordinate(rank)
            assert mesh[place] == rank
            row = layout.part([axis], place)
            assert row.mesh.tolist() in rows
            assert row.mesh[place[axis]] == rank
            assert row.names == (name,)
    assert layout.coordinate(len(ranks)) is None
    assert layout.flat(None).mesh.tolist() == ranks
    assert layout.flat(None).names == ("_".join(names),)
    assert layout.flat("x").names == ("x",)


def test_a_mesh_is_a_copy():
    mesh = np.arange(4)
    layout = layout_of_ranks("cuda", mesh, None, 4)
    mesh[:] = 0
    assert layout.mesh.tolist() == [0, 1, 2, 3]
    assert layout.flat(None).names is None


def test_parts_keep_the_order():
    layout = layout_of_shape("cpu", (2, 2, 3), ("dp", "cp", "tp"), 12)
    assert layout.part(layout.axes(("dp", "tp")), (0, 1, 2)).mesh.tolist() == [
        [3, 4, 5],
        [9, 10, 11],
    ]
    assert layout.axes("cp") == [1]
    for names in ((), ("tp", "dp"), ("dp", "dp"), "pp", ("dp", "pp")):
        with pytest.raises(KeyError, match=r"DeviceMesh\(\(dp=2, cp=2, tp=3\)"):
            layout.axes(names)
    for dim in (3, -4):
        with pytest.raises(IndexError, match=f"no dimension {dim}; it has 3"):
            layout.axis(dim)
    with pytest.raises(KeyError, match="the names are None"):
        layout_of_shape("cpu", (2, 2), None, 4).axis("dp")


def test_words():
    assert str(layout_of_ranks("cpu", [[0, 1], [3, 2]], ("dp", "tp"), 4)) == (
        "DeviceMesh((dp=2, tp=2), 'cpu', [[0, 1], [3, 2]])"
    )
    assert str(layout_of_shape("cuda", (3,), None, 3)) == "DeviceMesh((3), 'cuda', [0, 1, 2])"
    assert len(str(layout_of_shape("cpu", (100, 100), None, 10_000))) < 150


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("gpu", [0], None, 1), ValueError, "unknown device_type 'gpu'; the known ones are cpu"),
        (("cuda:0", [0], None, 1), ValueError, "unknown device_type 'cuda:0'"),
        ((None, [0], None, 1), ValueError, "unknown device_type None"),
        (("cpu", [], None, 1), ValueError, "at least one dimension"),
        (("cpu", 0, None, 1), ValueError, "at least one dimension"),
        (("cpu", [[0, 1], [2]], None, 4), ValueError, "inhomogeneous"),
        (("cpu", [0.0, 1.0], None, 2), TypeError, "as integers, not float64"),
        (("cpu", [True], None, 2), TypeError, "as integers, not bool"),
        (("cpu", [0, 1, 0], None, 2), ValueError, r"rank\(s\) \[0\] .* more than once"),
        (("cpu", [0, -1, 5], None, 3), ValueError, r"rank\(s\) \[-1, 5\] .* world of 3"),
        (("cpu", [0, 1], ("a", "b"), 2), ValueError, "1 dimension.* not \\('a', 'b'\\)"),
        (("cpu", [[0, 1]], ("a", "a"), 2), ValueError, "2 dimension.* distinct"),
        (("cpu", [[0, 1]], (), 2), ValueError, "2 dimension"),
        (("cpu", [0, 1], ("",), 2), ValueError, "distinct"),
        (("cpu", [0, 1], "a", 2), TypeError, "tuple of strings, not 'a'"),
        (("cpu", [0, 1], (1,), 2), TypeError, "tuple of strings"),
    ],
)
def test_what_is_no_mesh(arguments, error, text):
    with pytest.raises(error, match=text):
        layout_of_ranks(*arguments)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (-2, -2), (4, 2)])
def test_a_shape_that_does_not_fit(shape):
    with pytest.raises(ValueError, match=r"mesh_shape .* and the world has 4"):
        layout_of_shape("cpu", shape, None, 4)


def test_a_shape_of_other_things():
    with pytest.raises(TypeError, match="integers"):
        layout_of_shape("cpu", (2.0, 2), None, 4)
