"""Collectives of arrays on GPUs through NCCL, CUDA IPC, MPI and the host, against NumPy."""

import dataclasses
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from _cases import stand_in_cupy, stand_in_nccl
from _cases.endpoints import wait_until
from _cases.gpu_calls import idle_bytes, lent_bytes

import mpidist.group.gpu_operation
import mpidist.group.ipc_backend
import mpidist.group.process_group
from mpidist import ProcessGroup, ReduceOp
from mpidist.errors import (
    DeadlineExceededError,
    DistBackendError,
    GroupBrokenError,
    ResourceExhaustedError,
)
from mpidist.gpu import has_dtype
from mpidist.group import make_group

COUNT = (1 << 15) + 12  # elements: several chunks, the last of them incomplete
BF16 = np.dtype(ml_dtypes.bfloat16)
BACKENDS = ("nccl", "ipc", "ipc on several GPUs", "mpi", "staged")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
ON_GPUS = ("nccl", "ipc", "ipc on several GPUs")


@pytest.fixture
def grouped(world, xp, monkeypatch):
    """Provide a maker of groups with a given backend. It also makes this rank's GPU current."""
    made = []
    package = mpidist.group
    # 64 KiB in place of 4 and 16 MiB, so that small arrays take all steps.
    monkeypatch.setattr(package.gpu_operation, "IPC_MIN_BYTES", 1 << 16)
    monkeypatch.setattr(package.ipc_backend, "CHUNK_BYTES", 1 << 16)

    def make(backend, timeout=None):
        if xp is stand_in_cupy:
            monkeypatch.setattr(xp, "DEVICES", 4)
        elif backend == "mpi":
            pytest.skip("this MPI takes no device memory")
        several = backend in ("nccl", "ipc on several GPUs")
        if several and xp.cuda.runtime.getDeviceCount() < world.size:
            pytest.skip("each rank needs a GPU of its own")
        device = world.rank if several else 0
        if backend == "ipc on several GPUs" or (backend == "ipc" and world.size == 1):
            monkeypatch.setattr(package.process_group, "nccl_problem", lambda: "switched off")
        config = dataclasses.replace(package.process_group.config, gpu_mpi=backend == "mpi")
        monkeypatch.setattr(package.process_group, "config", config)
        context = xp.cuda.Device(device)
        context.__enter__()
        group = ProcessGroup(world.Dup(), "test", timeout, None if backend == "staged" else device)
        made.append((group, context))
        assert group.gpu_rule.backend == backend.partition(" ")[0]
        return group

    yield make
    for group, context in made:
        if not group.freed:
            group.free()
        context.__exit__()


def values(rank, count=COUNT, dtype="f4"):
    """Return the numbers of a rank. Every rank computes the same numbers."""
    return np.random.default_rng(rank).integers(0, 9, count).astype(dtype)


def everyone(group, *args, **kwargs):
    return [values(rank, *args, **kwargs) for rank in range(group.size())]


def host(xp, array):
    return xp.asnumpy(array)


def staged_bytes():
    """Return the size of the pinned memory in the pool. It grows if an array is staged."""
    return lent_bytes() + idle_bytes()


def run_all(group, xp, async_op=False):
    """Run every collective with a GPU backend, and compare the results."""

    def done(work):
        if async_op:
            work.wait(60)

    rank, size = group.rank(), group.size()
    count = COUNT * size
    parts = everyone(group, count)
    total = np.sum(parts, 0, dtype="f8")
    array = xp.asarray(parts[rank])
    done(group.all_reduce(array, async_op=async_op))
    np.testing.assert_array_equal(host(xp, array), total)
    array = xp.asarray(parts[rank])
    done(group.reduce(array, size - 1, "max", async_op))
    wanted = np.max(parts, 0) if rank == size - 1 else parts[rank]
    np.testing.assert_array_equal(host(xp, array), wanted)
    array = xp.asarray(parts[rank])
    done(group.broadcast(array, size - 1, async_op))
    np.testing.assert_array_equal(host(xp, array), parts[-1])
    output = xp.zeros(size * count, "f4")
    done(group.all_gather_into_tensor(output, xp.asarray(parts[rank]), async_op))
    np.testing.assert_array_equal(host(xp, output), np.concatenate(parts))
    output = xp.zeros(COUNT, "f4")
    done(group.reduce_scatter_tensor(output, xp.asarray(parts[rank]), async_op=async_op))
    np.testing.assert_array_equal(host(xp, output), total[rank * COUNT :][:COUNT])
    output = xp.zeros(count, "f4")
    done(group.all_to_all_single(output, xp.asarray(parts[rank]), async_op=async_op))
    wanted = np.concatenate([part[rank * COUNT :][:COUNT] for part in parts])
    np.testing.assert_array_equal(host(xp, output), wanted)


