"""Direct ways between GPUs, with real ranks: NCCL, and CUDA IPC; against NumPy."""

import dataclasses
import gc
import threading
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

from mpidist.cuda import DeviceArray, streams
from mpidist.cuda.ways import NotDirectError, tail
from mpidist.cuda.ways.ipc_way import Ipc
from mpidist.cuda.ways.nccl import Nccl, unique_id, why_not
from mpidist.errors import DeadlineExceededError, DistBackendError, FailedPreconditionError

BF16 = np.dtype(ml_dtypes.bfloat16)
SIZE = 1003  # no multiple of anything


def is_true(xp):
    return xp.__name__ == "cupy"


@pytest.fixture
def devices(xp, monkeypatch):
    """How many devices there are."""
    if not is_true(xp):
        monkeypatch.setattr(xp, "DEVICES", 4)
    return xp.cuda.runtime.getDeviceCount()


def ipc_way(world, device=0):
    def meet(is_well):
        return all(world.allgather(is_well))

    return Ipc(world.size, world.rank, device, world.allgather, meet)


def nccl_way(world, device=None):
    if why_not() is not None:
        pytest.skip(why_not())
    unique = world.bcast(unique_id() if world.rank == 0 else None)
    return Nccl(world.size, world.rank, unique, world.rank if device is None else device)


@pytest.fixture(params=["nccl", "ipc", "ipc on several devices"])
def way(request, xp, world, devices):
    """Each of them; the current device is the way's."""
    number = 0 if request.param == "ipc" else world.rank
    if request.param != "ipc" and world.size > devices:
        pytest.skip("there are not as many devices as ranks")
    with xp.cuda.Device(number):
        made = nccl_way(world) if request.param == "nccl" else ipc_way(world, number)
        yield made
        made.close()


def values(rank, dtype="f4", size=SIZE):
    """What a rank has: the same on whichever rank asks."""
    generator, dtype = np.random.default_rng(rank), np.dtype(dtype)
    if dtype.kind in "biu":
        return generator.integers(0, 2 if dtype.kind == "b" else 50, size).astype(dtype)
    reals = generator.standard_normal(size)
    if dtype.kind == "c":
        reals = reals + 1j * generator.standard_normal(size)
    return reals.astype(dtype)


class Held:
    """An array of any dtype on the current device, and as the library sees it."""

    def __init__(self, xp, data, offset=0):
        data = np.ascontiguousarray(data)
        bits = data.view(np.uint16) if data.dtype == BF16 else data
        self._xp, self._dtype = xp, data.dtype
        self._whole = xp.full(offset + data.size, 1, bits.dtype)
        self.array = self._whole[offset:]
        self.array[...] = xp.asarray(bits)
        self.taken = DeviceArray(self.array)
        self.taken.dtype = data.dtype

    def get(self):
        return self._xp.asnumpy(self.array).view(self._dtype)


def zeros(xp, size, dtype="f4"):
    return Held(xp, np.zeros(size, dtype))


def reduced(parts, op):
    """In float64 or wider, as far as there is a wider one."""
    parts = np.stack([part.astype("f8") if part.dtype.kind in "fV" else part for part in parts])
    if parts.dtype.kind == "b":
        return parts.any(0) if op in ("SUM", "MAX") else parts.all(0)
    functions = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
    return functions[op](parts, 0)


def check(got, wanted):
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, wanted.astype(got.dtype))
        return
    eps = ml_dtypes.finfo(got.dtype).eps
    wide = got.astype("f8") if got.dtype.kind != "c" else got
    np.testing.assert_allclose(wide, wanted, rtol=4 * float(eps), atol=4 * float(eps))


DTYPES = ["f4", BF16, "?", "u1", "i2", "i4", "i8", "f2", "f8", "F", "D"]
OPS = ["AVG", "MAX", "SUM", "PRODUCT", "MIN"]


def cases(xp, world, way):
    """Dtypes and operations; all of them on two ranks."""
    few = world.size != 2
    pairs = [(np.dtype(d), op) for d in DTYPES[: 2 if few else None] for op in OPS]
    return [pair for pair in pairs if way.reduces(*pair)][: 4 if few else None]


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_reduce(way, world, xp):
    for dtype, op in cases(xp, world, way):
        held = Held(xp, values(world.rank, dtype))
        way.all_reduce(held.taken, op)
        got = held.get()
        check(got, reduced([values(rank, dtype) for rank in range(world.size)], op))
        assert len(set(world.allgather(got.tobytes()))) == 1, "not the same on all ranks"
    assert way.reduces(np.dtype("i2"), "SUM") == (way.name == "ipc")
    assert not way.reduces(np.dtype("i4"), "AVG")
    with pytest.raises(TypeError, match=r"float32\[3\] on GPU"):
        way.all_reduce(Held(xp, np.zeros(3, "f4")).taken, "BXOR")


