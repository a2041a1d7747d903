"""The default group, and the functions named as those of torch.distributed."""

import numpy as np
import pytest

import mpidist as dist
from mpidist import ProcessGroup


@pytest.fixture
def default(world):
    made = dist.init_process_group()
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.ranks(1, 2, 3)
def test_life(world, rank_count):
    assert dist.is_available()
    before = dist.is_initialized()
    group = dist.init_process_group("cpu:mpi,cuda:nccl", "env://", world_size=world.size,
                                    rank=world.rank, group_name="everybody")  # fmt: skip
    facts = (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend())
    with pytest.raises(ValueError, match="exists already"):
        dist.init_process_group()
    dist.destroy_process_group()
    assert isinstance(group, ProcessGroup)
    assert group.name == "everybody"
    assert group.ranks == tuple(range(rank_count))
    assert not before
    assert facts == (True, world.rank, world.size, "cpu:mpi,cuda:nccl")
    assert not dist.is_initialized()
    for call in (dist.get_rank, dist.barrier, dist.destroy_process_group, dist.get_backend):
        with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
            call()
    again = dist.init_process_group(backend="MPI")
    dist.barrier()
    dist.destroy_process_group(again)
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_arguments_that_contradict_the_launcher(world):
    cases = [
        ({"world_size": 5}, "world_size=5, but the launcher says 2"),
        ({"rank": 1 - world.rank}, f"but the launcher says {world.rank}"),
        ({"backend": "gloo"}, "'gloo' is not one of this package, which runs on MPI: leave it out"),
        ({"init_method": "tcp://host:1"}, "needs no rendezvous"),
        ({"store": object()}, "store has no meaning here"),
        ({"pg_options": 1}, "pg_options has no meaning here"),
        ({"device_id": 0}, "device_id 0 cannot be used: there is no CuPy"),
        ({"timeout": -1.0}, "cannot be negative"),
    ]
    for arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            dist.init_process_group(**arguments)
    assert not dist.is_initialized()
    world.Barrier()


@pytest.mark.ranks(2, 3)
def test_functions_act_on_the_default_group(default, rank_count):
    here, last = dist.get_rank(), rank_count - 1
    summed, rooted, copied = (np.array([here + 1.0]) for _ in range(3))
    gathered = [np.zeros(1) for _ in range(rank_count)]
    dist.all_reduce(summed)
    dist.reduce(rooted, last, dist.ReduceOp.MAX)
    dist.broadcast(copied, last)
    dist.all_gather(gathered, np.array([10.0 * here]))
    dist.barrier(timeout=30)
    total = rank_count * (rank_count + 1) / 2
    assert summed[0] == total
    assert rooted[0] == (rank_count if here == last else here + 1)
    assert copied[0] == rank_count
    assert [array[0] for array in gathered] == [10.0 * rank for rank in range(rank_count)]
    into, later = np.zeros(1), np.zeros(1)
    after, before = (here + 1) % rank_count, (here - 1) % rank_count
    work = dist.irecv(later, before, tag=2)
    sending = dist.isend(np.array([float(here)]), after, tag=1)
    assert dist.recv(into, before, tag=1) == before
    dist.send(into, after, tag=2)
    assert sending.wait()
    assert work.result() == before
    assert (into[0], later[0]) == (before, (before - 1) % rank_count)


@pytest.mark.ranks(2)
def test_functions_act_on_a_given_group(default, world):
    turned = world.Create_group(world.group.Incl([1, 0]))
    group = ProcessGroup(turned, "turned")
    here = dist.get_rank(group)
    copied = np.array([float(world.rank)])
    dist.broadcast(copied, group=group, group_src=0)
    summed = np.array([1.0])
    work = dist.all_reduce(summed, group=group, async_op=True)
    assert work.wait()
    if world.rank:
        dist.send(copied, group=group, group_dst=1)
    else:
        assert dist.recv(summed, group=group, group_src=0) == 1
    dist.barrier(group)
    assert here == 1 - world.rank
    assert dist.get_world_size(group) == 2
    assert copied[0] == 1.0
    dist.destroy_process_group(group)
    assert dist.is_initialized()
    dist.all_reduce(summed)


@pytest.mark.ranks(2, 3)
def test_rank_within_the_node(world, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank() == world.rank  # all ranks are on this host
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert dist.get_node_local_rank() == 5


@pytest.mark.ranks(2)
def test_launched(world):
    assert dist.launched()
