"""Operations of groups that go from GPU to GPU, by each way, against NumPy."""

import dataclasses
import gc

import numpy as np
import pytest
from _cases import stand_in_cupy, stand_in_nccl
from _cases.endpoints import wait_until

from mpidist import DirectGroup, ProcessGroup, ReduceOp
from mpidist.cuda import (
    NotDirectError,
    aware,
    device_memory_by_mpi,
    pinned_pool,
)
from mpidist.cuda.ways import ipc, ipc_way
from mpidist.errors import (
    DeadlineExceededError,
    DistBackendError,
    FailedPreconditionError,
    GroupBrokenError,
    ResourceExhaustedError,
)
from mpidist.group import direct_call, pieces, way_makers, ways

COUNT = (1 << 15) + 12  # elements: several pieces, of which the last is not whole
MOVES = ("broadcast", "all_gather_into_tensor", "all_to_all_single")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor")
CARRIED = {
    "nccl": {*MOVES, *REDUCTIONS},
    "ipc": {*MOVES, *REDUCTIONS},
    "mpi": {*MOVES, *REDUCTIONS} - {"reduce"},
    "pieces": {"broadcast", "all_reduce", "reduce"},
}
every_way = pytest.mark.parametrize("way", sorted(CARRIED))


@pytest.fixture
def say(monkeypatch):
    """Sets settings of this process."""

    def set_to(**settings):
        monkeypatch.setattr(aware, "_found", [])
        for module in (ways, aware):
            monkeypatch.setattr(module, "config", dataclasses.replace(module.config, **settings))

    return set_to


@pytest.fixture
def group(world, xp, monkeypatch):
    """A group whose ranks have a GPU each, as far as there are enough."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(ways, "SIZES", (1 << 16, 1 << 18))  # the stand-in's time says nothing
    if xp is stand_in_cupy:
        monkeypatch.setattr(stand_in_cupy, "DEVICES", 4)
    made = DirectGroup(world.Dup(), "test")
    with xp.cuda.Device(made.rank() % xp.cuda.runtime.getDeviceCount()):
        yield made
        if not made.freed:
            made.free()


@pytest.fixture
def shared(group, xp):
    """The same, with one GPU for all."""
    with xp.cuda.Device(0):
        yield group


def go_by(way, group, say, xp):
    """Have a group go one way, and no other."""
    if way == "nccl" and xp.cuda.runtime.getDeviceCount() < group.size():
        pytest.skip("NCCL wants a GPU for each rank")
    if way == "mpi" and not takes_device_memory(xp):
        pytest.skip("this MPI takes no device memory")
    say(gpu_way=way, gpu_mpi="1" if way == "mpi" else "0")


def takes_device_memory(xp):
    """Whether MPI may be given addresses of arrays: the stand-in's are of the host."""
    return xp is stand_in_cupy or device_memory_by_mpi().usable


def values(rank, count=COUNT, dtype="f4"):
    """What a rank has: the same on whichever rank asks."""
    return np.random.default_rng(rank).integers(0, 9, count).astype(dtype)


def everyone(group, *args, **kwargs):
    return [values(rank, *args, **kwargs) for rank in range(group.size())]


@pytest.fixture
def went(group, monkeypatch):
    """The names of the operations that have gone directly, with the ways."""
    seen = []
    go = direct_call.Call.go

    def note(call, way):
        go(call, way)
        seen.append((call.name, way.name))

    monkeypatch.setattr(direct_call.Call, "go", note)
    return seen


