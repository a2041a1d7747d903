"""Workers that wait for each other: bitwise equal results, and bounded lead."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from _cases.clusters import on_cluster

from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.partitioners import FixedShardsPartitioner, FlatPartitioner, fixed_size_partitioner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))
TRANSPORTS = ("shared", "rma", "p2p")
STEPS = 12
BATCH = 32


def digits_job():
    """Return the gradient function of the main job, its data, and its first weights."""
    import train_digits

    training, _ = train_digits.load_data()
    random = np.random.default_rng(0)
    shapes = {"w1": (64, 256), "b1": (256,), "w2": (256, 10), "b2": (10,)}
    first = {
        name: (random.standard_normal(shape) / 8).astype(np.float32)
        for name, shape in shapes.items()
    }
    return train_digits.loss_and_gradients, training, first


def micro_batch(training, worker, step):
    order = np.random.default_rng((worker, step)).permutation(len(training.digits))[:BATCH]
    return training.images[order], training.digits[order]


def mean(gradients):
    """Return the mean, summed in the documented order of the workers."""
    total = gradients[0]
    for one in gradients[1:]:
        total = total + one
    return total / total.dtype.type(len(gradients))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_digits_job_in_step_is_that_of_one_process(world, transport):
    ps = 1 if world.size < 4 else 2
    compute, training, first = digits_job()

    def train(strategy, workers):
        with strategy.scope():
            weights = [get_variable(name, initializer=value) for name, value in first.items()]
        optimizer = optimizers.Adam(2e-3)
        for step in range(STEPS):
            values = [weight.read_value() for weight in weights]
            _, grads = compute(values, *micro_batch(training, strategy.worker_index, step))
            applied = optimizer.apply_gradients(zip(grads, weights, strict=True)).result()
            assert applied.staleness == (0,) * len(weights)
        assert int(strategy.global_step) == STEPS
        return strategy.num_workers, [weight.read_value() for weight in weights]

    partitioner = FixedShardsPartitioner(2) if ps == 2 else None
    result = on_cluster(world, ps, train, transport, mode="sync", variable_partitioner=partitioner)
    if result is None:
        return
    workers, values = result
    with ParameterServerStrategy(server=None).scope():
        alone = [get_variable(name, initializer=value) for name, value in first.items()]
    optimizer = optimizers.Adam(2e-3)
    for step in range(STEPS):
        before = [weight.read_value() for weight in alone]
        each = [compute(before, *micro_batch(training, w, step))[1] for w in range(workers)]
        grads = [mean(parts) for parts in zip(*each, strict=True)]
        optimizer.apply_gradients(zip(grads, alone, strict=True)).wait()
    for value, weight in zip(values, alone, strict=True):
        np.testing.assert_array_equal(value, weight)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_do_without_a_slow_worker(world, transport):
    """Let two workers complete all steps while the third is in its first step."""

    def train(strategy, workers):
        with strategy.scope():
            variables = [get_variable("small", 3, initializer=0.0)]
            variables.append(get_variable("large", 700_000, initializer=0.0))
        slow = strategy.worker_index == 2
        grads = [np.full(v.shape, 2.0**strategy.worker_index) for v in variables]

        def step():
            pairs = zip(grads, variables, strict=True)
            return optimizers.SGD(1.0).apply_gradients(pairs).result().contributed

        if slow:  # until the others are done
            while int(strategy.global_step) < STEPS:
                time.sleep(0.001)
        contributed = [step() for _ in range(1 if slow else STEPS)]
        workers.barrier()
        return contributed, [np.unique(v.read_value()).tolist() for v in variables]

    result = on_cluster(world, 1, train, transport, mode="sync", backup_workers=1)
    if result is None:
        return
    contributed, values = result
    slow = world.rank == 3
    assert contributed == ([False] if slow else [True] * STEPS)
    assert values == [[-1.5 * STEPS]] * 2


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("bound", [0, 2])
def test_nobody_gets_too_far_ahead(world, bound):
    """Check that a worker sees all pushes of the others up to ``bound`` steps ago."""

    def train(strategy, workers):
        with strategy.scope():
            counts = get_variable("counts", (strategy.num_workers, 50_000), np.float64, 0.0)
        random = np.random.default_rng(strategy.worker_index)
        own = np.zeros(counts.shape)
        own[strategy.worker_index] = 1
        seen = []
        for step in range(STEPS):
            now = counts.read_value()
            assert (now.min(axis=1) == now.max(axis=1)).all()
            assert -now[strategy.worker_index, 0] == step
            seen.append(-now[:, 0] - step)
            time.sleep(random.choice([0, 0, 0.01]))  # slow at random
            optimizers.SGD(1.0).apply_gradients([(own, counts)])
        strategy.finish()
        workers.barrier()
        return np.array(seen), counts.read_value()

    result = on_cluster(world, 1, train, mode="ssp", staleness=bound)
    if result is None:
        return
    seen, counts = result
    assert seen.min() >= -bound
    assert seen.max() <= bound + 1
    np.testing.assert_array_equal(counts, np.full(counts.shape, -float(STEPS)))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_sums_in_parts_are_exact(world, transport, dtype):
    """Push known sums, whole and by rows, into variables divided in every way."""
    ps = 1 if world.size == 2 else 2
    shape = (601, 7, 5)
    ways = {
        "rows": fixed_size_partitioner(3),
        "columns": fixed_size_partitioner(2, axis=1),
        "flat": FlatPartitioner(3),
        "whole": None,
    }

    def train(strategy, workers):
        with strategy.scope():
            variables = [
                get_variable(name, shape, dtype, initializer=0, partitioner=way)
                for name, way in ways.items()
            ]
        for step in range(STEPS):
            random = np.random.default_rng((strategy.worker_index, step))
            change = random.integers(-9, 10, shape).astype(dtype)
            ids = random.integers(0, shape[0], 40)
            for variable in variables:
                variable.assign_add(change)
                variable.scatter_sub(ids, change[:40])
        workers.barrier()
        rows = [variable.gather(np.arange(600, -1, -50)) for variable in variables]
        return strategy.num_workers, [variable.read_value() for variable in variables], rows

    result = on_cluster(world, ps, train, transport)
    if result is None:
        return
    workers, values, rows = result
    total = np.zeros(shape)
    for worker in range(workers):
        for step in range(STEPS):
            random = np.random.default_rng((worker, step))
            change = random.integers(-9, 10, shape)
            total += change
            np.subtract.at(total, random.integers(0, shape[0], 40), change[:40])
    for value, some in zip(values, rows, strict=True):
        np.testing.assert_array_equal(value, total)
        np.testing.assert_array_equal(some, total[600::-50])
