"""Arrays of any kind as buffers of MPI transfers and reductions. NumPy plays the MPI library."""

import array
import functools
import itertools
import operator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpidist import ReduceOp, host_view
from mpidist.buffers.packing import as_mpi_buffer
from mpidist.buffers.reduce_op import WrappingSum, to_reduce

# Type codes that mpi4py accepts directly, in the byte order of the machine.
MPI_TYPES = "bBhHiIlLqQfdgFDG"
NUMBERS = ["int8", "uint16", "int32", "int64", "uint64", "float32", "float64", "complex64"]
WIDENED = ["float16", "bfloat16"]
COMBINE = {
    ReduceOp.SUM: operator.add,
    WrappingSum.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
REAL = {ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX}
BITS = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def laid_out(values, layout):
    """Return a copy of the values in another memory layout."""
    values = np.asarray(values)
    if layout == "C":
        return values.copy()
    if layout == "F":
        return np.array(values, order="F")
    if layout == "swapped":
        return values.astype(values.dtype.newbyteorder())
    wide = np.zeros([2 * n + 1 for n in values.shape], values.dtype)
    view = wide[(..., *(slice(1, 2 * n + 1, 2) for n in values.shape))]
    if layout == "reversed":
        view = view[(..., *(slice(None, None, -1) for _ in values.shape))]
    view[...] = values
    return view


LAYOUTS = ["C", "F", "strided", "reversed"]


def draw(data, shape, dtype, layouts):
    values = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 4, shape)
    return laid_out(values.astype(dtype), data.draw(st.sampled_from(layouts)))


def is_fit_for_mpi(direct):
    return direct.flags.c_contiguous and direct.dtype.char in MPI_TYPES and direct.dtype.isnative


@settings(deadline=None, max_examples=100)
@given(st.data(), shapes, st.sampled_from([*NUMBERS, *WIDENED, "bool", "datetime64[s]", "i4,f8"]))
def test_moving(data, shape, name):
    dtype = dtype_of(name)
    layouts = [*LAYOUTS, "swapped"] if name in NUMBERS else LAYOUTS
    source = draw(data, shape, dtype, layouts)
    target = laid_out(np.zeros(shape, source.dtype), data.draw(st.sampled_from(LAYOUTS)))
    before = source.copy()
    send, nothing = as_mpi_buffer(source, write=False)
    recv, finish = as_mpi_buffer(target, write=True)
    assert nothing is None
    assert is_fit_for_mpi(send)
    assert is_fit_for_mpi(recv)
    assert send.nbytes == recv.nbytes == source.nbytes
    recv.reshape(-1).view(np.uint8)[:] = send.reshape(-1).view(np.uint8)
    if finish is not None:
        finish()
    np.testing.assert_array_equal(target, source)
    np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize("dtype", [*NUMBERS, "longdouble", "complex128"])
def test_what_mpi_knows_moves_and_reduces_without_a_copy(dtype):
    for values in (np.ones((2, 3), dtype), np.ones((), dtype), np.empty((0, 2), dtype)):
        direct, finish = as_mpi_buffer(values, write=True)
        assert (direct is values, finish) == (True, None)
        direct, op, finish = to_reduce(values, ReduceOp.SUM, 2)
        small = np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize <= 2
        expected = WrappingSum.SUM if small else ReduceOp.SUM
        assert (direct is values, op, finish) == (True, expected, None)


def reduce_all(arrays, op):
    """Reduce arrays in place, like an all-reduce of several ranks."""
    prepared = [to_reduce(a, op, len(arrays)) for a in arrays]
    assert all(is_fit_for_mpi(direct) for direct, _, _ in prepared)
    (mpi_op,) = {mpi_op for _, mpi_op, _ in prepared}
    combine = COMBINE[ReduceOp.SUM if mpi_op is ReduceOp.AVG else mpi_op]  # MPI computes a sum
    total = functools.reduce(combine, [direct for direct, _, _ in prepared])
    for direct, _, finish in prepared:
        direct[...] = total
        if finish is not None:
            finish()


def possible(name):
    if name in ("float32", "float64", *WIDENED):
        return REAL
    if name.startswith("complex"):
        return {ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT}
    return (REAL | BITS) - {ReduceOp.AVG}


@pytest.mark.parametrize(
    ("name", "op"), [(n, op) for n in [*NUMBERS, *WIDENED] for op in sorted(possible(n))]
)
def test_reducing(name, op):
    layouts = LAYOUTS if name in WIDENED else [*LAYOUTS, "swapped"]
    for shape, layout, count in itertools.product([(), (0, 2), (2, 3)], layouts, [1, 3]):
        rng = np.random.default_rng(count)
        ints = [rng.integers(1, 4, shape) for _ in range(count)]
        arrays = [laid_out(values.astype(dtype_of(name)), layout) for values in ints]
        expected = sum(ints) / count if op is ReduceOp.AVG else functools.reduce(COMBINE[op], ints)
        reduce_all(arrays, op)
        rtol = 1e-2 if name in WIDENED else 1e-6
        for a in arrays:
            np.testing.assert_allclose(a.astype(complex), expected, rtol=rtol)


