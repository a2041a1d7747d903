"""Groups made from groups, and what they are asked for."""

import warnings

import numpy as np
import pytest

import mpidist as dist
from mpidist import errors

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture
def default(world):
    yield dist.init_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def total(group):
    """The sum of the world ranks of a group's members, as they find out."""
    array = np.array([dist.get_rank()])
    dist.all_reduce(array, group=group)
    return int(array[0])


@pytest.mark.ranks(1, 2, 3, 4)
def test_new_group(default):
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = list(range(0, size, 2))
    group = dist.new_group(ranks, group_desc="even")
    if rank % 2:
        assert group is OUTSIDE
        return
    assert group.name == "even"
    assert total(group) == sum(ranks)
    assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_rank(group) == dist.get_group_rank(group, rank) == rank // 2
    assert dist.get_global_rank(group, rank // 2) == rank
    assert dist.get_world_size(group) == len(ranks)


@pytest.mark.ranks(3)
def test_only_members_need_to_call(default):
    if dist.get_rank():
        group = dist.new_group([2, 1], use_local_synchronization=True)
        assert total(group) == 3
        assert group.ranks == (1, 2)
        unsorted = dist.new_group([2, 1], sort_ranks=False)
        assert unsorted.ranks == (2, 1)
        array = np.array([dist.get_rank()])
        dist.broadcast(array, src=2, group=unsorted)
        assert array[0] == 2


@pytest.mark.ranks(2)
def test_who_is_not_a_member(default):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return
    assert dist.get_rank(group) == dist.get_world_size(group) == -1
    array = np.ones(2)
    with pytest.warns(UserWarning, match="not a member of the group"):
        assert dist.all_reduce(array, group=group) is None
    with pytest.warns(UserWarning, match="not a member of the group"):
        assert dist.recv(array, 0, group=group) == -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_object([], 1, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
    for ask in (dist.get_backend, dist.get_process_group_ranks):
        with pytest.raises(ValueError, match="not a member"):
            ask(group)
    with pytest.raises(ValueError, match="not a member"):
        dist.P2POp(dist.isend, array, 0, group)
    assert array.tolist() == [1, 1]


@pytest.mark.ranks(4)
def test_subgroups(default):
    mine, groups = dist.new_subgroups(2)
    rank = dist.get_rank()
    assert total(mine) == (1 if rank < 2 else 5)
    assert [group is mine for group in groups] == [rank < 2, rank >= 2]
    assert groups[rank < 2] is OUTSIDE
    of_node, _ = dist.new_subgroups()
    assert dist.get_world_size(of_node) == 4
    mine, groups = dist.new_subgroups_by_enumeration([[0, 3], [1]])
    assert len(groups) == 2
    assert mine is None if rank == 2 else total(mine) == {0: 3, 3: 3, 1: 1}[rank]
    half = dist.split_group(dist.new_group([3, 2, 1]), [[2, 0], [1]]) if rank else None
    if rank:
        assert half.ranks == {1: (3, 1), 2: (2,), 3: (3, 1)}[rank]


@pytest.mark.ranks(3)
def test_shrink_while_the_excluded_live(default):
    whole = dist.new_group()
    smaller = dist.shrink_group([1], whole)
    if dist.get_rank() == 1:
        assert smaller is OUTSIDE
    else:
        assert total(smaller) == 2
    assert total(whole) == 3


@pytest.mark.ranks(2)
def test_groups_that_cannot_be(default):
    for make in (
        lambda: dist.new_group([0, 0]),
        lambda: dist.new_group([]),
        lambda: dist.new_group([0, 7]),
        lambda: dist.new_group([0], backend="smoke signals"),
        lambda: dist.new_group([0], pg_options=1),
        lambda: dist.new_subgroups(3),
        lambda: dist.new_subgroups(0),
        lambda: dist.new_subgroups_by_enumeration([[0], [0, 1]]),
        lambda: dist.new_subgroups_by_enumeration([]),
        lambda: dist.split_group(None, []),
        lambda: dist.split_group(None, [[0, 5]]),
        lambda: dist.shrink_group([]),
        lambda: dist.shrink_group([0, 1]),
        lambda: dist.shrink_group([9]),
        lambda: dist.get_global_rank(None, 2),
        lambda: dist.get_group_rank(None, 2),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            make()
    assert total(None) == 1


@pytest.mark.ranks(2)
def test_after_the_end(default):
    group, other = dist.new_group(), dist.new_group()
    dist.destroy_process_group(group)
    array = np.ones(2)
    for use in (
        lambda: dist.all_reduce(array, group=group),
        lambda: dist.barrier(group, async_op=True),
        lambda: dist.send(array, 1 - dist.get_rank(), group),
        lambda: dist.irecv(array, 1 - dist.get_rank(), group),
        lambda: dist.all_gather_object([None, None], 1, group),
        lambda: dist.destroy_process_group(group),
    ):
        with pytest.raises(ValueError, match=r"group 'group .*' was destroyed"):
            use()
    assert total(other) == 1
    dist.destroy_process_group()  # and with it all others
    with pytest.raises(ValueError, match="was destroyed"):
        other.barrier()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.new_group()
    assert dist.GroupMember.WORLD is None


@pytest.mark.ranks(2)
def test_a_group_of_any_communicator(default, world):
    group = dist.ProcessGroup(world.Split(0, key=-world.rank), "turned round")
    assert group.ranks == (1, 0)
    assert group.comm.allreduce(1) == 2
    array = np.array([world.rank])
    group.broadcast(array, group_src=0)
    assert array[0] == 1
    group.free()


@pytest.mark.ranks(2, 3)
def test_a_batch_of_messages(default):
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    arrays = [np.zeros(n) for n in (3, 50_000)]
    ops = [dist.P2POp(dist.irecv, array, left, tag=tag) for tag, array in enumerate(arrays)]
    ops += [
        dist.P2POp(dist.isend, np.full(array.size, 1.0 * rank), group_peer=right, tag=tag)
        for tag, array in enumerate(arrays)
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert all((array == left).all() for array in arrays)
    for bad in ([], [1], [ops[0], dist.P2POp(dist.isend, arrays[0], right, dist.new_group())]):
        with pytest.raises(ValueError, match="batch_isend_irecv"):
            dist.batch_isend_irecv(bad)
    for args in ((dist.send, arrays[0], 0), (dist.isend, arrays[0]), (dist.isend, arrays[0], 9)):
        with pytest.raises(ValueError, match=r"\w"):
            dist.P2POp(*args)
    dist.barrier()


@pytest.mark.ranks(3)
def test_monitored_barrier(default, world):
    dist.monitored_barrier(timeout=20)
    for late in (0, 2):
        if dist.get_rank() == late:
            world.Barrier()  # until the others have given up
        with pytest.raises(errors.DeadlineExceededError, match=r"rank\(s\) \d.* did not"):
            dist.monitored_barrier(timeout=0.3, wait_all_ranks=True)
        if dist.get_rank() != late:
            world.Barrier()
        world.Barrier()
    dist.monitored_barrier(timeout=20)
