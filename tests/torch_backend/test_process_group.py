"""The operations of torch.distributed with the backend "mpidist", against NumPy in float64."""

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpidist
from mpidist.errors import DeadlineExceededError

pytestmark = pytest.mark.usefixtures("backend")

FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, "bool")
LAYOUTS = ("contiguous", "strided", "transposed", "empty", "scalar")


def values_of(rank, shape=(4, 6)):
    """Return small integers of a rank, which every dtype has exactly."""
    return np.random.default_rng(100 + rank).integers(0, 3, shape)


def all_values(shape=(4, 6)):
    return np.stack([values_of(rank, shape) for rank in range(dist.get_world_size())])


def tensor_of(values, dtype, layout="contiguous"):
    """Return a tensor with some values, in a memory layout."""
    tensor = torch.tensor(np.asarray(values)).to(getattr(torch, dtype))
    if layout == "strided":
        wide = torch.zeros(4, 12, dtype=tensor.dtype)
        wide[:, ::2] = tensor
        return wide[:, ::2]
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "empty":
        return tensor[:0].clone()
    if layout == "scalar":
        return tensor[0, 0].clone()
    return tensor.requires_grad_() if layout == "requires_grad" else tensor


def check(tensor, expected):
    """Compare a tensor with the values that it should have."""
    dtype = tensor.dtype
    if dtype is torch.bool:
        expected = np.asarray(expected) != 0
    wide = torch.complex128 if dtype.is_complex else torch.float64
    result = tensor.detach().to(wide).numpy()
    np.testing.assert_array_equal(result, torch.tensor(np.asarray(expected)).to(dtype).to(wide))


def cut(values, layout):
    return {"empty": values[..., :0, :], "scalar": values[..., 0, 0]}.get(layout, values)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *((dtype, layout) for dtype in DTYPES for layout in LAYOUTS),
        *((dtype, "requires_grad") for dtype in ("float32", "bfloat16")),
    ],
)
def test_all_reduce(dtype, layout):
    tensor = tensor_of(values_of(dist.get_rank()), dtype, layout)
    dist.all_reduce(tensor)
    check(tensor, cut(all_values().sum(0), layout))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("op", "reduce"),
    [
        ("AVG", lambda values: values.mean(0)),
        ("PRODUCT", lambda values: values.prod(0)),
        ("MIN", lambda values: values.min(0)),
        ("MAX", lambda values: values.max(0)),
        ("BAND", np.bitwise_and.reduce),
        ("BOR", np.bitwise_or.reduce),
        ("BXOR", np.bitwise_xor.reduce),
    ],
)
def test_reductions(op, reduce):
    dtype = "int64" if op.startswith("B") else "float64"
    tensor = tensor_of(values_of(dist.get_rank()), dtype)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    np.testing.assert_allclose(tensor.numpy(), reduce(all_values()), rtol=1e-15)


@pytest.mark.ranks(2)
def test_premul_sum():
    tensor = tensor_of(values_of(dist.get_rank()), "float32")
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    check(tensor, 0.5 * all_values().sum(0))


@pytest.mark.ranks(3)
def test_reduce_and_broadcast():
    rank = dist.get_rank()
    tensor = tensor_of(values_of(rank), "float32")
    dist.reduce(tensor, 1)
    if rank == 1:
        check(tensor, all_values().sum(0))
    dist.broadcast(tensor, 1)
    check(tensor, all_values().sum(0))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_gathering(dtype, layout):
    rank, size = dist.get_rank(), dist.get_world_size()
    own = tensor_of(values_of(rank), dtype, layout)
    outputs = [tensor_of(np.zeros((4, 6)), dtype, layout) for _ in range(size)]
    dist.all_gather(outputs, own)
    for output, values in zip(outputs, all_values(), strict=True):
        check(output, values)

    whole = torch.zeros(4 * size, 6, dtype=own.dtype)
    dist.group.WORLD.all_gather_single(whole, own).wait()
    check(whole, all_values().reshape(-1, 6))

    outputs = [torch.zeros(4, 6, dtype=own.dtype) for _ in range(size)] if rank == 2 else None
    dist.gather(own, outputs, 2)
    for output, values in zip(outputs or (), all_values(), strict=False):
        check(output, values)


@pytest.mark.ranks(3)
def test_scattering():
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [tensor_of(values_of(10 + part), "float32") for part in range(size)]
    output = torch.zeros(4, 6)
    dist.scatter(output, parts if rank == 1 else None, 1)
    check(output, values_of(10 + rank))

    inputs = tensor_of(values_of(rank, (size, 5)), "float64")
    summed = all_values((size, 5)).sum(0)
    output = torch.zeros(5, dtype=torch.float64)
    dist.reduce_scatter(output, list(inputs))
    check(output, summed[rank])
    output.zero_()
    dist.group.WORLD.reduce_scatter_single(output, inputs.flatten()).wait()
    check(output, summed[rank])


