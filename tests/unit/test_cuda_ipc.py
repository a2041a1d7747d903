"""What other processes can open of this one's GPU memory, and what tells that it has gone."""

import gc
import sys
import types

import numpy as np
import pytest

from mpidist.cuda import DeviceArray
from mpidist.cuda.ways import ipc
from mpidist.cuda.ways.ipc import Exports, Imports, Place
from mpidist.cuda.ways.nccl import unique_id, why_not
from mpidist.cuda.ways.nccl_library import connected
from mpidist.errors import DistBackendError, FailedPreconditionError


def test_arrays_of_one_allocation_have_one_handle(xp):
    whole, exports = xp.zeros(10_000, "f4"), Exports(0)
    first, second = (exports.describe(DeviceArray(part)) for part in (whole, whole[1000:2000]))
    assert first.handle == second.handle
    assert first.number == second.number
    assert second.offset - first.offset == 4000
    assert len(first.handle) == 64


def over(xp, place, size):
    return DeviceArray(xp.ndarray((size,), np.dtype("f4"), place))


def test_memory_without_a_handle_says_why(xp):
    exports = Exports(0)
    assert exports.describe(over(xp, xp.cuda.malloc_managed(400), 100)) == "managed memory"
    assert "not of cudaMalloc" in exports.describe(over(xp, xp.cuda.malloc_async(400), 100))
    assert exports.describe(DeviceArray(xp.zeros((4, 4), "f4")[:, 0])) == "it is strided"
    assert exports.gone(8) == ([], False)


def test_memory_that_cuda_does_not_know(xp):
    host = np.zeros(100, "f4")
    memory = xp.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    said = Exports(0).describe(over(xp, xp.cuda.MemoryPointer(memory, 0), 100))
    assert said == "CUDA does not know its memory"


def test_without_the_library_of_the_driver(xp, monkeypatch):
    def fail():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ipc, "libcuda", fail)
    with pytest.raises(FailedPreconditionError, match=r"cannot be shared .* libcuda\.so\.1"):
        Exports(0)


def test_an_array_on_another_device(xp):
    said = Exports(1).describe(DeviceArray(xp.zeros(3, "f4")))
    assert said == "it lies on GPU 0, not on 1"


