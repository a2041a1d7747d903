"""Pushes of workers: sums, versions and the global step, over every transport."""

import numpy as np
import pytest
from _cases.clusters import on_cluster

from mpidist import errors
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers

# Elements of float32: one, one message, the smallest staged array, a block, several blocks.
SIZES = (1, 1000, 4095, 4096, 1 << 18, (5 << 18) + 3)
TRANSPORTS = ("shared", "rma", "p2p")


def gradient(step, size, dtype=np.float32):
    return np.random.default_rng(step).standard_normal(size).astype(dtype)


def adam(params, grads, rate):
    """Apply Adam in float64, as in Kingma and Ba, section 2."""
    m, v = 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = g.astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        params = params - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)
    return params


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transports_agree_bit_by_bit(world, dtype):
    def train(strategy, workers):
        values = {}
        first = [gradient(1000 + n, size, dtype) for n, size in enumerate(SIZES)]
        with strategy.scope():
            variables = [get_variable(f"v{n}", initializer=v) for n, v in enumerate(first)]
        sgd, fast = optimizers.SGD(0.5), optimizers.Adam(0.01)
        workers.barrier()
        if strategy.is_chief:
            for step in range(3):
                grads = [gradient(10 * step + n, size, dtype) for n, size in enumerate(SIZES)]
                half = len(SIZES) // 2
                sgd.apply_gradients(list(zip(grads, variables, strict=True))[:half])
                fast.apply_gradients(list(zip(grads, variables, strict=True))[half:]).wait()
            variables[1].assign_sub(gradient(77, SIZES[1], dtype))
            variables[4].assign_add(gradient(78, SIZES[4], dtype))
            variables[5].assign(2 * variables[5])
        workers.barrier()
        for variable in variables:
            values[variable.name] = (variable.read_value(), variable.version)
        return first, values, int(strategy.global_step)

    ps = world.size - 1
    results = [on_cluster(world, ps, train, transport) for transport in TRANSPORTS]
    if results[0] is None:
        return
    first, shared, steps = results[0]
    for _, others, _ in results[1:]:
        for name, (value, version) in shared.items():
            assert value.tobytes() == others[name][0].tobytes(), name
            assert version == others[name][1] == {"v1": 5, "v4": 5, "v5": 5}.get(name, 4), name
    assert steps == 6
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    for n, size in enumerate(SIZES):
        grads = [gradient(10 * step + n, size, dtype) for step in range(3)]
        if n < len(SIZES) // 2:
            expected = first[n].astype(float) - 0.5 * sum(g.astype(float) for g in grads)
        else:
            expected = adam(first[n].astype(float), grads, 0.01)
        expected = {1: expected - gradient(77, size, dtype), 4: expected}.get(n, expected)
        expected = expected + gradient(78, size, dtype) if n == 4 else expected
        expected = 2 * expected if n == 5 else expected
        value = shared[f"v{n}"][0]
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ps", [1, 2])
def test_sums_of_all_workers_are_exact(world, ps, transport):
    steps = 12

    def train(strategy, workers):
        with strategy.scope():
            variables = [get_variable(f"v{n}", size, initializer=0) for n, size in enumerate(SIZES)]
        sgd = optimizers.SGD(1.0)
        waiting = []
        for step in range(steps):
            rng = np.random.default_rng((strategy.worker_index, step))
            grads = [rng.integers(-9, 10, size).astype(np.float32) for size in SIZES]
            waiting.append(sgd.apply_gradients(zip(grads, variables, strict=True)))
            for grad in grads:
                grad[:] = np.nan  # the caller may reuse the array after the call
        staleness = [applied.result(60).staleness for applied in waiting]
        workers.barrier()
        values = [variable.read_value() for variable in variables]
        versions = [variable.version for variable in variables]
        others = (strategy.num_workers - 1) * steps + 1  # the first value is the chief's
        assert all(0 <= one <= others for step in staleness for one in step)
        return strategy.num_workers, values, versions, int(strategy.global_step)

    result = on_cluster(world, ps, train, transport)
    if result is None:
        return
    count, values, versions, total = result
    assert total == count * steps
    assert versions == [count * steps + 1] * len(SIZES)
    sums = [np.zeros(size) for size in SIZES]
    for worker in range(count):
        for step in range(steps):
            rng = np.random.default_rng((worker, step))
            for into, size in zip(sums, SIZES, strict=True):
                into -= rng.integers(-9, 10, size)
    for value, expected in zip(values, sums, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_and_staleness(world, transport):
    def train(strategy, workers):
        with strategy.scope():
            small = get_variable("small", 3, initializer=0)
            large = get_variable("large", 1 << 19, initializer=0)
        sgd = optimizers.SGD(1.0)
        both = [(np.ones(3), small), (np.ones(1 << 19), large)]
        seen = []
        assert small.read_value().sum() == 0
        assert large.read_value().sum() == 0
        seen.append((small.version, large.version))
        workers.barrier()
        if strategy.worker_index == 1:
            seen += [sgd.apply_gradients(both).result() for _ in range(3)]
        workers.barrier()
        if strategy.worker_index == 0:
            # Computed from version 1, applied to version 4. The worker's own pushes do not count.
            seen += [sgd.apply_gradients(both).result() for _ in range(2)]
            small.read_value()
            large.read_value()
            seen.append(sgd.apply_gradients(both).result())
        workers.barrier()
        if strategy.worker_index == 1:
            seen.append(small.assign(np.zeros(3)))
            seen.append(small.version)
        workers.barrier()
        return strategy.worker_index, seen

    result = on_cluster(world, 1, train, transport)
    if result is None:
        return
    worker, seen = result
    assert seen[0] == (1, 1)
    if worker == 1:
        assert [applied.versions for applied in seen[1:4]] == [(2, 2), (3, 3), (4, 4)]
        assert [applied.staleness for applied in seen[1:4]] == [(0, 0)] * 3
        assert seen[4:] == [8, 8]
    else:
        assert [applied.versions for applied in seen[1:]] == [(5, 5), (6, 6), (7, 7)]
        assert [applied.staleness for applied in seen[1:]] == [(3, 3), (3, 3), (0, 0)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_reads_its_own_pushes(world, transport):
    def train(strategy, workers):
        with strategy.scope():
            own = [
                get_variable(f"{worker}/{size}", size, initializer=0)
                for worker in range(strategy.num_workers)
                for size in SIZES
            ]
        mine = own[strategy.worker_index * len(SIZES) :][: len(SIZES)]
        sgd = optimizers.SGD(1.0)
        wrong = []
        for step in range(1, 9):
            sgd.apply_gradients([(np.full(v.shape, -1.0), v) for v in mine])
            for variable in mine:
                value = variable.read_value()
                if not (value == step).all() or variable.version != step + 1:
                    wrong.append((step, variable.name, value, variable.version))
        return wrong

    assert not on_cluster(world, 1, train, transport)


@pytest.mark.ranks(2)
def test_gradients_in_any_layout_and_dtype(world):
    base = np.arange(6 * 2**15).reshape(-1, 6) % 100

    def train(strategy, workers):
        results = []
        cases = {
            "reversed": base[::-1, ::-1].astype(np.float32),
            "fortran": np.asfortranarray(base, np.float32),
            "strided": np.repeat(base, 2, axis=1)[:, ::2],  # int64, converted to float32
            "double": base.astype(np.float64),
            "half": base.astype(np.float16),
        }
        cases["reversed"] = cases["reversed"][::-1, ::-1]
        for size in (3, len(base)):
            for name, grad in cases.items():
                with strategy.scope():
                    variable = get_variable(f"{name}{size}", (size, 6), initializer="zeros")
                optimizers.SGD(1.0).apply_gradients([(grad[:size], variable)])
                results.append((name, size, variable.read_value()))
        return results

    for name, size, value in on_cluster(world, 1, train) or ():
        np.testing.assert_array_equal(value, -base[:size].astype(float), err_msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [4, 1 << 19])
def test_a_push_that_the_server_refuses_changes_nothing(world, size):
    def train(strategy, workers):
        with strategy.scope():
            counts = get_variable("counts", size, dtype=np.int32, initializer=0)
            weights = get_variable("weights", size, initializer=0)
        sgd = optimizers.SGD(1.0)
        ones = np.ones(size, np.int32)
        with pytest.raises(errors.InvalidArgumentError, match="SGD cannot change variable 'coun"):
            sgd.apply_gradients([(ones, counts), (ones, weights)]).wait()
        counts.assign_add(ones)
        sgd.apply_gradients([(ones, weights)]).wait()
        return counts.read_value(), weights.read_value()

    result = on_cluster(world, 1, train)
    if result is not None:
        np.testing.assert_array_equal(result[0], np.ones(size))
        np.testing.assert_array_equal(result[1], np.full(size, -1.0))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_under_way_is_applied_before_a_worker_leaves(world, transport):
    size = 1 << 19

    def train(strategy, workers):
        with strategy.scope():
            variable = get_variable("v", size, initializer=0)
        if strategy.worker_index == 1:
            for _ in range(5):
                optimizers.SGD(1.0).apply_gradients([(np.ones(size), variable)])
            return None
        world.recv(source=2)
        return variable.read_value(), int(strategy.global_step)

    result = on_cluster(world, 1, train, transport)
    if world.rank == 2:
        world.send("has left", 1)
    if world.rank == 1:
        np.testing.assert_array_equal(result[0], np.full(size, -5.0))
        assert result[1] == 5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_small_pushes_after_large_ones(world, transport):
    """Keep the order of changes, although a small message may overtake a large one."""
    large, rounds = (5 << 18) + 3, 15

    def train(strategy, workers):
        with strategy.scope():
            big = get_variable("big", large, initializer=0)
            small = get_variable("small", 3, initializer=0)
        sgd = optimizers.SGD(1.0)
        works = []
        for _ in range(rounds):
            works.append(sgd.apply_gradients([(np.ones(large), big), (np.ones(3), small)]))
            works.append(sgd.apply_gradients([(np.ones(3), small)]))
        versions = [work.result(60).versions[-1] for work in works]
        return versions, big.read_value(), small.read_value()

    result = on_cluster(world, 1, train, transport)
    if result is not None:
        versions, big, small = result
        assert versions == list(range(2, 2 * rounds + 2))
        np.testing.assert_array_equal(big, np.full(large, -float(rounds)))
        np.testing.assert_array_equal(small, np.full(3, -2.0 * rounds))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_strategies_of_a_worker(world, transport):
    """Number the pushes of each strategy separately."""
    sizes, rounds = (3, 4096, (1 << 18) + 5), 6

    def train(strategy, workers):
        strategies = [strategy, ParameterServerStrategy(transport=transport, name="other")]
        owners = [("all", f"{strategy.worker_index}/{number}") for number in range(2)]
        variables = []
        for one, names in zip(strategies, owners, strict=True):
            with one.scope():
                made = [get_variable(f"{n}/{s}", s, initializer=0) for n in names for s in sizes]
            variables.append(made)
        sgd = optimizers.SGD(1.0)
        works = []
        for _ in range(rounds):
            for factor, made in enumerate(variables, 1):
                pairs = [(np.full(v.shape, -factor, np.float32), v) for v in made]
                works.append(sgd.apply_gradients(pairs))
        for work in works:
            work.wait(60)
        workers.barrier()
        return strategy.num_workers, [[v.read_value() for v in made] for made in variables]

    count, values = on_cluster(world, 1, train, transport) or (None, [])
    for factor, made in enumerate(values, 1):
        for value, size in zip(made[:3], sizes, strict=True):
            np.testing.assert_array_equal(value, np.full(size, 3.0 * rounds * count))
        for value, size in zip(made[3:], sizes, strict=True):
            np.testing.assert_array_equal(value, np.full(size, 1.0 * factor * rounds))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_that_all_workers_change_add_up(world, transport):
    """Push whole numbers with exact sums. All workers change row 0 and the last row."""
    steps, count, width = 20, 5000, 16

    def slices(worker, step):
        random = np.random.default_rng(100 * worker + step)
        ids = np.append(random.integers(0, count, 300), [0, count - 1, 0])
        return IndexedSlices(random.integers(-9, 9, (len(ids), width)).astype(np.float32), ids)

    def train(strategy, workers):
        with strategy.scope():
            table = get_variable("table", (count, width), initializer="zeros")
        sgd = optimizers.SGD(1.0)
        for step in range(steps):
            given = slices(strategy.worker_index, step)
            sgd.apply_gradients([(given, table)])
            table.scatter_sub(given)
            seen = table.gather(given.indices)
            assert seen.shape == (303, width)
        workers.barrier()
        return table.read_value(), table.gather(np.arange(count)[::-1]), table.version

    result = on_cluster(world, 1, train, transport)
    if result is not None:
        whole, backwards, version = result
        expected = np.zeros((count, width))
        for worker in range(world.size - 1):
            for step in range(steps):
                given = slices(worker, step)
                np.subtract.at(expected, given.indices, 2.0 * given.values)
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(backwards, expected[::-1])
        assert version == 1 + 2 * steps * (world.size - 1)