@pytest.mark.ranks(3)
def test_all_to_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    everyones = all_values((size, 4))
    outputs = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(outputs, list(tensor_of(everyones[rank], "float32")))
    check(torch.stack(outputs), everyones[:, rank])

    output = torch.zeros(size * 4)
    dist.all_to_all_single(output, tensor_of(everyones[rank].ravel(), "float32"))
    check(output, everyones[:, rank].ravel())

    # Rank r sends r + 1 rows to each rank.
    sent = torch.full((size * (rank + 1), 2), float(rank))
    received = torch.zeros(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(received, sent, list(range(1, size + 1)), [rank + 1] * size)
    check(received[:, 0], np.repeat(np.arange(size), np.arange(1, size + 1)))


@pytest.mark.ranks(2)
def test_coalescing():
    size = dist.get_world_size()
    tensors = [torch.ones(n) for n in (3, 70000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        check(tensor, np.full(tensor.shape, size))

    group = dist.group.WORLD
    wholes = [torch.zeros(size * 2) for _ in range(2)]
    group.all_gather_single_coalesced(wholes, [torch.full((2,), float(k)) for k in (1, 2)]).wait()
    check(torch.stack(wholes), np.repeat([[1], [2]], 2 * size, axis=1))
    parts = [torch.zeros(2) for _ in range(2)]
    group.reduce_scatter_single_coalesced(parts, [torch.ones(2 * size) for _ in range(2)]).wait()
    check(torch.stack(parts), np.full((2, 2), size))
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    rank = float(dist.get_rank())
    group.allgather_coalesced(lists, [torch.full((2,), rank), torch.full((3,), -rank)]).wait()
    for sender, (first, second) in enumerate(lists):
        check(first, np.full(2, sender))
        check(second, np.full(3, -sender))


@pytest.mark.ranks(2)
def test_coalescing_of_broadcasts():
    tensors = [torch.full((n,), float(dist.get_rank())) for n in (2, 5)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 1)
    manager.wait()
    for tensor in tensors:
        check(tensor, np.ones(tensor.shape))


@pytest.mark.ranks(2)
def test_asynchronous_operations_in_a_coalescing_block():
    import torch.distributed._functional_collectives as functional

    rank, other = dist.get_rank(), 1 - dist.get_rank()
    own, received = torch.full((2,), float(rank)), torch.empty(2)
    with dist._coalescing_manager(device=torch.device("cpu")):
        functional.broadcast(torch.ones(2), 1, dist.group.WORLD)  # by torch's C++ code
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        work = dist.broadcast(own, 1, async_op=True)
    manager.wait()
    assert work is not None
    assert own.tolist() == [1, 1]
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.isend(torch.full((2,), float(rank)), other)
        dist.irecv(received, other)
    assert received.tolist() == [other, other]


@pytest.mark.ranks(2)
def test_sparse_all_reduce():
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor(
        [[rank, 3]], torch.tensor([[1.0, 2], [3, 4]]), (5, 2), check_invariants=True
    )
    dist.all_reduce(tensor)
    expected = np.zeros((5, 2))
    expected[:2], expected[3] = [1, 2], [6, 8]
    check(tensor.to_dense(), expected)


@pytest.mark.ranks(3)
def test_messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = set()
        for _ in range(1, size):
            received = torch.zeros(2)
            sender = dist.recv(received, tag=3)
            check(received, np.full(2, sender))
            seen.add(sender)
        assert seen == {1, 2}
    else:
        dist.send(torch.full((2,), float(rank)), 0, tag=3)
    received = torch.zeros(2)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    check(received, np.full(2, (rank - 1) % size))


@pytest.mark.ranks(2)
def test_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    objects = [rank, "text"]
    dist.broadcast_object_list(objects, 1)
    assert objects == [1, "text"]
    output = [None]
    dist.scatter_object_list(output, list("ab") if rank == 0 else None, 0)
    assert output == ["ab"[rank]]


@pytest.mark.ranks(2)
def test_works_and_futures():
    size = dist.get_world_size()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: 2 * future.value()[0])
    check(doubled.wait(), np.full(3, 2 * size))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor

    def reduce_again(future):
        # PowerSGD's hook waits in a callback in this way.
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    result = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(reduce_again).wait()
    check(result, np.full(3, size * size))


@pytest.mark.ranks(2)
def test_blocking_and_asynchronous_calls_match():
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=dist.get_rank() == 0)
    if work is not None:
        work.wait()
    check(tensor, np.full(1000, dist.get_world_size()))


@pytest.mark.ranks(3)
def test_groups():
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank != 1:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        check(tensor, [2, 2])
        assert dist.get_group_rank(group, rank) == rank // 2
        dist.broadcast(tensor.fill_(rank), 2, group=group)
        check(tensor, [2, 2])
        local = dist.new_group([0, 2], use_local_synchronization=True)
        dist.barrier(local)
        dist.destroy_process_group(local)
    dist.barrier()
    assert dist.get_backend(dist.group.WORLD) == "mpidist"


@pytest.mark.ranks(2)
def test_gloo_beside():
    group = dist.new_group(backend="gloo")  # its addresses go through the store of the MPI job
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    check(tensor, [2, 2])


@pytest.mark.ranks(2)
def test_store():
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    store.set(f"key {rank}", f"value {rank}")
    assert store.get(f"key {1 - rank}") == f"value {1 - rank}".encode()
    store.add("count", 2)
    dist.barrier()
    assert store.add("count", 0) == 4
    store.wait(["key 0", "key 1"], timedelta(seconds=5))
    assert store.check(["key 0"])
    assert not store.check(["missing"])
    assert store.multi_get(["key 0", "key 1"]) == [b"value 0", b"value 1"]
    with pytest.raises(RuntimeError, match="missing"):
        store.wait(["missing"], timedelta(seconds=0.1))


@pytest.mark.ranks(2)
def test_scan_of_the_group_below():
    array = np.ones(2)
    dist.group.WORLD.group.scan(array)
    np.testing.assert_array_equal(array, np.full(2, dist.get_rank() + 1))


# Bad input and faults


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call",
    [
        lambda rank: dist.all_reduce(torch.ones(2 + rank)),
        lambda rank: dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int32)[rank])),
        lambda rank: (dist.all_reduce if rank else dist.broadcast)(torch.ones(2), *[0][rank:]),
        lambda rank: dist.broadcast(torch.ones(2), rank),
        lambda rank: dist.all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
    ],
)
def test_different_calls_raise_on_every_rank(call):
    with pytest.raises(ValueError, match="call different collectives") as error:
        call(dist.get_rank())
    assert "test_process_group.py" in str(error.value)  # the line of the script


