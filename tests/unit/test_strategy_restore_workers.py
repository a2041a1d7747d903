"""Restores by several workers, and from several servers: all of a checkpoint or nothing of it."""

import os
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.servers import Cluster, variable

from mpidist import errors
from mpidist.config import config as settings
from strategy import ParameterServerStrategy, optimizers
from strategy.checkpoints import saved

SIZES = {"a": 1000, "b": 10, "c": 5, "d": 3000}


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def create(strategy, sizes, value=0.0):
    return {name: variable(strategy, name, size, value) for name, size in sizes.items()}


def check_all(variables, value):
    for v in variables.values():
        np.testing.assert_array_equal(v, np.full(v.shape, value))


def test_it_is_carried_out_once_for_all_workers(make, tmp_path):
    cluster = make()
    strategies = [cluster.worker(i) for i in range(2)]
    one, two = (variable(strategy, "v", 2) for strategy in strategies)
    path = strategies[0].save(str(tmp_path))
    one.assign(5)
    assert strategies[0].restore(path) == 0
    one.assign_add(1)
    assert strategies[1].restore(path) == 0
    np.testing.assert_array_equal(two, [1, 1])


def test_the_same_folder_by_another_name(make, tmp_path, monkeypatch):
    cluster = make()
    strategies = [cluster.worker(i) for i in range(2)]
    path = strategies[0].save(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    strategies[0].restore("step-0/")
    assert strategies[1].restore(path) == 0


@pytest.mark.parametrize("servers", [1, 3])
def test_workers_that_restore_different_checkpoints(make, tmp_path, servers):
    cluster = make(servers=servers)
    strategies = [cluster.worker(i) for i in range(2)]
    made = [create(strategy, SIZES) for strategy in strategies]
    paths = []
    for value in (1.0, 2.0):
        for v in made[0].values():
            v.assign(value)
        paths.append(strategies[0].save(str(tmp_path)))
        optimizers.SGD(1.0).apply_gradients([(np.zeros(10), made[0]["b"])]).wait()
    assert [strategies[0].restore(path) for path in paths] == [0, 1]
    for v in made[0].values():
        v.assign(3)
    # Worker 1 has skipped one. Its first restore is of what was worker 0's second.
    with pytest.raises(errors.InvalidArgumentError) as info:
        strategies[1].restore(paths[1])
    for part in ("worker 1", "the chief", *paths, "number 1", "same order"):
        assert part in info.value.message
    check_all(made[1], 3)
    assert strategies[1].restore(paths[0]) == 1  # the global step is that of worker 0's second
    assert strategies[1].restore(paths[1]) == 1
    check_all(made[1], 3)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("servers", [2, 3])
def test_what_does_not_fit_on_one_server_changes_nothing_on_any(make, tmp_path, servers, name):
    path = _saved(make, tmp_path, SIZES)
    strategy = make(servers=servers, workers=1).worker(0)
    made = create(strategy, SIZES | {name: SIZES[name] + 1}, 7.0)
    for _ in range(2):
        with pytest.raises(errors.InvalidArgumentError, match=f"checkpoint has '{name}' as float"):
            strategy.restore(path)
        check_all(made, 7)
        assert {v.version for v in made.values()} == {1}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("servers", [2, 3])
def test_what_is_missing_on_one_server_changes_nothing_on_any(make, tmp_path, servers, name):
    path = _saved(make, tmp_path, {n: size for n, size in SIZES.items() if n != name})
    strategy = make(servers=servers, workers=1).worker(0)
    made = create(strategy, SIZES, 7.0)
    for _ in range(2):
        with pytest.raises(errors.NotFoundError, match=rf"does not have \['{name}'\]"):
            strategy.restore(path)
        check_all(made, 7)
        assert {v.version for v in made.values()} == {1}


def test_every_worker_may_fall_back_on_an_older_one(make, tmp_path):
    cluster = make(servers=2)
    strategies = [cluster.worker(i) for i in range(2)]
    made = [create(strategy, SIZES) for strategy in strategies]
    good = strategies[0].save(str(tmp_path))
    optimizers.SGD(1.0).apply_gradients([(np.ones(10), made[0]["b"])]).wait()
    bad = strategies[0].save(str(tmp_path))
    os.truncate(os.path.join(bad, "ps-1-of-2.safetensors"), 100)
    for strategy in strategies:
        with pytest.raises(errors.DataLossError, match="ps-1-of-2"):
            strategy.restore(bad)
        assert strategy.restore(good) == 0
    check_all(made[1], 0)


@pytest.mark.parametrize("again", ["same", "other"])
def test_one_that_failed_half_way_can_be_repeated(make, tmp_path, monkeypatch, again):
    cluster = make(servers=2)
    strategies = [cluster.worker(i) for i in range(2)]
    made = [create(strategy, SIZES, 1.0) for strategy in strategies]
    paths = {"same": strategies[0].save(str(tmp_path / "same"))}
    for v in made[0].values():
        v.assign(2)
    paths["other"] = strategies[0].save(str(tmp_path / "other"))
    for v in made[0].values():
        v.assign(3)
    read, calls = saved.read_shards, []

    def fail_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise errors.DataLossError("the disk is gone")
        return read(*arguments)

    monkeypatch.setattr(saved, "read_shards", fail_at_the_second)
    with pytest.raises(errors.DataLossError, match="the disk is gone"):
        strategies[0].restore(paths["same"])
    strategies[0].restore(paths[again])
    check_all(made[0], 1 if again == "same" else 2)
    for v in made[0].values():
        v.assign(4)
    strategies[1].restore(paths[again])
    check_all(made[1], 4)


def after_arrays(monkeypatch, strategy, count, call):
    """Call a function when a restore has sent some arrays to the only ps task."""
    (connection,) = strategy._connections
    send_array, calls = connection.send_array, []

    def send(*arguments):
        send_array(*arguments)
        calls.append(arguments)
        if len(calls) == count:
            call()

    monkeypatch.setattr(connection, "send_array", send)


@pytest.mark.parametrize("count", [1, 2, 3])  # the global step, the values, and a slot
def test_a_file_that_is_damaged_while_it_is_read(make, tmp_path, monkeypatch, count):
    strategy = make(workers=1).worker(0)
    v = variable(strategy, "v", 300_000)
    optimizers.Adam(0.1).apply_gradients([(np.ones(300_000), v)]).wait()
    saved_values = v.numpy()
    path = strategy.save(str(tmp_path))
    v.assign(1)
    file = f"{path}/ps-0-of-1.safetensors"
    with open(file, "rb") as stream:
        content = stream.read()
    after_arrays(monkeypatch, strategy, count, lambda: os.truncate(file, 2_000_000))
    with pytest.raises(errors.DataLossError, match=r"ps-0-of-1.*restore an older one"):
        strategy.restore(path)
    monkeypatch.undo()
    assert v.remotes[0].shared.try_read(np.empty(300_000)) is not None  # of one version
    with open(file, "wb") as stream:
        stream.write(content)
    strategy.restore(path)
    np.testing.assert_array_equal(v, saved_values)


def test_one_that_is_replaced_while_it_is_read(make, tmp_path, monkeypatch):
    strategy = make(workers=1).worker(0)
    made = create(strategy, SIZES)
    path = strategy.save(str(tmp_path / "first"))
    made["a"].assign(1)
    other = strategy.save(str(tmp_path / "second"))

    def replace():
        os.rename(path, tmp_path / "gone")
        os.rename(other, path)

    after_arrays(monkeypatch, strategy, 2, replace)
    with pytest.raises(errors.DataLossError, match="step-0' is gone, or another one is in its"):
        strategy.restore(path)
    monkeypatch.undo()
    strategy.restore(path)
    np.testing.assert_array_equal(made["a"], np.ones(SIZES["a"]))


def test_two_strategies_of_a_worker(make, tmp_path):
    cluster = make()
    host = cluster.host(0)
    one, two = (ParameterServerStrategy(server=host, name=name) for name in "ab")
    other = cluster.worker(1, name="a")
    v, w, x = (variable(strategy, "v", 2) for strategy in (one, two, other))
    path = one.save(str(tmp_path))
    for strategy in (one, two):  # of two names, which restore independently
        v.assign_add(5)
        strategy.restore(path)
        np.testing.assert_array_equal(w, [0, 0])
    v.assign_add(5)
    other.restore(path)  # the chief of this name has restored it
    np.testing.assert_array_equal(x, [5, 5])


def _saved(make, folder, sizes):
    strategy = make(workers=1).worker(0)
    create(strategy, sizes, 1.0)
    return strategy.save(str(folder))


def test_a_restore_after_a_strategy_was_reopened(make, tmp_path):
    """Worker 1 still has its first strategy when worker 0 restores with the second."""
    cluster = make()
    strategies = [cluster.worker(index) for index in range(2)]
    v = create(strategies[0], SIZES)
    path = strategies[0].save(str(tmp_path))
    for strategy in strategies:
        strategy.restore(path)
    strategies[0].close()
    reopened = cluster.worker(0, name="default")
    v = create(reopened, SIZES)
    for one in v.values():
        one.assign(7)
    reopened.restore(path)
    check_all(v, 0)
    strategies[1].restore(path)


def test_the_chief_restores_the_variables_of_all_workers(make, tmp_path):
    cluster = make(servers=2)
    strategies = [cluster.worker(index) for index in range(2)]
    made = create(strategies[1], SIZES, 3.0)
    path = strategies[0].save(str(tmp_path))
    for v in made.values():
        v.assign(4)
    assert strategies[0].restore(path) == strategies[1].restore(path) == 0
    check_all(made, 3)


def test_a_worker_waits_for_a_chief_that_comes_late(make, tmp_path, caplog):
    before = settings.stall_s
    object.__setattr__(settings, "stall_s", 0.01)
    cluster = make()
    early = cluster.worker(1)
    made = create(early, SIZES, 1.0)
    path = early.save(str(tmp_path))
    done = threading.Thread(target=early.restore, args=(path,))
    try:
        done.start()
        wait_until(lambda: "for the chief (worker 0) to restore" in caplog.text)
    finally:
        object.__setattr__(settings, "stall_s", before)
    for v in made.values():
        v.assign(2)
    cluster.worker(0).restore(path)
    done.join(60)
    assert not done.is_alive()
    check_all(made, 1)


def test_a_worker_does_not_wait_for_a_chief_that_has_left(make, tmp_path):
    cluster = make()
    strategy = cluster.worker(1)
    path = strategy.save(str(tmp_path))
    cluster.gone.add(("worker", 0))
    with pytest.raises(errors.AbortedError, match="the chief, worker 0, has left the cluster"):
        strategy.restore(path)
