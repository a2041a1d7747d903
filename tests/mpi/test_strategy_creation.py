"""Creation of strategies and variables on a cluster: required agreement, and its errors."""

import numpy as np
import pytest
from _cases.clusters import counted, on_cluster, spec_of

from mpidist import ClusterSpec, Server, errors
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.creation import Use


def in_turn(workers, strategy, first, second):
    """Run ``first`` on worker 0, then ``second`` on worker 1. Return worker index and result."""
    result = first() if strategy.worker_index == 0 else None
    workers.barrier()
    if strategy.worker_index == 1:
        result = second()
    workers.barrier()
    return strategy.worker_index, result


def failure(call):
    with pytest.raises(errors.OpError) as info:
        call()
    return info.value


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("there", "text"),
    [
        (("w", (3,), "float32"), r"float32\[3\], but worker 0 created it as float32\[2\]"),
        (("w", (2,), "float64"), r"float64\[2\], but worker 0 created it as float32\[2\]"),
    ],
    ids=["shape", "dtype"],
)
def test_variables_that_differ_name_both_workers(world, there, text):
    def train(strategy, workers):
        first = ("w", (2,), "float32")
        return in_turn(
            workers,
            strategy,
            lambda: strategy.creator.create(*first, "zeros", Use()),
            lambda: failure(lambda: strategy.creator.create(*there, "zeros", Use())),
        )

    worker, result = on_cluster(world, 1, train) or (None, None)
    if worker == 1:
        assert isinstance(result, errors.InvalidArgumentError)
        assert isinstance(result, ValueError)
        assert result.message.startswith("worker 1 creates variable 'w' as ")
        with pytest.raises(ValueError, match=text):
            raise result


@pytest.mark.ranks(3)
def test_the_first_worker_to_come_gives_the_first_value(world):
    def train(strategy, workers):
        asked = []

        def value(shape, dtype):
            asked.append(shape)
            return np.full(shape, 7.0 + strategy.worker_index)

        def create():
            with strategy.scope():
                return get_variable("v", (2, 2), initializer=value).read_value(), asked

        return in_turn(workers, strategy, create, create)

    worker, result = on_cluster(world, 1, train) or (None, None)
    if worker is not None:
        assert (result[0] == 7.0).all()
        assert len(result[1]) == (1 if worker == 0 else 0)


@pytest.mark.ranks(3)
def test_variables_made_at_once_by_all_workers(world):
    def train(strategy, workers):
        workers.barrier()
        with strategy.scope():
            made = [get_variable(f"v{n}", 1 << 16, initializer=n) for n in range(20)]
        return [np.unique(variable.read_value()).tolist() for variable in made]

    result = on_cluster(world, 1, train)
    assert result is None or result == [[float(n)] for n in range(20)]


@pytest.mark.ranks(3)
def test_global_step_counts_the_pushes_of_all(world):
    def train(strategy, workers):
        with strategy.scope():
            v = get_variable("v", 3, initializer=0)
        assert int(strategy.global_step) == 0
        workers.barrier()
        for _ in range(40 + strategy.worker_index):
            optimizers.SGD().apply_gradients([(np.zeros(3), v)])
        strategy.global_step.read_value()  # this worker's own pushes have been applied
        workers.barrier()
        facts = (strategy.worker_index, strategy.num_workers, strategy.is_chief)
        return facts, int(strategy.global_step), strategy.num_replicas_in_sync

    result = on_cluster(world, 1, train)
    if result is not None:
        assert result[0] == (world.rank - 1, 2, world.rank == 1)
        assert result[1:] == (81, 1)


@pytest.mark.ranks(3)
def test_ways_to_name_the_cluster(world):
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    with pytest.raises(errors.FailedPreconditionError, match="no Server has been started"):
        ParameterServerStrategy(spec)
    with Server(spec, job, task) as server:
        if job == "ps":
            with pytest.raises(ValueError, match="ps 0 does not train"):
                ParameterServerStrategy()
            server.join()
            return
        resolver = MPIClusterResolver({"ps": 1, "worker": -1})
        for arguments in (
            {},
            {"cluster_resolver": resolver},
            {"cluster_resolver": spec.as_dict()},
            {"cluster_spec": spec, "task_type": "worker", "task_id": task, "server": server},
        ):
            with ParameterServerStrategy(**arguments) as strategy:
                assert strategy.worker_index == task
        other = ClusterSpec({"ps": ["a:0"], "worker": ["a:1"]})
        for arguments, text in (
            ({"cluster_resolver": other}, "the strategy is given .* and the started Server is of"),
            ({"task_type": "chief"}, "task_type is 'chief', and that of the started Server 'wor"),
            ({"task_id": 1 - task}, f"task_id is {1 - task}"),
            ({"cluster_resolver": spec, "cluster_spec": spec}, "not both"),
            ({"transport": "carrier"}, "unknown transport 'carrier'"),
        ):
            with pytest.raises(ValueError, match=text):
                ParameterServerStrategy(**arguments)


@pytest.mark.ranks(2)
def test_cluster_without_ps(world):
    spec = counted({"worker": 2}, [spec_of(world, 1).task_address("ps", 0)[:-2]] * 2)
    with Server(spec, "worker", world.rank):
        with pytest.raises(ValueError, match="no ps task"):
            ParameterServerStrategy()
        world.Barrier()


@pytest.mark.ranks(3)
def test_datasets_are_sharded_over_the_workers(world):
    class Sharded:
        def shard(self, count, index):
            return range(index, 10, count)

    class Distributed(Sharded):
        distributed = True

        def __iter__(self):
            return iter("all")

    def train(strategy, workers):
        give = strategy.experimental_distribute_dataset
        return strategy.worker_index, list(give(Sharded())), list(give(Distributed())), give([1, 2])

    result = on_cluster(world, 1, train)
    if result is not None:
        assert result == (result[0], list(range(result[0], 10, 2)), ["a", "l", "l"], [1, 2])