@pytest.mark.ranks(1, 2, 4)
@every_way
def test_every_operation(group, xp, say, went, way):
    go_by(way, group, say, xp)
    rank, size = group.rank(), group.size()
    if way == "ipc" and size == 1:
        with pytest.raises(FailedPreconditionError, match="one rank only"):
            group.all_reduce(xp.zeros(COUNT, "f4"))
        return
    count = COUNT * size
    parts = everyone(group, count)
    total = np.sum(parts, 0, dtype="f8")

    array = xp.asarray(parts[rank])
    group.all_reduce(array)
    np.testing.assert_array_equal(xp.asnumpy(array), total)
    array = xp.asarray(parts[rank])
    group.reduce(array, size - 1, "max")
    wanted = np.max(parts, 0) if rank == size - 1 else parts[rank]
    np.testing.assert_array_equal(xp.asnumpy(array), wanted)
    array = xp.asarray(parts[rank])
    group.broadcast(array, size - 1)
    np.testing.assert_array_equal(xp.asnumpy(array), parts[-1])
    output = xp.zeros(size * count, "f4")
    group.all_gather_into_tensor(output, xp.asarray(parts[rank]))
    np.testing.assert_array_equal(xp.asnumpy(output), np.concatenate(parts))
    output = xp.zeros(COUNT, "f4")
    group.reduce_scatter_tensor(output, xp.asarray(parts[rank]))
    np.testing.assert_array_equal(xp.asnumpy(output), total[rank * COUNT :][:COUNT])
    output = xp.zeros(count, "f4")
    group.all_to_all_single(output, xp.asarray(parts[rank]))
    wanted = np.concatenate([part[rank * COUNT :][:COUNT] for part in parts])
    np.testing.assert_array_equal(xp.asnumpy(output), wanted)
    assert set(went) == {(name, way) for name in CARRIED[way]}


@pytest.mark.ranks(2)
@every_way
def test_dtypes(group, xp, say, way):
    go_by(way, group, say, xp)
    for dtype in ("?", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "F", "D"):
        parts = everyone(group, dtype=dtype)
        array = xp.asarray(parts[group.rank()])
        group.all_reduce(array)
        np.testing.assert_array_equal(xp.asnumpy(array), np.sum(parts, 0).astype(dtype))
        array = xp.asarray(parts[group.rank()])
        group.broadcast(array, 1)
        np.testing.assert_array_equal(xp.asnumpy(array), parts[1])


@pytest.mark.ranks(3)
@every_way
def test_reductions(group, xp, say, way):
    go_by(way, group, say, xp)
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
        np.testing.assert_allclose(xp.asnumpy(array), right, rtol=1e-6)


@pytest.mark.ranks(2)
@every_way
def test_an_operation_begins_after_what_is_queued_and_is_there_for_what_follows(
    group, xp, say, way
):
    go_by(way, group, say, xp)
    with xp.cuda.Stream(non_blocking=True):
        array = xp.zeros(COUNT, "f4")
        for _ in range(3):
            array += group.rank() + 1
            group.all_reduce(array)
            array += 1
        expected = 0
        for _ in range(3):
            expected = 2 * expected + 3 + 1
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(COUNT, expected))


@pytest.mark.ranks(2)
def test_the_fastest_way_is_taken(group, xp, say, went):
    names = ["ipc", "pieces", *(["mpi"] if takes_device_memory(xp) else [])]
    say(gpu_mpi="1" if "mpi" in names else "0")
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    table = group.ways
    assert set(table.seconds) == set(ways.SIZES)
    assert all({"staged", *names} <= set(times) for times in table.seconds.values())
    assert "all_reduce of 64 KiB: " in str(table)
    group._ways.from_bytes = ways.LEAST_BYTES
    for fastest in names:
        for times in table.seconds.values():
            times.update(dict.fromkeys(times, 1.0) | {fastest: 0.5})
        went.clear()
        group.all_reduce(array)
        assert went == [("all_reduce", fastest)]
    for times in table.seconds.values():
        times["staged"] = 0.1
    went.clear()
    group.all_reduce(array)
    assert not went
    assert xp.asnumpy(array)[0] == 2 ** (2 + len(names))


@pytest.mark.ranks(2)
def test_where_the_host_is_always_the_fastest_nothing_is_agreed_on_any_more(
    group, xp, say, monkeypatch
):
    say(gpu_mpi="0")
    monkeypatch.setattr(ways.Ways, "_time", lambda _, name, array: 0.5 if name == "staged" else 1)
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    before = group._submission._sequence
    group.all_reduce(array)
    assert group._submission._sequence == before + 1


@pytest.mark.ranks(2)
@every_way
def test_arrays_of_the_host_and_of_gpus_together_go_through_the_host(group, xp, say, went, way):
    go_by(way, group, say, xp)
    for _ in range(2):
        mine = values(group.rank())
        array = xp.asarray(mine) if group.rank() else mine
        group.all_reduce(array)
        np.testing.assert_array_equal(xp.asnumpy(array), np.sum(everyone(group), 0))
    assert not went


