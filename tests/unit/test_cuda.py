"""Arrays on a GPU as host memory: stream order, layouts, and pinned memory."""

import dataclasses
import gc
import pickle
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from _cases.gpu_calls import idle_bytes, lent_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import Window, errors, host_view
from mpidist.buffers.lists import check_outputs, flat_output
from mpidist.buffers.packing import as_mpi_buffer, with_upload
from mpidist.buffers.reduce_op import ReduceOp, to_reduce, to_reduce_into
from mpidist.gpu import device_count, pinned_pool, stage, streams
from mpidist.gpu.pinned_pool import PinnedPool, size_class

LAYOUTS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "strided": lambda a: a[::2, 1::3],
    "reversed": lambda a: a[::-1, ::-1],
    "scalar": lambda a: a[1, 2],
    "empty": lambda a: a[:0],
}


def numbers(shape=(4, 6), dtype="f4"):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def pinned_bytes(pool, nbytes):
    return pool.array((nbytes,), np.dtype("u1"), np.ndarray)


def bring(view):
    """Upload the values written to a view."""
    finish = with_upload(view)
    assert finish is not None
    finish()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", "f4", "f8", "F", "D"])
def test_values_go_to_the_host_and_back(xp, dtype, layout):
    whole = xp.asarray(numbers(dtype=dtype))
    array, expected = LAYOUTS[layout](whole), LAYOUTS[layout](numbers(dtype=dtype))
    view = host_view(array)
    assert view.flags.carray
    assert view.dtype == expected.dtype
    np.testing.assert_array_equal(view, expected)
    view[...] = other = (expected == 0) if dtype == "?" else (expected + 1).astype(dtype)
    bring(view)
    result = numbers(dtype=dtype)
    place = LAYOUTS[layout](result) if layout != "scalar" else result[1:2, 2:3]
    place[...] = other
    np.testing.assert_array_equal(xp.asnumpy(whole), result)


def test_dtypes_that_cupy_does_not_know(xp):
    bits = xp.asarray(np.arange(6, dtype=np.uint16))
    array = bits.view(ml_dtypes.bfloat16)
    view = host_view(array)
    assert view.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(view.view(np.uint16), np.arange(6))


def test_what_is_queued_before_is_waited_for(xp):
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        array = xp.zeros(1000, "f4")
        for _ in range(10):
            array += 1
        np.testing.assert_array_equal(host_view(array), np.full(1000, 10))


def test_what_follows_sees_what_was_written(xp):
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        array = xp.zeros(1000, "f4")
        view = host_view(array, read=False)
        view[...] = 7
        bring(view)
        array += 1
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(1000, 8))


def test_another_thread_brings_it_to_the_stream_of_the_caller(xp):
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        array = xp.zeros(1000, "f4")
        array += 1
        view = host_view(array, read=False)
        view[...] = 7
        thread = threading.Thread(target=bring, args=(view,))
        thread.start()
        thread.join()
        array += 1
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(1000, 8))


def test_pinned_memory_is_not_used_again_while_a_device_reads_it(xp):
    arrays = [xp.zeros(1000, "f4") for _ in range(8)]
    for number, array in enumerate(arrays):
        view = host_view(array, read=False)
        view[...] = number
        bring(view)
        del view
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(1000, number))


def test_pinned_memory_comes_back_and_is_used_again(xp):
    gc.collect()
    array, before = xp.zeros(1 << 16, "f4"), lent_bytes()
    view = host_view(array)
    part = view[10:20]
    assert lent_bytes() >= before + array.nbytes
    del view
    assert lent_bytes() >= before + array.nbytes, "a view of it is still there"
    del part
    assert lent_bytes() == before
    idle = idle_bytes()
    for _ in range(20):
        host_view(array)
    assert idle_bytes() == idle
    assert lent_bytes() == before