def test_an_error_of_cuda_is_none_of_the_memory(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("devices cannot be made to fail there")

    def fail(_):
        raise xp.CUDARuntimeError(700)

    array = DeviceArray(xp.zeros(3, "f4"))
    monkeypatch.setattr(xp.cuda.runtime, "ipcGetMemHandle", fail)
    with pytest.raises(DistBackendError, match=r"float32\[3\] on GPU 0 .* failed on GPU 0"):
        Exports(0).describe(array)


def test_what_has_gone_is_told_once_though_its_address_is_in_use_again(xp):
    exports, seen, gone = Exports(0), [], []
    for _ in range(3):
        array = DeviceArray(xp.zeros(1 << 20, "f4"))
        seen.append(exports.describe(array))
        assert exports.describe(array) == seen[-1]
        gone += exports.gone(8)[0]
        del array
        gc.collect()
        xp.get_default_memory_pool().free_all_blocks()
    assert len({place.number for place in seen}) == len({place.handle for place in seen}) == 3
    assert gone == [place.number for place in seen[:2]]


def test_more_than_fits_waits(xp):
    exports = Exports(0)
    arrays = [DeviceArray(xp.zeros((1 << 20) + n, "f4")) for n in range(5)]
    places = [exports.describe(array) for array in arrays]
    arrays.clear()
    gc.collect()
    xp.get_default_memory_pool().free_all_blocks()
    exports.describe(DeviceArray(xp.zeros(1 << 21, "f4")))
    told = [exports.gone(2) for _ in range(4)]
    assert [(len(part), more) for part, more in told] == [
        (2, True),
        (2, True),
        (1, False),
        (0, False),
    ]
    assert {n for part, _ in told for n in part} == {place.number for place in places}


def test_what_has_gone_is_told_although_nothing_new_is_used(xp):
    exports, kept = Exports(0), DeviceArray(xp.zeros(1 << 20, "f4"))
    large = DeviceArray(xp.zeros(1 << 21, "f4"))
    place, _ = exports.describe(large), exports.describe(kept)
    del large
    gc.collect()
    xp.get_default_memory_pool().free_all_blocks()
    exports.describe(kept)
    assert exports.gone(8) == ([place.number], False)


def test_groups_have_an_allocation_open_once_and_none_when_it_is_gone(xp, monkeypatch):
    opened, closed = [], []
    runtime = xp.cuda.runtime
    monkeypatch.setattr(runtime, "ipcOpenMemHandle", lambda handle, _: opened.append(handle) or 7)
    monkeypatch.setattr(runtime, "ipcCloseMemHandle", closed.append)
    process, place = ipc.Opened(), Place(b"x", 5, 16)
    world, part = (Imports(0, 0, 8, process) for _ in range(2))
    for one in (world, part):
        one.open(1, place)
        assert one.address(1, place) == 7 + 16
    assert opened == [b"x"]
    world.forget(1, [5], are_gone=True)
    assert closed == [7]
    world.open(1, Place(b"x", 6, 0))  # another one, at the same address
    part.close()
    assert closed == [7]
    world.close()
    assert closed == [7, 7]
    part.open(1, place)
    world.open(1, place)
    part.close()
    assert len(closed) == 2
    world.close()
    assert len(closed) == 3


def test_a_process_does_not_open_its_own(xp):
    place = Exports(0).describe(DeviceArray(xp.zeros(1000, "f4")))
    own = Imports(3, 0, 8)
    own.open(3, place)
    assert len(own) == 0
    with pytest.raises(xp.cuda.runtime.CUDARuntimeError):
        Imports(0, 0, 8).open(3, place)


def test_all_ranks_close_the_same(xp, monkeypatch):
    """Which allocations are open depends on what was used in which order alone."""
    opened, closed = [], []
    monkeypatch.setattr(
        xp.cuda.runtime, "ipcOpenMemHandle", lambda handle, _: opened.append(handle) or len(opened)
    )
    monkeypatch.setattr(xp.cuda.runtime, "ipcCloseMemHandle", closed.append)
    random = np.random.default_rng(1)
    ranks = [Imports(rank, 0, 5, ipc.Opened()) for rank in range(3)]
    for _ in range(300):
        owner, number = int(random.integers(3)), int(random.integers(1, 5))
        place = Place(bytes([owner]), number, 16)
        known = [one.knows(owner, place) for one in ranks]
        assert len(set(known)) == 1
        for rank, one in enumerate(ranks):
            if not known[0]:
                one.open(owner, place)
            one.trim()
            if rank != owner:
                assert one.address(owner, place) > 16
        if random.random() < 0.1:
            for one in ranks:
                one.forget(owner, [number], are_gone=True)
    assert sum(map(len, ranks)) <= 3 * 5
    for one in ranks:
        one.close()
    assert sorted(closed) == list(range(1, len(opened) + 1))


def test_all_are_closed_though_one_fails(xp, monkeypatch):
    error, closed = xp.cuda.runtime.CUDARuntimeError(1), []

    def close(base):
        closed.append(base)
        if base == 2:
            raise error

    monkeypatch.setattr(xp.cuda.runtime, "ipcOpenMemHandle", lambda handle, _: int(handle))
    monkeypatch.setattr(xp.cuda.runtime, "ipcCloseMemHandle", close)
    imports = Imports(0, 0, 8)
    for number in (1, 2, 3):
        imports.open(1, Place(str(number).encode(), number, 0))
    with pytest.raises(xp.cuda.runtime.CUDARuntimeError):
        imports.close()
    assert closed == [1, 2, 3]
    assert len(imports) == 0


def test_without_nccl_the_remedy_is_told(xp, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", types.SimpleNamespace(available=False))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nccl", None)
    assert "pip install nvidia-nccl-cu12" in why_not()
    with pytest.raises(FailedPreconditionError, match="CuPy has no NCCL"):
        unique_id()


def test_without_cupy_there_is_no_nccl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "extras cuda13 and cuda12" in why_not()


@pytest.mark.parametrize("takes", [bytes, tuple, "signed"])
def test_ids_as_each_cupy_takes_them(xp, monkeypatch, takes):
    """Before version 14 they were tuples of numbers, in some signed."""
    if xp.__name__ == "cupy":
        pytest.skip("there is one CuPy")
    taken = []

    def make(size, unique, rank):
        if not isinstance(unique, bytes if takes is bytes else tuple):
            raise TypeError(f"not a {type(unique)}")
        if takes == "signed" and max(unique) > 127:
            raise OverflowError
        taken.append(unique)
        return "a communicator"

    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "NcclCommunicator", make)
    assert connected(1, bytes(range(128, 256)), 0, 0, "here") == "a communicator"
    expected = range(-128, 0) if takes == "signed" else range(128, 256)
    assert list(taken[0]) == list(expected)