@pytest.mark.ranks(1, 2, 4)
@every_backend
def test_every_operation(grouped, xp, backend):
    group = grouped(backend)
    before = staged_bytes()
    run_all(group, xp)
    run_all(group, xp, async_op=True)
    if backend in ON_GPUS:
        assert staged_bytes() == before


@pytest.mark.ranks(2)
@every_backend
def test_dtypes(grouped, xp, backend):
    group = grouped(backend)
    dtypes = ["?", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "F", "D"]
    for dtype in [*dtypes, BF16] if has_dtype(BF16) else dtypes:
        parts = everyone(group, dtype=dtype)
        array = xp.asarray(parts[group.rank()])
        group.all_reduce(array)
        np.testing.assert_array_equal(host(xp, array), np.sum(parts, 0).astype(dtype))
        array = xp.asarray(parts[group.rank()])
        group.broadcast(array, 1)
        np.testing.assert_array_equal(host(xp, array), parts[1])


@pytest.mark.ranks(3)
@every_backend
def test_reductions(grouped, xp, backend):
    group = grouped(backend)
    parts = np.stack(everyone(group, dtype="i4"))
    expected = {
        "avg": parts.mean(0),
        "product": parts.prod(0),
        "min": parts.min(0),
        "max": parts.max(0),
        "bor": np.bitwise_or.reduce(parts, 0),
    }
    for op, right in expected.items():
        array = xp.asarray(parts[group.rank()].astype("i4" if op == "bor" else "f4"))
        group.all_reduce(array, op)
        np.testing.assert_allclose(host(xp, array), right, rtol=1e-6)
        array = xp.asarray(parts[group.rank()].astype("i4" if op == "bor" else "f2"))
        group.reduce(array, 1, op)
        if group.rank() == 1 and op != "product":
            np.testing.assert_allclose(host(xp, array), right, rtol=2e-3)
        if group.rank() != 1:
            np.testing.assert_array_equal(host(xp, array), parts[group.rank()])


@pytest.mark.ranks(2)
@every_backend
@pytest.mark.parametrize("async_op", [False, True])
def test_operations_are_ordered_with_the_stream(grouped, xp, backend, async_op):
    group = grouped(backend)
    with xp.cuda.Stream(non_blocking=True):
        array = xp.zeros(COUNT, "f4")
        expected = 0
        for _ in range(3):
            array += group.rank() + 1
            work = group.all_reduce(array, async_op=async_op)
            if async_op:
                work.wait(60)
            array += 1
            expected = 2 * expected + 3 + 1
        np.testing.assert_array_equal(host(xp, array), np.full(COUNT, expected))


