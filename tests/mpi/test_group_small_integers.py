"""Reductions of 8- and 16-bit integers, which wrap modulo 2^n like NumPy's, and of bools."""

import array as buffers
import functools

import ml_dtypes
import numpy as np
import pytest
from _cases.clusters import on_cluster

import mpidist as dist
from mpidist import ProcessGroup, ReduceOp
from strategy import ParameterServerStrategy, get_variable

DTYPES = ("int8", "uint8", "int16", "uint16")
# Vector registers have 16 to 64 elements, and the rest of an array takes another code path.
COUNTS = (*range(71), 1000, 100_003)
UFUNCS = {
    ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum, ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip
LAYOUTS = ("contiguous", "strided", "reversed", "transposed", "unaligned", "foreign order")

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "small integers")


def values_of(rank, dtype, shape=100):
    """Return values of a rank from the whole range of a dtype. Most of their sums overflow."""
    bounds = np.iinfo(dtype)
    rng = np.random.default_rng(100 + rank)
    values = rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    values.flat[::3] = bounds.max
    values.flat[1::3] = bounds.min
    return values


def total_of(parts, op=ReduceOp.SUM):
    return functools.reduce(UFUNCS[op], parts)


def laid_out(values, layout):
    """Return an array with the given values in a memory layout."""
    if layout == "strided":
        array = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)[..., ::2]
    elif layout == "reversed":
        array = np.zeros_like(values)[::-1]
    elif layout == "transposed":
        array = np.zeros(values.shape[::-1], values.dtype).T
    elif layout == "unaligned":
        array = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    else:
        order = values.dtype.newbyteorder() if layout == "foreign order" else values.dtype
        array = np.zeros(values.shape, order)
    array[...] = values
    return array


@pytest.mark.ranks(2, 3, 4)
@each_dtype
@pytest.mark.parametrize("op", UFUNCS, ids=lambda op: op.name)
def test_every_reduction_of_every_length(group, dtype, op):
    results = []
    for count in COUNTS:
        array = values_of(group.rank(), dtype, count)
        group.all_reduce(array, op)
        results.append(array)
    for count, array in zip(COUNTS, results, strict=True):
        expected = total_of([values_of(rank, dtype, count) for rank in group.ranks], op)
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == dtype


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", UFUNCS, ids=lambda op: op.name)
def test_bools_of_every_length(group, op):
    logical = {ReduceOp.SUM: np.logical_or, ReduceOp.PRODUCT: np.logical_and}.get(op, UFUNCS[op])
    parts = [[values_of(rank, "int8", count) > 0 for rank in group.ranks] for count in COUNTS]
    for each in parts:
        group.all_reduce(array := each[group.rank()].copy(), op)
        np.testing.assert_array_equal(array, functools.reduce(logical, each))
        assert array.dtype == bool