@pytest.mark.parametrize("way", ["to_move", "to_reduce", "to_reduce_into", "spread"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "?"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_every_way_to_write_ends_on_the_device(xp, way, dtype, layout):
    whole = xp.asarray(np.zeros((4, 6), dtype))
    array = LAYOUTS[layout](whole)
    if way == "to_move":
        memory, finish = as_mpi_buffer(array, write=True)
        memory = memory.reshape(-1).view(dtype)
    elif way == "to_reduce":
        memory, _, finish = to_reduce(array, ReduceOp.SUM, 2)
    elif way == "to_reduce_into":
        source = np.ones(array.shape, dtype)
        _, memory, _, finish = to_reduce_into(source, host_view(array), ReduceOp.SUM, 2)
    else:
        memory, finish = flat_output([host_view(array, read=False)])
    memory[...] = 1
    finish()
    expected = np.zeros((4, 6), dtype)
    LAYOUTS[layout](expected)[...] = 1
    np.testing.assert_array_equal(xp.asnumpy(whole), expected)


def test_lists_on_devices(xp):
    arrays = [xp.zeros((n, 2), "f4") for n in range(1, 4)]
    memory, finish = flat_output([host_view(array, read=False) for array in arrays])
    memory[...] = np.arange(12)
    finish()
    got = np.concatenate([xp.asnumpy(array).ravel() for array in arrays])
    np.testing.assert_array_equal(got, np.arange(12))


def test_memory_in_common_is_found(xp):
    array = xp.zeros((4, 4), "f4")
    with pytest.raises(ValueError, match="arrays 0 and 1 of a list"):
        check_outputs([host_view(array[:2]), host_view(array[1:3])])
    check_outputs([host_view(array[::2]), host_view(array[1::2])])
    with pytest.raises(ValueError, match="arrays 0 and 1 of a list"):
        check_outputs([host_view(array), host_view(array)])


def test_elements_that_share_memory_cannot_receive(xp):
    array = xp.zeros((1, 4), "f4")
    memory = xp.cuda.UnownedMemory(array.data.ptr, array.nbytes, array, 0)
    wide = xp.ndarray((3, 4), np.dtype("f4"), xp.cuda.MemoryPointer(memory, 0), strides=(0, 4))
    np.testing.assert_array_equal(host_view(wide), np.zeros((3, 4)))
    with pytest.raises(ValueError, match="elements of it share memory"):
        as_mpi_buffer(wide, write=True)
    with pytest.raises(ValueError, match="elements of it share memory"):
        Window.private(100).get(0, 0, wide)


class Foreign:
    """An array of a framework that has only the CUDA array interface."""

    def __init__(self, array, read_only, stream=None):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.data.ptr, read_only),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
            "stream": stream,
        }


def test_arrays_of_other_frameworks(xp):
    array = xp.asarray(numbers())
    xp.cuda.get_current_stream().synchronize()
    view = host_view(Foreign(array, read_only=False))
    np.testing.assert_array_equal(view, numbers())
    view += 1
    bring(view)
    np.testing.assert_array_equal(xp.asnumpy(array), numbers() + 1)
    for layout, part in LAYOUTS.items():
        if layout != "empty":
            view = host_view(Foreign(part(array), read_only=False))
            np.testing.assert_array_equal(view, part(numbers() + 1))
    with pytest.raises(ValueError, match="read-only"):
        as_mpi_buffer(Foreign(array, read_only=True), write=True)


def test_the_stream_that_a_framework_names(xp):
    array, stream = xp.zeros(1000, "f4"), xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        array += 3
    np.testing.assert_array_equal(host_view(Foreign(array, False, stream.ptr)), np.full(1000, 3))


