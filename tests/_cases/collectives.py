"""Checks of every collective against NumPy with random dtypes, shapes, strides, roots, groups."""

import ml_dtypes
import numpy as np

from mpidist import ProcessGroup, ReduceOp
from mpidist.group import make_group

NUMBERS = [np.dtype(char) for char in "bBhHiIlLqQefdgFDG"]
NUMBERS += [np.dtype(np.bool_), np.dtype(">i4"), np.dtype(">f8")]
NUMBERS += [np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]
OTHERS = [np.dtype("M8[s]"), np.dtype([("a", "i4"), ("b", "f8")]), np.dtype("S5")]
PRECISION = {"float16": 2e-3, "bfloat16": 2e-2, "float8_e4m3fn": 0.15}
LAYOUTS = ("contiguous", "fortran", "every second", "backwards")


class Draw:
    """Random choices that are equal on all ranks, and random arrays of each rank.

    Args:
        seed: Seed of the choices.
        group: The process group.
    """

    def __init__(self, seed, group):
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.size, self.rank = group.size(), group.rank()
        self.root = int(self.rng.integers(self.size))

    def pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    def shape(self, most=5):
        return tuple(int(n) for n in self.rng.integers(0, most, self.rng.integers(0, 4)))

    def values(self, dtype, shape, rank, number=0):
        """Return the input array of a rank. Every rank can compute it."""
        rng = np.random.default_rng([self.seed, rank, number])
        data = np.asarray(rng.integers(0, 2 if dtype.kind == "b" else 4, shape))
        if dtype.kind == "c":
            return (data + 1j * rng.integers(-2, 3, shape)).astype(dtype)
        if dtype.fields:
            return np.array(list(zip(data.ravel(), data.ravel(), strict=True)), dtype).reshape(
                shape
            )
        return data.astype(dtype) if dtype.kind != "S" else data.astype("S1").astype(dtype)

    def laid_out(self, values):
        """Copy an array to a memory layout that each rank draws for itself."""
        values = np.asarray(values)
        kind = LAYOUTS[np.random.default_rng([self.seed, self.rank, 99]).integers(len(LAYOUTS))]
        if kind == "fortran":
            return np.array(values, order="F")
        if kind == "every second" and values.ndim:
            memory = np.zeros((2 * values.shape[0], *values.shape[1:]), values.dtype)
            memory[::2] = values
            return memory[::2]
        if kind == "backwards" and values.ndim:
            return values[::-1].copy()[::-1]
        return values.copy()

    def empty(self, dtype, shape):
        return self.laid_out(np.zeros(shape, dtype))


FACTOR = 0.375
SCALED = ("AVG", "PREMUL_SUM")
OPS = [ReduceOp.PREMUL_SUM(FACTOR), *(op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM)]


def possible(op, dtype):
    if dtype.kind in "iub":
        return op.name not in SCALED
    if dtype.kind == "c":
        return op.name in (*SCALED, "SUM", "PRODUCT")
    return op.name not in ("BAND", "BOR", "BXOR")


def reduced(op, parts):
    """Reduce the parts with NumPy. Floating-point parts are widened to at least float64."""
    values = np.stack(parts)
    if values.dtype.kind == "b":
        ufunc = {"SUM": np.any, "MAX": np.any, "BOR": np.any}.get(op.name, np.all)
        return np.logical_xor.reduce(values) if op is ReduceOp.BXOR else ufunc(values, 0)
    if values.dtype.kind not in "iuc":
        values = values.astype(np.longdouble if values.dtype.char == "g" else np.float64)
    if op is ReduceOp.AVG:
        return values.mean(0)
    if op.name == "PREMUL_SUM":
        return (values * FACTOR).sum(0)
    names = {"SUM": "add", "PRODUCT": "multiply", "MIN": "minimum", "MAX": "maximum"}
    bits = {"BAND": "bitwise_and", "BOR": "bitwise_or", "BXOR": "bitwise_xor"}
    return getattr(np, (names | bits)[op.name]).reduce(values, 0, dtype=values.dtype)


def assert_close(got, expected):
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected)
        return
    wide = np.clongdouble if got.dtype.kind == "c" else np.longdouble
    precision = PRECISION.get(got.dtype.name, 1e-6)
    np.testing.assert_allclose(got.astype(wide), expected, rtol=precision, atol=precision)


def reduction(draw):
    """Draw an operation and a dtype that the operation supports."""
    dtype = draw.pick(NUMBERS)
    return draw.pick([op for op in OPS if possible(op, dtype)]), dtype


