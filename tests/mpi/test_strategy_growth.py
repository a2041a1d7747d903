"""Memory of servers grows, and workers create variables in any order."""

import threading

import numpy as np
import pytest
from _cases.clusters import spec_of

from mpidist import Server
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.partitioners import fixed_size_partitioner
from strategy.server import memory

MIB = 1 << 20


@pytest.fixture
def small_segments(monkeypatch):
    """First segments of 1 MiB."""
    monkeypatch.setattr(memory, "_MIN_SEGMENT_BYTES", MIB)


def on_small_cluster(world, ps, train, transport="auto"):
    """As ``on_cluster``; ``train`` gets the Server too."""
    spec = spec_of(world, ps)
    job, task = spec.task_of(world.rank)
    with Server(spec, job, task) as server:
        if job == "ps":
            server.join()
            return None
        return train(ParameterServerStrategy(transport=transport), server)


def create(strategy, names, size, value=0.0):
    with strategy.scope():
        return [get_variable(name, size, "float64", value) for name in names]


def push_all(made, value, rounds):
    for _ in range(rounds):
        optimizers.SGD(1.0).apply_gradients([(np.full(v.shape, -value), v) for v in made])


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("ps", "transport"), [(1, "shared"), (2, "shared"), (2, "rma"), (1, "p2p")]
)
def test_several_growths(world, small_segments, ps, transport):
    """Variables right before and after each growth, and changes of all of them."""
    sizes = (100, 3 << 17, 7, 1 << 17, 1 << 20, 50, 3 << 20, 1 << 12, 1 << 20)

    def train(strategy, server):
        group, segments = server.job_group("worker"), []
        made = []
        for number, size in enumerate(sizes):
            made += create(strategy, [f"v{number}"], size, number)
            segments.append(made[-1].remotes[0].shared is not None)
            push_all(made, 1.0, 2)
        for v in made:
            v.read_value()
        group.barrier()
        workers = strategy.num_workers
        wrong = [
            v.name
            for n, v in enumerate(made)
            if not (v.read_value() == n + 2.0 * workers * (len(sizes) - n)).all()
        ]
        group.barrier()
        return wrong, segments

    result = on_small_cluster(world, ps, train, transport)
    if result is not None:
        assert result == ([], [transport != "p2p"] * len(sizes))


@pytest.mark.ranks(3)
def test_threads_and_strategies_that_grow_at_once(world, small_segments):
    def train(strategy, server):
        second = ParameterServerStrategy(name="second")
        problems = []

        def work(mine, own):
            try:
                for number in range(4):
                    both = create(mine, [f"all/{number}", f"{own}/{number}"], 1 << 18)
                    push_all(both, 1.0, 3)
                for v in mine.creator.by_name.values():
                    v.read_value()
            except Exception as error:
                problems.append(error)

        threads = [
            threading.Thread(target=work, args=arguments)
            for arguments in ((strategy, "first"), (second, "second"))
        ]
        if strategy.worker_index == 1:
            threads.reverse()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        server.job_group("worker").barrier()
        values = {v.name: np.unique(v.read_value()) for v in strategy.creator.by_name.values()}
        values |= {v.name: np.unique(v.read_value()) for v in second.creator.by_name.values()}
        server.job_group("worker").barrier()
        return problems, values

    result = on_small_cluster(world, 1, train)
    if result is not None:
        problems, values = result
        assert problems == []
        del values["global_step"]
        assert len(values) == 12
        for name, value in values.items():
            assert value.tolist() == [12.0 if name.startswith("all") else 6.0]


@pytest.mark.ranks(4)
def test_threads_and_strategies_over_two_servers(world, small_segments):
    """All strategies create the same; which thread comes first differs."""

    def train(strategy, server):
        strategies = [strategy, ParameterServerStrategy(name="second")]
        problems = []

        def work(number):
            try:
                made = create(strategies[number], [f"v{n}" for n in range(8)], 1 << 18, 1.0)
                push_all(made, 1.0, 2)
                for v in made:
                    v.read_value()
            except Exception as error:
                problems.append(error)

        order = (0, 1) if strategy.worker_index else (1, 0)
        threads = [threading.Thread(target=work, args=(number,)) for number in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        server.job_group("worker").barrier()
        values = [
            np.unique(v.read_value()).tolist()
            for v in strategy.creator.by_name.values()
            if v.name != "global_step"
        ]
        server.job_group("worker").barrier()
        return problems, values

    result = on_small_cluster(world, 2, train)
    if result is not None:
        assert result == ([], [[9.0]] * 8)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", ["auto", "rma"])
def test_workers_create_variables_in_any_order(world, small_segments, transport):
    """The first worker of each variable decides its parts and its place."""

    def train(strategy, server):
        mine = range(6) if strategy.worker_index else range(5, -1, -1)
        parts = fixed_size_partitioner(2 + strategy.worker_index)
        with strategy.scope():
            made = {
                n: get_variable(f"v{n}", (1 << 15, 4), "float64", n, partitioner=parts)
                for n in mine
            }
        push_all(made.values(), 1.0, 1)
        for v in made.values():
            v.read_value()
        server.job_group("worker").barrier()
        places = {n: [(r.name, r.connection.index) for r in v.remotes] for n, v in made.items()}
        values = {n: np.unique(v.read_value()).tolist() for n, v in made.items()}
        server.job_group("worker").barrier()
        return places, values

    result = on_small_cluster(world, 2, train, transport)
    workers = [each for each in world.allgather(result) if each is not None]
    if result is not None:
        assert workers[0][0] == workers[1][0]
        assert result[1] == {n: [n + 2.0] for n in range(6)}
