"""Calls of torch.distributed users, with the same meaning here."""

import sys
import threading

import numpy as np
import pytest
from _cases.endpoints import LIMIT_S

import mpidist as dist


@pytest.fixture
def default():
    group = dist.init_process_group()
    yield group
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_the_default_group_by_its_names(default):
    assert dist.group.WORLD is default
    assert dist.GroupMember.WORLD is default
    array = np.ones(2)
    dist.all_reduce(array, group=dist.group.WORLD)
    assert array.tolist() == [2, 2]
    dist.destroy_process_group()
    assert dist.group.WORLD is None
    again = dist.init_process_group()
    assert dist.group.WORLD is again


ROOTLESS = {
    "broadcast": lambda group, **options: dist.broadcast(np.ones(2), group=group, **options),
    "reduce": lambda group, **options: dist.reduce(np.ones(2), group=group, **options),
    "broadcast of the group": lambda group, **options: group.broadcast(np.ones(2), **options),
    "reduce of the group": lambda group, **options: group.reduce(np.ones(2), **options),
    "send": lambda group, **_: dist.send(np.ones(2), group=group),
    "isend": lambda group, **_: dist.isend(np.ones(2), group=group),
    "send_object_list": lambda group, **_: dist.send_object_list([1], group=group),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ROOTLESS)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_root_that_is_missing(default, call, async_op):
    with pytest.raises(ValueError, match=r"(src|dst), .* is missing: give (src|dst) or group_"):
        ROOTLESS[call](default, async_op=async_op)
    dist.barrier()


@pytest.mark.ranks(2)
def test_roots_that_torch_has_by_default(default):
    """Use rank 0 as the default root of these calls only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [np.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(np.full(2, float(rank)), gathered)
    own = np.zeros(2)
    dist.scatter(own, gathered)
    objects = [None] * size if rank == 0 else None
    dist.gather_object(rank, objects)
    told = [rank]
    dist.broadcast_object_list(told)
    share = [None]
    dist.scatter_object_list(share, objects)
    assert own.tolist() == [rank, rank]
    assert told == [0]
    assert share == [rank]


def begun(name, rank, size, length):
    """Start a collective. Return its Work, and its output arrays."""
    array, output, whole = np.ones(length), np.zeros(length), np.zeros(length * size)
    parts = [np.zeros(length) for _ in range(size)]
    given = [np.ones(length) for _ in range(size)]
    at_root = rank == 0
    match name:
        case "all_reduce":
            return dist.all_reduce(array, async_op=True), [array]
        case "reduce":
            return dist.reduce(array, 0, async_op=True), [array]
        case "broadcast":
            return dist.broadcast(array, 0, async_op=True), [array]
        case "all_gather":
            return dist.all_gather(parts, array, async_op=True), parts
        case "all_gather_into_tensor":
            return dist.all_gather_into_tensor(whole, array, async_op=True), [whole]
        case "all_gather_single":
            return dist.all_gather_single(whole, array, async_op=True), [whole]
        case "gather":
            parts = parts if at_root else None
            return dist.gather(array, parts, 0, async_op=True), parts or []
        case "scatter":
            return dist.scatter(output, given if at_root else None, 0, async_op=True), [output]
        case "reduce_scatter":
            return dist.reduce_scatter(output, given, async_op=True), [output]
        case "reduce_scatter_tensor":
            return dist.reduce_scatter_tensor(output, np.ones_like(whole), async_op=True), [output]
        case "reduce_scatter_single":
            return dist.reduce_scatter_single(output, np.ones_like(whole), async_op=True), [output]
        case "all_to_all":
            return dist.all_to_all(parts, given, async_op=True), parts
        case "all_to_all_single":
            work = dist.all_to_all_single(whole, np.ones_like(whole), async_op=True)
            return work, [whole]
        case "all_reduce_coalesced":
            return dist.all_reduce_coalesced(given, async_op=True), given
        case "barrier":
            return dist.barrier(async_op=True), []


COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "barrier",
)  # fmt: skip


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("length", [2, 20_000])
def test_the_result_of_a_collective(default, name, length):
    work, outputs = begun(name, dist.get_rank(), dist.get_world_size(), length)
    result = work.result(LIMIT_S)
    assert type(result) is list
    assert len(result) == len(outputs)
    assert all(one is other for one, other in zip(result, outputs, strict=True))
    again = work.get_future().wait()
    assert all(one is other for one, other in zip(again, outputs, strict=True))
    dist.barrier()


@pytest.mark.ranks(1, 2, 3)
def test_collectives_on_one_array(default):
    """Call collectives by the names of torch 2.13, and by the older names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for gather, reduce in (
        (dist.all_gather_single, dist.reduce_scatter_single),
        (dist.all_gather_into_tensor, dist.reduce_scatter_tensor),
    ):
        gathered, row = np.zeros((size, 2)), np.zeros(2)
        gather(gathered, np.array([rank, 10.0 * rank]))
        assert gathered.tolist() == [[each, 10.0 * each] for each in range(size)]
        reduce(row, np.arange(2.0 * size), "max")
        assert row.tolist() == [2.0 * rank, 2.0 * rank + 1]