@pytest.mark.ranks(2, 3)
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [100, 200_000])
def test_every_operation(group, dtype, layout, count):
    """Send longer arrays through the members in a pipeline if the operation blocks."""
    rank, size = group.rank(), group.size()
    parts = [values_of(member, dtype, (4, count // 4)) for member in group.ranks]
    rows = [values_of(10 + member, dtype, (size, 4, count // 4)) for member in group.ranks]
    total = total_of(parts)
    made = []

    def own(values=parts[rank]):
        made.append(laid_out(values, layout))
        return made[-1]

    def expect(expected):
        np.testing.assert_array_equal(made.pop(0), expected)

    group.all_reduce(own())
    group.all_reduce(own(), "sum")
    group.all_reduce(own(), async_op=True).wait()
    group.all_reduce_coalesced([own(), own()])
    with group.coalesce(async_ops=True) as begun:
        group.all_reduce(own())
        group.all_reduce(own())
    begun.wait()
    for _ in range(7):
        expect(total)
    for root in range(size):
        group.reduce(own(), root)
        expect(total if rank == root else parts[rank])
    group.scan(own())
    expect(total_of(parts[: rank + 1]))
    group.exscan(own())
    expect(total_of(parts[:rank]) if rank else parts[0])
    group.exscan(own(), async_op=True).wait()
    expect(total_of(parts[:rank]) if rank else parts[0])
    part = total_of([row[rank] for row in rows])
    group.reduce_scatter(own(), [laid_out(row, layout) for row in rows[rank]])
    expect(part)
    group.reduce_scatter(own(), list(laid_out(rows[rank], layout)))
    expect(part)
    group.reduce_scatter_tensor(own(), laid_out(rows[rank], layout))
    expect(part)
    group.reduce_scatter_tensor(own(), laid_out(rows[rank], layout), async_op=True).wait()
    expect(part)


@pytest.mark.ranks(2, 3)
@each_dtype
def test_time_limits_and_parts_of_the_world(world, dtype):
    group = ProcessGroup(world.Dup(), "limited", timeout=60)
    parts = [values_of(rank, dtype) for rank in group.ranks]
    array, scanned = parts[group.rank()].copy(), parts[group.rank()].copy()
    group.all_reduce(array)
    group.scan(scanned)
    np.testing.assert_array_equal(array, total_of(parts))
    np.testing.assert_array_equal(scanned, total_of(parts[: group.rank() + 1]))


@pytest.mark.ranks(2, 3)
@each_dtype
def test_prepared(group, dtype):
    rank, size = group.rank(), group.size()
    array, part, rooted, scanned = (np.zeros(100, dtype) for _ in range(4))
    whole = np.zeros((size, 100), dtype)
    steps = [
        group.prepare("all_reduce", array),
        group.prepare("reduce_scatter_tensor", part, whole),
        group.prepare("reduce", rooted, size - 1, op="sum"),
        group.prepare("scan", scanned),
    ]
    for turn in range(4):
        parts = [values_of(10 * turn + member, dtype) for member in group.ranks]
        array[:] = rooted[:] = scanned[:] = parts[rank]
        whole[:] = parts[rank]
        for step in steps:
            if turn % 2:
                step()
            else:
                step.start().wait()
        total = total_of(parts)
        np.testing.assert_array_equal(array, total)
        np.testing.assert_array_equal(part, total)
        np.testing.assert_array_equal(rooted, total if rank == size - 1 else parts[rank])
        np.testing.assert_array_equal(scanned, total_of(parts[: rank + 1]))


@pytest.mark.ranks(2)
@each_dtype
def test_prepared_on_one_side(group, dtype):
    array = values_of(0, dtype)
    step = group.prepare("all_reduce", array)
    for _ in range(3):
        expected = array + array
        if group.rank() == 0:
            step()
        else:
            group.all_reduce(array)
        np.testing.assert_array_equal(array, expected)


@pytest.mark.ranks(2)
def test_prepared_sums_are_still_checked(group):
    array = np.zeros((4, 4), np.int8)
    for strange in (array[:, ::2], np.zeros(4, ">i2")):
        with pytest.raises(ValueError, match="would work on copies"):
            group.prepare("all_reduce", strange)
    step = group.prepare("all_reduce", array)
    if group.rank() == 0:
        work = step.start()
        with pytest.raises(ValueError, match="still pending"):
            step()
        group.send(np.zeros(1), 1)
        work.wait()
    else:
        group.recv(np.zeros(1), 0)
        step.start().wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", "bBhH")
def test_arrays_of_other_libraries(group, code):
    values = [values_of(rank, code) for rank in group.ranks]
    plain = buffers.array(code, values[group.rank()].tolist())
    view = memoryview(values[group.rank()].copy())
    exported = ByDlpack(values[group.rank()].copy())
    for one in (plain, view, exported):
        group.all_reduce(one)
    for one in (plain, view, exported.array):
        np.testing.assert_array_equal(np.asarray(one), total_of(values))


class ByDlpack:
    """An array that implements only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["int8", "uint8", "int16"])
def test_tensors(group, name):
    torch = pytest.importorskip("torch")
    parts = [values_of(rank, name) for rank in group.ranks]
    tensor = torch.tensor(parts[group.rank()])
    group.all_reduce(tensor)
    np.testing.assert_array_equal(tensor.numpy(), total_of(parts))


@pytest.mark.ranks(2)
@each_dtype
@pytest.mark.parametrize("count", [100, 1 << 18])
def test_arrays_on_gpus(world, xp, dtype, count):
    group = ProcessGroup(world.Dup(), "on GPUs")
    parts = [values_of(rank, dtype, count) for rank in group.ranks]
    array, later, part = (xp.asarray(parts[group.rank()]) for _ in range(3))
    whole = xp.asarray(np.concatenate([parts[group.rank()]] * group.size()))
    group.all_reduce(array)
    group.all_reduce(later, async_op=True).wait()
    group.reduce_scatter_tensor(part, whole)
    for one in (array, later, part):
        np.testing.assert_array_equal(xp.asnumpy(one), total_of(parts))


@pytest.mark.ranks(4)
@each_dtype
def test_grids_and_their_rows(world, dtype):
    dist.init_process_group()
    try:
        grid = dist.new_cartesian_group([2, 2], [True, False])
        group = dist.new_group([0, 2, 3])
        for one in (grid, group):
            if isinstance(one, ProcessGroup):
                array = values_of(world.rank, dtype)
                one.all_reduce(array)
                np.testing.assert_array_equal(
                    array, total_of([values_of(rank, dtype) for rank in one.ranks])
                )
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
@each_dtype
def test_means_of_integers_are_refused(group, dtype):
    with pytest.raises(TypeError, match="cannot be reduced with AVG; reduce with SUM and divide"):
        group.all_reduce(np.zeros(3, dtype), "avg")
    with pytest.raises(TypeError, match="cannot be reduced with PREMUL_SUM"):
        group.all_reduce(np.zeros(3, dtype), ReduceOp.PREMUL_SUM(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_integers_that_numpy_does_not_know_are_refused(group, name):
    with pytest.raises(TypeError, match=f"arrays of dtype {name} cannot be reduced with SUM"):
        group.all_reduce(np.zeros(3, getattr(ml_dtypes, name)))


@pytest.mark.ranks(2)
@each_dtype
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
def test_changes_of_variables(world, dtype, transport):
    change = values_of(5, dtype)

    def train(strategy: ParameterServerStrategy, _):
        with strategy.scope():
            variable = get_variable("counts", initializer=values_of(0, dtype))
        for _ in range(3):
            variable.assign_add(change)
        variable.assign_sub(values_of(7, dtype))
        return variable.read_value()

    result = on_cluster(world, 1, train, transport)
    if result is not None:
        expected = values_of(0, dtype) + change + change + change - values_of(7, dtype)
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == dtype
