"""Groups on Cartesian grids, and exchanges between neighbours."""

import itertools

import numpy as np
import pytest

import mpidist as dist

GRIDS = {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1)]}


@pytest.fixture
def default(world):
    yield dist.init_process_group()
    dist.destroy_process_group()


def neighbor(grid, place, dimension, step):
    """Return the coordinates of a neighbour, or None beyond an edge."""
    other = list(place)
    other[dimension] += step
    if grid.periodic[dimension]:
        other[dimension] %= grid.shape[dimension]
    elif not 0 <= other[dimension] < grid.shape[dimension]:
        return None
    return tuple(other)


def neighbors(grid):
    """Return the group ranks of the neighbours in MPI's order. None marks an edge."""
    places = [
        neighbor(grid, grid.coordinates, dimension, step)
        for dimension in range(len(grid.shape))
        for step in (-1, 1)
    ]
    return [None if place is None else rank_at(grid, place) for place in places]


def rank_at(grid, place):
    """Return the group rank of coordinates, in C order."""
    return int(np.ravel_multi_index(place, grid.shape))


def every_grid():
    """Yield all grids of the world's size, periodic and non-periodic."""
    for shape in GRIDS[dist.get_world_size()]:
        for periodic in itertools.product((False, True), repeat=len(shape)):
            yield dist.new_cartesian_group(shape, periodic)


@pytest.mark.ranks(1, 2, 3, 4)
def test_places(default):
    for grid in every_grid():
        assert grid.rank_at(grid.coordinates) == grid.rank() == rank_at(grid, grid.coordinates)
        for rank, place in enumerate(np.ndindex(grid.shape)):
            assert grid.coordinates_of(rank) == place
        for dimension in range(len(grid.shape)):
            before, behind = neighbors(grid)[2 * dimension : 2 * dimension + 2]
            assert grid.shift(dimension) == (before, behind)
            assert grid.shift(dimension, -1) == (behind, before)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["f4", "i8", "f2", "?", ">f8"])
def test_all_gather_among_neighbors(default, dtype):
    for grid in every_grid():
        own = np.array([[grid.rank() % 2, 1]], dtype)
        output = np.zeros((2 * len(grid.shape), 1, 2), dtype)
        grid.neighbor_all_gather(output, own)
        for part, rank in zip(output, neighbors(grid), strict=True):
            expected = [[0, 0]] if rank is None else [[rank % 2, 1]]
            np.testing.assert_array_equal(part, np.array(expected, dtype))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_to_all_among_neighbors(default, async_op):
    for grid in every_grid():
        sides = 2 * len(grid.shape)
        given = 100.0 * grid.rank() + np.arange(sides * 3).reshape(sides, 3)
        output = np.full((3, sides), -1.0).T  # in Fortran order
        work = grid.neighbor_all_to_all(output, given, async_op)
        if work is not None:
            work.wait()
        for side, rank in enumerate(neighbors(grid)):
            there = side ^ 1  # data from one side was sent to the opposite side
            expected = -1 if rank is None else 100.0 * rank + np.arange(3 * there, 3 * there + 3)
            np.testing.assert_array_equal(output[side], np.broadcast_to(expected, 3))


@pytest.mark.ranks(2, 4)
def test_a_halo_exchange_repeated(default):
    grid = dist.new_cartesian_group((dist.get_world_size(),), periodic=True)
    parts, halo, around = np.empty((2, 5)), np.empty((2, 5)), np.empty((2, 5))
    before, behind = grid.shift(0)
    to_all = grid.prepare("neighbor_all_gather", halo, parts[0])
    to_each = grid.prepare("neighbor_all_to_all", around, parts)
    for turn in range(4):
        parts[0], parts[1] = grid.rank() + turn, -grid.rank()
        if turn % 2:
            to_all()
            to_each()
        else:
            to_all.start().wait()
            to_each.start().wait()
        np.testing.assert_array_equal(halo, np.repeat([[before], [behind]], 5, 1) + turn)
        np.testing.assert_array_equal(around[0], -before)
        np.testing.assert_array_equal(around[1], behind + turn)


@pytest.mark.ranks(2)
def test_it_is_a_group(default):
    grid = dist.new_cartesian_group([2, 1], group_desc="grid", timeout=60)
    array = np.ones(2)
    grid.all_reduce(array)
    dist.broadcast(array, 1, group=grid)
    np.testing.assert_array_equal(array, 2)
    assert (grid.name, grid.shape, grid.periodic) == ("grid", (2, 1), (False, False))
    dist.destroy_process_group(grid)
    with pytest.raises(ValueError, match="group 'grid' was destroyed"):
        grid.neighbor_all_gather(np.zeros((4, 1)), np.zeros(1))


@pytest.mark.ranks(2)
def test_what_does_not_fit(default):
    for shape in [(3,), (2, 2), (), (-1, -2), (0, 2)]:
        with pytest.raises(ValueError, match=r"the 2 members .* do not fill a grid"):
            dist.new_cartesian_group(shape)
    with pytest.raises(ValueError, match="one answer each"):
        dist.new_cartesian_group((2, 1), [True])
    grid = dist.new_cartesian_group((2,))
    cases = [
        (lambda: grid.neighbor_all_gather(np.zeros((3, 2)), np.zeros(2)), "one part of"),
        (lambda: grid.neighbor_all_gather(np.zeros((2, 2)), np.zeros(3)), "one part of"),
        (lambda: grid.neighbor_all_gather(np.zeros((2, 2)), np.zeros(2, "f4")), "one dtype"),
        (lambda: grid.neighbor_all_to_all(np.zeros((2, 2)), np.zeros(2)), "one part of"),
        (lambda: grid.neighbor_all_to_all(np.zeros((3, 2)), np.zeros((3, 2))), "one part of"),
        (lambda: grid.rank_at((2,)), "no place"),
        (lambda: grid.rank_at((0, 0)), "no place"),
        (lambda: grid.coordinates_of(2), "group rank 2"),
        (lambda: grid.shift(1), "no dimension 1"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    output = np.zeros((2, 2))
    output.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        grid.neighbor_all_gather(output, np.zeros(2))
