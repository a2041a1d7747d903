"""Failing devices and unusable arrays: errors, and no leaks."""

import gc
import os

import numpy as np
import pytest
from _cases.gpu_calls import lent_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import errors, host_view
from mpidist.buffers.packing import with_upload
from mpidist.gpu import (
    Prefetcher,
    cupy_api,
    device_array,
    make_current,
    pinned_pool,
)
from mpidist.gpu.pinned_pool import PinnedPool

LOST = 700
LENGTH = 3 << 16


@pytest.fixture
def stand_in(xp):
    """Yield the CuPy stand-in, in which devices can be made to fail."""
    if xp.__name__ == "cupy":
        pytest.skip("a device cannot be made to fail")
    yield xp
    xp.failure.clear()
    xp.longest.clear()


@pytest.fixture(autouse=True)
def nothing_leaks():
    gc.collect()
    before = lent_bytes()
    yield
    gc.collect()
    assert lent_bytes() == before


@pytest.fixture(autouse=True)
def rank(monkeypatch):
    monkeypatch.setattr(cupy_api, "this_rank", lambda: "rank 3 (worker 1) on n7")


def bring(view):
    with_upload(view)()


def fails(kind, text, call, *args):
    with pytest.raises(kind, match=text):
        call(*args)


@settings(max_examples=60)
@given(data=st.data())
def test_strided_arrays_are_packed_part_by_part(xp_module, data):
    xp = xp_module
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    axes = data.draw(st.permutations(range(len(shape))))
    steps = tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape)
    limit = data.draw(st.integers(1, 200))
    expected = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    whole = xp.asarray(expected.copy())
    array = whole.transpose(axes)[steps]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_array, "_PART_BYTES", max(limit, 8))
        view = host_view(array)
        np.testing.assert_array_equal(view, expected.transpose(axes)[steps])
        view += 1000
        bring(view)
    expected.transpose(axes)[steps] += 1000
    np.testing.assert_array_equal(xp.asnumpy(whole), expected)


def test_what_is_packed_takes_little_memory_of_the_device(stand_in, monkeypatch):
    xp, array = stand_in, stand_in.zeros((2, LENGTH), "f4").T
    monkeypatch.setattr(device_array, "_PART_BYTES", 100_000)
    xp.longest.append(100_000)
    view = host_view(array)
    view[...] = numbers = np.arange(2 * LENGTH, dtype="f4").reshape(LENGTH, 2)
    bring(view)
    np.testing.assert_array_equal(host_view(array), numbers)


@pytest.mark.parametrize("way", ["download", "upload"])
def test_a_device_without_memory_to_pack_says_so(stand_in, way):
    xp, array = stand_in, stand_in.zeros((2, LENGTH), "f4").T
    view = host_view(array, read=False)
    xp.longest.append(10)
    call = (lambda: host_view(array)) if way == "download" else (lambda: bring(view))
    text = r"GPU 0 of rank 3 .worker 1. on n7 has not enough memory for .*float32.196608, 2. on GPU"
    fails(errors.ResourceExhaustedError, text, call)
    xp.longest.clear()
    bring(view)
    np.testing.assert_array_equal(host_view(array), view)