def all_reduce(group, draw):
    (op, dtype), shape = reduction(draw), draw.shape()
    parts = [draw.values(dtype, shape, rank) for rank in range(draw.size)]
    array = draw.laid_out(parts[draw.rank])
    group.all_reduce(array, op)
    assert_close(array, reduced(op, parts))


def reduce(group, draw):
    (op, dtype), shape = reduction(draw), draw.shape()
    parts = [draw.values(dtype, shape, rank) for rank in range(draw.size)]
    array = draw.laid_out(parts[draw.rank])
    group.reduce(array, op=op, group_dst=draw.root)
    if draw.rank == draw.root:
        assert_close(array, reduced(op, parts))
    else:
        np.testing.assert_array_equal(array, parts[draw.rank])


def all_reduce_coalesced(group, draw):
    op = draw.pick([ReduceOp.SUM, ReduceOp.MAX])
    kinds = [draw.pick([d for d in NUMBERS if possible(op, d)]) for _ in range(4)]
    shapes = [draw.shape() for _ in kinds]
    parts = [
        [draw.values(kind, shape, rank, n) for rank in range(draw.size)]
        for n, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    ]
    arrays = [draw.laid_out(part[draw.rank]) for part in parts]
    group.all_reduce_coalesced(arrays, op)
    for array, part in zip(arrays, parts, strict=True):
        assert_close(array, reduced(op, part))


def reduce_scatter(group, draw):
    (op, dtype), shape = reduction(draw), draw.shape()
    parts = [
        [draw.values(dtype, shape, rank, n) for n in range(draw.size)] for rank in range(draw.size)
    ]
    output = draw.empty(dtype, shape)
    group.reduce_scatter(output, [draw.laid_out(part) for part in parts[draw.rank]], op)
    assert_close(output, reduced(op, [part[draw.rank] for part in parts]))


def reduce_scatter_tensor(group, draw):
    (op, dtype), shape = reduction(draw), draw.shape()
    whole = (draw.size, *shape)
    parts = [draw.values(dtype, whole, rank) for rank in range(draw.size)]
    output = draw.empty(dtype, shape)
    group.reduce_scatter_tensor(output, draw.laid_out(parts[draw.rank]), op)
    assert_close(output, reduced(op, [part[draw.rank] for part in parts]))


def scan(group, draw):
    dtype = draw.pick(NUMBERS)
    op = draw.pick([op for op in OPS if possible(op, dtype) and op.name not in SCALED])
    shape = draw.shape()
    parts = [draw.values(dtype, shape, rank) for rank in range(draw.size)]
    array, before = draw.laid_out(parts[draw.rank]), draw.laid_out(parts[draw.rank])
    group.scan(array, op)
    group.exscan(before, op)
    assert_close(array, reduced(op, parts[: draw.rank + 1]))
    expected = reduced(op, parts[: draw.rank]) if draw.rank else parts[0]
    assert_close(before, expected.astype(before.dtype).astype(expected.dtype))


def broadcast(group, draw):
    dtype, shape = draw.pick(NUMBERS + OTHERS), draw.shape()
    array = draw.laid_out(draw.values(dtype, shape, draw.rank))
    group.broadcast(array, group_src=draw.root)
    np.testing.assert_array_equal(array, draw.values(dtype, shape, draw.root))


def gathered(draw, dtype, shape):
    return [draw.values(dtype, shape, rank) for rank in range(draw.size)]


def all_gather(group, draw):
    dtype, shape = draw.pick(NUMBERS + OTHERS), draw.shape()
    parts = gathered(draw, dtype, shape)
    outputs = [draw.empty(dtype, shape) for _ in parts]
    group.all_gather(outputs, draw.laid_out(parts[draw.rank]))
    np.testing.assert_array_equal(np.stack(outputs), np.stack(parts))


def all_gather_into_tensor(group, draw):
    dtype, shape = draw.pick(NUMBERS + OTHERS), draw.shape()
    parts = gathered(draw, dtype, shape)
    output = draw.empty(dtype, (draw.size, *shape))
    group.all_gather_into_tensor(output, draw.laid_out(parts[draw.rank]))
    np.testing.assert_array_equal(output, np.stack(parts))


def all_gather_in_place(group, draw):
    dtype, shape = draw.pick(NUMBERS + OTHERS), draw.shape()
    parts = gathered(draw, dtype, shape)
    output = np.zeros((draw.size, *shape), dtype)
    output[draw.rank] = parts[draw.rank]
    group.all_gather_into_tensor(output, output[draw.rank, ...])
    np.testing.assert_array_equal(output, np.stack(parts))