@pytest.mark.parametrize("name", [*NUMBERS, *WIDENED, "bool", "datetime64[s]", "S3", "i4,f8"])
@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM])
def test_what_cannot_be_reduced(name, op):
    values = np.zeros(3, dtype_of(name))
    known = name in NUMBERS or name in WIDENED or name == "bool"
    if known and op in possible(name):
        to_reduce(values, op, 2)
    else:
        with pytest.raises(TypeError, match=f"cannot be reduced with {op.name}"):
            to_reduce(values, op, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bools_reduce_by_logic(layout):
    table = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], bool)
    for op, expected in (
        (ReduceOp.SUM, table.any(0)),
        (ReduceOp.MAX, table.any(0)),
        (ReduceOp.BOR, table.any(0)),
        (ReduceOp.PRODUCT, table.all(0)),
        (ReduceOp.MIN, table.all(0)),
        (ReduceOp.BAND, table.all(0)),
        (ReduceOp.BXOR, table[0] ^ table[1]),
    ):
        arrays = [laid_out(row, layout) for row in table]
        reduce_all(arrays, op)
        for a in arrays:
            np.testing.assert_array_equal(a, expected)


@pytest.mark.parametrize("name", WIDENED)
def test_half_precision_adds_in_single_precision(name):
    arrays = [np.full(4, 0.001, dtype_of(name)) for _ in range(1000)]
    each = float(arrays[0][0])
    reduce_all(arrays, ReduceOp.SUM)
    np.testing.assert_allclose(arrays[0].astype(float), 1000 * each, rtol=0.01)


def test_a_contribution_is_not_changed():
    for values in (np.arange(3.0), np.arange(6.0)[::2], np.arange(3).astype(np.float16)):
        values.flags.writeable = False
        _, op, finish = to_reduce(values, ReduceOp.AVG, 2, write=False)
        assert (op, finish) == (ReduceOp.AVG, None)


def test_results_need_memory_that_can_be_written():
    values = np.zeros(3)
    values.flags.writeable = False
    for use in (
        lambda: as_mpi_buffer(values, write=True),
        lambda: to_reduce(values, ReduceOp.SUM, 2),
        lambda: as_mpi_buffer(np.broadcast_to(np.zeros(1), 3), write=True),
        lambda: as_mpi_buffer(b"bytes", write=True),
    ):
        with pytest.raises(ValueError, match="read-only"):
            use()
    direct, _ = as_mpi_buffer(values, write=False)
    assert direct is values


@pytest.mark.parametrize("dtype", [object, [("a", object)]])
def test_python_objects_do_not_move(dtype):
    values = np.zeros(2, dtype)
    for use in (
        lambda: as_mpi_buffer(values, write=False),
        lambda: to_reduce(values, ReduceOp.SUM, 2),
    ):
        with pytest.raises(TypeError, match="holds Python objects"):
            use()


def test_views_of_other_arrays():
    other = Foreign(np.zeros(2))
    for source, memory in (
        (other, other.memory),
        (a := np.zeros(2), a),
        (b := array.array("d", [0, 0]), b),
        (memoryview(c := np.zeros(2)), c),
    ):
        view = host_view(source)
        view[1] = 5
        assert memory[1] == 5
    assert host_view(bytearray(b"ab")).tolist() == [97, 98]


@pytest.mark.parametrize("thing", [[1, 2], 3, 2.5, "text", {}])
def test_what_is_no_array(thing):
    with pytest.raises(TypeError, match=f"a {type(thing).__name__} is not an array"):
        host_view(thing)


def test_none_is_no_array():
    with pytest.raises(TypeError, match="None is not an array: does the parameter have a gradient"):
        host_view(None)


class Foreign:
    """An array of another framework that exports given memory and names a given device."""

    def __init__(self, memory, device=1, error=None):
        self.memory, self.device, self.error = memory, device, error

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **kwargs):
        if self.error is not None:
            raise self.error
        return self.memory.__dlpack__(**kwargs)

    def __array__(self, dtype=None, copy=None):
        return self.memory


@pytest.mark.parametrize("device", [8, 10, 14])
def test_dlpack_of_a_device(device):
    array = Foreign(np.zeros(3), device, AssertionError("asked for its memory"))
    with pytest.raises(TypeError, match=r"a Foreign lies in .* no CUDA GPU; .*tensor\.cpu\(\)"):
        host_view(array)


@pytest.mark.parametrize("error", [BufferError("sealed"), RuntimeError("sealed")])
def test_dlpack_that_fails(error):
    with pytest.raises(TypeError, match=r"memory of a Foreign .*sealed.*pass a NumPy array"):
        host_view(Foreign(np.zeros(3), error=error))


def test_dlpack_that_says_it_is_read_only():
    memory = np.zeros(3)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="read-only; pass a writable copy"):
        as_mpi_buffer(Foreign(memory), write=True)


@pytest.mark.parametrize("package", ["jax", "jaxlib._jax"])
def test_arrays_that_cannot_change(package):
    kind = type("ArrayImpl", (Foreign,), {"__module__": package})
    memory = np.arange(3).astype(ml_dtypes.bfloat16)
    array = kind(memory, error=BufferError("DLPack would let it be written"))
    view = host_view(array)
    assert np.shares_memory(view, memory)
    assert memory.flags.writeable
    for use in (
        lambda: as_mpi_buffer(array, write=True),
        lambda: to_reduce(array, ReduceOp.SUM, 2),
    ):
        with pytest.raises(ValueError, match="read-only; pass a writable copy"):
            use()
    direct, _, _ = to_reduce(array, ReduceOp.SUM, 2, write=False)
    assert direct.tolist() == [0, 1, 2]


def test_names_of_reductions():
    assert ReduceOp.MEAN is ReduceOp.AVG
    for op in ReduceOp:
        assert ReduceOp.of(op) is op
        assert ReduceOp.of(op.name) is ReduceOp.of(op.name.lower()) is op
    assert ReduceOp.of("mean") is ReduceOp.AVG
    for name in ("median", "", 3):
        with pytest.raises(ValueError, match=r"unknown reduction .*SUM.*MEAN"):
            ReduceOp.of(name)