@pytest.mark.parametrize("step", ["pack", "copy"])
def test_copies_of_the_parts_before_keep_their_memory(stand_in, monkeypatch, step):
    """If a download fails midway, its block is not reused until the started copies end."""
    xp, size = stand_in, 5000
    monkeypatch.setattr(device_array, "_PART_BYTES", 4 * size // 2)
    monkeypatch.setattr(pinned_pool, "pool", PinnedPool())
    first, second = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    calls = []
    place = (xp, "ascontiguousarray") if step == "pack" else (xp.cuda.runtime, "memcpyAsync")
    itself = getattr(*place)

    def fail_second(*args):
        calls.append(args)
        if len(calls) > 1:
            raise xp.CUDARuntimeError(1)
        return itself(*args)

    with first:
        array = xp.full(2 * size, 111.0, "f4")[::2]
        with monkeypatch.context() as patch:
            patch.setattr(*place, fail_second)
            fails(errors.DistBackendError, "GPU 0", host_view, array)
    assert len(calls) == 2
    with second:
        other = host_view(xp.full(size, 222.0, "f4"))
        first.synchronize()
        np.testing.assert_array_equal(other, np.full(size, 222))


def no_pinned_memory(xp, status=2):
    def fail(*_):
        raise xp.CUDARuntimeError(status)

    return fail


def test_without_pinned_memory_an_operation_goes_on(stand_in, monkeypatch, caplog):
    xp = stand_in
    array = xp.asarray(np.arange(LENGTH, dtype="f4"))
    monkeypatch.setattr(pinned_pool, "_warned", [])
    monkeypatch.setattr(pinned_pool, "pool", PinnedPool())
    monkeypatch.setattr(xp.cuda, "PinnedMemory", no_pinned_memory(xp))
    view = host_view(array)
    view += 1
    bring(view)
    np.testing.assert_array_equal(xp.asnumpy(array), np.arange(LENGTH) + 1)
    assert [record.message.count("can be pinned") for record in caplog.records] == [1]


@pytest.mark.parametrize("way", ["download", "send"])
def test_a_host_without_memory(stand_in, monkeypatch, way):
    xp = stand_in
    array = xp.zeros(LENGTH, "f4")

    def none(nbytes):
        raise MemoryError(f"no {nbytes} bytes")

    monkeypatch.setattr(pinned_pool, "_warned", [])
    monkeypatch.setattr(pinned_pool, "pool", PinnedPool())
    monkeypatch.setattr(xp.cuda, "PinnedMemory", no_pinned_memory(xp))
    monkeypatch.setattr(pinned_pool, "bytearray", none, raising=False)
    call = host_view if way == "download" else Prefetcher(0).send
    given = array if way == "download" else [np.zeros(LENGTH, "f4")]
    text = "the host of rank 3 .* has not enough memory for"
    fails(errors.ResourceExhaustedError, text, call, given)


def test_a_lost_device_is_told_by_every_later_call(stand_in):
    xp = stand_in
    array, delivery = xp.zeros(LENGTH, "f4"), Prefetcher(0)
    strided, view = array[::2], host_view(array)
    xp.cuda.get_current_stream().queue.add(lambda: xp.failure.append(LOST))
    text = r"GPU 0 of rank 3 .worker 1. on n7: cudaError700\. The device is lost .* must end"
    fails(errors.DistBackendError, text, host_view, array)
    for _ in range(2):
        fails(errors.DistBackendError, text, host_view, array)
        fails(errors.DistBackendError, text, host_view, strided)
        fails(errors.DistBackendError, text, bring, view)
        fails(errors.DistBackendError, text, delivery.send, [np.zeros(LENGTH)])


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (46, errors.DistBackendError, "exclusive to another process"),
        (3, errors.FailedPreconditionError, "'spawn' or 'forkserver'"),
        (35, errors.FailedPreconditionError, "there is no driver"),
        (100, errors.FailedPreconditionError, "CUDA_VISIBLE_DEVICES"),
        (999, errors.DistBackendError, "must end"),
        (7, errors.DistBackendError, "reports errors late"),
    ],
)
def test_devices_that_cannot_be_used(stand_in, monkeypatch, caplog, status, kind, text):
    xp, array = stand_in, stand_in.zeros(LENGTH, "f4")
    monkeypatch.setattr(pinned_pool, "_warned", [])
    monkeypatch.setattr(pinned_pool, "pool", PinnedPool())
    with monkeypatch.context() as patch:
        patch.setattr(xp.cuda, "PinnedMemory", no_pinned_memory(xp, status))
        patch.setattr(xp.cuda.runtime, "memcpyAsync", no_pinned_memory(xp, status))
        fails(kind, f"GPU 0 of rank 3 .*{text}", host_view, array)
    told = [record for record in caplog.records if "can be pinned" in record.message]
    assert not told or status == 7
    with monkeypatch.context() as patch:
        patch.setattr(xp.cuda.runtime, "getDevice", no_pinned_memory(xp, status))
        fails(kind, f"making it the current device failed on GPU 1 of rank 3 .*{text}",
              make_current, 1)  # fmt: skip


