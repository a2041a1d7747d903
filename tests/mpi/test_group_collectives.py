"""all_reduce, reduce, broadcast, all_gather and barrier of a process group, against NumPy."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import ProcessGroup, ReduceOp

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(c) for c in "bBhHiIlLqQ"]
FLOATS = [np.dtype(c) for c in "efdg"] + [BFLOAT16]
COMPLEX = [np.dtype(c) for c in "FDG"]
FOREIGN = [np.dtype(c).newbyteorder() for c in "hqdD"]
NUMBERS = INTEGERS + FLOATS + COMPLEX + FOREIGN
LAYOUTS = ("contiguous", "fortran", "strided", "reversed", "scalar", "empty")
SENTINEL = 111  # value of the memory between the elements of a strided array


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def values_of(rank, dtype, shape=(3, 4)):
    """Return the contribution of a rank. Every rank computes the same values."""
    rng = np.random.default_rng(100 + rank)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    # Small values: products of three neither overflow nor round in any dtype.
    data = rng.integers(1, 5, shape)
    if dtype.kind == "c":
        return (data + 1j * rng.integers(-2, 3, shape)).astype(dtype)
    return data.astype(dtype)


def placed(values, layout):
    """Return an array in a memory layout, and its underlying memory if the array has gaps."""
    if layout == "contiguous":
        return values.copy(), None
    if layout == "fortran":
        return np.asfortranarray(values), None
    if layout == "reversed":
        memory = values[::-1, ::-1].copy()
        return memory[::-1, ::-1], None
    if layout == "scalar":
        return np.array(values[0, 0]), None
    if layout == "empty":
        return values[:0].copy(), None
    memory = np.full((2 * values.shape[0], 3 * values.shape[1]), SENTINEL).astype(values.dtype)
    array = memory[::2, 1::3]
    array[...] = values
    return array, memory


def untouched(memory):
    """Return whether the memory between the elements is unchanged."""
    if memory is None:
        return True
    between = np.ones(memory.shape, bool)
    between[::2, 1::3] = False
    return bool((memory[between] == np.full(1, SENTINEL).astype(memory.dtype)).all())


def logical(values):
    return {"SUM": values.any(0), "MAX": values.any(0), "MIN": values.all(0),
            "PRODUCT": values.all(0), "BAND": values.all(0), "BOR": values.any(0),
            "BXOR": np.logical_xor.reduce(values)}  # fmt: skip


def reduced(op, parts):
    """Reduce the arrays of all ranks with NumPy. Floating-point sums use float64 or wider."""
    values = np.stack(parts)
    kind = values.dtype.kind
    if kind == "b":
        return logical(values)[op.name]
    if values.dtype in FLOATS:
        values = values.astype(np.float64)
    if op is ReduceOp.AVG:
        return values.mean(0)
    ufunc = {
        ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum, ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
    }[op]  # fmt: skip
    return ufunc.reduce(values, 0, dtype=values.dtype)


def possible(op, dtype):
    if op is ReduceOp.PREMUL_SUM:  # this operation needs a factor
        return False
    bitwise = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    if dtype.kind in "iub":
        return op is not ReduceOp.AVG
    if dtype.kind == "c":
        return op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    return not bitwise


def cut(values, layout):
    return {"scalar": values[..., 0, 0], "empty": values[..., :0, :]}.get(layout, values)


def assert_reduced(array, expected):
    if array.dtype.kind in "iub":
        np.testing.assert_array_equal(array, expected)
        return
    precision = 1e-2 if array.dtype == BFLOAT16 else 2e-3 if array.dtype.char == "e" else 1e-6
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(array.astype(wide), expected, rtol=precision)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [*NUMBERS, np.dtype(bool)], ids=str)
def test_all_reduce(group, dtype):
    parts = [values_of(rank, dtype) for rank in group.ranks]
    results = []
    for layout, op in itertools.product(LAYOUTS, ReduceOp):
        if possible(op, dtype):
            array, memory = placed(parts[group.rank()], layout)
            assert group.all_reduce(array, op) is None
            results.append((layout, op, array, memory))
    assert len(results) >= 3 * len(LAYOUTS)
    for layout, op, array, memory in results:
        assert_reduced(array, cut(reduced(op, parts), layout))
        assert untouched(memory)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [*NUMBERS, np.dtype(bool)], ids=str)
def test_reduce_changes_only_the_root(group, dtype):
    parts = [values_of(rank, dtype) for rank in group.ranks]
    results = []
    for layout in LAYOUTS:
        for op in ReduceOp:
            for root in group.ranks if possible(op, dtype) else ():
                array, memory = placed(parts[group.rank()], layout)
                if group.rank() != root:
                    array.flags.writeable = False
                assert group.reduce(array, root, op) is None
                results.append((layout, op, root, array, memory))
    for layout, op, root, array, memory in results:
        if group.rank() == root:
            assert_reduced(array, cut(reduced(op, parts), layout))
        else:
            np.testing.assert_array_equal(array, cut(parts[group.rank()], layout))
        assert untouched(memory)


MOVED = [*NUMBERS, np.dtype(bool), np.dtype("M8[ns]"), np.dtype([("a", "i1"), ("b", "f8")])]


def any_values(rank, dtype):
    if dtype.kind == "V" and dtype.names:
        values = np.zeros((3, 4), dtype)
        values["a"], values["b"] = rank, np.arange(12).reshape(3, 4) + rank
        return values
    if dtype.kind == "M":
        return values_of(rank, np.dtype(np.int64)).astype(dtype)
    return values_of(rank, dtype)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast(group, dtype):
    results = []
    for root in group.ranks:
        # The layouts of the ranks may differ: only the numbers of elements must match.
        for number in range(4):
            own = LAYOUTS[(number + group.rank()) % 4] if dtype.kind != "V" else "contiguous"
            array, memory = placed(any_values(group.rank(), dtype), own)
            if group.rank() == root:
                array.flags.writeable = False
            assert group.broadcast(array, root) is None
            results.append((root, array, memory))
        for layout in LAYOUTS[4:]:
            array, _ = placed(any_values(group.rank(), dtype), layout)
            group.broadcast(array, group_src=root)
            results.append((root, array, None))
    for root, array, memory in results:
        expected = any_values(root, dtype)
        if array.shape == ():
            expected = expected[0, 0]
        np.testing.assert_array_equal(array, expected[:0] if array.size == 0 else expected)
        assert untouched(memory)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_gather(group, dtype):
    results = []
    for layout in LAYOUTS if dtype.kind != "V" else ("contiguous", "scalar", "empty"):
        own, memory = placed(any_values(group.rank(), dtype), layout)
        own.flags.writeable = False
        into = [placed(any_values(9, dtype), layout) for _ in group.ranks]
        assert group.all_gather([array for array, _ in into], own) is None
        results.append((layout, into))
        assert untouched(memory)
    for layout, into in results:
        for rank, (array, memory) in zip(group.ranks, into, strict=True):
            np.testing.assert_array_equal(array, cut(any_values(rank, dtype), layout))
            assert untouched(memory)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("size", [1, 1000, 100_003, 1 << 20])
def test_sizes(group, size):
    array = np.arange(size, dtype=np.float32) + group.rank()
    copied = array.copy()
    gathered = [np.empty_like(array) for _ in group.ranks]
    group.all_gather(gathered, array)
    group.all_reduce(array)
    group.broadcast(copied, group.size() - 1)
    count = group.size()
    base = np.arange(size, dtype=np.float64)
    np.testing.assert_allclose(array, base * count + count * (count - 1) / 2, rtol=1e-6)
    np.testing.assert_array_equal(copied, base + count - 1)
    for rank, part in enumerate(gathered):
        np.testing.assert_array_equal(part, base + rank)


@pytest.mark.ranks(2)
def test_reduction_in_wider_type_than_float16(group):
    # In float16 2048 + 1 + 1 is 2048 if the ones are added one by one.
    values = np.array([60000.0, 2048.0, 1.0], np.float16)
    array = values if group.rank() == 0 else np.array([60000.0, 1.0, 1.0], np.float16)
    group.all_reduce(array, "avg")
    np.testing.assert_array_equal(array, np.array([60000.0, 1024.5, 1.0], np.float16))


@pytest.mark.ranks(3)
def test_small_parts_survive_in_bfloat16(group):
    array = np.array([256.0, 1.0, 1.0], BFLOAT16)[[group.rank()]]
    group.all_reduce(array)
    assert array.astype(float).tolist() == [258.0]


@pytest.mark.ranks(2, 3)
def test_names_of_operations(group):
    array = np.array([float(group.rank() + 1)])
    for name in ("sum", "SUM", "mean", "avg", "product", "max", "min"):
        copy = array.copy()
        group.all_reduce(copy, name)
        parts = [np.array([float(rank + 1)]) for rank in group.ranks]
        np.testing.assert_allclose(copy, reduced(ReduceOp[name.upper()], parts))


REDUCING = {
    "all_reduce": lambda group, op: group.all_reduce(np.ones(3), op),
    "reduce": lambda group, op: group.reduce(np.ones(3), group.ranks[0], op),
    "reduce_scatter": lambda group, op: group.reduce_scatter(
        np.ones(3), list(np.ones((group.size(), 3))), op
    ),
    "reduce_scatter_tensor": lambda group, op: group.reduce_scatter_tensor(
        np.ones(3), np.ones((group.size(), 3)), op
    ),
    "all_reduce_coalesced": lambda group, op: group.all_reduce_coalesced([np.ones(3)], op),
    "scan": lambda group, op: group.scan(np.ones(3), op),
    "exscan": lambda group, op: group.exscan(np.ones(3), op),
}


def frames_of(call):
    """Return how many Python functions a call enters."""
    entered = []
    sys.setprofile(lambda _, event, __: entered.append(event) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)


NAMED = [
    (name, spelling)
    for name in REDUCING
    for spelling in ("sum", "SUM", "mean", "product", "max")
    if spelling != "mean" or "scan" not in name  # a scan has no mean
]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("name", "spelling"), NAMED)
def test_names_of_operations_cost_no_frames(group, name, spelling):
    call = REDUCING[name]
    counts = []
    for op in (ReduceOp[spelling.upper()], spelling):
        call(group, op)  # the first call imports modules
        counts.append(frames_of(lambda op=op: call(group, op)))
    by_member, by_name = counts
    assert by_name <= by_member


@pytest.mark.ranks(2)
def test_few_frames(group):
    """Blocking calls enter few Python functions once the group compares one collective in 256."""
    array, large = np.ones(1), np.ones(1 << 17)
    outputs = [np.empty_like(large) for _ in range(2)]
    for _ in range(110):
        group.barrier()
    group.all_reduce(array)  # the flight recorder writes each call once
    group.all_gather(outputs, large)
    for op in (ReduceOp.SUM, "sum"):
        assert frames_of(lambda op=op: group.all_reduce(array, op)) <= 8 + 1  # one for the lambda
    assert frames_of(lambda: group.all_gather(outputs, large)) <= 25 + 1
    np.testing.assert_array_equal(outputs, 1)


@pytest.mark.ranks(2)
def test_arguments_that_cannot_be(group):
    # Refused before anything is sent: the ranks stay in step.
    with pytest.raises(TypeError, match="int64 cannot be reduced with AVG"):
        group.all_reduce(np.zeros(2, np.int64), "avg")
    with pytest.raises(TypeError, match="float32 cannot be reduced with BXOR"):
        group.all_reduce(np.zeros(2, np.float32), "bxor")
    with pytest.raises(TypeError, match="complex64 cannot be reduced with MAX"):
        group.all_reduce(np.zeros(2, np.complex64), ReduceOp.MAX)
    with pytest.raises(TypeError, match="Python objects"):
        group.broadcast(np.array([None]), 0)
    with pytest.raises(TypeError, match="list is not an array"):
        group.all_reduce([1.0])
    with pytest.raises(ValueError, match="unknown reduction 'median'"):
        group.all_reduce(np.zeros(2), "median")
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        group.all_reduce(frozen)
    with pytest.raises(ValueError, match="world rank 7 is not in group 'test'"):
        group.broadcast(np.zeros(2), 7)
    with pytest.raises(ValueError, match="not both"):
        group.reduce(np.zeros(2), 0, group_dst=0)
    with pytest.raises(ValueError, match="needs 2 arrays, not 1"):
        group.all_gather([np.zeros(2)], np.zeros(2))
    with pytest.raises(ValueError, match=r"float64\[2\] has float32\[2\] in its list"):
        group.all_gather([np.zeros(2, "f")] * 2, np.zeros(2))
    lists = [np.zeros(2), np.zeros(2)]
    if group.rank() == 0:
        with pytest.raises(ValueError, match="gather_list is missing on the root, rank 0"):
            group.gather(np.zeros(2))
        with pytest.raises(ValueError, match="scatter_list of group 'test' needs 2 entries, not 1"):
            group.scatter(np.zeros(2), lists[:1])
    else:
        with pytest.raises(ValueError, match="gather_list is only for the root, rank 0; leave it"):
            group.gather(np.zeros(2), lists)
        with pytest.raises(ValueError, match="scatter_list is only for the root"):
            group.scatter(np.zeros(2), lists)
    array = np.ones(2)
    group.all_reduce(array)
    assert array.tolist() == [2.0, 2.0]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("count", [2, 1 << 14])
def test_the_rows_of_an_array_in_place_of_a_list(group, count):
    rank, size = group.rank(), group.size()
    own, rows = np.full(count, float(rank)), np.empty((size, count))
    everyones = np.repeat(np.arange(float(size)), count).reshape(size, count)
    group.all_gather(rows, own)
    np.testing.assert_array_equal(rows, everyones)
    rows[:] = -1
    group.gather(own, rows if rank == 0 else None)
    np.testing.assert_array_equal(rows, everyones if rank == 0 else -1)
    group.scatter(own, everyones[::-1] if rank == 0 else None)
    np.testing.assert_array_equal(own, size - 1 - rank)
    group.all_to_all(rows, everyones)
    np.testing.assert_array_equal(rows, rank)


@pytest.mark.ranks(2)
def test_outputs_that_overlap(group):
    whole, own, rows = np.zeros((3, 2)), np.ones(2), [np.zeros(2), np.zeros(2)]
    twice = [whole[0], whole[0]]
    expanded = np.lib.stride_tricks.as_strided(np.zeros(2), (2, 2), (0, 8))
    uses = [
        lambda: group.all_gather(twice, own),
        lambda: group.all_gather_coalesced([[row] for row in twice], [own]),
        lambda: group.all_to_all(twice, rows),
        lambda: group.all_reduce(expanded),
        lambda: group.broadcast(expanded, 1 - group.rank()),
        lambda: group.all_gather_into_tensor(expanded, own),
        lambda: group.all_to_all_single(expanded, np.zeros((2, 2))),
        lambda: group.scatter(expanded[0:2], [np.zeros((2, 2))] * 2 if group.rank() == 0 else None),
        lambda: group.reduce_scatter(expanded, [np.zeros((2, 2))] * 2),
        lambda: group.recv(expanded, 1 - group.rank()),
    ]
    if group.rank() == 0:
        uses.append(lambda: group.gather(own, twice))
    for use in uses:
        with pytest.raises(ValueError, match=r"have memory in common|elements of it share memory"):
            use()
    group.all_gather([whole[0], whole[2]], own)
    assert whole.tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.ranks(2)
def test_what_a_rank_gives_itself(group):
    """Check the size of a rank's part for itself. No message carries this part."""
    rank, two, three = group.rank(), np.zeros(2), np.zeros(3)
    with pytest.raises(
        ValueError, match=rf"rank {rank} of group .* has 2 elements for itself .* 3"
    ):
        group.all_to_all([three, np.zeros(3)], [two, two])
    with pytest.raises(ValueError, match="for itself"):
        group.all_to_all_single(three, three.copy(), [rank + 1, 2 - rank], [2 - rank, rank + 1])