def all_gather_coalesced(group, draw):
    kinds = [draw.pick(NUMBERS + OTHERS) for _ in range(3)]
    shapes = [draw.shape() for _ in kinds]
    both = list(zip(kinds, shapes, strict=True))
    outputs = [[draw.empty(*pair) for pair in both] for _ in range(draw.size)]
    inputs = [draw.laid_out(draw.values(*pair, draw.rank, n)) for n, pair in enumerate(both)]
    group.all_gather_coalesced(outputs, inputs)
    for rank, arrays in enumerate(outputs):
        for n, (array, pair) in enumerate(zip(arrays, both, strict=True)):
            np.testing.assert_array_equal(array, draw.values(*pair, rank, n))


def all_gather_ragged(group, draw):
    dtype = draw.pick(NUMBERS + OTHERS)
    shapes = [draw.shape() for _ in range(draw.size)]
    got = group.all_gather_ragged(draw.laid_out(draw.values(dtype, shapes[draw.rank], draw.rank)))
    for rank, (array, shape) in enumerate(zip(got, shapes, strict=True)):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, draw.values(dtype, shape, rank))


def gather(group, draw):
    dtype, shape = draw.pick(NUMBERS + OTHERS), draw.shape()
    parts = gathered(draw, dtype, shape)
    is_root = draw.rank == draw.root
    outputs = [draw.empty(dtype, shape) for _ in parts] if is_root else None
    group.gather(draw.laid_out(parts[draw.rank]), outputs, group_dst=draw.root)
    if outputs is not None:
        np.testing.assert_array_equal(np.stack(outputs), np.stack(parts))


def scatter(group, draw):
    dtype, shape = draw.pick(NUMBERS + OTHERS), draw.shape()
    parts = [draw.laid_out(part) for part in gathered(draw, dtype, shape)]
    output = draw.empty(dtype, shape)
    group.scatter(output, parts if draw.rank == draw.root else None, group_src=draw.root)
    np.testing.assert_array_equal(output, draw.values(dtype, shape, draw.rank))


def all_to_all(group, draw):
    dtype = draw.pick(NUMBERS + OTHERS)
    shapes = [[draw.shape() for _ in range(draw.size)] for _ in range(draw.size)]
    inputs = [
        draw.laid_out(draw.values(dtype, shape, draw.rank, to))
        for to, shape in enumerate(shapes[draw.rank])
    ]
    outputs = [draw.empty(dtype, shapes[rank][draw.rank]) for rank in range(draw.size)]
    group.all_to_all(outputs, inputs)
    for rank, array in enumerate(outputs):
        expected = draw.values(dtype, shapes[rank][draw.rank], rank, draw.rank)
        np.testing.assert_array_equal(array, expected)


def all_to_all_single(group, draw):
    dtype, row = draw.pick(NUMBERS + OTHERS), draw.shape(4)
    splits = draw.rng.integers(0, 5, (draw.size, draw.size)).tolist()
    given = [draw.values(dtype, (sum(counts), *row), rank) for rank, counts in enumerate(splits)]
    taken = [counts[draw.rank] for counts in splits]
    output = draw.empty(dtype, (sum(taken), *row))
    group.all_to_all_single(output, draw.laid_out(given[draw.rank]), taken, splits[draw.rank])
    starts = [sum(counts[: draw.rank]) for counts in splits]
    expected = [
        rows[start : start + count] for rows, start, count in zip(given, starts, taken, strict=True)
    ]
    np.testing.assert_array_equal(output, np.concatenate(expected))


def all_to_all_single_equal(group, draw):
    dtype, row, each = draw.pick(NUMBERS + OTHERS), draw.shape(4), int(draw.rng.integers(4))
    given = [draw.values(dtype, (each * draw.size, *row), rank) for rank in range(draw.size)]
    output = draw.empty(dtype, given[0].shape)
    group.all_to_all_single(output, draw.laid_out(given[draw.rank]))
    mine = slice(each * draw.rank, each * (draw.rank + 1))
    np.testing.assert_array_equal(output, np.concatenate([rows[mine] for rows in given]))


def rows_of(draw, dtype, rank, each=3):
    return draw.values(dtype, (draw.size, each), rank)


def all_gather_from_its_outputs(group, draw):
    dtype = draw.pick(NUMBERS)
    whole = np.zeros((draw.size, 1 << 13), dtype)  # large enough for the in-place path
    whole[draw.rank] = draw.rank % 2
    rows = list(whole)
    group.all_gather(rows, rows[draw.rank])
    np.testing.assert_array_equal(whole[:, -1], (np.arange(draw.size) % 2).astype(dtype))