class Foreign:
    """An array of another framework."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3,
            "data": (array.data.ptr, False),
        }  # fmt: skip


def test_memory_that_was_freed(stand_in):
    xp, array = stand_in, stand_in.zeros(LENGTH, "f4")
    foreign, view = Foreign(array), host_view(array)
    xp.free(array.data.ptr)
    fails(ValueError, "a Foreign has its memory at 0x.* rank 3 .* was freed", host_view, foreign)
    text = r"copying float32.196608. on GPU 0 {} the host failed on GPU 0 of rank 3 .* was freed"
    fails(errors.DistBackendError, text.format("to"), host_view, array)
    fails(errors.DistBackendError, text.format("from"), bring, view)


def test_managed_memory(xp):
    pointer = xp.cuda.malloc_managed(4 * 24)
    array = xp.ndarray((4, 6), np.dtype("f4"), pointer)
    array[...] = xp.asarray(np.arange(24, dtype="f4").reshape(4, 6))
    for one in (array, array.T, Foreign(array)):
        xp.cuda.get_current_stream().synchronize()
        before = xp.asnumpy(array)
        view = host_view(one)
        np.testing.assert_array_equal(view, before.T if one is not array and view.shape[0] == 6
                                      else before)  # fmt: skip
        view += 1
        bring(view)
        np.testing.assert_array_equal(xp.asnumpy(array), before + 1)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "foreign"])
def test_pinned_memory_of_the_host_as_an_array_of_the_device(xp, layout):
    pinned = xp.cuda.PinnedMemory(4 * 24, xp.cuda.runtime.hostAllocPortable)
    memory = xp.cuda.UnownedMemory(pinned.ptr, 4 * 24, pinned, 0)
    whole = xp.ndarray((4, 6), np.dtype("f4"), xp.cuda.MemoryPointer(memory, 0))
    whole[...] = 1
    xp.cuda.get_current_stream().synchronize()
    array = {"contiguous": whole, "strided": whole[::2], "foreign": Foreign(whole)}[layout]
    view = host_view(array)
    np.testing.assert_array_equal(view, np.ones(view.shape))
    view[...] = 2
    bring(view)
    expected = np.full((4, 6), 2.0)
    if layout == "strided":
        expected[1::2] = 1
    np.testing.assert_array_equal(xp.asnumpy(whole), expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_arrays_of_few_elements_or_none(xp, shape):
    array = xp.zeros(shape, "f4")
    for one in (array, array.T):
        view = host_view(one)
        assert view.shape == one.shape
        view[...] = 5
        bring(view)
        np.testing.assert_array_equal(xp.asnumpy(one), np.full(one.shape, 5))


def in_child(call):
    """Return the error of a call in a forked child process, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            call()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_process_is_told_at_its_first_use(xp):
    array = xp.zeros(4, "f4")
    view = host_view(array)
    for call in (lambda: host_view(array), lambda: bring(view), lambda: Prefetcher(0),
                 cupy_api.device_count, lambda: make_current(0)):  # fmt: skip
        said = in_child(call)
        assert said.startswith("FailedPreconditionError: process "), said
        assert f"was forked from process {os.getpid()}, which had used GPUs" in said
        assert "'spawn' or 'forkserver'" in said
    assert "nothing" in in_child(lambda: gc.collect())


def test_a_child_of_one_that_used_cupy_alone(xp, monkeypatch):
    array = xp.zeros(4, "f4")
    xp.cuda.get_current_stream().synchronize()
    monkeypatch.setattr(cupy_api, "_first_user", [])
    said = in_child(lambda: host_view(array))
    assert said.startswith("FailedPreconditionError: ")
    assert "'spawn' or 'forkserver'" in said


def test_a_forked_process_can_drop_arrays(xp):
    holder = [host_view(xp.zeros(4, "f4")), *Prefetcher(0).send([np.zeros(4)]).hand_over()]

    def drop():
        holder.clear()
        gc.collect()

    assert in_child(drop) == "nothing"