@pytest.mark.ranks(3)
def test_group_of_some_ranks(world):
    part = world.Create_group(world.group.Incl([2, 0])) if world.rank != 1 else None
    if part is None:
        return
    group = ProcessGroup(part, "two of three")
    assert group.ranks == (2, 0)
    array = np.array([float(world.rank)])
    group.broadcast(array, src=0)  # world rank 0 is group rank 1
    by_group = np.array([float(world.rank)])
    group.broadcast(by_group, group_src=0)
    first = np.array([float(world.rank)])
    with pytest.raises(ValueError, match="src, the rank of the other side, is missing"):
        group.broadcast(first)  # torch has no default, either
    group.broadcast(first, group_src=0)
    assert (array[0], by_group[0], first[0]) == (0.0, 2.0, 2.0)


@pytest.mark.ranks(2, 3)
def test_nobody_leaves_a_barrier_before_all_have_entered(group, world):
    early = []
    for late in group.ranks:
        if group.rank() == late:
            world.Barrier()  # the other ranks have entered
        # In MPI all ranks must use the same form, blocking or not.
        work = group.barrier(async_op=True)
        if group.rank() != late:
            early.append(work.is_completed())
            world.Barrier()
        work.wait()
    assert not any(early)
    assert group.barrier() is None


@pytest.mark.ranks(4)
def test_gathering_complex_long_doubles(group):
    """Gather long doubles as bytes: MPICH 5.0.2 aborts over four ranks while it packs them."""
    own = np.full((1000, 7), group.rank() + 1j, np.clongdouble)
    outputs = [np.empty_like(own) for _ in range(4)] if group.rank() == 0 else None
    group.gather(own, outputs, group_dst=0)
    for rank, output in enumerate(outputs or ()):
        np.testing.assert_array_equal(output, np.full((1000, 7), rank + 1j, np.clongdouble))
    group.all_reduce(own)
    np.testing.assert_array_equal(own, np.full((1000, 7), 6 + 4j, np.clongdouble))


FLOAT8 = [name for name in dir(ml_dtypes) if name.startswith("float8_e") and "e8m0" not in name]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8(world, name):
    """Some of these dtypes have the type characters of uint64 and complex long doubles."""
    dtype, rank = np.dtype(getattr(ml_dtypes, name)), world.rank
    group = mpidist.init_process_group()
    try:
        for op, expected in (("sum", 3.0), ("product", 2.0), ("max", 2.0), ("avg", 1.5)):
            array = np.full(5, 1.0 + rank, dtype)
            group.all_reduce(array, op)
            np.testing.assert_array_equal(array.astype(float), np.full(5, expected))
        array = np.full(5, 1.0 + rank, dtype)
        group.broadcast(array, 1)
        np.testing.assert_array_equal(array.astype(float), np.full(5, 2.0))
        rows = [np.empty(2, dtype) for _ in range(2)]
        group.all_gather(rows, np.full(2, 1.0 + rank, dtype))
        np.testing.assert_array_equal(np.array(rows, float), [[1, 1], [2, 2]])
    finally:
        mpidist.destroy_process_group()
