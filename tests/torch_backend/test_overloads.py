"""torch's overloads of the methods of a group for one tensor, a reduction, a root and a limit."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpidist.errors import DeadlineExceededError

LIMIT = timedelta(seconds=10)


@pytest.fixture(params=["mpidist", "gloo"])
def group(request):
    """Make torch's default group with the backend, and with gloo, whose methods are torch's own."""
    dist.init_process_group(request.param, timeout=timedelta(seconds=20))
    yield dist.group.WORLD
    dist.destroy_process_group()


def rank_tensor():
    return torch.full((2,), float(dist.get_rank()))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("arguments", "named", "expected"),
    [
        ((), {}, 3),
        ((dist.ReduceOp.MAX,), {}, 2),
        ((dist.ReduceOp.MAX, LIMIT), {}, 2),
        ((), {"op": dist.ReduceOp.MIN, "timeout": LIMIT}, 0),
        ((), {"timeout": None}, 3),
    ],
)
def test_allreduce(group, arguments, named, expected):
    for form in (lambda tensor: tensor, lambda tensor: [tensor]):
        tensor = rank_tensor()
        group.allreduce(form(tensor), *arguments, **named).wait()
        assert tensor.tolist() == [expected, expected]
    tensor = rank_tensor()
    if not arguments:
        group.allreduce(tensor=tensor, **named).wait()
        assert tensor.tolist() == [expected, expected]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [((1,), {}), ((1, LIMIT), {}), ((), {"root": 1}), ((1,), {"timeout": LIMIT})],
)
def test_broadcast(group, arguments, named):
    tensor = rank_tensor()
    group.broadcast(tensor, *arguments, **named).wait()
    assert tensor.tolist() == [1, 1]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("arguments", "named", "expected"),
    [
        ((0,), {}, 3),
        ((0, dist.ReduceOp.MAX), {}, 2),
        ((), {"root": 0, "op": dist.ReduceOp.MAX, "timeout": LIMIT}, 2),
    ],
)
def test_reduce(group, arguments, named, expected):
    tensor = rank_tensor()
    group.reduce(tensor, *arguments, **named).wait()
    assert dist.get_rank() or tensor.tolist() == [expected, expected]


@pytest.mark.ranks(3)
def test_gathering(group):
    for arguments, named in (((), {}), ((LIMIT,), {}), ((), {"timeout": LIMIT})):
        parts = [torch.empty(2) for _ in range(3)]
        group.allgather(parts, rank_tensor(), *arguments, **named).wait()
        assert torch.stack(parts)[:, 0].tolist() == [0, 1, 2]
    for arguments, named in (((1,), {}), ((1, LIMIT), {}), ((), {"root": 1})):
        parts = [torch.empty(2) for _ in range(3)] if dist.get_rank() == 1 else []
        group.gather(parts, rank_tensor(), *arguments, **named).wait()
        assert not parts or torch.stack(parts)[:, 0].tolist() == [0, 1, 2]
    parts = [torch.empty(2) for _ in range(3)]
    group.allgather(output_tensors=parts, input_tensor=rank_tensor()).wait()
    group.allgather(output_tensors=[parts], input_tensors=[rank_tensor()]).wait()
    assert torch.stack(parts)[:, 0].tolist() == [0, 1, 2]


@pytest.mark.ranks(3)
def test_scattering(group):
    rank = dist.get_rank()
    output = torch.empty(2)
    for arguments, named in (((1,), {}), ((1, LIMIT), {}), ((), {"root": 1})):
        parts = [torch.full((2,), float(k)) for k in range(3)] if rank == 1 else []
        group.scatter(output.zero_(), parts, *arguments, **named).wait()
        assert output.tolist() == [rank, rank]
    for arguments, named, factor in (
        ((), {}, 3),
        ((dist.ReduceOp.MAX,), {}, 1),
        ((), {"op": dist.ReduceOp.MAX, "timeout": LIMIT}, 1),
    ):
        inputs = [torch.full((2,), float(k)) for k in range(3)]
        group.reduce_scatter(output, inputs, *arguments, **named).wait()
        assert output.tolist() == [factor * rank] * 2


@pytest.mark.ranks(3)
def test_all_to_all_and_barrier(group):
    rank, received = dist.get_rank(), torch.empty(3)
    sent = torch.arange(3.0) + 10 * rank
    for arguments, named in (((), {}), ((LIMIT,), {}), ((), {"timeout": LIMIT})):
        group.all_to_all_single(received, sent, [], [], *arguments, **named).wait()
        assert received.tolist() == [rank, 10 + rank, 20 + rank]
        group.alltoall_base(received, sent, [], [], *arguments, **named).wait()
        group.barrier(*arguments, **named).wait()


@pytest.mark.ranks(2)
def test_form_with_lists_without_options(group):
    tensor, whole = rank_tensor(), [torch.empty(2), torch.empty(2)]
    group.broadcast([tensor]).wait()
    assert tensor.tolist() == [0, 0]
    group.reduce([tensor]).wait()
    group.allgather([whole], [rank_tensor()]).wait()
    assert torch.cat(whole).tolist() == [0, 0, 1, 1]
    inputs = [[torch.ones(2), torch.ones(2)]]
    group.scatter([tensor], inputs if dist.get_rank() == 0 else []).wait()
    assert tensor.tolist() == [1, 1]
    group.reduce_scatter([tensor], inputs).wait()
    assert tensor.tolist() == [2, 2]


@pytest.mark.ranks(2)
def test_bad_arguments(group):
    tensor = torch.ones(2)
    for call in (
        lambda: group.broadcast(tensor),
        lambda: group.reduce(tensor, op=dist.ReduceOp.MAX),
        lambda: group.allreduce(),
        lambda: group.allreduce(tensor, dist.ReduceOp.SUM, LIMIT, 1),
        lambda: group.allreduce(tensor, root=1),
        lambda: group.allreduce(tensor, "SUM"),
        lambda: group.barrier(1),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.ranks(2)
def test_time_limit_of_a_call(backend):
    group, tensor = dist.group.WORLD, torch.ones(2)
    if dist.get_rank() == 0:
        work = group.allreduce(tensor, timeout=timedelta(seconds=0.2))
        begin = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
            work.wait()
        assert time.monotonic() - begin < 5
        dist.distributed_c10d._get_default_store().set("late", "")
        work.wait(timedelta(seconds=10))
    else:
        dist.distributed_c10d._get_default_store().wait(["late"])
        group.allreduce(tensor).wait()
    assert tensor.tolist() == [2, 2]
