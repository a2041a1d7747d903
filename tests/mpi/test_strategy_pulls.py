"""Pulls while others push: never a mix of two versions, and always with the version they have."""

import itertools
import time

import numpy as np
import pytest
from _cases.clusters import on_cluster

from strategy import get_variable, optimizers

LIMIT_S = 30.0
BLOCK = 1 << 18  # elements of float32 in a block
LARGE = 20 * BLOCK + 3  # which goes in pieces where it goes by message
SIZES = (1, BLOCK, 5 * BLOCK + 17, LARGE)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["auto", "rma", "p2p"])
@pytest.mark.parametrize("size", SIZES)
def test_every_pull_is_of_one_version(world, transport, size):
    rounds = {1: 200, BLOCK: 40, LARGE: 6}.get(size, 15)

    def train(strategy, workers):
        with strategy.scope():
            variable = get_variable("v", size, initializer=0)
        ones, out = np.ones(size, np.float32), np.empty(size, np.float32)
        sgd = optimizers.SGD(1.0)
        mixed, versions = [], []
        workers.barrier()
        for step in range(rounds):
            # The last worker only pushes, without pause: the others' pulls fall among its changes.
            sgd.apply_gradients([(ones, variable)])
            if strategy.num_workers > 1 and strategy.worker_index == strategy.num_workers - 1:
                continue
            variable.read_value(out)
            versions.append(variable.version)
            expected = 1.0 - variable.version  # each version took 1 from every element
            if not (out == expected).all():
                mixed.append((step, variable.version, np.unique(out)))
        variable.read_value(out)  # all own pushes are applied: what follows the barrier sees them
        workers.barrier()
        final = variable.read_value()
        return mixed, versions, strategy.num_workers, final, variable.version

    result = on_cluster(world, 1, train, transport)
    if result is None:
        return
    mixed, versions, workers, final, version = result
    assert mixed == []
    assert versions == sorted(versions)
    assert version == workers * rounds + 1
    np.testing.assert_array_equal(final, np.full(size, -float(workers * rounds)))


def pull_while_another_pushes(world, transport, pulls):
    """Worker 0 pulls while worker 1 pushes without pause; what worker 0 found wrong."""
    size = 2 * BLOCK + BLOCK // 2 + 3

    def train(strategy, workers):
        with strategy.scope():
            variable = get_variable("v", size, initializer=0)
        workers.barrier()
        if strategy.worker_index == 1:
            sgd, minus_one = optimizers.SGD(1.0), np.full(size, -1, np.float32)
            pushes = 0
            while not world.Iprobe(source=1):
                sgd.apply_gradients([(minus_one, variable)])
                pushes += 1
            world.recv(source=1)
            return pushes
        out, versions, torn = np.empty(size, np.float32), [], []
        deadline = time.monotonic() + LIMIT_S
        # Pulls may be over before the first push of a rank that had to wait for a core.
        for number in itertools.count():
            if number >= pulls and (versions[-1] > versions[0] or time.monotonic() > deadline):
                break
            variable.read_value(out)
            versions.append(variable.version)
            # The first value is version 1; every push adds 1 to all elements.
            if not out.min() == out.max() == variable.version - 1:
                torn.append((number, variable.version, np.unique(out)))
        world.send("enough", dest=2)
        return torn, versions

    result = on_cluster(world, 1, train, transport)
    if world.rank == 1:
        torn, versions = result
        assert torn == []
        assert len(versions) >= pulls
        assert versions == sorted(versions)
        assert versions[-1] > versions[0]
    if world.rank == 2:
        assert result > 0


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
def test_pulls_under_updates_without_pause(world, transport):
    pull_while_another_pushes(world, transport, 150)


@pytest.mark.long
@pytest.mark.ranks(3, timeout=900)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
def test_ten_thousand_pulls_under_updates_without_pause(world, transport):
    pull_while_another_pushes(world, transport, 10_000)


@pytest.mark.ranks(3)
def test_blocks_of_an_inconsistent_pull_are_each_of_one_version(world):
    size, rounds = 3 * BLOCK + 5, 25

    def train(strategy, workers):
        with strategy.scope():
            variable = get_variable("v", size, initializer=0)
        sgd = optimizers.SGD(1.0)
        mixed = []
        workers.barrier()
        for _ in range(rounds):
            if strategy.worker_index == 1:
                sgd.apply_gradients([(np.ones(size), variable)])
                continue
            value = variable.read_value(consistent=False)
            blocks = [np.unique(value[start : start + BLOCK]) for start in range(0, size, BLOCK)]
            mixed += [block for block in blocks if len(block) > 1]
        return mixed

    assert not on_cluster(world, 1, train)


@pytest.mark.ranks(3)
def test_variables_of_two_servers_do_not_mix(world):
    sizes = (BLOCK // 2, 40, 3 * BLOCK, 1, 2000, BLOCK)

    def train(strategy, workers):
        with strategy.scope():
            variables = [get_variable(f"v{n}", s, initializer=n) for n, s in enumerate(sizes)]
        before = [variable.read_value() for variable in variables]
        grads = [np.full(size, float(10 + n)) for n, size in enumerate(sizes)]
        applied = optimizers.SGD(1.0).apply_gradients(zip(grads, variables, strict=True)).result()
        order = [4, 0, 2]
        chosen = [(grads[n], variables[n]) for n in order]
        again = optimizers.SGD(1.0).apply_gradients(chosen).result()
        servers = {id(variable.remotes[0].connection) for variable in variables}
        return before, [variable.read_value() for variable in variables], applied, again, servers

    result = on_cluster(world, 2, train)
    if result is None:
        return
    before, after, applied, again, servers = result
    assert len(servers) == 2
    assert applied.versions == (2,) * 6
    assert again.versions == (3,) * 3
    for n, size in enumerate(sizes):
        np.testing.assert_array_equal(before[n], np.full(size, n))
        times = 2 if n in (4, 0, 2) else 1
        np.testing.assert_array_equal(after[n], np.full(size, n - times * (10.0 + n)))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
def test_dtypes(world, transport):
    rng = np.random.default_rng(5)
    dtypes = ("float16", "float32", "float64", "int8", "int64", "uint16", "bool", "bfloat16")
    shapes = ((), (7, 3), (700, 601))
    values = [rng.integers(0, 100, s).astype(dtype) for dtype in dtypes for s in shapes]

    def train(strategy, workers):
        with strategy.scope():
            variables = [get_variable(f"v{n}", v.shape, v.dtype, v) for n, v in enumerate(values)]
        first = [variable.read_value() for variable in variables]
        workers.barrier()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value[::-1] if value.ndim else value)
        return first, [variable.read_value() for variable in variables]

    result = on_cluster(world, 1, train, transport)
    if result is None:
        return
    for value, first, second in zip(values, *result, strict=True):
        assert first.dtype == second.dtype == value.dtype
        np.testing.assert_array_equal(first, value)
        np.testing.assert_array_equal(second, value[::-1] if value.ndim else value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
def test_variable_without_elements(world, transport):
    def train(strategy, workers):
        with strategy.scope():
            empty = get_variable("empty", (0, 3))
            after = get_variable("after", 2, initializer=1)
        version = empty.assign(np.zeros((0, 3)))
        workers.barrier()
        return empty.read_value().shape, version, empty.version, after.read_value().tolist()

    result = on_cluster(world, 1, train, transport)
    if result is not None:
        assert result[0] == (0, 3)
        assert result[1] in (2, 3)
        assert result[2:] == (3, [1.0, 1.0])
