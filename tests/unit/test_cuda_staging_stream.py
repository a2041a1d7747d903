"""Staging streams, persistent memory on a device, and host memory pinned in place."""

import mmap

import numpy as np
import pytest
from _cases import stand_in_memory

from mpidist import errors
from mpidist.gpu import (
    Prefetcher,
    StagingStream,
    allocate_persistent,
    kernel,
    pin,
    staging,
    staging_stream,
)

TEXT = """
extern "C" __global__ void twice(long long size, const float* from, float* to, float more) {
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < size) to[at] = from[at] * 2 + more;
}
"""


def unused_memory():
    """Memory that CuPy's pool keeps, and that no array uses."""
    return [one for one in stand_in_memory.allocated if one.holder is not None and not one.holder()]


def pages(count):
    """Memory of whole pages."""
    memory = np.zeros((count + 1) * mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + count * mmap.PAGESIZE]


def test_pieces_go_up_are_worked_on_and_come_down(compiling_xp):
    twice, stagings = kernel(TEXT, "twice"), [StagingStream(0) for _ in range(3)]
    twice.compile(0)
    for number in range(9):
        staging, array = stagings[number % 3], np.full(1000, number, "f4")
        with staging.working("a piece"), staging.current():
            source, target = staging.place(array, room=array.nbytes)
            array[:] = -1  # it may be used again
            twice(1000, source.ptr, target.ptr, np.float32(0.5))
            staging.fetch(target.ptr, array.nbytes)
        np.testing.assert_array_equal(staging.finish().view("f4"), np.full(1000, 2 * number + 0.5))


@pytest.mark.parametrize("sizes", [(1, 2, 3), (0, 5), (1000, 1, 7)])
def test_several_arrays_lie_apart(xp, sizes):
    staging = StagingStream(0)
    arrays = [np.arange(size, dtype="i8") + 10 * number for number, size in enumerate(sizes)]
    with staging.working("some arrays"):
        places = staging.place(*arrays)
    for array, place in zip(arrays, places, strict=False):
        with staging.working("looking"):
            staging.fetch(place.ptr, array.nbytes)
        np.testing.assert_array_equal(staging.finish().view("i8"), array)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_lasts_on_the_device(xp, pinned):
    staging, memory = StagingStream(0), pages(3)
    there = allocate_persistent(0, memory.nbytes, np.dtype("u1"), "a test")
    held = pin(memory, 0) if pinned else None
    memory[:] = 5
    with staging.working("up"):
        staging.upload(there.data.ptr, memory, pinned=pinned)
        if not pinned:
            memory[:] = 1  # it was copied
    staging.finish()
    memory[:] = 2
    if held is not None:
        with staging.working("down"):
            staging.download(there.data.ptr, memory)
        staging.finish()
        np.testing.assert_array_equal(memory, np.full(memory.size, 5))
        held.close()
        held.close()
    np.testing.assert_array_equal(xp.asnumpy(there), np.full(memory.size, 5))


def test_only_whole_pages_are_pinned(xp):
    with pytest.raises(ValueError, match="no whole pages"):
        pin(pages(2)[1:], 0)
    with pytest.raises(ValueError, match="no whole pages"):
        pin(pages(1)[:0], 0)


def test_pages_that_are_pinned_already(xp, monkeypatch, caplog):
    monkeypatch.setattr(staging_stream, "_warned", [])
    memory = pages(2)
    first = pin(memory, 0)
    assert pin(memory, 0) is None
    assert pin(memory, 0) is None
    assert caplog.text.count("cannot be pinned in place") == 1
    first.close()
    again = pin(memory, 0)
    assert again is not None
    again.close()


def test_a_device_without_memory(xp):
    with pytest.raises(errors.ResourceExhaustedError, match=r"GPU 0 .* of a table"):
        allocate_persistent(0, 1 << 50, np.dtype("f4"), "a table")
    assert allocate_persistent(0, 10, np.dtype("f4"), "a table").size == 10


def test_idle_memory_is_given_up_where_there_is_no_other(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("it would have to fill the GPU")
    Prefetcher(0).send([np.zeros(1 << 17)]).hand_over()
    xp.cuda.Device(0).synchronize()  # no stream has use for it any more
    assert staging._waiting[0]
    monkeypatch.setattr(xp, "limit", [sum(xp.in_use.values())])
    with pytest.raises(errors.ResourceExhaustedError):
        allocate_persistent(0, 10, np.dtype("f4"), "a table")
    assert not staging._waiting[0]
    assert not unused_memory()


def test_a_piece_begins_when_the_one_before_is_over(xp):
    staging = StagingStream(0)
    there = [allocate_persistent(0, 4096, np.dtype("u1"), "a test") for _ in range(2)]
    for value, target in enumerate(there, 1):
        with staging.working("up"):
            staging.upload(target.data.ptr, np.full(4096, value, np.uint8), pinned=False)
    staging.finish()
    for value, target in enumerate(there, 1):
        np.testing.assert_array_equal(xp.asnumpy(target), np.full(4096, value))