@pytest.mark.ranks(2, 3)
def test_reduce_and_reduce_scatter(way, world, xp):
    size, last = world.size, world.size - 1
    for dtype, op in cases(xp, world, way):
        parts = [values(rank, dtype) for rank in range(size)]
        held = Held(xp, parts[world.rank])
        way.reduce(held.taken, op, last)
        if world.rank == last:
            check(held.get(), reduced(parts, op))
        else:
            np.testing.assert_array_equal(held.get(), parts[world.rank])
        parts = [values(rank, dtype, 5 * size) for rank in range(size)]
        send, recv = Held(xp, parts[world.rank]), zeros(xp, 5, dtype)
        way.reduce_scatter(send.taken, recv.taken, op)
        check(recv.get(), reduced(parts, op)[5 * world.rank :][:5])
        np.testing.assert_array_equal(send.get(), parts[world.rank])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["?", "i2", BF16, "f8", "D", ml_dtypes.float8_e5m2])
def test_moves(way, world, xp, dtype):
    dtype, size, rank = np.dtype(dtype), world.size, world.rank
    bits = np.dtype("u1") if dtype.name.startswith("float8") else dtype
    parts = [values(one, "u1", 7 * size * dtype.itemsize).view(bits) for one in range(size)]
    if dtype.kind == "b":
        parts = [part % 2 == 1 for part in parts]

    for root in range(size):
        held = Held(xp, parts[rank])
        way.broadcast(held.taken, root)
        assert held.get().tobytes() == parts[root].tobytes()
    send, recv = Held(xp, parts[rank]), zeros(xp, 7 * size * size, bits)
    way.all_gather(send.taken, recv.taken)
    assert recv.get().tobytes() == np.concatenate(parts).tobytes()
    recv = zeros(xp, 7 * size, bits)
    way.all_to_all(send.taken, recv.taken)
    wanted = np.concatenate([part[7 * rank :][:7] for part in parts])
    assert recv.get().tobytes() == wanted.tobytes()


@pytest.mark.ranks(2)
def test_it_begins_behind_the_streams_and_they_have_the_result(way, world, xp):
    first, second = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        send = xp.zeros(1000, "f4")
        for _ in range(5):
            send += world.rank + 1
        sent = DeviceArray(send)
    with second:
        recv = xp.zeros(2000, "f4")
        recv += 7
        received = DeviceArray(recv)
    for _ in range(3):
        way.all_gather(sent, received)
        with second:
            recv += 1
        with first:
            send += 1  # not before it has been read
    with second:
        got = xp.asnumpy(recv)
    np.testing.assert_array_equal(got, np.repeat([5 + 2 + 1, 10 + 2 + 1], 1000))


@pytest.mark.ranks(2)
def test_a_long_chain_of_operations(way, world, xp):
    held = Held(xp, np.ones(100, "f8"))
    for _ in range(20):
        way.all_reduce(held.taken, "SUM")
        held.array /= 2
        held.array += world.rank
        way.broadcast(held.taken, 1)
    np.testing.assert_array_equal(held.get(), np.full(100, 21))


@pytest.mark.ranks(2)
def test_arrays_without_elements(way, world, xp):
    empty = zeros(xp, 0)
    way.all_reduce(empty.taken, "SUM")
    way.broadcast(empty.taken, 1)
    way.all_gather(empty.taken, zeros(xp, 0).taken)
    way.all_to_all(empty.taken, zeros(xp, 0).taken)
    with pytest.raises(ValueError, match="equal parts"):
        way.all_gather(zeros(xp, 3).taken, zeros(xp, 7).taken)


@pytest.mark.ranks(2, 4)
def test_places_in_allocations(world, xp):
    way = ipc_way(world)
    for offset in (0, 1, 77, 4096, 100_001):
        held = Held(xp, values(world.rank), offset + world.rank)
        way.all_reduce(held.taken, "SUM")
        check(held.get(), reduced([values(rank) for rank in range(world.size)], "SUM"))
    way.close()
    with pytest.raises(FailedPreconditionError, match="closed"):
        way.broadcast(held.taken, 0)


