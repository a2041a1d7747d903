"""Uploads and downloads on streams of their own: order and memory."""

import gc

import ml_dtypes
import numpy as np
import pytest
from _cases.gpu_calls import device_bytes, lent_bytes
from _cases.held import held

from mpidist import errors
from mpidist.gpu import Download, Prefetcher, Upload, copy_stream, staging
from mpidist.gpu.streams import is_done

SIZE = 1000


def uploaded(value, dtype="f4", size=SIZE):
    """Upload an array of one value, and return the device array for the current stream."""
    upload = Upload(0, (size,), np.dtype(dtype))
    upload.host[...] = value
    return upload.start()


@pytest.fixture
def stream(xp):
    """Yield a current stream for which memory is allocated and kernels are loaded.

    Loading a kernel may wait for the work of all streams, including a blocked stream.
    """
    with xp.cuda.Stream(non_blocking=True) as stream:
        array = uploaded(0)
        array += array
        array += array + 1
        Download(array).result()
        stream.synchronize()
        del array
        yield stream


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f4", "D"])
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)])
def test_values_are_uploaded_and_downloaded(xp, dtype, shape):
    values = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2 + 1).astype(dtype)
    upload = Upload(0, shape, np.dtype(dtype))
    upload.host[...] = values
    array = upload.start()
    assert isinstance(array, xp.ndarray)
    assert array.dtype == dtype
    np.testing.assert_array_equal(xp.asnumpy(array), values)
    copy = Download(array)
    assert (copy.shape, copy.dtype) == (shape, np.dtype(dtype))
    np.testing.assert_array_equal(copy.result(), values)
    np.testing.assert_array_equal(np.asarray(copy), values)


def test_they_are_on_the_device_that_was_named(xp):
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    upload = Upload(1, (3,), np.dtype("f4"))
    upload.host[...] = 5
    array = upload.start()
    assert array.device.id == 1
    np.testing.assert_array_equal(Download(array).result(), [5, 5, 5])


def test_an_upload_passes_by_what_the_stream_has_to_do(xp, stream):
    with held(stream):
        array = uploaded(7)
        copy_stream(0, "up").synchronize()
        with xp.cuda.Stream(non_blocking=True):
            np.testing.assert_array_equal(xp.asnumpy(array), np.full(SIZE, 7))


def test_the_stream_that_takes_it_waits_for_it(xp, stream):
    array = uploaded(7)
    array += 1
    np.testing.assert_array_equal(xp.asnumpy(array), np.full(SIZE, 8))


def test_memory_is_not_used_again_while_the_stream_works_on_it(xp, stream):
    total = xp.zeros(SIZE, "f4")
    for number in range(50):
        array = uploaded(number)
        total += array
        del array
        copy_stream(0, "up").synchronize()  # the upload stream may run ahead of the current stream
    np.testing.assert_array_equal(xp.asnumpy(total), np.full(SIZE, sum(range(50))))


@pytest.mark.parametrize("way", ["upload", "prefetcher"])
def test_new_memory_is_written_behind_what_the_current_stream_has_to_do_with_it(xp, way):
    """CuPy's pool reuses the memory of a freed array while operations on it are still queued."""
    prefetcher, size = Prefetcher(0), 3_000_000
    with xp.cuda.Stream(non_blocking=True):
        if way == "upload":
            array = uploaded(7, "u1", size)
            copy_stream(0, "up").synchronize()
        else:
            batch = prefetcher.send([np.full(size, 7, "u1")])
            copy_stream(0, "up").synchronize()
            (array,) = batch.hand_over()
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(size, 7))


def test_memory_is_bounded_where_the_host_runs_ahead(xp, stream, monkeypatch):
    size = 40_000
    monkeypatch.setattr(staging, "WAITING_BYTES", 4 * 4 * size)
    gc.collect()
    total = xp.zeros(size, "f4")
    pool = xp.get_default_memory_pool()
    before = pool.used_bytes()
    with held(stream):
        for number in range(50):
            total += uploaded(number, size=size)
        assert pool.used_bytes() <= before + 8 * 4 * size
    np.testing.assert_array_equal(xp.asnumpy(total), np.full(size, sum(range(50))))


def test_what_leaves_is_behind_what_was_queued_and_passes_by_what_is_queued_later(xp, stream):
    array = xp.zeros(SIZE, "f4")
    for _ in range(20):
        array += 1
    copy = Download(array)
    with held(stream):
        np.testing.assert_array_equal(copy.result(), np.full(SIZE, 20))


def test_the_stream_goes_on_while_arrays_leave(xp, stream):
    array = uploaded(7)
    with held(copy_stream(0, "down")):
        copy = Download(array)
        np.testing.assert_array_equal(xp.asnumpy(array + 1), np.full(SIZE, 8))
        assert not is_done(copy._block.event)
    np.testing.assert_array_equal(copy.result(), np.full(SIZE, 7))


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_strided_arrays_leave(xp, stream, layout):
    whole = xp.asarray(np.arange(24.0).reshape(4, 6))
    whole += 1
    array = whole.T if layout == "transposed" else whole[::2, ::-1]
    expected = np.arange(1.0, 25).reshape(4, 6)
    expected = expected.T if layout == "transposed" else expected[::2, ::-1]
    copy = Download(array)
    del array
    with held(stream):
        np.testing.assert_array_equal(copy.result(), expected)


def test_dtypes_that_cupy_does_not_know_leave(xp):
    array = xp.asarray(np.arange(6, dtype=np.uint16)).view(ml_dtypes.bfloat16)
    values = Download(array).result()
    assert values.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(values.view(np.uint16), np.arange(6))


def test_memory_comes_back(xp, stream):
    gc.collect()
    before = device_bytes(xp), lent_bytes()
    array = uploaded(3)
    assert device_bytes(xp) > before[0]
    copies = [Download(array) for _ in range(3)]
    copies[0].result()
    Upload(0, (SIZE,), np.dtype("f4"))  # freed at once
    del array, copies
    assert (device_bytes(xp), lent_bytes()) == before


def test_copies_that_fail(xp, stream, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("copies cannot be made to fail there")

    def fail(*_):
        raise xp.CUDARuntimeError(1)

    array, copy = uploaded(3), Download(uploaded(4))
    gc.collect()
    before = device_bytes(xp), lent_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(xp.cuda.runtime, "memcpyAsync", fail)
        for attempt in (lambda: uploaded(1), lambda: Download(array)):
            with pytest.raises(errors.DistBackendError, match="GPU 0"):
                attempt()
        patch.setattr(xp, "failure", [700])
        with pytest.raises(errors.DistBackendError, match=r"copying float32.1000. on GPU 0 to"):
            copy.result()
    assert (device_bytes(xp), lent_bytes()) == before
    np.testing.assert_array_equal(copy.result(), np.full(SIZE, 4))


def test_a_device_without_memory(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("memory cannot be made short there")

    def fail(_):
        raise xp.OutOfMemoryError("out of memory")

    monkeypatch.setattr(xp.cuda, "alloc", fail)
    with pytest.raises(errors.ResourceExhaustedError, match=r"GPU 0 .* an array of float32\[99999"):
        Upload(0, (9999999,), np.dtype("f4"))
