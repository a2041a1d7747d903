"""Checkpoints are consistent cuts, taken while workers push."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.servers import Cluster, variable
from safetensors.numpy import load_file

from mpidist import errors
from strategy import optimizers
from strategy.checkpoints.cut import Cut, targets_of
from strategy.client.checkpoints import CheckpointClient
from strategy.proto import parameter_server_pb2 as pb
from strategy.server import checkpoints

SIZES = {"small": 3, "other": 5, "large": 600_000, "largest": 700_000}


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def ask(connection, method, path):
    """Ask a ps task to hold its pushes for the save of a file, or to release them."""
    connection.call(method, pb.HoldRequest(connection=connection.number, path=path))


def start_save(connection, path):
    """Ask a ps task to write a file without any pushes."""
    return connection.start("Save", pb.SaveRequest(path=path))


def values_in(path, servers):
    """Return the one number that all elements of each variable have."""
    found = {}
    for index in range(servers):
        for key, tensor in load_file(f"{path}/ps-{index}-of-{servers}.safetensors").items():
            if key.endswith(":data"):
                (found[key.removesuffix(":data")],) = np.unique(tensor).tolist()
    return found


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("servers", [2, 3])
def test_a_push_to_several_servers_is_saved_whole(make, tmp_path, servers, mode, near):
    cluster = make(servers=servers, workers=2, near=near)
    strategies = [cluster.worker(index, mode=mode) for index in range(2)]
    made = [[variable(s, name, n) for name, n in SIZES.items()] for s in strategies]
    stop, problems = threading.Event(), []

    def train(index):
        optimizer = optimizers.SGD(1.0)
        grads = [np.ones(v.shape) for v in made[index]]
        try:
            while not stop.is_set():
                optimizer.apply_gradients(zip(grads, made[index], strict=True))
        except Exception as error:
            problems.append(error)
        finally:
            strategies[index].finish()

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    saver = cluster.worker(1, mode=mode)  # a strategy of its own, which does not train
    places = {id(v.remotes[0].connection) for v in made[0]}
    assert len(places) == servers
    seen = []
    for number in range(8):
        path = saver.save(str(tmp_path / str(number)))
        found = values_in(path, servers)
        step = found.pop("global_step")
        assert found == dict.fromkeys(SIZES, -float(step))
        seen.append(step)
        wait_until(lambda before=step: problems or int(saver.global_step) > before)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert seen == sorted(set(seen))
    last = int(strategies[0].global_step)
    for v in made[0]:
        np.testing.assert_array_equal(v, np.full(v.shape, -float(last)))


def test_two_saves_at_once(make, tmp_path):
    cluster = make(servers=2)
    strategy = cluster.worker(0)
    v = variable(strategy, "v", 3)
    other = cluster.worker(1)
    ask(other._connections[1], "Hold", "other")
    with pytest.raises(errors.FailedPreconditionError, match="ps 1 is being saved already"):
        strategy.save(str(tmp_path))
    ask(strategy._connections[1], "Release", "own")  # for another save
    with pytest.raises(errors.FailedPreconditionError, match="ps 1 is being saved already"):
        strategy.save(str(tmp_path))
    ask(other._connections[1], "Release", "other")
    assert v.assign_add(1) == 2
    strategy.save(str(tmp_path))


def test_workers_that_save_at_once_do_each_other_no_harm(make, tmp_path):
    cluster = make(servers=2)
    strategies = [cluster.worker(index) for index in range(2)]
    v = variable(strategies[0], "v", 3)
    begin, refusals = threading.Barrier(2), []

    def save(strategy):
        begin.wait(60)
        try:
            return strategy.save(str(tmp_path), extra={"state": b"x" * 100_000})
        except errors.FailedPreconditionError as error:
            refusals.append(error.message)
            return None

    for step in range(30):
        with ThreadPoolExecutor(2) as pool:
            paths = list(pool.map(save, strategies))
        assert set(paths) - {None} == {str(tmp_path / f"step-{step}")}
        kept = range(max(step - 2, 0), step + 1)
        assert sorted(os.listdir(tmp_path)) == sorted(f"step-{n}" for n in kept)
        assert values_in(strategies[0].latest_checkpoint(str(tmp_path)), 2)["v"] == -step
        optimizers.SGD(1.0).apply_gradients([(np.ones(3), v)]).wait()
    assert all("is being saved already" in message for message in refusals)


@pytest.mark.parametrize("where", ["Hold", "Save"])
def test_a_save_that_is_interrupted_holds_nobody_up(make, tmp_path, monkeypatch, where):
    strategy = make(servers=2).worker(0)
    made = [variable(strategy, name, 3) for name in "ab"]
    connection = strategy._connections[1]
    start = connection.start

    def interrupted(method, *arguments, **options):
        work = start(method, *arguments, **options)
        if method == where:
            work.wait()
            raise KeyboardInterrupt
        return work

    monkeypatch.setattr(connection, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        strategy.save(str(tmp_path))
    assert [v.assign_add(1) for v in made] == [2, 2]
    monkeypatch.undo()
    strategy.save(str(tmp_path))


def test_a_save_that_fails_lets_all_go_on(make, tmp_path):
    strategy = make(servers=2).worker(0)
    made = [variable(strategy, name, 3) for name in "ab"]
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FailedPreconditionError, match=r"file/step-0': .* must be room"):
        strategy.save(str(tmp_path / "file"))
    for n in range(2):
        (tmp_path / f"{n}" / "not a file").mkdir(parents=True)
    works = []
    for n, connection in enumerate(strategy._connections):
        ask(connection, "Hold", str(tmp_path / f"{n}"))
        works.append(start_save(connection, str(tmp_path / f"{n}")))
    for work in works:
        with pytest.raises(errors.FailedPreconditionError, match="cannot write"):
            work.wait()
    assert [v.assign_add(1) for v in made] == [2, 2]


def test_a_part_to_be_fetched_is_discarded_by_the_release(make):
    cluster = make()
    strategy = cluster.worker(0)
    variable(strategy, "v", 3)
    (connection,) = strategy._connections
    ask(connection, "Hold", "/nowhere/part")
    reply = start_save(connection, "/nowhere/part").result()
    assert pb.SaveReply.FromString(reply.body).nbytes > 0
    (server,) = cluster.parameter_servers
    assert list(server._checkpoints._parts) == ["/nowhere/part"]
    ask(connection, "Release", "/nowhere/part")
    ask(connection, "Release", "/nowhere/part")
    assert not server._checkpoints._parts
    client = CheckpointClient([connection], cluster.host(0), 0, {})
    with pytest.raises(errors.FailedPreconditionError, match="'/nowhere/part'"):
        client.begin_save(["/nowhere/part"]).end()
    assert not server._checkpoints._parts


def test_targets_are_what_anybody_has_said():
    one, two = (0, 0), (1, 0)
    said = [[(one, (5, 2)), (two, (1, 9))], [(one, (4, 3)), (two, ())]]
    assert targets_of(dict(enumerate(said))) == {0: {one: 5, two: 1}, 1: {one: 3, two: 9}}
    cut = Cut(0, "path")
    assert not cut.allows(one, 1)
    assert not cut.is_reached({one: 9})
    cut.aim({one: 5, two: 1}, print)
    assert [cut.allows(one, 5), cut.allows(one, 6), cut.allows((2, 0), 1)] == [True, False, False]
    assert not cut.is_reached({one: 5, two: 0})
    assert cut.is_reached({one: 5, two: 1})
    assert cut.is_reached({one: 5})  # a closed connection has applied all its pushes


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_a_push_that_reaches_some_servers_only_keeps_no_save_waiting(make, tmp_path, problem):
    cluster = make(servers=2, workers=2)
    strategies = [cluster.worker(index, placement="round_robin") for index in range(2)]
    made = [[variable(strategy, name, 4) for name in "abcd"] for strategy in strategies]
    sgd = optimizers.SGD(1.0)

    def step(index):
        return sgd.apply_gradients([(np.ones(4), v) for v in made[index]])

    step(0).wait()
    step(1).wait()
    first = made[1][0].remotes[0].connection  # in the order of the gradients
    (last,) = [one for one in strategies[1]._connections if one is not first]
    push = last.push

    def fail(*_):
        last.push = push
        raise problem

    last.push = fail
    with pytest.raises(problem):
        step(1)
    with ThreadPoolExecutor(1) as pool:
        path = pool.submit(strategies[0].save, str(tmp_path)).result(60)
    step(0).wait()
    step(1).wait()
    values = {float(v.numpy()[0]) for v in made[0]}
    assert values == {-4.0, -5.0}  # with that push, and without it
    strategies[0].restore(path)
    assert {float(v.numpy()[0]) for v in made[0]} == {-2.0, -3.0}


def test_a_save_that_fails_keeps_no_parts(make, tmp_path, monkeypatch):
    cluster = make(servers=2)
    strategy = cluster.worker(0, placement="round_robin")
    for name in "abcd":
        variable(strategy, name, 4)
    # No server sees the folder, and one server has no room.
    path = SimpleNamespace(isdir=lambda folder: False, dirname=os.path.dirname, join=os.path.join)
    hidden = SimpleNamespace(path=path, fstat=os.fstat)
    monkeypatch.setattr(checkpoints, "os", hidden)
    second = cluster.parameter_servers[1]._checkpoints

    def refuse(request, path, state):
        request.fail(errors.ResourceExhaustedError("no room"))

    monkeypatch.setattr(second, "_write", refuse)
    for _ in range(3):
        with pytest.raises(errors.ResourceExhaustedError, match="no room"):
            strategy.save(str(tmp_path))
    assert [server._checkpoints._parts for server in cluster.parameter_servers] == [{}, {}]


def test_a_release_names_the_save_that_it_releases(make):
    strategy = make().worker(0)
    v = variable(strategy, "v", 3)
    (connection,) = strategy._connections
    ask(connection, "Hold", "first")
    ask(connection, "Release", "second")  # another file, same connection
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(v.assign_add, 1)
        with pytest.raises(errors.FailedPreconditionError, match="the save of 'second'"):
            start_save(connection, "second").wait()
        assert not change.done()
        ask(connection, "Release", "first")
        assert change.result(60) == 2