def gather_and_scatter_from_their_rows(group, draw):
    dtype, is_root = draw.pick(NUMBERS), draw.rank == draw.root
    whole = np.zeros((draw.size, 1 << 13), dtype)
    whole[draw.rank] = draw.rank % 2
    rows = list(whole)
    group.gather(rows[draw.rank], rows if is_root else None, group_dst=draw.root)
    expected = (np.arange(draw.size) % 2).astype(dtype)
    if is_root:
        np.testing.assert_array_equal(whole[:, 0], expected)
    group.scatter(rows[0], rows if is_root else None, group_src=draw.root)
    np.testing.assert_array_equal(whole[0], np.full(1 << 13, expected[draw.rank]))


def all_to_all_in_place(group, draw):
    dtype = draw.pick(NUMBERS)
    array = rows_of(draw, dtype, draw.rank)
    group.all_to_all_single(array, array)
    given = [rows_of(draw, dtype, rank)[draw.rank] for rank in range(draw.size)]
    np.testing.assert_array_equal(array, np.stack(given))


def reduce_scatter_in_place(group, draw):
    op, dtype = reduction(draw)
    parts = [rows_of(draw, dtype, rank) for rank in range(draw.size)]
    array = parts[draw.rank].copy()
    group.reduce_scatter_tensor(array[draw.rank], array, op)
    assert_close(array[draw.rank], reduced(op, [part[draw.rank] for part in parts]))


def an_object(draw, *seed):
    """Return a random object with an array of up to 200,000 elements."""
    rng = np.random.default_rng([draw.seed, *seed])
    size = int(rng.choice([0, 3, 600, 200_000]))
    return {"of": seed, "text": "x" * int(rng.integers(5)), "array": rng.normal(size=size)}


def same(got, expected):
    np.testing.assert_array_equal(got.pop("array"), expected.pop("array"))
    assert got == expected


def all_gather_object(group, draw):
    got = [None] * draw.size
    group.all_gather_object(got, an_object(draw, draw.rank))
    for rank, one in enumerate(got):
        same(one, an_object(draw, rank))


def gather_object(group, draw):
    got = [None] * draw.size if draw.rank == draw.root else None
    group.gather_object(an_object(draw, draw.rank), got, group_dst=draw.root)
    for rank, one in enumerate(got or ()):
        same(one, an_object(draw, rank))


def broadcast_object_list(group, draw):
    given = [an_object(draw, 0), an_object(draw, 1)]
    got = given if draw.rank == draw.root else [None, None]
    group.broadcast_object_list(got, group_src=draw.root)
    for number, one in enumerate(got):
        same(one, an_object(draw, number))


def scatter_object_list(group, draw):
    given = [an_object(draw, rank) for rank in range(draw.size)] if draw.rank == draw.root else None
    got = [None]
    group.scatter_object_list(got, given, group_src=draw.root)
    same(got[0], an_object(draw, draw.rank))


BY_PARTS = (
    all_gather, all_gather_into_tensor, all_gather_in_place, all_gather_coalesced, gather, scatter,
    all_to_all, all_to_all_single, all_to_all_single_equal, all_to_all_in_place,
)  # fmt: skip
COLLECTIVES = (
    all_reduce, reduce, all_reduce_coalesced, reduce_scatter, reduce_scatter_tensor, scan,
    broadcast, all_gather, all_gather_into_tensor, all_gather_in_place, all_gather_coalesced,
    all_gather_ragged, gather, scatter, all_to_all, all_to_all_single, all_to_all_single_equal,
    all_gather_from_its_outputs, gather_and_scatter_from_their_rows, all_to_all_in_place,
    reduce_scatter_in_place, all_gather_object, gather_object, broadcast_object_list,
    scatter_object_list,
)  # fmt: skip


def check(collective, comm, seeds, timeout=None):
    """Check a collective in random groups of some ranks, and in the group of all ranks.

    Args:
        collective: One of COLLECTIVES.
        comm: Communicator of all ranks.
        seeds: Seeds of the random choices; the same on all ranks.
        timeout: Timeout of the group of all ranks. With a timeout, the group uses nonblocking MPI
            operations.
    """
    whole = ProcessGroup(comm.Dup(), "whole", timeout)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        ranks = rng.permutation(whole.size())[: rng.integers(1, whole.size() + 1)]
        group = make_group(whole, [int(rank) for rank in ranks], "some")
        if group is not None:
            collective(group, Draw(seed, group))
            group.free()
        collective(whole, Draw(seed + 1000, whole))
    whole.free()
