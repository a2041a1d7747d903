"""Host arrays that are prefetched to a device: streams, reuse of memory, chunks."""

import gc

import ml_dtypes
import numpy as np
import pytest
from _cases.gpu_calls import device_bytes, idle_bytes, lent_bytes

from mpidist import errors
from mpidist.gpu import Prefetcher


def sent(xp, *arrays, number=0):
    return Prefetcher(number).send(list(arrays)).hand_over()


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f4", "D", ">f4"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "scalar", "empty"])
def test_values_arrive(xp, dtype, layout):
    whole = (
        np.arange(24).reshape(4, 6) % 2 if dtype == "?" else np.arange(24).reshape(4, 6)
    ).astype(dtype)
    array = {
        "contiguous": whole,
        "strided": whole[::2, ::-1],
        "scalar": np.asarray(whole[1, 1]),
        "empty": whole[:0],
    }[layout]
    (got,) = sent(xp, array)
    assert isinstance(got, xp.ndarray)
    assert got.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(xp.asnumpy(got), array)


def test_it_is_on_the_device_that_was_named(xp):
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    (got,) = sent(xp, np.ones(3), number=1)
    assert got.device.id == 1


def test_the_stream_that_takes_it_waits_and_the_host_does_not(xp):
    batch = Prefetcher(0).send([np.full(1000, 5, "f4")])
    with xp.cuda.Stream(non_blocking=True):
        (array,) = batch.hand_over()
        array += 1
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(1000, 6))


def test_what_was_sent_may_be_changed_at_once(xp):
    array = np.full(1000, 5, "f4")
    batch = Prefetcher(0).send([array])
    array[...] = 9
    np.testing.assert_array_equal(xp.asnumpy(batch.hand_over()[0]), np.full(1000, 5))


def test_memory_is_not_used_again_while_a_stream_works_on_it(xp):
    prefetcher = Prefetcher(0)
    with xp.cuda.Stream(non_blocking=True):
        total = xp.zeros(1000, "f4")
        for number in range(50):
            (array,) = prefetcher.send([np.full(1000, number, "f4")]).hand_over()
            total += array
            del array
        np.testing.assert_array_equal(xp.asnumpy(total), np.full(1000, sum(range(50))))


def test_memory_is_used_again_once_all_views_are_gone(xp):
    gc.collect()
    prefetcher = Prefetcher(0)
    (array,) = prefetcher.send([np.zeros(1 << 14, "f4")]).hand_over()
    before, view = device_bytes(xp), array[3:5]
    del array
    assert device_bytes(xp) == before, "a view of it is still there"
    del view
    assert device_bytes(xp) == before - (1 << 16)


def test_what_nobody_wants_gives_its_memory_back(xp):
    gc.collect()
    before = device_bytes(xp), lent_bytes()
    Prefetcher(0).send([np.zeros(1000)])
    assert (device_bytes(xp), lent_bytes()) == before


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([None]),
        np.array([b"a"]),
        np.zeros(3, np.longdouble),
        np.zeros(3, "f4,i4"),
        np.zeros(3, ml_dtypes.float8_e5m2),
    ],
)
def test_what_cupy_does_not_have_is_refused(xp, array):
    with pytest.raises(TypeError, match="cannot lie on a GPU"):
        Prefetcher(0).send([np.zeros(3), array])


def test_memory_comes_back_when_a_copy_fails(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("copies cannot be made to fail there")

    def fail(*_):
        raise xp.CUDARuntimeError(1)

    gc.collect()
    prefetcher = Prefetcher(0)
    prefetcher.send([np.zeros(1 << 16)]).hand_over()
    before = device_bytes(xp), lent_bytes(), idle_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(xp.cuda.runtime, "memcpyAsync", fail)
        for _ in range(5):
            with pytest.raises(errors.DistBackendError, match="GPU 0"):
                prefetcher.send([np.zeros(1 << 16)])
            xp.cuda.Device(0).synchronize()
    assert device_bytes(xp) <= before[0]
    assert lent_bytes() <= before[1]
    assert idle_bytes() <= before[2] + (1 << 19)


def test_a_device_that_there_is_not(xp):
    with pytest.raises(errors.DistBackendError, match="GPU 99"):
        Prefetcher(99)


def test_a_device_without_memory(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("memory cannot be made short there")

    def fail(_):
        raise xp.OutOfMemoryError("out of memory")

    monkeypatch.setattr(xp.cuda, "alloc", fail)
    with pytest.raises(
        errors.ResourceExhaustedError, match="GPU 0 has not enough memory for an array"
    ):
        Prefetcher(0).send([np.zeros(1 << 20)])