class Tensor:
    """A CUDA tensor with the attributes of torch tensors that the library reads."""

    is_cuda, requires_grad, is_nested, layout = True, False, False, "strided"

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, f"torch.{array.dtype.name}"
        self.device = types.SimpleNamespace(type="cuda", index=array.device.id)
        self.data_ptr = lambda: array.data.ptr
        self.stride = lambda: tuple(stride // array.itemsize for stride in array.strides)
        self.is_contiguous = lambda: array.flags.c_contiguous
        self.is_conj = self.is_neg = lambda: False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_torch_are_ordered_with_the_stream_of_torch(xp, monkeypatch, layout):
    stream = xp.cuda.Stream(non_blocking=True)
    torch = types.ModuleType("torch")
    torch.Tensor, torch.strided = Tensor, "strided"
    current = types.SimpleNamespace(cuda_stream=stream.ptr)
    torch.cuda = types.SimpleNamespace(current_stream=lambda device: current)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with stream:
        whole = xp.asarray(numbers())
        whole += 1
    expected = LAYOUTS[layout](numbers() + 1)
    view = host_view(Tensor(LAYOUTS[layout](whole)))
    np.testing.assert_array_equal(view, expected)
    view[...] = expected + 1
    bring(view)
    with stream:
        np.testing.assert_array_equal(xp.asnumpy(LAYOUTS[layout](whole)), expected + 1)


def test_a_kernel_that_never_ends_is_told_and_given_up(xp, monkeypatch, caplog):
    if xp.__name__ == "cupy":
        pytest.skip("it would never end there")
    impatient = dataclasses.replace(streams.config, stall_s=0.01, stall_abort_s=0.05)
    array = xp.zeros(4, "f4")
    with monkeypatch.context() as patch:
        patch.setattr(streams, "config", impatient)
        patch.setattr(streams, "is_done", lambda _: False)
        with pytest.raises(errors.DeadlineExceededError, match=r"float32\[4\] on GPU 0 .* waited"):
            host_view(array)
    assert [record.message.count("has waited") for record in caplog.records] == [1]


def test_without_cupy_the_remedy_is_told(monkeypatch):
    class OnDevice:
        def __dlpack_device__(self):
            return 2, 0

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(errors.FailedPreconditionError, match="extras cuda13 and cuda12"):
        host_view(OnDevice())
    with pytest.raises(errors.FailedPreconditionError, match="extras cuda13 and cuda12"):
        device_count()


@pytest.mark.parametrize("error", [BufferError("sharded"), ValueError("meta")])
def test_what_has_no_one_device_is_refused(error):
    class Somewhere:
        def __dlpack__(self, **_):
            raise AssertionError

        def __dlpack_device__(self):
            raise error

    with pytest.raises(TypeError, match=f"cannot be used as it is .{error}"):
        host_view(Somewhere())


def test_devices_that_are_no_cuda_gpus_are_refused():
    class OnDevice:
        def __dlpack__(self, **_):
            raise AssertionError

        def __dlpack_device__(self):
            return 8, 0

    with pytest.raises(TypeError, match="no CUDA GPU"):
        host_view(OnDevice())


def test_a_device_without_memory_says_which_and_for_what(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("memory cannot be made short there")

    def fail(*_):
        raise xp.OutOfMemoryError("out of memory")

    array = xp.zeros((4, 4), "f4")[::2]
    monkeypatch.setattr(xp, "ascontiguousarray", fail)
    with pytest.raises(errors.ResourceExhaustedError, match=r"GPU 0 .* float32\[2, 4\]"):
        host_view(array)
    assert stage(array, read=False).shape == (2, 4)


def test_a_device_that_fails_says_which(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("devices cannot be made to fail there")

    def fail(*_):
        raise xp.CUDARuntimeError(700)

    array = xp.zeros(4, "f4")
    monkeypatch.setattr(xp.cuda.runtime, "memcpyAsync", fail)
    with pytest.raises(errors.DistBackendError, match=r"failed on GPU 0.*: cudaError700"):
        host_view(array)


def test_a_kernel_that_fails_ends_the_waiting_for_it(xp):
    if xp.__name__ == "cupy":
        pytest.skip("a context that has failed stays so")
    array, lent = xp.zeros(4, "f4"), lent_bytes()
    xp.cuda.get_current_stream().queue.add(lambda: xp.failure.append(700))
    with pytest.raises(errors.DistBackendError, match=r"failed on GPU 0.*: cudaError700"):
        host_view(array)
    gc.collect()
    assert lent_bytes() == lent
    idle = idle_bytes()
    xp.failure.clear()
    host_view(xp.zeros(4, "f4"))
    assert idle_bytes() >= idle


@pytest.mark.parametrize("way", ["download", "upload"])
def test_memory_of_a_copy_that_was_interrupted_is_not_used_again(xp, monkeypatch, way):
    if xp.__name__ == "cupy":
        pytest.skip("it is not interrupted there")

    def interrupt(*_):
        raise KeyboardInterrupt

    size = 5000
    first, second = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    with first:
        array = xp.full(size, 111.0, "f4")
        view = host_view(array, read=False)
        view[...] = 333
        with monkeypatch.context() as patch:
            patch.setattr(xp.Event, "record", interrupt)
            with pytest.raises(KeyboardInterrupt):
                host_view(array) if way == "download" else bring(view)
        del view
    with second:
        other = host_view(xp.full(size, 222.0, "f4"))
        first.synchronize()
        np.testing.assert_array_equal(other, np.full(size, 222))


def test_blocks_are_found_quickly_however_many_there_are(xp):
    looks = []

    class Busy:
        ptr = 1

    def busy(_):
        looks.append(1)
        return False

    pool = PinnedPool()
    lent = [pinned_bytes(pool, 8)[1] for _ in range(1000)]
    for block in lent:
        block.event = Busy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_pool, "is_done", busy)
        for _ in range(10):
            pinned_bytes(pool, 8)
    assert len(looks) <= 10 * 4


def test_one_late_device_does_not_hide_what_is_idle(xp):
    pool = PinnedPool()
    lent = [pinned_bytes(pool, 8) for _ in range(12)]
    busy = [block for _, block in lent[:8]]
    for block in busy:
        block.event = object()
    while lent:  # the busy blocks are returned first
        del lent[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_pool, "is_done", lambda _: False)
        taken = [pinned_bytes(pool, 8) for _ in range(6)]
    assert not [block for _, block in taken if block in busy]
    assert lent_bytes(pool) + idle_bytes(pool) <= (12 + 2) * 4096


def test_what_is_computed_of_host_views_is_an_array_like_any_other(xp):
    view = host_view(xp.asarray(numbers()))
    assert type(view + 1) is np.ndarray
    assert type(view.sum()) is np.float32
    assert type(pickle.loads(pickle.dumps(view))) is np.ndarray


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_a_stream_that_was_made_current_stays_so(xp, layout):
    stream, before = xp.cuda.Stream(non_blocking=True), xp.cuda.get_current_stream()
    stream.use()
    try:
        view = host_view(LAYOUTS[layout](xp.zeros((4, 6), "f4")))
        bring(view)
        assert xp.cuda.get_current_stream().ptr == stream.ptr
        other = xp.cuda.Stream(non_blocking=True)
        view = host_view(Foreign(LAYOUTS[layout](xp.zeros((4, 6), "f4")), False, other.ptr))
        assert xp.cuda.get_current_stream().ptr == stream.ptr
        bring(view)
        assert xp.cuda.get_current_stream().ptr == stream.ptr
    finally:
        before.use()


def test_an_array_on_another_device_than_the_current(xp):
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    with xp.cuda.Device(1):
        array = xp.asarray(numbers())
        xp.cuda.get_current_stream().synchronize()
    for one in (array, Foreign(array, read_only=False)):
        view = host_view(one)
        assert view.origin.device == 1
        view += 1
        bring(view)
    with xp.cuda.Device(1):
        np.testing.assert_array_equal(xp.asnumpy(array), numbers() + 2)


def test_the_default_stream_of_a_thread_is_refused(xp):
    array = xp.zeros(4, "f4")
    xp.cuda.get_current_stream().synchronize()
    with xp.cuda.Stream.ptds, pytest.raises(errors.FailedPreconditionError, match="non_blocking"):
        host_view(array)
    with pytest.raises(errors.FailedPreconditionError, match="non_blocking"):
        host_view(Foreign(array, read_only=False, stream=2))


def test_memory_that_cannot_be_pinned_is_told_once(xp, monkeypatch, caplog):
    def fail(nbytes):
        raise MemoryError(f"no {nbytes} bytes")

    monkeypatch.setattr(pinned_pool, "_warned", [])
    monkeypatch.setattr(pinned_pool, "_pin", fail)
    short = PinnedPool()
    for _ in range(2):
        memory, _ = pinned_bytes(short, 10_000)
        memory[...] = 1
        assert len(memory) == 10_000
    assert [record.message.count("can be pinned") for record in caplog.records] == [1]


def test_idle_memory_is_freed_when_blocks_of_another_size_are_needed(xp):
    few = PinnedPool(100_000)
    lent = [pinned_bytes(few, 20_000)[0] for _ in range(20)]
    assert lent_bytes(few) >= 400_000
    lent.clear()
    assert lent_bytes(few) == 0
    assert idle_bytes(few) >= 400_000  # the next operation may need as much
    pinned_bytes(few, 20_000)
    assert idle_bytes(few) >= 400_000
    pinned_bytes(few, 50_000)
    assert 0 < idle_bytes(few) <= 100_000 + size_class(50_000)


def test_what_is_needed_again_is_not_given_up_however_large(xp, monkeypatch):
    made, pool = [], PinnedPool(100_000)
    monkeypatch.setattr(
        pinned_pool, "_pin", lambda nbytes: made.append(nbytes) or bytearray(nbytes)
    )
    for _ in range(5):
        pinned_bytes(pool, 300_000)
    assert len(made) == 1
    for _ in range(5):
        held = [pinned_bytes(pool, 100_000) for _ in range(8)]
        del held
    assert len(made) == 9


def test_what_lies_idle_is_given_up_before_memory_is_short(xp, monkeypatch):
    room = [100_000]

    def allocate(nbytes):
        if nbytes > room[0]:
            raise MemoryError
        room[0] -= nbytes
        return bytearray(nbytes)

    monkeypatch.setattr(pinned_pool, "_pin", allocate)
    pool = PinnedPool()
    pinned_bytes(pool, 60_000)
    assert idle_bytes(pool) >= 60_000
    room[0] = 0
    pinned_bytes(pool, 80_000)
    assert idle_bytes(pool) == size_class(80_000)


@settings(max_examples=200)
@given(st.integers(0, 1 << 40))
def test_blocks_are_long_enough_and_of_few_lengths(nbytes):
    size = size_class(nbytes)
    assert max(nbytes, 4096) <= size <= max(1.25 * nbytes + 1, 4096)
    assert size_class(size) == size
