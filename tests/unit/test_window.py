"""Private windows, and what every window refuses."""

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import Window, errors


def test_private_memory():
    window = Window.private(1000)
    assert window.local.dtype == np.uint8
    assert window.local.shape == (1000,)
    assert not window.local.any()
    window.local[5] = 9
    assert window.part(0)[5] == 9
    window.sync()
    window.free()
    window.free()


def test_empty_private_memory():
    assert Window.private(0).local.shape == (0,)


def test_sizes_and_numbers_that_cannot_be():
    with pytest.raises(ValueError, match="cannot have -5 bytes"):
        Window.private(-5)
    window = Window.private(16)
    for value in (1.9, "1", None):
        with pytest.raises(TypeError):
            window.fetch_add(0, 0, value)
    assert window.fetch_add(0, 0, np.int32(3)) == 0
    assert window.local.view(np.int64)[0] == 3
    with pytest.raises(TypeError):
        Window.private(10.5)


def test_private_memory_is_only_address_space_until_it_is_written():
    window = Window.private(1 << 42)  # more than any machine of ours has
    window.local[-1] = 3
    assert window.local[-1] == 3
    assert window.local[1 << 41] == 0


@given(st.integers(0, 300), st.integers(0, 300))
def test_bytes_go_in_and_come_out(offset, size):
    window = Window.private(600)
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    window.put(0, offset, data)
    out = np.zeros(size, np.uint8)
    window.get(0, offset, out)
    np.testing.assert_array_equal(out, data)
    assert not window.local[:offset].any()
    assert not window.local[offset + size :].any()


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_arrays_of_any_shape(shape):
    window = Window.private(1000)
    data = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 0.5
    window.put(0, 3, data)
    window.put(0, 200, data)
    window.add(0, 200, data)
    out, twice = np.empty(shape), np.empty(shape)
    window.get(0, 3, out)
    window.get(0, 200, twice)
    np.testing.assert_array_equal(out, data)
    np.testing.assert_array_equal(twice, 2 * data)


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "u8", "f2", "f4", "f8", "c16", "bfloat16"])
def test_sums(dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    window = Window.private(800)
    data = np.arange(7).astype(dtype)
    for _ in range(3):
        window.add(0, 2 * dtype.itemsize, data)
    out = np.empty(7, dtype)
    window.get(0, 2 * dtype.itemsize, out)
    np.testing.assert_array_equal(out, (3 * np.arange(7)).astype(dtype))


def test_threads_lose_nothing():
    window = Window.private(64)
    got = []

    def count():
        for _ in range(500):
            got.append(window.fetch_add(0, 8, 3))
            window.add(0, 16, np.ones(2))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(0, 6000, 3))
    assert window.fetch_add(0, 8, -1) == 6000
    assert window.local[16:32].view(float).tolist() == [2000, 2000]


class OnDevice:
    def __dlpack__(self, **_):
        raise AssertionError("asked for its memory")

    def __dlpack_device__(self):
        return 10, 0


read_only = np.zeros(4, np.uint8)
read_only.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda w: w.get(1, 0, np.zeros(1)), ValueError, r"of 1 rank\(s\) has no rank 1"),
        (lambda w: w.part(-1), ValueError, "has no rank -1"),
        (lambda w: w.put(-1, 0, np.zeros(1)), ValueError, "has no rank -1"),
        (lambda w: w.put(0, 93, np.zeros(1)), ValueError, "8 bytes at offset 93 .* has 100 bytes"),
        (lambda w: w.get(0, -1, np.zeros(1)), ValueError, "8 bytes at offset -1"),
        (lambda w: w.get(0, 101, np.zeros(0)), ValueError, "0 bytes at offset 101"),
        (lambda w: w.add(0, 4, np.zeros(1)), ValueError, "offset 4 is not a multiple of 8"),
        (lambda w: w.fetch_add(0, 4, 1), ValueError, "offset 4 is not a multiple of 8"),
        (lambda w: w.fetch_add(0, 96, 1), ValueError, "8 bytes at offset 96"),
        (lambda w: w.fetch_add(0, 0, 1 << 63), OverflowError, "too large|too big"),
        (lambda w: w.get(0, 0, np.zeros((4, 4))[:, 0]), ValueError, "not C-contiguous"),
        (lambda w: w.put(0, 0, np.zeros((4, 4))[:, 0]), ValueError, "not C-contiguous"),
        (lambda w: w.get(0, 0, read_only), ValueError, "read-only"),
        (lambda w: w.put(0, 0, OnDevice()), TypeError, "no CUDA GPU"),
        (lambda w: w.put(0, 0, [1, 2]), TypeError, "a list is not an array"),
        (lambda w: w.put(0, 0, np.array([None])), TypeError, "Python objects"),
        (lambda w: w.add(0, 0, np.zeros(1, bool)), TypeError, "dtype bool cannot be added"),
        (lambda w: w.add(0, 0, np.zeros(1, ">f8")), TypeError, "byte order"),
    ],
)
def test_what_a_window_refuses(call, error, text):
    window = Window.private(100)
    with pytest.raises(error, match=text):
        call(window)
    assert not window.local.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.get(0, 0, np.zeros(1)),
        lambda w: w.put(0, 0, np.zeros(1)),
        lambda w: w.add(0, 0, np.zeros(1)),
        lambda w: w.fetch_add(0, 0, 1),
        lambda w: w.sync(),
        lambda w: w.part(0),
        lambda w: w.local,
    ],
)
def test_a_window_that_was_freed(call):
    window = Window.private(100)
    window.free()
    with pytest.raises(errors.FailedPreconditionError, match="was freed"):
        call(window)


def test_arrays_on_devices(xp):
    window = Window.private(100)
    window.put(0, 8, xp.asarray(np.arange(4.0)))
    window.add(0, 8, xp.asarray(np.ones(4)))
    out = xp.zeros(4)
    window.get(0, 8, out)
    np.testing.assert_array_equal(xp.asnumpy(out), np.arange(4) + 1)