@pytest.mark.ranks(2)
@every_backend
def test_asynchronous_operations_in_order_with_blocking_ones(grouped, xp, backend):
    group = grouped(backend)
    arrays = [xp.full(COUNT, n + group.rank(), "f4") for n in range(4)]
    works = [group.all_reduce(array, async_op=True) for array in arrays]
    last = xp.ones(COUNT, "f4")
    group.broadcast(last, 0)
    group.all_reduce(last)
    for number, (array, work) in enumerate(zip(arrays, works, strict=True)):
        assert work.result(60)[0] is array
        np.testing.assert_array_equal(host(xp, array), np.full(COUNT, 2 * number + 1))
    np.testing.assert_array_equal(host(xp, last), np.full(COUNT, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["ipc", "ipc on several GPUs", "staged"])
@pytest.mark.parametrize("async_op", [False, True])
def test_arrays_of_the_host_and_of_gpus_together(grouped, xp, backend, async_op):
    group = grouped(backend)
    for _ in range(2):
        mine = values(group.rank())
        with xp.cuda.Stream(non_blocking=True):
            array = xp.asarray(mine) if group.rank() else mine.copy()
            work = group.all_reduce(array, async_op=async_op)
            if async_op:
                work.wait(60)
            np.testing.assert_array_equal(host(xp, array), np.sum(everyone(group), 0))
    output = np.zeros(2 * COUNT, "f4")
    group.all_gather_into_tensor(output, xp.asarray(values(group.rank())))
    np.testing.assert_array_equal(output, np.concatenate(everyone(group)))
    group.all_reduce(xp.ones(COUNT, "f4"))


@pytest.mark.ranks(2)
def test_with_nccl_arrays_of_the_host_and_of_gpus_together_are_an_error(grouped, xp):
    group = grouped("nccl")
    array = xp.ones(COUNT, "f4") if group.rank() else np.ones(COUNT, "f4")
    said = r"rank 0 calls all_reduce\(SUM, float32\[32780\]\).*; rank 1 .*on GPUs by nccl"
    with pytest.raises(ValueError, match=said):
        group.all_reduce(array)


@pytest.mark.ranks(2)
@every_backend
def test_strided_overlapping_and_other_arrays(grouped, xp, backend):
    group = grouped(backend)
    parts = everyone(group)
    total = np.sum(parts, 0)
    strided = xp.zeros((COUNT, 2), "f4")[:, 0]
    strided[...] = xp.asarray(parts[group.rank()])
    group.all_reduce(strided)
    np.testing.assert_array_equal(host(xp, strided), total)
    group.broadcast(strided, 1)
    np.testing.assert_array_equal(host(xp, strided), total)
    array = xp.asarray(parts[group.rank()])
    group.all_reduce(array, ReduceOp.PREMUL_SUM(0.5))
    np.testing.assert_array_equal(host(xp, array), total / 2)
    with group.coalesce():
        group.all_reduce(array)
    np.testing.assert_array_equal(host(xp, array), total)
    group.all_to_all_single(xp.zeros(COUNT, "f4"), array, [COUNT // 2] * 2, [COUNT // 2] * 2)
    whole = xp.zeros(2 * COUNT, "f4")
    whole[group.rank() * COUNT :][:COUNT] = array
    group.all_gather_into_tensor(whole, whole[group.rank() * COUNT :][:COUNT])
    np.testing.assert_array_equal(host(xp, whole), np.tile(total, 2))
    small = xp.ones(4, "f4")
    group.all_reduce(small)
    np.testing.assert_array_equal(host(xp, small), np.full(4, 2))
    group.all_reduce(xp.zeros(0, "f4"))
    with pytest.raises(ValueError, match="reduce_scatter_tensor"):
        group.reduce_scatter_tensor(xp.zeros(COUNT, "f4"), xp.zeros(COUNT, "f4"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["async", "managed"])
def test_memory_without_a_handle(grouped, xp, kind):
    group = grouped("ipc")
    before = staged_bytes()
    place = getattr(xp.cuda, f"malloc_{kind}")(4 * COUNT)
    array = xp.ndarray((COUNT,), np.dtype("f4"), place)
    array[...] = xp.asarray(values(group.rank()))
    group.all_reduce(array)
    np.testing.assert_array_equal(host(xp, array), np.sum(everyone(group), 0))
    assert staged_bytes() == before


@pytest.mark.ranks(2)
def test_an_array_on_another_gpu(grouped, xp):
    if xp is not stand_in_cupy and xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU only")
    group = grouped("nccl")
    with xp.cuda.Device(1 - group.rank()):
        array = xp.ones(COUNT, "f4")
        with pytest.raises(ValueError, match=r"group 'test' uses GPU [01] on rank [01]"):
            group.all_reduce(array)
    group = grouped("ipc on several GPUs")
    with xp.cuda.Device(1 - group.rank()):
        array = xp.ones(COUNT, "f4")
        group.all_reduce(array)
        assert host(xp, array)[-1] == 2


@pytest.mark.ranks(2, 3)
@every_backend
def test_different_calls_are_told_on_all_members(grouped, xp, backend):
    group = grouped(backend)
    array = xp.ones(COUNT, "f4")
    said = r"rank 0 calls all_reduce\(SUM, .*; rank 1 calls broadcast\(root 0"
    call = (lambda: group.broadcast(array, 0)) if group.rank() else lambda: group.all_reduce(array)
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [100, COUNT])
@pytest.mark.parametrize("backend", ["ipc", "staged"])
def test_prepared_operations_match_calls(grouped, xp, count, backend):
    group = grouped(backend)
    for module in (np, xp):
        prepared = np.ones(count, "f4")
        step = group.prepare("all_reduce", prepared)
        called = module.ones(count, "f4")
        for expected in (2, 4):
            if group.rank() == 0:
                step()
                np.testing.assert_array_equal(prepared, expected)
            else:
                group.all_reduce(called)
                got = host(xp, called) if module is xp else called
                np.testing.assert_array_equal(got, expected)
        step.start().wait(60)


def fails(monkeypatch, place, name, error):
    """Have a function raise an error."""

    def fail(*_):
        raise error

    monkeypatch.setattr(place, name, fail)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_rank_that_fails_halfway_tells_the_others(grouped, xp, monkeypatch, async_op):
    group = grouped("ipc")
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    if group.rank() == 1:
        fails(monkeypatch, mpidist.group.ipc_backend, "combine", MemoryError("short"))
    expected = "short" if group.rank() else "another rank has failed"

    def run(group, array):
        work = group.all_reduce(array, async_op=async_op)
        if work is not None:
            work.wait(60)

    with pytest.raises((ResourceExhaustedError, DistBackendError), match=expected):
        run(group, array)
    with pytest.raises(GroupBrokenError, match="left halfway"):
        group.all_reduce(array)


@pytest.mark.ranks(2)
def test_a_device_that_fails_breaks_the_group(grouped, xp, monkeypatch):
    if xp is not stand_in_cupy:
        pytest.skip("devices cannot be made to fail there")
    group = grouped("nccl")
    array, output = xp.ones(COUNT, "f4"), xp.ones(2 * COUNT, "f4")
    group.all_reduce(array)
    host(xp, array)  # if one rank aborted, the operation of the other rank would end
    with monkeypatch.context() as patch:
        fails(patch, stand_in_nccl.NcclCommunicator, "allGather", xp.CUDARuntimeError(700))
        with pytest.raises(DistBackendError, match="failed on GPU"):
            group.all_gather_into_tensor(output, array)
    with pytest.raises(GroupBrokenError):
        group.all_reduce(array)


@pytest.mark.ranks(3)
def test_gpus_that_cannot_open_each_others_memory_are_staged(grouped, xp, monkeypatch, caplog):
    if xp is not stand_in_cupy:
        pytest.skip("GPUs cannot be made strangers there")
    monkeypatch.setattr(xp, "strangers", [{0, 2}])
    group = grouped("ipc on several GPUs")
    for _ in range(2):
        array = xp.asarray(values(group.rank()))
        group.all_reduce(array)
        np.testing.assert_array_equal(host(xp, array), np.sum(everyone(group), 0))
    warnings = [one.message for one in caplog.records if "CUDA IPC cannot be used" in one.message]
    assert len(warnings) == 1
    assert "group rank 0" in warnings[0]


@pytest.mark.ranks(2)
@every_backend
def test_a_time_limit_holds_if_a_member_does_not_come(grouped, world, xp, backend):
    group = grouped(backend, 0.5)
    array = xp.ones(COUNT, "f4")
    group.set_timeout(60)
    group.all_reduce(array)
    group.set_timeout(0.2)
    if group.rank() == 0:
        with pytest.raises(DeadlineExceededError, match=r"has not completed within 0\.2 s"):
            group.all_reduce(array)
        with pytest.raises(GroupBrokenError):
            group.all_reduce(array)
    world.Barrier()
    group.set_timeout(60)
    if group.rank() == 1:
        group.all_reduce(array)
    world.Barrier()

    def is_usable():
        try:
            group.all_reduce(xp.ones(COUNT, "f4"))
        except GroupBrokenError:
            return False
        return True

    wait_until(is_usable)  # the late operation has ended on this rank, too


@pytest.mark.ranks(2)
@every_backend
def test_no_memory_is_kept(grouped, xp, backend):
    group = grouped(backend)
    array = xp.zeros(COUNT, "f4")
    group.all_reduce(array)
    host(xp, array)
    before = lent_bytes()
    for _ in range(20):
        group.all_reduce(array)
        group.broadcast(array, 1, async_op=True).wait(60)
    host(xp, array)
    wait_until(lambda: lent_bytes() <= before)  # the watchdog polls pending operations


@pytest.mark.ranks(2)
def test_freeing_a_group_closes_the_buffers(grouped, xp):
    from _cases import stand_in_memory

    group = grouped("ipc")
    before = len(stand_in_memory.opened)
    group.all_reduce(xp.ones(COUNT, "f4"))
    if xp is stand_in_cupy:
        assert len(stand_in_memory.opened) == before + 1
    group.free()
    assert len(stand_in_memory.opened) == before


@pytest.mark.ranks(2)
def test_groups_that_are_made_of_others_have_their_gpus(grouped, world):
    whole = grouped("ipc")
    part = make_group(whole, [1, 0], "part")
    assert part.device == 0
    assert part.gpu_rule.backend == "ipc"
    plain = ProcessGroup(world.Dup(), "plain")
    assert "no CuPy" in str(plain.gpu_rule)
    assert make_group(plain, [0, 1], "part").device is None


@pytest.mark.ranks(2)
def test_messages_of_device_memory(grouped, xp):
    group = grouped("mpi")
    rank, other = group.rank(), 1 - group.rank()
    before = staged_bytes()
    array = xp.zeros(8, "f4")
    mine = xp.asarray(np.arange(8, dtype="f4") + rank)
    mine *= 2
    if rank == 0:
        group.send(mine, 1)
        assert group.recv(array, 1, timeout=30) == 1
    else:
        assert group.recv(array) == 0
        group.isend(mine, 0).wait()
    assert staged_bytes() == before
    np.testing.assert_array_equal(host(xp, array), 2.0 * (np.arange(8) + other))
    for strange in (xp.zeros((4, 4), "f4")[:, 0], xp.zeros(4, "f2")):  # both are staged
        strange[...] = xp.asarray(np.full(4, rank + 1.0, strange.dtype))
        if rank == 0:
            group.send(strange, 1)
        else:
            group.recv(strange, 0)
        np.testing.assert_array_equal(host(xp, strange), np.ones(4))
    if rank == 0:
        group.send(np.full(3, 9, "f4"), 1)
    else:
        assert group.recv(array) == 0
        np.testing.assert_array_equal(host(xp, array)[:4], [9, 9, 9, 6])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("backend", "array"), [("nccl", "strided"), ("nccl", "half"), ("ipc", "strided")]
)
def test_a_rank_without_memory_can_join_the_others_later(grouped, xp, backend, array):
    if xp is not stand_in_cupy:
        pytest.skip("memory cannot be made short there")
    group = grouped(backend)
    if array == "strided":
        array = xp.ones((COUNT, 2), "f4")[:, 0]
    else:
        array = xp.ones(COUNT, "f2")
    if group.rank() == 1:
        xp.longest.append(10)
        with pytest.raises(ResourceExhaustedError, match=r"GPU . of rank 1 .* all_reduce"):
            group.all_reduce(array)
        xp.longest.clear()
    group.all_reduce(array)
    np.testing.assert_array_equal(host(xp, array), np.full(COUNT, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("status", [6, 7])
def test_an_error_of_nccl_that_comes_late(grouped, world, xp, monkeypatch, status):
    if xp is not stand_in_cupy:
        pytest.skip("NCCL cannot be made to fail there")
    group = grouped("nccl")
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    host(xp, array)
    world.Barrier()
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
    monkeypatch.setattr(stand_in_nccl, "async_error", [status])
    assert ended.wait(20)
    with pytest.raises(DistBackendError, match=r"NCCL failed on rank . of 2, GPU .: .*[67]"):
        group.all_reduce(array)
    with pytest.raises(GroupBrokenError):
        group.all_reduce(array)


@pytest.mark.ranks(2)
def test_nccl_that_is_missing_on_a_rank(world, xp, monkeypatch):
    if xp is not stand_in_cupy:
        pytest.skip("NCCL is there")
    monkeypatch.setattr(xp, "DEVICES", 4)
    if world.rank == 1:
        missing = types.SimpleNamespace(available=False)
        monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", missing)
        monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nccl", None)
    group = ProcessGroup(world.Dup(), "test", device=world.rank)
    assert group.gpu_rule.backend == "ipc"
    assert "rank 1: CuPy has no NCCL" in str(group.gpu_rule)
    assert "pip install nvidia-nccl-cu12" in str(group.gpu_rule)
    group.free()


@pytest.mark.ranks(2)
def test_after_a_failure_queued_operations_fail_on_all_ranks(grouped, xp, monkeypatch):
    group = grouped("ipc")
    arrays = [xp.ones(COUNT, "f4") for _ in range(3)]
    group.all_reduce(arrays[0])
    held = threading.Event()
    carry_out = mpidist.group.ipc_backend.IpcBackend._carry_out

    def hold(backend, entry):
        assert held.wait(60)
        carry_out(backend, entry)

    monkeypatch.setattr(mpidist.group.ipc_backend.IpcBackend, "_carry_out", hold)
    combine, calls = mpidist.group.ipc_backend.combine, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("short")
        combine(*args)

    if group.rank() == 1:
        monkeypatch.setattr(mpidist.group.ipc_backend, "combine", fail_once)
    works = [group.all_reduce(array, async_op=True) for array in arrays]
    held.set()
    for work in works:
        with pytest.raises((ResourceExhaustedError, DistBackendError)):
            work.wait(60)
    with pytest.raises(GroupBrokenError):
        group.all_reduce(arrays[0])


@pytest.mark.ranks(2)
def test_a_failure_after_the_last_copies_is_told_to_all_ranks(grouped, xp, monkeypatch):
    group = grouped("ipc")
    array = xp.zeros((COUNT, 2), "f4")[:, 0]
    group.all_reduce(array)
    if group.rank() == 0:
        fails(monkeypatch, mpidist.group.gpu_operation.GpuOp, "unpack", MemoryError("short"))
    expected = "another rank has failed" if group.rank() else "short"
    with pytest.raises((ResourceExhaustedError, DistBackendError), match=expected):
        group.all_reduce(array)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ON_GPUS)
def test_freeing_a_group_waits_for_its_operations(grouped, xp, monkeypatch, backend):
    group = grouped(backend)
    arrays = [xp.full(COUNT, n, "f4") for n in range(3)]
    carry_out, released = mpidist.group.ipc_backend.IpcBackend._carry_out, threading.Event()

    def end_late(ipc, entry):
        carry_out(ipc, entry)
        assert released.wait(60)

    if group.rank() == 1:  # the operations are pending here when those of the other rank have ended
        monkeypatch.setattr(mpidist.group.ipc_backend.IpcBackend, "_carry_out", end_late)
    works = [group.all_reduce(array, async_op=True) for array in arrays]
    if group.rank() == 0:
        for work in works:
            work.wait(60)
    threading.Timer(0.5, released.set).start()
    group.free()
    for number, (array, work) in enumerate(zip(arrays, works, strict=True)):
        work.wait(60)
        np.testing.assert_array_equal(host(xp, array), np.full(COUNT, 2 * number))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ON_GPUS)
def test_any_stream_sees_a_strided_result_after_wait(grouped, xp, backend):
    group = grouped(backend)
    array = xp.ones((COUNT, 2), "f4")[:, 0]
    group.all_reduce(array, async_op=True).wait(60)
    with xp.cuda.Stream(non_blocking=True):
        np.testing.assert_array_equal(host(xp, array), np.full(COUNT, 2))


@pytest.mark.ranks(4)
def test_a_prepared_gather_of_large_parts_matches_calls(grouped, monkeypatch):
    group = grouped("ipc")
    # The threshold lies between the size of a part and the size of the output.
    monkeypatch.setattr(mpidist.group.gpu_operation, "IPC_MIN_BYTES", 1 << 17)
    part = np.full(1 << 14, group.rank(), "f4")  # a separate message, a quarter of the output
    output = np.zeros(4 << 14, "f4")
    prepared = group.prepare("all_gather_into_tensor", output, part)
    for _ in range(2):
        if group.rank() % 2:
            prepared()
        else:
            group.all_gather_into_tensor(output, part)
        np.testing.assert_array_equal(output, np.repeat(np.arange(4), 1 << 14))


@pytest.mark.ranks(2)
def test_one_rank_decides_whether_mpi_takes_device_memory(world, xp, monkeypatch):
    module = mpidist.group.process_group
    config = dataclasses.replace(module.config, gpu_mpi=world.rank == 0)
    monkeypatch.setattr(module, "config", config)
    group = ProcessGroup(world.Dup(), "test", device=0)
    assert group.gpu_rule.backend == "mpi"
    group.free()
