"""Groups made from groups, and their queries."""

import gc
import warnings
import weakref

import numpy as np
import pytest
from _cases.endpoints import wait_until

import mpidist as dist
from mpidist import errors

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture
def default(world):
    yield dist.init_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def total(group):
    """Return the sum of the members' world ranks, computed by the group itself."""
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
    dist.new_group().free()
    dist.destroy_process_group()  # frees all other groups, too
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


def blamed(world, late, **options):
    """Return the error message of each rank if the ranks ``late`` enter after the timeout."""
    said = ""
    for turn in (False, True):
        if (world.rank in late) == turn:
            try:
                dist.monitored_barrier(timeout=1, **options)
            except dist.DeadlineExceededError as error:
                said = str(error)
        world.Barrier()
    return world.allgather(said)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("every", [False, True])
def test_a_late_first_rank_is_told_that_it_is_late(default, world, every):
    """Report rank 0 as late, and not the others (which came in time) as missing."""
    said = blamed(world, [0], wait_all_ranks=every)
    assert "rank 0, this one, is late: rank(s) 1, 2 came in time" in said[0]
    assert "did not come" not in said[0]
    for rank in (1, 2):
        assert "rank(s) 0 did not come within 1 s" in said[rank]
        assert "is late" not in said[rank]
    dist.monitored_barrier(timeout=20)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("late", [1, 2])
def test_another_late_rank_is_told_that_it_is_late(default, world, late):
    said = blamed(world, [late])
    for rank in range(3):
        if rank == late:
            assert f"rank {late}, this one, is late: the others waited for 1 s" in said[rank]
            assert "did not come" not in said[rank]
        else:
            assert f"rank(s) {late} did not come within 1 s" in said[rank]
    dist.monitored_barrier(timeout=20)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("every", [False, True])
def test_each_of_several_late_ranks_is_told_that_it_is_late(default, world, every):
    said = blamed(world, [1, 2], wait_all_ranks=every)
    assert f"rank(s) {'1, 2' if every else '1'} did not come within 1 s" in said[0]
    for rank in (1, 2):
        assert f"rank {rank}, this one, is late" in said[rank]
    dist.monitored_barrier(timeout=20)


@pytest.mark.ranks(3)
def test_a_late_rank_of_another_group(default, world):
    """Name world ranks in messages. The first member is not rank 0."""
    group = dist.new_group([1, 2])
    said = blamed(world, [0, 1], group=group) if world.rank else blamed_outside(world)
    assert "rank 1, this one, is late: rank(s) 2 came in time" in said[1]
    assert "rank(s) 1 did not come within 1 s" in said[2]


def blamed_outside(world):
    """Take part in the collective calls of ``blamed`` on a rank outside the group."""
    world.Barrier()
    world.Barrier()
    return world.allgather("")


@pytest.mark.ranks(3)
def test_monitored_barrier(default, world):
    dist.monitored_barrier(timeout=20)
    for late in (0, 2):
        if dist.get_rank() == late:
            world.Barrier()  # until the others have given up
        said = "this one, is late" if dist.get_rank() == late else rf"rank\(s\) {late} did not come"
        with pytest.raises(errors.DeadlineExceededError, match=said):
            dist.monitored_barrier(timeout=0.3, wait_all_ranks=True)
        if dist.get_rank() != late:
            world.Barrier()
        world.Barrier()
    dist.monitored_barrier(timeout=20)


@pytest.mark.ranks(2)
def test_the_default_group_ended_by_its_own_method(default):
    default.free()
    dist.destroy_process_group()
    again = dist.init_process_group()
    assert repr(again) == f"<ProcessGroup 'world': rank {again.rank()} of 2>"
    assert repr(default).endswith(", destroyed>")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["plain", "grid"])
def test_nothing_works_on_a_destroyed_group(default, kind):
    group = dist.new_group() if kind == "plain" else dist.new_cartesian_group((2,))
    group.free()
    one, whole = np.ones(2), np.ones((2, 2))
    uses = [
        lambda: group.all_gather(list(whole), one),
        lambda: group.all_gather_into_tensor(whole, one),
        lambda: group.all_gather_coalesced([[one.copy()], [one.copy()]], [one]),
        lambda: group.all_reduce(one, async_op=True),
        lambda: group.isend(one, 1 - default.rank()),
        lambda: group.recv(one, 1 - default.rank()),
        lambda: dist.split_group(group, [[0], [1]]),
        lambda: dist.new_subgroups(1, group),
        lambda: dist.new_cartesian_group((2,), group=group),
        lambda: group.comm,
    ]
    if kind == "grid":
        uses += [lambda: group.rank_at((0,)), lambda: group.shift(0)]
        uses += [lambda: group.coordinates_of(0)]
    for use in uses:
        with pytest.raises(ValueError, match="was destroyed and cannot be used any more"):
            use()


@pytest.mark.ranks(2)
def test_groups_that_freed_themselves_are_forgotten(default):
    groups = [weakref.ref(dist.new_group()) for _ in range(5)]
    for number in range(5):
        groups[number]().free()
    dist.new_group()

    def are_gone():
        gc.collect()  # the watchdog may still hold an operation of a group
        return not any(group() for group in groups)

    wait_until(are_gone)


@pytest.mark.ranks(2)
def test_partners_of_a_batch(default):
    peer = 1 - default.rank()
    assert dist.P2POp(dist.isend, np.ones(1), group_peer=peer).peer == peer
    for wrong in (-1, 99):
        with pytest.raises(ValueError, match=f"group rank {wrong} is not in a group of 2"):
            dist.P2POp(dist.isend, np.ones(1), group_peer=wrong)


@pytest.mark.ranks(2)
def test_ragged_parts_have_one_dtype(default):
    dtype = ">i4" if default.rank() else "<i4"
    with pytest.raises(ValueError, match="needs one dtype"):
        default.all_gather_ragged(np.array([1, 2], dtype))


@pytest.mark.ranks(2)
def test_split_sizes_as_arrays(default):
    output, given = np.empty(2, int), np.array([0, 1]) + 10 * default.rank()
    dist.all_to_all_single(output, given, np.ones(2, int), np.ones(2, int))
    np.testing.assert_array_equal(output, [default.rank(), default.rank() + 10])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tag", [-1, 29000, 30001, 32767])
def test_tags_that_are_taken(default, tag):
    with pytest.raises(ValueError, match=f"tag {tag} cannot be used"):
        default.isend(np.ones(1), 1 - default.rank(), tag)


@pytest.mark.ranks(1)
def test_communicators_that_are_no_group(world):
    from mpi4py import MPI

    with pytest.raises(ValueError, match="group 'x' needs a communicator of which this rank"):
        dist.ProcessGroup(MPI.COMM_NULL, "x")


@pytest.mark.ranks(1)
def test_what_prepare_does_not_take(default):
    with pytest.raises(TypeError, match="prepare takes no async_op"):
        default.prepare("all_reduce", np.ones(3), async_op=True)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("unfinished", ["monitored_barrier", "barrier"])
def test_groups_after_one_that_a_member_left_unfinished(default, unfinished):
    # Open MPI gave the context id of a freed communicator to the next one, which took its messages.
    for _ in range(3):
        group = dist.new_group(timeout=0.02)
        if dist.get_rank() == 0:
            with pytest.raises(errors.DeadlineExceededError):
                getattr(group, unfinished)()
        dist.destroy_process_group(group)
        pair = dist.new_group([1, 2])
        if pair is not OUTSIDE:
            array = np.ones(2)
            dist.reduce(array, 2, group=pair)
            assert total(pair) == 3
            dist.destroy_process_group(pair)
