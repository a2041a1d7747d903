"""Copies: the plain and the compiled copies give the same results."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.buffers import compiling, copying
from mpidist.buffers.compiling import can_compile
from mpidist.buffers.copying import copy_array, put_rows, take_rows

pytest.importorskip("numba")
from mpidist.buffers import compiled_copies
from mpidist.buffers.compiled_copies import copy_past_caches, put_compiled, take_ahead

LARGE = copying.LARGE_BYTES


@pytest.fixture
def used(monkeypatch):
    """Return a list that records the targets of copies that bypass the caches."""
    targets = []

    def copy(target, source):
        targets.append(target)
        copy_past_caches(target, source)

    monkeypatch.setattr(compiled_copies, "copy_past_caches", copy)
    return targets


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 130), st.integers(0, 130), st.integers(0, 5000))
def test_every_byte_and_no_other(begin, whence, length):
    source = np.random.default_rng(length).integers(0, 256, whence + length, np.uint8)
    target, expected = np.full((2, begin + length + 200), 7, np.uint8)
    copy_past_caches(target[begin : begin + length], source[whence:])
    expected[begin : begin + length] = source[whence:]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.complex128, ml_dtypes.bfloat16, np.bool_, "M8[s]", "f4,i2", ">i4"]
)
def test_dtypes_and_shapes(used, dtype):
    dtype = np.dtype(dtype)
    bytes_ = np.random.default_rng(1).integers(0, 2, (LARGE // 64 + 3) * 64 * dtype.itemsize)
    source = bytes_.astype(np.uint8).view(dtype).reshape(64, -1, 1)
    target = np.zeros_like(source)
    copy_array(target, source)
    assert target.tobytes() == source.tobytes()
    assert len(used) == 1


@pytest.mark.parametrize("what", ["cast", "strided", "backwards", "broadcast", "small", "objects"])
def test_what_numpy_copies(used, what):
    count = 1000 if what == "small" else LARGE // 8
    source, target = np.arange(count * 2.0)[:count], np.zeros(2 * count)[:count]
    if what == "cast":
        target = target.astype(np.float32)
    if what == "strided":
        target = np.zeros(2 * count)[::2]
    if what == "backwards":
        source = source[::-1]
    if what == "broadcast":
        source = source[:1]
    if what == "objects":
        source, target = source.astype(object), target.astype(object)
    copy_array(target, source)
    np.testing.assert_array_equal(target, np.broadcast_to(source, target.shape))
    assert used == []


def test_arrays_that_overlap(used):
    whole = np.arange(LARGE, dtype=np.int64)
    copy_array(whole[5:], whole[:-5])
    np.testing.assert_array_equal(whole[5:], np.arange(LARGE - 5))
    assert used == []


def test_a_target_that_is_read_only():
    target = np.zeros(LARGE, np.uint8)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_array(target, np.ones(LARGE, np.uint8))
    assert not target.any()


def test_without_numba(monkeypatch, used):
    monkeypatch.setattr(copying, "can_compile", lambda: False)
    target, source = np.zeros(LARGE, np.uint8), np.ones(LARGE, np.uint8)
    copy_array(target, source)
    assert target.all()
    assert used == []


def test_a_numba_that_cannot_be_imported(monkeypatch, caplog):
    def fail(name):
        raise ImportError("needs another NumPy")

    monkeypatch.setattr(compiling, "import_module", fail)
    can_compile.cache_clear()
    try:
        target, source = np.zeros(LARGE, np.uint8), np.ones(LARGE, np.uint8)
        copy_array(target, source)
        assert target.all()
        assert "numba cannot be imported: needs another NumPy" in caplog.text
    finally:
        can_compile.cache_clear()


def test_first_copies_of_several_threads():
    script = """
import threading
import numpy as np
from mpidist.buffers.copying import copy_array
sources = [np.full(9 << 20, n, np.uint8) for n in range(4)]
targets = [np.zeros(9 << 20, np.uint8) for _ in sources]
threads = [threading.Thread(target=copy_array, args=p) for p in zip(targets, sources)]
[t.start() for t in threads]
[t.join() for t in threads]
assert all((t == s).all() for t, s in zip(targets, sources))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([np.uint8, np.float32, np.float64, np.complex128, ml_dtypes.bfloat16]),
    st.integers(1, 300),
    st.integers(1, 90),
    st.integers(1, 70),
)
def test_rows(dtype, rows, width, count):
    random = np.random.default_rng(rows)
    table = random.integers(0, 2, (rows, width)).astype(dtype)
    ids = random.integers(0, rows, count)
    around = np.zeros((count + 2, width), dtype)
    take_ahead(table, ids, around[1:-1])
    np.testing.assert_array_equal(around[1:-1], table[ids])
    assert not around[0].any()
    assert not around[-1].any()
    ids, target = np.unique(ids), np.zeros_like(table)
    put_compiled(target, ids, table[ids])
    expected = np.zeros_like(table)
    expected[ids] = table[ids]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("shape", [(1 << 19, 16), (1 << 18, 4, 8), (1 << 23,), (1 << 13, 2048)])
def test_rows_of_large_tables(shape):
    table = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    ids = np.random.default_rng(0).integers(0, shape[0], 1000)
    ids[-2:] = 0, shape[0] - 1
    for chosen in (ids, ids[:3], ids[:0], ids[::2]):
        out = np.zeros((len(chosen), *shape[1:]), np.float32)
        take_rows(table, chosen, out)
        np.testing.assert_array_equal(out, table[chosen])


@pytest.mark.parametrize("wrong", [-1, 1 << 18])
def test_a_row_that_is_not_there(wrong):
    table = np.zeros((1 << 18, 32), np.float32)
    ids = np.zeros(1000, np.int64)
    ids[500] = wrong
    with pytest.raises(IndexError, match="has 262144 rows"):
        take_rows(table, ids, np.empty((1000, 32), np.float32))


@pytest.mark.parametrize("shape", [(5000, 16), (5000, 4, 8), (5000,), (5000, 2048), (5000, 0)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
def test_rows_that_are_put(shape, dtype):
    random = np.random.default_rng(0)
    ids = random.permutation(5000)[:1000]
    for chosen in (ids, ids[:3], ids[:0], ids[::2]):
        rows = random.integers(0, 2, (len(chosen), *shape[1:])).astype(dtype)
        rows.flags.writeable = False
        target, expected = np.zeros((2, *shape), dtype)
        put_rows(target, chosen, rows)
        expected[chosen] = rows
        np.testing.assert_array_equal(target, expected)
    strided = np.zeros((5000, 2, *shape[1:]), dtype)[:, 0]
    put_rows(strided, chosen, rows)
    np.testing.assert_array_equal(strided[chosen], rows)


@pytest.mark.parametrize("wrong", [-5001, 5000])
def test_a_place_that_is_not_there(wrong):
    table, ids = np.zeros((5000, 32), np.float32), np.arange(1000)
    ids[500] = wrong
    with pytest.raises(IndexError):
        put_rows(table, ids, np.ones((1000, 32), np.float32))
    assert not table[700:].any()
    with pytest.raises(IndexError):
        put_rows(table[:0], ids, np.ones((1000, 32), np.float32))
    with pytest.raises(IndexError):  # few, and from the end
        put_rows(table, np.array([0, -1]), np.ones((2, 32), np.float32))
    table.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        put_rows(table, np.arange(1000), np.ones((1000, 32), np.float32))