@pytest.mark.ranks(2)
@every_way
def test_what_a_way_cannot_carry_goes_through_the_host(group, xp, say, went, way):
    go_by(way, group, say, xp)
    group.all_reduce(xp.zeros(COUNT, "f4"))
    went.clear()
    parts = everyone(group)
    strided = xp.zeros((COUNT, 2), "f4")[:, 0]
    strided[...] = xp.asarray(parts[group.rank()])
    group.all_reduce(strided)
    np.testing.assert_array_equal(xp.asnumpy(strided), np.sum(parts, 0))
    array = xp.asarray(parts[group.rank()])
    group.all_reduce(array, ReduceOp.PREMUL_SUM(0.5))
    np.testing.assert_array_equal(xp.asnumpy(array), np.sum(parts, 0) / 2)
    group.all_reduce(array, async_op=True).wait()
    np.testing.assert_array_equal(xp.asnumpy(array), np.sum(parts, 0))
    with group.coalesce():
        group.all_reduce(array)
    np.testing.assert_array_equal(xp.asnumpy(array), 2 * np.sum(parts, 0))
    group.all_to_all_single(xp.zeros(COUNT, "f4"), array, [COUNT // 2] * 2, [COUNT // 2] * 2)
    whole = xp.zeros(2 * COUNT, "f4")
    whole[group.rank() * COUNT :][:COUNT] = array
    group.all_gather_into_tensor(whole, whole[group.rank() * COUNT :][:COUNT])
    np.testing.assert_array_equal(xp.asnumpy(whole), np.tile(2 * np.sum(parts, 0), 2))
    group.all_reduce(xp.zeros(4, "f4"))
    assert not went


@pytest.mark.ranks(2)
def test_on_another_gpu_than_the_ways_of_the_group_arrays_go_through_the_host(group, xp, say, went):
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU only")
    say(gpu_way="ipc")
    group.all_reduce(xp.zeros(COUNT, "f4"))
    went.clear()
    with xp.cuda.Device(1 - group.rank()):
        array = xp.ones(COUNT, "f4")
        group.all_reduce(array)
        assert xp.asnumpy(array)[-1] == 2
    assert not went


@pytest.mark.ranks(2, 3)
def test_different_calls_are_told_on_all_members(group, xp, say):
    array = xp.ones(COUNT, "f4")
    call = (lambda array: group.broadcast(array, 0)) if group.rank() else group.all_reduce
    said = r"rank 0 all_reduce\(op SUM\) .*; rank 1 broadcast\(root 0\)"
    with pytest.raises(ValueError, match=said):
        call(array)
    with pytest.raises(ValueError, match="call different collectives"):
        group.all_reduce(np.ones(COUNT + group.rank(), "f4"))
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == group.size()


@pytest.mark.ranks(2)
def test_a_way_that_gives_wrong_numbers_is_not_gone(group, xp, say, monkeypatch):
    say(gpu_mpi="0")
    right = direct_call.Call.go
    from mpidist.cuda.ways.ipc_way import Ipc

    def wrong(way, array, op):
        array.flat.fill(group.rank())

    monkeypatch.setattr(Ipc, "all_reduce", wrong)
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 2
    assert "wrong numbers" in group.ways.missing["ipc"]
    assert all("ipc" not in times for times in group.ways.seconds.values())
    assert right is direct_call.Call.go


@pytest.mark.ranks(2)
def test_a_way_that_fails_on_one_member_is_gone_by_none(group, xp, say, monkeypatch):
    say(gpu_mpi="0")

    def fail(_):
        raise DistBackendError("no handle")

    if group.rank() == 1:
        monkeypatch.setattr(way_makers.MAKERS["ipc"], "make", fail)
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    assert group.ways.missing["ipc"] == "rank 1: no handle"
    say(gpu_way="ipc")
    other = DirectGroup(group.comm.Dup(), "other")
    with pytest.raises(FailedPreconditionError, match=r"MPIDIST_GPU_WAY=ipc, but .*no handle"):
        other.all_reduce(array)


def fails(monkeypatch, place, name, error):
    """Have something fail here."""

    def fail(*_):
        raise error

    monkeypatch.setattr(place, name, fail)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_kernel_that_fails_while_a_way_is_proven(group, xp, say, monkeypatch, everywhere):
    say(gpu_mpi="0")
    if everywhere or group.rank() == 1:
        fails(monkeypatch, ipc_way, "combine", RuntimeError("no compiler"))
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 2
    assert "ipc" in group.ways.missing
    assert "pieces" not in group.ways.missing


@pytest.mark.ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_nccl_that_fails_at_its_first_operation(group, xp, say, monkeypatch, everywhere):
    if xp is not stand_in_cupy:
        pytest.skip("it cannot be made to fail there")
    say(gpu_mpi="0")
    if everywhere or group.rank() == 1:
        place = stand_in_nccl.NcclCommunicator
        fails(monkeypatch, place, "allReduce", stand_in_nccl.NcclError(2))
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 2
    assert "nccl" in group.ways.missing
    assert "ipc" not in group.ways.missing


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [100, COUNT])
def test_what_one_has_prepared_others_call(group, xp, count):
    """Those who call large arrays look first whether anybody's is on a GPU."""
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
                got = xp.asnumpy(called) if module is xp else called
                np.testing.assert_array_equal(got, expected)
        step.start().wait(60)


@pytest.mark.ranks(2)
def test_a_member_without_room_for_numbers_to_prove_ways_by(group, xp, say, monkeypatch):
    say(gpu_mpi="0")
    array = xp.ones(COUNT, "f4")
    with monkeypatch.context() as patch:
        if group.rank() == 1:
            fails(patch, xp, "asarray", MemoryError("short"))
        group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 2
    assert set(group.ways.missing) >= {"ipc", "pieces"}
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 4


@pytest.mark.ranks(2)
def test_who_fails_in_the_middle_tells_the_others(group, xp, say, monkeypatch):
    say(gpu_way="ipc")
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    if group.rank() == 1:
        fails(monkeypatch, ipc_way, "combine", MemoryError("short"))
    expected = "short" if group.rank() else "another rank has failed half-way"
    with pytest.raises((ResourceExhaustedError, DistBackendError), match=expected):
        group.all_reduce(array)
    with pytest.raises(GroupBrokenError, match="left halfway"):
        group.all_reduce(array)


@pytest.mark.ranks(2)
def test_more_members_than_a_kernel_takes(group, xp, say, monkeypatch):
    say(gpu_mpi="0")
    monkeypatch.setattr(way_makers, "MOST", 1)
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 2
    assert group.ways.missing["ipc"] == "it is for 1 ranks at most, and these are 2"


@pytest.mark.ranks(2)
def test_ranks_that_want_different_ways(group, xp, say):
    say(gpu_way=("ipc", "pieces")[group.rank()])
    with pytest.raises(FailedPreconditionError, match=r"differs between .*'ipc', 1: 'pie"):
        group.all_reduce(xp.ones(COUNT, "f4"))


class Foreign:
    """An array that has DLPack, and tells nothing else of itself."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.ranks(2)
def test_arrays_that_have_dlpack_alone(group, say, xp):
    say(gpu_mpi="0")
    mine = np.ones(COUNT, "f4")
    group.all_reduce(Foreign(mine) if group.rank() else mine)
    assert mine[-1] == 2


@pytest.mark.ranks(2)
def test_a_group_that_is_dropped_leaves_nothing_open(world, xp, say, group):
    say(gpu_way="ipc")
    before = len(ipc.opened)
    array = xp.ones(COUNT, "f4")
    dropped = DirectGroup(world.Dup(), "dropped")
    dropped.all_reduce(array)
    assert len(ipc.opened) > before
    world.Barrier()
    del dropped

    def is_closed():
        gc.collect()  # the watchdog may have just had a look at an operation of the group
        return len(ipc.opened) == before

    wait_until(is_closed)


@pytest.mark.ranks(2)
def test_what_cannot_go_this_time_goes_through_the_host(group, xp, say, monkeypatch):
    say(gpu_way="ipc")
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)

    def refuse(*_):
        raise NotDirectError("a member has no handle")

    monkeypatch.setattr(type(group._ways._made["ipc"]), "all_reduce", refuse)
    group.all_reduce(array)
    assert xp.asnumpy(array)[0] == 4


@pytest.mark.ranks(2)
def test_after_a_failure_half_way_the_group_takes_nothing_more(group, xp, say, monkeypatch):
    say(gpu_way="ipc")
    array = xp.ones(COUNT, "f4")
    group.all_reduce(array)

    def fail(*_):
        raise DistBackendError("the device is lost")

    monkeypatch.setattr(type(group._ways._made["ipc"]), "all_reduce", fail)
    with pytest.raises(DistBackendError, match="lost"):
        group.all_reduce(array)
    with pytest.raises(GroupBrokenError, match="left halfway"):
        group.all_reduce(array)


@pytest.mark.ranks(2)
@every_way
def test_a_time_limit_holds_where_members_do_not_come(world, xp, say, way):
    made = DirectGroup(world.Dup(), "limited", 0.2)
    go_by(way, made, say, xp)
    if made.rank() == 0:
        with pytest.raises(DeadlineExceededError, match=r"has not completed within 0\.2 s"):
            made.all_reduce(xp.ones(COUNT, "f4"))
        with pytest.raises(GroupBrokenError):
            made.all_reduce(xp.ones(COUNT, "f4"))
    world.Barrier()


@pytest.mark.ranks(2)
@every_way
def test_nothing_is_kept(group, xp, say, way):
    go_by(way, group, say, xp)
    array = xp.zeros(COUNT, "f4")
    group.all_reduce(array)
    xp.asnumpy(array)
    before = pinned_pool().lent_bytes()
    for _ in range(20):
        group.all_reduce(array)
        group.broadcast(array, 1)
    xp.asnumpy(array)
    wait_until(lambda: pinned_pool().lent_bytes() <= before)  # the watchdog looks at operations


@pytest.mark.ranks(2)
def test_pieces_are_ready_before_they_are_moved_and_come_back_in_order(group, xp, say):
    say(gpu_way="pieces")
    for shift in range(3):
        size = (1 << 14) * 5 + shift
        array = xp.asarray(np.arange(size, dtype="f4"))
        array += 1
        group.all_reduce(array)
        array *= 2
        np.testing.assert_array_equal(xp.asnumpy(array), 4 * (np.arange(size, dtype="f8") + 1))


@pytest.mark.ranks(1)
def test_groups_that_are_made_of_others(world, xp):
    from mpidist.group import make_group

    whole = DirectGroup(world.Dup(), "whole")
    assert type(make_group(whole, [0], "part")) is DirectGroup
    assert type(make_group(ProcessGroup(world.Dup(), "plain"), [0], "part")) is ProcessGroup


@pytest.mark.ranks(2)
def test_messages_by_an_mpi_that_takes_memory_of_devices(group, xp, say, monkeypatch):
    go_by("mpi", group, say, xp)
    group.all_reduce(xp.zeros(COUNT, "f4"))
    rank, other = group.rank(), 1 - group.rank()
    staged = pinned_pool().lent_bytes(), pinned_pool().idle_bytes()
    array = xp.zeros(8, "f4")
    mine = xp.asarray(np.arange(8, dtype="f4") + rank)
    mine *= 2
    if rank == 0:
        group.send(mine, 1)
        assert group.recv(array, 1, timeout=30) == 1
    else:
        assert group.recv(array) == 0
        group.isend(mine, 0).wait()
    assert (pinned_pool().lent_bytes(), pinned_pool().idle_bytes()) == staged
    np.testing.assert_array_equal(xp.asnumpy(array), 2.0 * (np.arange(8) + other))
    for strange in (xp.zeros((4, 4), "f4")[:, 0], xp.zeros(4, "f2")):  # which go through the host
        strange[...] = xp.asarray(np.full(4, rank + 1.0, strange.dtype))
        if rank == 0:
            group.send(strange, 1)
        else:
            group.recv(strange, 0)
        np.testing.assert_array_equal(xp.asnumpy(strange), np.ones(4))
    if rank == 0:
        group.send(np.full(3, 9, "f4"), 1)
    else:
        assert group.recv(array) == 0
        np.testing.assert_array_equal(xp.asnumpy(array)[:4], [9, 9, 9, 6])
