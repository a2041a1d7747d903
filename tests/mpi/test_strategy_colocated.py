"""Tasks that share a rank: the script trains, and its parameter server serves on a thread."""

import numpy as np
import pytest
from _cases.clusters import spec_of

from mpidist import ClusterSpec, Server
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.server import memory

SIZE = (3 << 18) + 5


@pytest.fixture(params=["shared", "rma", "p2p"])
def transport(request):
    return request.param


def colocated(world, servers):
    """Every rank is a worker; the first ranks are ps tasks too."""
    host = spec_of(world, 1).task_address("ps", 0).rpartition(":")[0]
    return ClusterSpec(
        {
            "ps": [f"{host}:{rank}" for rank in range(servers)],
            "worker": [f"{host}:{rank}" for rank in range(world.size)],
        }
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("servers", [1, 2])
def test_training(world, transport, servers):
    steps = 10
    spec = colocated(world, servers)
    with Server(spec, "worker", world.rank) as server:
        own = server.own_tasks
        strategy = ParameterServerStrategy(transport=transport)
        with strategy.scope():
            large = get_variable("large", SIZE, initializer=0)
            small = get_variable("small", 4, initializer=0)
        sgd, mixed = optimizers.SGD(1.0), []
        for _ in range(steps):
            sgd.apply_gradients([(np.ones(SIZE), large), (np.ones(4), small)])
            value = large.read_value()
            if not (value == 1 - large.version).all():
                mixed.append((large.version, np.unique(value)))
        strategy.global_step.read_value()
        server.job_group("worker").barrier()
        results = large.read_value(), small.read_value(), int(strategy.global_step)
        server.job_group("worker").barrier()
    expected_own = [("worker", world.rank)] + [("ps", world.rank)] * (world.rank < servers)
    assert own == expected_own
    assert mixed == []
    total = -float(steps * world.size)
    np.testing.assert_array_equal(results[0], np.full(SIZE, total))
    np.testing.assert_array_equal(results[1], np.full(4, total))
    assert results[2] == steps * world.size


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("servers", [1, 2])
def test_memory_grows(world, transport, servers, monkeypatch):
    monkeypatch.setattr(memory, "_MIN_SEGMENT_BYTES", 1 << 20)
    with Server(colocated(world, servers), "worker", world.rank) as server:
        strategy = ParameterServerStrategy(transport=transport)
        with strategy.scope():
            made = [get_variable(f"v{n}", SIZE, initializer=n) for n in range(5)]
        for v in made:
            v.assign_add(np.full(SIZE, world.rank + 1.0))
        server.job_group("worker").barrier()
        values = [np.unique(v.read_value()).tolist() for v in made]
        near = [v.remotes[0].shared is not None for v in made]
        server.job_group("worker").barrier()
    total = world.size * (world.size + 1) / 2
    assert values == [[n + total] for n in range(5)]
    assert near == [transport != "p2p"] * 5


@pytest.mark.ranks(2)
def test_ranks_of_tasks(world):
    spec = colocated(world, 1)
    assert spec.task_of(0) == ("worker", 0)
    with Server(spec, "worker", world.rank) as server:
        if world.rank == 0:
            assert server.own_index("ps") == 0
        address = server.task_address("ps", 0)
        assert address == server.task_address("worker", 0)
        world.Barrier()


@pytest.mark.ranks(2)
def test_a_worker_with_a_ps_waits_for_the_others(world):
    """Leaving the Server ends what it serves, so the worker with the ps waits in join."""
    spec = colocated(world, 1)
    with Server(spec, "worker", world.rank) as server:
        strategy = ParameterServerStrategy()
        with strategy.scope():
            variable = get_variable("v", 3, initializer=0)
        if world.rank == 0:
            server.join()
        else:
            for _ in range(50):
                optimizers.SGD(1.0).apply_gradients([(np.ones(3), variable)]).wait(30)
            assert variable.read_value().tolist() == [-50.0] * 3
