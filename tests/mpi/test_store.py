"""Stores between ranks: one in the memory of a rank, and one in a file."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.stores import (
    CALLS,
    CASES,
    LIMIT_S,
    NAMES,
    SHORT_S,
    check_like_model,
    counted,
    in_threads,
)
from hypothesis import HealthCheck, given, settings

from mpidist import DistStoreError, FileStore, MPIStore, PrefixStore, mpi
from mpidist.store.mpi_store import store_server

SHARED = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture
def held(world):
    """Provide a store on the last rank, which lives during the calls of all other ranks."""
    store = MPIStore(LIMIT_S, rank=world.size - 1)
    world.Barrier()
    yield store
    world.Barrier()
    store.close()
    world.Barrier()


@pytest.fixture
def filed(world):
    folder = tempfile.mkdtemp() if world.rank == 0 else None
    path = Path(world.bcast(folder)) / "store"
    store = FileStore(path, world.size)
    store.set_timeout(LIMIT_S)
    yield store
    world.Barrier()
    store.close()
    world.Barrier()
    assert not path.exists()
    if world.rank == 0:
        path.parent.rmdir()


@pytest.fixture(params=["held", "filed"])
def store(request):
    return request.getfixturevalue(request.param)


@SHARED
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(world, held, case):
    case(PrefixStore(f"of rank {world.rank}", held))  # all at the same time


@pytest.mark.ranks(1, 2)
def test_counted(world, held):
    if world.rank == 0:
        assert held.num_keys() == 0
        counted(held)
        assert held.num_keys() == 1
        assert repr(held) == f"MPIStore(rank={world.size - 1})"
        assert held.rank == world.size - 1


@pytest.mark.ranks(2)
@given(calls=CALLS)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_like_a_dict(world, held, calls):
    part = PrefixStore(f"example {held.add(f'of rank {world.rank}', 1)} of {world.rank}", held)
    check_like_model(part, calls)
    held.set_timeout(LIMIT_S)


@SHARED
def test_all_add(world, store):
    totals = world.allgather([store.add("n", 1) for _ in range(50)])
    np.testing.assert_array_equal(np.sort(np.ravel(totals)), np.arange(1, 50 * world.size + 1))
    assert store.get("n") == b"%d" % (50 * world.size)


@SHARED
def test_all_race(world, store):
    mine = f"rank {world.rank}"
    for round_ in range(20):
        won = store.compare_set(f"winner {round_}", "", mine) == mine.encode()
        winners = [rank for rank, one in enumerate(world.allgather(won)) if one]
        assert len(winners) == 1
        assert store.get(f"winner {round_}") == b"rank %d" % winners[0]


@pytest.mark.ranks(2, 3, 4)
def test_ranks_wait_for_each_other(world, store):
    rank, size = world.rank, world.size
    if rank == 0:
        store.set("ring 0", "0")
    value = store.get(f"ring {rank}")
    store.set(f"ring {rank + 1}", value + b" %d" % (rank + 1))
    assert store.get(f"ring {size}").split() == [b"%d" % n for n in range(size + 1)]
    store.barrier("end", size)
    assert store.multi_get([f"ring {n}" for n in range(size)])[rank] == value


@pytest.mark.ranks(2, 3, 4)
def test_a_queue_of_ranks(world, store):
    each = 20
    if world.rank == 0:
        for number in range(each * (world.size - 1)):
            store.queue_push("q", str(number))
        taken = []
    else:
        taken = [int(store.queue_pop("q")) for _ in range(each)]
        assert taken == sorted(taken)
    everything = sorted(number for part in world.allgather(taken) for number in part)
    assert everything == list(range(each * (world.size - 1)))
    assert store.queue_len("q") == 0


@pytest.mark.ranks(2)
def test_64_mib(world, held):
    value = np.arange(8 << 20).tobytes()
    if world.rank == 0:
        held.set("large", value)
    got = [held.get("large")]
    world.Barrier()  # before any rank changes the value
    got.append(held.compare_set("large", value, "small"))
    same = [got[0] == value, got[1] in (b"small", value)]
    assert same == [True, True]  # a failure would take minutes to print 64 MiB


@pytest.mark.ranks(2)
def test_what_waits_leaves_nothing_behind(world, held):
    holds = world.rank == held.rank
    if not holds:
        calls = [lambda: held.wait(["never"], SHORT_S), lambda: held.wait(["never"], 0)]
        errors = in_threads(*calls * 4)
        assert [type(error) for error in errors] == [DistStoreError] * 8
        assert all(f"on rank {world.rank}" in str(error) for error in errors)
    world.Barrier()
    if holds:
        wait_until(lambda: store_server().num_waiting == 0)


@pytest.mark.ranks(2)
def test_what_a_lost_rank_waited_for(world, held):
    if world.rank != held.rank:
        part = held.clone()
        second = [lambda: held.get("parked"), world.Barrier, part.close]
        first, _ = in_threads(lambda: part.get("never"), lambda: [step() for step in second])
        assert isinstance(first, DistStoreError)
    else:
        wait_until(lambda: store_server().num_waiting == 2)
        held.set("parked", "1")
        wait_until(lambda: store_server().num_waiting == 1)
        store_server()._on_peer_lost("rank 1")
        store_server()._on_peer_lost("rank 0")
        assert store_server().num_waiting == 0
        world.Barrier()  # a closed part ends its waits, too


@pytest.mark.ranks(2)
def test_a_store_that_is_closed_while_it_waits_takes_nothing(world, held):
    if world.rank != held.rank:
        part = held.clone()
        taken, _ = in_threads(
            lambda: part.queue_pop("q"), lambda: [held.get("parked"), part.close()]
        )
        assert isinstance(taken, DistStoreError)
    else:
        wait_until(lambda: store_server().num_waiting == 2)
        held.set("parked", "1")
        wait_until(lambda: store_server().num_waiting == 0)
        held.queue_push("q", "1")
        assert held.queue_pop("q", block=False) == b"1"


@pytest.mark.ranks(1, 2, 3)
def test_an_element_is_given_or_kept(world, held):
    """Check that no element is lost if readers time out while elements come."""
    part = held.clone()
    part.set_timeout(0.001)
    taken = []
    if world.rank == held.rank:
        for number in range(200):
            held.queue_push("q", str(number))
        held.set("all", "1")
    while not held.check(["all"]) or held.queue_len("q"):
        try:
            taken.append(int(part.queue_pop("q")))
        except DistStoreError:
            continue
    everything = sorted(number for one in world.allgather(taken) for number in one)
    assert everything == list(range(200))
    part.close()


@pytest.mark.ranks(2, 3)
def test_the_holder_closes(world):
    store = MPIStore(LIMIT_S)
    world.Barrier()
    if world.rank == 0:
        wait_until(lambda: store_server().num_waiting == world.size - 1)
        second = MPIStore()
        store.close()
        assert second.num_keys() == 0  # as long as the holder has one
        second.close()
        second.close()
    else:
        with pytest.raises(DistStoreError, match="until rank 0 closes it"):
            store.get("never")
    world.Barrier()
    with pytest.raises(DistStoreError):
        store.set("a", "1")
    store.close()
    world.Barrier()
    with MPIStore(LIMIT_S) as again:
        world.Barrier()
        again.barrier("end", world.size)
        assert sorted(again.list_keys()) == ["end/last_member", "end/num_members"]
        world.Barrier()


@pytest.mark.ranks(2, own_launch=True)
def test_a_holder_that_is_made_later(world):
    number = world.size - 1
    mpi.world()  # MPI must be started on all ranks together
    if world.rank != number:
        store = MPIStore(LIMIT_S, rank=number)
        (value,) = in_threads(lambda: [world.send("asked", number), store.get("a")][1])
        assert value == b"1"
    else:
        world.recv()
        store = MPIStore(LIMIT_S, rank=number)
        store.set("a", "1")
    world.Barrier()
    store.close()


@pytest.mark.ranks(2)
def test_ranks_that_cannot_hold_it(world):
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="ranks are 0 to 1"):
            MPIStore(rank=rank)
    with pytest.raises(ValueError, match="negative"):
        MPIStore(-1)
