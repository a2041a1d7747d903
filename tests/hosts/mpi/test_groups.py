"""Process groups between hosts, against NumPy."""

import pytest

COLLECTIVES = """
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 500_003):
        everybody = [np.random.default_rng(seed).normal(size=count) for seed in range(size)]
        array = everybody[rank].copy()
        dist.all_reduce(array)
        np.testing.assert_allclose(array, np.sum(everybody, axis=0), rtol=0, atol=1e-12)
        for root in range(size):
            array = everybody[rank].copy()
            dist.broadcast(array, root)
            np.testing.assert_array_equal(array, everybody[root])
        parts = [np.empty(count) for _ in range(size)]
        dist.all_gather(parts, everybody[rank])
        np.testing.assert_array_equal(parts, everybody)
        before, after = (rank - 1) % size, (rank + 1) % size
        work = dist.isend(everybody[rank], after)
        dist.recv(array, before)
        np.testing.assert_array_equal(array, everybody[before])
        work.wait()
    print("right")
"""


@pytest.mark.parametrize(
    "places", [{"node1": 2, "node2": 2}, dict.fromkeys(["node1", "node2", "node3"], 1)]
)
def test_collectives(jobs, places):
    ended = jobs.ranks(places, jobs.script(COLLECTIVES))
    assert ended.status == 0, ended.err
    assert ended.out.count("right") == sum(places.values())


EVERY_ONE = """
    from _cases.collectives import COLLECTIVES, check
    from mpidist.mpi import world

    for collective in COLLECTIVES:
        check(collective, world().comm, range(4))
    print("all", len(COLLECTIVES))
"""


def test_every_collective_in_random_groups(jobs):
    ended = jobs.ranks({"node1": 2, "node2": 2}, jobs.script(EVERY_ONE), timeout_s=120)
    assert ended.status == 0, ended.err
    assert ended.out.count("all 25") == 4
