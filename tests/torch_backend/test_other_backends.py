"""Groups that name another backend of torch for the tensors of a device.

gloo serves the tensors on the CPU here, as NCCL serves those on GPUs in ``cpu:mpidist,cuda:nccl``.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpidist.group import ProcessGroup
from mpidist.torch import MpidistProcessGroup

CPU = torch.device("cpu")
OPERATIONS = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "broadcast", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "gather",
    "scatter", "all_to_all", "all_to_all_single", "barrier", "isend", "irecv", "coalesce",
)  # fmt: skip


@pytest.fixture(params=["cpu:gloo,cuda:mpidist", "cuda:mpidist,cpu:gloo"])
def mixed(request, monkeypatch):
    """Make torch's default group. Any operation of mpidist fails the test."""
    dist.init_process_group(request.param, timeout=timedelta(seconds=20))

    def fail(*args, **named):
        raise AssertionError("mpidist ran an operation on CPU tensors")

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(ProcessGroup, name, fail)
        yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_backends_of_devices(mixed):
    assert isinstance(mixed._get_backend(CPU), dist.ProcessGroupGloo)
    assert mixed._get_backend(torch.device("cuda")) is mixed
    assert sorted(device.type for device in mixed._device_types) == ["cpu", "cuda"]


@pytest.mark.ranks(2)
def test_barrier_first(mixed):
    dist.barrier()
    with pytest.raises(AssertionError, match="mpidist ran"):
        mixed.barrier()  # names no device


@pytest.mark.ranks(3)
def test_collectives(mixed):
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.full((2,), float(rank))

    tensor = own.clone()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3]
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
    assert work.get_future().wait()[0].tolist() == [3, 3]
    tensor = own.clone()
    dist.reduce(tensor, 1)
    assert rank != 1 or tensor.tolist() == [3, 3]
    tensor = own.clone()
    dist.broadcast(tensor, 2)
    assert tensor.tolist() == [2, 2]

    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, own)
    assert torch.stack(parts)[:, 0].tolist() == [0, 1, 2]
    whole = torch.empty(2 * size)
    dist.group.WORLD.all_gather_single(whole, own).wait()
    assert whole.tolist() == [0, 0, 1, 1, 2, 2]
    parts = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(own, parts, 1)
    assert parts is None or torch.stack(parts)[:, 0].tolist() == [0, 1, 2]
    output = torch.empty(2)
    dist.scatter(output, list(whole.view(3, 2)) if rank == 0 else None, 0)
    assert output.tolist() == [rank, rank]
    dist.reduce_scatter(output, list(whole.view(3, 2)))
    assert output.tolist() == [3 * rank, 3 * rank]
    mixed.reduce_scatter_single(output, whole).wait()
    assert output.tolist() == [3 * rank, 3 * rank]
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(parts, [own + 10 * other for other in range(size)])
    assert torch.stack(parts)[:, 0].tolist() == [10 * rank, 10 * rank + 1, 10 * rank + 2]
    received = torch.empty(2 * size)
    dist.all_to_all_single(received, whole)
    assert received.tolist() == [rank] * 6

    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [torch.ones(2), torch.ones(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert torch.cat(tensors).tolist() == [3] * 5
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1, 2]
    dist.barrier()


@pytest.mark.ranks(3)
def test_messages(mixed):
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.full((2,), float(rank)), torch.empty(2)
    batch = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 2
    if rank == 0:
        dist.send(sent, 1)
    elif rank == 1:
        assert dist.recv(received) == 0
        assert received.tolist() == [0, 0]


@pytest.mark.ranks(3)
def test_groups_and_their_end(mixed):
    config = dist.get_backend_config()
    group = dist.new_group([0, 2], timeout=timedelta(seconds=7))
    if dist.get_rank() != 1:
        assert dist.get_backend_config(group) == config
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2, 2]
        backend = group._get_backend(CPU)
        assert backend.options._timeout == timedelta(seconds=7)
        group.set_timeout(timedelta(seconds=8))
        assert backend.options._timeout == timedelta(seconds=8)
        dist.destroy_process_group(group)
        assert group._get_backend(CPU) is group  # gloo has ended
        assert group.group.freed
    dist.barrier()


@pytest.mark.ranks(2)
def test_abort_reaches_the_other_backend(mixed, monkeypatch):
    group = dist.new_group()
    dist.barrier(group)
    aborted = []  # gloo itself ignores an abort
    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "abort", lambda other: aborted.append(other))
        group.abort()
    assert [type(other) for other in aborted] == [dist.ProcessGroup]


@pytest.mark.ranks(2)
def test_data_parallel_training(mixed):
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1, 1]]


@pytest.mark.ranks(2)
def test_mpidist_serves_the_other_device():
    dist.init_process_group("cpu:mpidist,cuda:nccl")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]
    group = dist.group.WORLD
    assert group._get_backend(CPU) is group
    if not dist.is_nccl_available():
        assert group._device_types == [CPU]
        with pytest.raises(RuntimeError, match=r"no backend 'nccl'.*ask for 'cuda:mpidist'"):
            group._get_backend(torch.device("cuda"))
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nonsense", "no backend 'nonsense'.*ask for 'cpu:mpidist'"),
        ("fake", r"only 'gloo' and 'nccl': make a second group with dist.new_group\(.*'fake'\)"),
    ],
)
def test_backends_that_cannot_start(name, text):
    dist.init_process_group(f"cuda:mpidist,cpu:{name}")
    with pytest.raises(RuntimeError, match=text):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "first",
    [
        lambda group: dist.barrier(group),
        lambda group: dist.all_reduce(torch.ones(1), group=group),
        lambda group: group._get_backend(CPU),
        lambda group: group.bound_device_id,
        lambda group: group._device_types,
    ],
)
def test_mpidist_alone_has_the_plain_class_after_the_first_call(first):
    dist.init_process_group("mpidist")
    first(dist.group.WORLD)
    assert type(dist.group.WORLD) is MpidistProcessGroup
    dist.destroy_process_group()


@pytest.mark.ranks(1)
def test_groups_that_end_before_the_first_call():
    dist.init_process_group("mpidist")
    dist.new_group().abort()
    dist.destroy_process_group(dist.new_group())
    dist.destroy_process_group()
