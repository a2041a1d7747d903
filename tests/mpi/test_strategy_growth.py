"""Memory of servers grows, together with the workers of their node."""

import itertools
import threading

import numpy as np
import pytest
from _cases.clusters import spec_of
from _cases.jobs import run_job

from mpidist import Server, errors
from mpidist.config import config as settings
from strategy import ParameterServerStrategy, get_variable, optimizers

MIB = 1 << 20


@pytest.fixture
def small_arena():
    """First arenas of 1 MiB."""
    before = settings.arena_bytes
    object.__setattr__(settings, "arena_bytes", MIB)
    yield
    object.__setattr__(settings, "arena_bytes", before)


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
def test_several_growths(world, small_arena, ps, transport):
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
def test_threads_and_strategies_that_grow_at_once(world, small_arena):
    def train(strategy, server):
        second = ParameterServerStrategy()
        problems = []

        def work(mine, own):
            try:
                for number in range(4):
                    both = create(mine, [f"all/{number}", f"{own}/{number}"], 1 << 18)
                    push_all(both, 1.0, 3)
                for v in mine._variables.by_name.values():
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
        values = {v.name: np.unique(v.read_value()) for v in strategy._variables.by_name.values()}
        values |= {v.name: np.unique(v.read_value()) for v in second._variables.by_name.values()}
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
def test_threads_and_strategies_over_two_servers(world, small_arena):
    """All strategies create the same; which thread comes first differs."""

    def train(strategy, server):
        strategies = [strategy, ParameterServerStrategy()]
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
            for v in strategy._variables.by_name.values()
            if v.name != "global_step"
        ]
        server.job_group("worker").barrier()
        return problems, values

    result = on_small_cluster(world, 2, train)
    if result is not None:
        assert result == ([], [[9.0]] * 8)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("at_once", [False, True])
def test_two_servers_grow(world, small_arena, at_once):
    """One after the other, and at once: in threads, begun in opposite orders by the workers."""
    spec, segments = spec_of(world, 2), 12
    job, task = spec.task_of(world.rank)
    with Server(spec, job, task) as server:
        mates = server.memory.mates(0)
        workers = [mate for mate in mates if mate[0] == "worker"]
        indices = (task,) if job == "ps" else ((0, 1), (1, 0))[task * at_once]

        def grow(index, segment):
            server.memory.grow(index, segment, 4096 * segment, workers)

        def grow_often(index):
            for segment in range(1, segments + 1):
                grow(index, segment)

        if at_once:
            threads = [threading.Thread(target=grow_often, args=(index,)) for index in indices]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(50)
        else:
            for segment in range(1, segments + 1):
                for index in indices:
                    grow(index, segment)
        if job == "ps":
            for segment in range(1, segments + 1):
                server.memory.own(segment)[:] = 16 * task + segment
            server.memory.sync()
        world.Barrier()
        server.memory.sync()
        facts = {}
        for index, segment in itertools.product(indices, range(1, segments + 1)):
            part = server.memory.part(index, segment)
            facts[index, segment] = part.nbytes, np.unique(part).tolist()
        world.Barrier()
    assert mates == [("ps", 1), ("worker", 0), ("worker", 1)]
    for (index, segment), fact in facts.items():
        assert fact == (4096 * segment, [16 * index + segment])


@pytest.mark.ranks(3)
def test_a_worker_that_creates_something_else(world, small_arena):
    """The others' promise stands until they are told who is missing."""

    def train(strategy, server):
        group = server.job_group("worker")
        limit = settings.call_timeout_s
        caught = []
        if strategy.worker_index == 0:
            object.__setattr__(settings, "call_timeout_s", 2.0)
            try:
                create(strategy, ["large"], 1 << 18)
            except errors.DeadlineExceededError as error:
                caught.append(error.message)
            object.__setattr__(settings, "call_timeout_s", limit)
        group.barrier()
        (made,) = create(strategy, ["large"], 1 << 18, 2.0)
        made.assign_add(1)
        group.barrier()
        return strategy.worker_index, caught, np.unique(made.read_value()).tolist()

    result = on_small_cluster(world, 1, train)
    if result is not None:
        worker, caught, value = result
        assert value == [4.0]
        assert len(caught) == (1 if worker == 0 else 0)
        for message in caught:
            assert "worker 0 waits, and worker 1 did not create it in time" in message
            assert "variable 'large' as number 1, float64[262144]" in message


@pytest.mark.ranks(3)
def test_workers_that_differ_where_there_is_no_room(world, small_arena):
    def train(strategy, server):
        first, problems = ("large", "other")[strategy.worker_index], []
        group = server.job_group("worker")
        try:
            create(strategy, [first], 1 << 18)
        except errors.InvalidArgumentError as error:
            problems.append(error.message)
            create(strategy, ["other" if first == "large" else "large"], 1 << 18)
        group.barrier()
        return problems

    result = on_small_cluster(world, 1, train)
    gathered = world.allgather(result)
    messages = [m for problems in gathered if problems for m in problems]
    assert len(messages) == 1
    assert "all workers must create the same variables" in messages[0]


DYING = """
    import mpidist
    from mpidist.cluster_resolver import MPIClusterResolver
    from strategy import ParameterServerStrategy, get_variable
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    job, index = resolver.task_type, resolver.task_id
    with mpidist.Server(resolver.cluster_spec(), job, index) as server:
        if job == "ps":
            server.join()
        strategy = ParameterServerStrategy()
        server.job_group("worker").barrier()
        if index == 1:
            raise RuntimeError("before it creates the variable")
        with strategy.scope():
            get_variable("large", 1 << 20, initializer=0)
"""


def test_a_worker_that_dies_before_it_promises_ends_the_job(tmp_path):
    words, env = ["--ps", "1", "--worker", "2"], {"MPIDIST_ARENA_BYTES": str(MIB)}
    ended = run_job(tmp_path, words, DYING, env=env)
    assert ended.status == 1
    assert "RuntimeError: before it creates the variable" in ended.err
    assert "worker 1" in ended.err