@pytest.mark.ranks(2)
def test_collectives_on_one_array_outside_a_group(default):
    outside = dist.GroupMember.NON_GROUP_MEMBER
    for call in (
        lambda: dist.all_gather_single(np.zeros(2), np.zeros(1), outside),
        lambda: dist.reduce_scatter_single(np.zeros(1), np.zeros(2), group=outside),
    ):
        with pytest.warns(UserWarning, match="not a member of the group") as caught:
            assert call() is None
        assert caught[0].filename == __file__


def frames(call, array):
    """Return the number of Python frames that a call enters (the minimum of several calls)."""
    counts = []
    for _ in range(5):
        entered = []
        sys.setprofile(lambda frame, event, _, into=entered: into.append(event))
        try:
            call(array)
        finally:
            sys.setprofile(None)
        counts.append(entered.count("call"))
    return min(counts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", dist.ReduceOp.SUM])
def test_the_frames_that_a_function_adds_to_the_method(default, op):
    """The function adds its own frame and the frame of the group look-up."""
    array = np.ones(1)
    of_function = frames(lambda array: dist.all_reduce(array, op), array)
    of_method = frames(lambda array: default.all_reduce(array, op), array)
    assert of_function == of_method + 2


@pytest.mark.ranks(2)
def test_the_result_of_strided_arrays_is_what_was_given(default):
    strided = np.ones((4, 4))[:, 1]
    (result,) = dist.all_reduce(strided, async_op=True).result(LIMIT_S)
    assert result is strided
    assert strided.tolist() == [2.0] * 4


@pytest.mark.ranks(2)
def test_the_result_of_a_message(default):
    rank, array = dist.get_rank(), np.zeros(2)
    work = dist.irecv(array, 1 - rank)
    dist.send(np.ones(2), 1 - rank)
    assert work.result(LIMIT_S) == 1 - rank


@pytest.mark.ranks(2)
def test_callbacks_of_futures(default):
    array = np.ones(2)
    future = dist.all_reduce(array, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    named = halved.then(lambda done: f"mean {done.wait()[0]}")
    assert named.wait() == "mean 1.0"
    assert named.done()
    assert named.value() == named.result() == "mean 1.0"
    called = threading.Event()
    future.add_done_callback(lambda done: called.set())
    assert called.wait(LIMIT_S)
    assert future.exception() is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "nccl", "NCCL", "cpu:gloo,cuda:nccl", "ucc"])
def test_backends_of_torch(world, backend):
    with pytest.raises(ValueError, match=r"not one of this package.*leave it out"):
        dist.init_process_group(backend)
    assert not dist.is_initialized()
    dist.init_process_group()
    for make in (
        lambda: dist.new_group(backend=backend),
        lambda: dist.new_subgroups(1, backend=backend),
        lambda: dist.split_group(split_ranks=[[0, 1]], backend=backend),
        lambda: dist.new_subgroups_by_enumeration([[0], [1]], backend=backend),
    ):
        with pytest.raises(ValueError, match="leave it out"):
            make()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["mpich", "", 5])
def test_backends_that_there_are_not(world, backend):
    with pytest.raises(ValueError, match="unknown backend"):
        dist.init_process_group(backend)