@pytest.mark.ranks(2)
def test_late_difference_is_found_at_the_end():
    group = dist.new_group()
    for number in range(150):
        op = dist.ReduceOp.MAX if number == 140 and dist.get_rank() else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(2), op, group=group)
    with pytest.raises(ValueError, match="have called different collectives"):
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_destroying_does_not_wait_for_ever(world):
    group = dist.new_group()
    if dist.get_rank() == 0:
        group.shutdown()
        world.send("destroyed", 1)
    else:
        world.recv(source=0)
        group.shutdown()


@pytest.mark.ranks(2)
def test_future_has_the_time_limit_of_its_group(world):
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
        with pytest.raises(RuntimeError, match=r"has not completed within 0\.3 s"):
            torch.futures.wait_all([future])
    world.barrier()
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2), group=group)


@pytest.mark.ranks(2, timeout=40)
def test_time_limits(world):
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        with pytest.raises(DeadlineExceededError, match="all_reduce number 1"):
            dist.all_reduce(torch.ones(2), group=group)
    world.barrier()
    other = dist.new_group()
    tensor = torch.ones(2)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, group=other, async_op=True)
        with pytest.raises(DeadlineExceededError):
            work.wait(timedelta(seconds=0.1))
        world.barrier()
        work.wait()
    else:
        world.barrier()
        dist.all_reduce(tensor, group=other)
    check(tensor, [2, 2])


@pytest.mark.ranks(3)
def test_monitored_barrier_names_the_late_rank(world):
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=10))
    if dist.get_rank() == 0:
        with pytest.raises(DeadlineExceededError, match="Rank 2 failed to pass") as error:
            group.monitored_barrier(timedelta(seconds=0.5))
        assert "rank(s) 2 did not come" in str(error.value)
    elif dist.get_rank() == 1:
        with pytest.raises(DeadlineExceededError, match="Rank 1 successfully reached"):
            group.monitored_barrier(timedelta(seconds=0.5))
    world.barrier()


@pytest.mark.ranks(2)
def test_bad_arguments():
    with pytest.raises(TypeError, match="meta tensor"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(ValueError, match="pg_options"):
        dist.new_group(backend="mpidist", pg_options=object())
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # nothing of these left the rank
    check(tensor, [2, 2])


@pytest.mark.ranks(2)
def test_overlapping_tensors():
    memory = torch.arange(4.0) + 10 * dist.get_rank()
    outputs = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(outputs, memory[:2])
    check(torch.stack(outputs), [[0, 1], [10, 11]])
    dist.group.WORLD.all_gather_single(memory, memory[:2]).wait()  # the input lies in the output
    check(memory, [0, 1, 10, 11])


@pytest.mark.ranks(2)
def test_two_groups_in_two_threads():
    groups = [dist.new_group() for _ in range(2)]
    results = [torch.zeros(4) for _ in groups]

    def reduce_often(number):
        for step in range(200):
            results[number].fill_(step)
            dist.all_reduce(results[number], group=groups[number])

    threads = [threading.Thread(target=reduce_often, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for result in results:
        check(result, np.full(4, 199 * dist.get_world_size()))


@pytest.mark.ranks(2)
def test_destroy_and_init_again():
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("mpidist")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        check(tensor, [2])


@pytest.mark.ranks(2)
def test_aborted_group_refuses_operations():
    group = dist.new_group()
    group.abort()
    with pytest.raises(ValueError, match="cannot be used any more"):
        dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.ranks(2)
def test_mpidist_and_torch_use_one_world():
    assert mpidist.get_world_size() == dist.get_world_size()
    array = np.ones(2)
    mpidist.all_reduce(array)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    np.testing.assert_array_equal(array, tensor.numpy())