def freed(xp):
    gc.collect()
    xp.get_default_memory_pool().free_all_blocks()


@pytest.mark.ranks(2)
def test_memory_that_is_freed_and_allocated_again(world, xp):
    way, addresses = ipc_way(world), set()
    for turn in range(6):
        held = Held(xp, values(world.rank + 10 * turn, size=1 << 20))
        addresses.add(held.taken.pointer)
        way.all_reduce(held.taken, "SUM")
        check(held.get(), values(10 * turn, size=1 << 20) + values(1 + 10 * turn, size=1 << 20))
        del held
        freed(xp)
    if not is_true(xp):
        assert len(addresses) < 6, "none came to lie where another was"
    assert way.opened() <= 2, "what has gone is still open"
    way.close()
    assert way.opened() == 0


@pytest.mark.ranks(2)
def test_no_more_than_so_many_are_open(world, xp, monkeypatch):
    way = ipc_way(world)
    monkeypatch.setattr(way._imports, "_most", 6)
    arrays = [Held(xp, values(world.rank + n, size=(1 << 16) + n)) for n in range(10)]
    for _ in range(2):
        for number, held in enumerate(arrays):
            way.broadcast(held.taken, number % 2)
            size = (1 << 16) + number
            np.testing.assert_array_equal(held.get(), values(number + number % 2, size=size))
            assert way.opened() <= 3, "half of six are this rank's own"
    assert way.opened() >= 1
    way.close()
    assert way.opened() == 0
    if not is_true(xp):
        from _cases import stand_in_memory

        assert not stand_in_memory.opened


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["async", "managed", "strided"])
def test_memory_without_a_handle_is_told_by_all(world, xp, kind):
    way = ipc_way(world)
    held = Held(xp, values(world.rank))
    array = held.array
    if world.rank == 1 and kind == "strided":
        array = xp.zeros((SIZE, 2), "f4")[:, 0]
    elif world.rank == 1:
        place = getattr(xp.cuda, f"malloc_{kind}")(4 * SIZE)
        array = xp.ndarray((SIZE,), np.dtype("f4"), place)
    words = {"async": "not of cudaMalloc", "managed": "managed", "strided": "strided"}[kind]
    with pytest.raises(NotDirectError, match=f"rank 1 has no handle: .*{words}") as caught:
        way.all_reduce(DeviceArray(array), "SUM")
    assert not caught.value.lasting
    np.testing.assert_array_equal(held.get(), values(world.rank))
    way.all_reduce(held.taken, "SUM")
    check(held.get(), reduced([values(rank) for rank in range(3)], "SUM"))
    way.close()


@pytest.mark.ranks(3)
def test_devices_that_do_not_see_each_other(world, xp, devices, monkeypatch):
    if is_true(xp):
        pytest.skip("devices cannot be made strangers there")
    monkeypatch.setattr(xp, "strangers", [{0, 2}])
    with xp.cuda.Device(world.rank):
        way, held = ipc_way(world, world.rank), Held(xp, values(world.rank))
        with pytest.raises(NotDirectError, match=r"GPU [02] cannot open .* rank [02]") as caught:
            way.all_reduce(held.taken, "SUM")
        assert caught.value.lasting
        assert way.opened() == 0
        np.testing.assert_array_equal(held.get(), values(world.rank))
        way.broadcast(held.taken, 1)
        np.testing.assert_array_equal(held.get(), values(1))
        way.close()


@pytest.mark.ranks(2)
def test_an_array_on_another_device_than_the_way(world, xp, devices):
    if devices < 2:
        pytest.skip("there is one device")
    way = ipc_way(world)
    with xp.cuda.Device(world.rank):
        held = Held(xp, values(world.rank))
    with pytest.raises(NotDirectError, match="rank 1 has no handle: it lies on GPU 1"):
        way.broadcast(held.taken, 0)
    way.close()


