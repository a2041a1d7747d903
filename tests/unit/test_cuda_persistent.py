"""Persistent memory on a device, and host memory pinned in place."""

import mmap

import numpy as np
import pytest
from _cases import stand_in_memory

from mpidist import errors
from mpidist.gpu import Prefetcher, allocate_persistent, persistent, pin, staging


def unused_memory():
    """Memory that CuPy's pool keeps, and that no array uses."""
    return [one for one in stand_in_memory.allocated if one.holder is not None and not one.holder()]


def pages(count):
    """Memory of whole pages."""
    memory = np.zeros((count + 1) * mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + count * mmap.PAGESIZE]


def test_only_whole_pages_are_pinned(xp):
    with pytest.raises(ValueError, match="no whole pages"):
        pin(pages(2)[1:], 0)
    with pytest.raises(ValueError, match="no whole pages"):
        pin(pages(1)[:0], 0)


def test_pages_that_are_pinned_already(xp, monkeypatch, caplog):
    monkeypatch.setattr(persistent, "_warned", [])
    memory = pages(2)
    first = pin(memory, 0)
    assert pin(memory, 0) is None
    assert pin(memory, 0) is None
    assert caplog.text.count("cannot be pinned in place") == 1
    first.close()
    again = pin(memory, 0)
    assert again is not None
    again.close()
    again.close()


def test_a_device_without_memory(xp):
    with pytest.raises(errors.ResourceExhaustedError, match=r"GPU 0 .* of a table"):
        allocate_persistent(0, 1 << 50, np.dtype("f4"), "a table")
    there = allocate_persistent(0, 10, np.dtype("f4"), "a table")
    there.fill(5)
    np.testing.assert_array_equal(xp.asnumpy(there), np.full(10, 5))


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