@pytest.mark.ranks(2)
def test_ranks_that_make_different_calls_are_told(world, xp):
    way = ipc_way(world)
    held = Held(xp, np.zeros(4 + world.rank, "f4"))
    with pytest.raises(DistBackendError, match=r"rank . makes another than all_reduce SUM"):
        way.all_reduce(held.taken, "SUM")
    with pytest.raises(FailedPreconditionError, match="has failed"):
        way.all_reduce(held.taken, "SUM")
    way.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_a_device_that_fails_on_one_rank(world, xp, devices, monkeypatch, kind):
    if is_true(xp):
        pytest.skip("devices cannot be made to fail there")

    def fail(*_):
        raise xp.CUDARuntimeError(700)

    with xp.cuda.Device(world.rank):
        way = nccl_way(world) if kind == "nccl" else ipc_way(world, world.rank)
        held, recv = Held(xp, values(world.rank, size=10)), zeros(xp, 10)
        if world.rank == 1:
            monkeypatch.setattr(xp.cuda.runtime, "memcpyAsync", fail)
            with pytest.raises(DistBackendError, match=r"rank 1 of 2.* failed on GPU 1"):
                way.all_to_all(held.taken, recv.taken)
            with pytest.raises((DistBackendError, FailedPreconditionError), match="700"):
                way.all_to_all(held.taken, recv.taken)
        elif kind == "ipc":  # where the other waits for it
            with pytest.raises(DistBackendError, match=r"another rank has failed half-way"):
                way.all_to_all(held.taken, recv.taken)
        if world.rank == 1:
            monkeypatch.undo()
            with pytest.raises(DistBackendError, match="700") if kind == "nccl" else nullcontext():
                way.close()


@pytest.mark.ranks(2, timeout=30)
def test_two_ranks_on_one_device_are_refused_by_nccl(world, xp):
    with pytest.raises(DistBackendError, match=r"rank . of 2, GPU 0: .* a device of its own"):
        nccl_way(world, 0)


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come(world, xp, devices, monkeypatch, caplog):
    if is_true(xp):
        pytest.skip("what is given up ends more than the test there")
    raised, ended = [], threading.Event()

    def note(args):
        raised.append(args.exc_value)
        ended.set()

    monkeypatch.setattr(threading, "excepthook", note)
    impatient = dataclasses.replace(tail.config, stall_s=0.2, stall_abort_s=0.5)
    with xp.cuda.Device(world.rank):
        way, held = nccl_way(world), Held(xp, values(world.rank))
        way.all_reduce(held.taken, "SUM")
        held.get()
        assert way.pending() is None
        if world.rank == 0:
            monkeypatch.setattr(tail, "config", impatient)
            way.all_reduce(held.taken, "MAX")
            assert "all_reduce of float32[1003] on GPU 0" in way.pending()
            assert ended.wait(20)
            where = r"NCCL, rank 0 of 2, GPU 0: all_reduce of .* MPIDIST_STALL_ABORT_S"
            for call in (lambda: way.broadcast(held.taken, 0), way.close):
                with pytest.raises(DistBackendError, match=where):
                    call()
            assert "wrong values" in str(raised[0])
            assert sum("has not ended" in one.message for one in caplog.records) == 1
        world.Barrier()
        if world.rank == 1:
            way.all_reduce(held.taken, "MAX")
            assert ended.wait(20), "the other rank has given up, and is gone"
            with pytest.raises(DistBackendError, match="rank 1 of 2, GPU 1"):
                way.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("status", [6, 7])
def test_an_error_of_nccl_that_comes_late(world, xp, devices, monkeypatch, status):
    if is_true(xp):
        pytest.skip("NCCL cannot be made to fail there")
    from _cases import stand_in_nccl

    with xp.cuda.Device(world.rank):
        way, held = nccl_way(world), Held(xp, values(world.rank))
        way.all_reduce(held.taken, "SUM")
        held.get()
        world.Barrier()
        ended = threading.Event()
        monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
        monkeypatch.setattr(stand_in_nccl, "async_error", [status])
        assert ended.wait(20)
        with pytest.raises(DistBackendError, match=r"rank . of 2, GPU .: it has failed: .*[67]"):
            way.all_reduce(held.taken, "SUM")
        with pytest.raises(DistBackendError, match="it has failed"):
            way.close()


@pytest.mark.ranks(2)
def test_ranks_that_do_not_come_to_the_communicator(world, xp, devices, monkeypatch, caplog):
    if is_true(xp):
        pytest.skip("a thread would wait there for ever")
    from mpidist.cuda.ways import nccl_library

    impatient = dataclasses.replace(streams.config, stall_s=0.1, stall_abort_s=0.3)
    if world.rank == 0:
        monkeypatch.setattr(nccl_library, "config", impatient)
        with pytest.raises(DeadlineExceededError, match=r"rank 0 of 2, GPU 0: not all ranks"):
            Nccl(2, 0, unique_id(), 0)
        assert sum("not all ranks" in one.message for one in caplog.records) == 1
