"""Checkpoints of one cluster that another restores."""

import contextlib
import json
import os
import tempfile

import numpy as np
import pytest
from _cases.clusters import on_cluster
from _cases.hangs import STRATEGY
from _cases.jobs import run_job

from mpidist import errors
from strategy import get_variable, optimizers

SIZES = (5000, 300, 1000, 20)  # by their bytes on both of two servers
SCRIPT = """
import json, sys
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

folder = {folder!r}
resolver = MPIClusterResolver({{"ps": 1, "worker": -1}})
job, task = resolver.task_type, resolver.task_id
SHAPES = {{"scalar": (), "matrix": (40, 30), "large": (3, 700, 211), "other": (900,), "last": (5,)}}

def gradient(step, name):
    return np.random.default_rng((step, len(name))).standard_normal(SHAPES[name])

def train(strategy, steps):
    for step in steps:
        pairs = [(gradient(step, name), variables[name]) for name in SHAPES]
        adam.apply_gradients(pairs[:3])
        sgd.apply_gradients(pairs[3:])

with mpidist.Server(resolver.cluster_spec(), job, task) as server:
    if job == "ps":
        server.join()
    else:
        workers = server.job_group("worker")
        strategy = ParameterServerStrategy()
        adam, sgd = optimizers.Adam(0.01), optimizers.SGD(0.1)
        with strategy.scope():
            variables = {{n: get_variable(n, s, initializer=0.5) for n, s in SHAPES.items()}}
        {body}
"""
SAVE = """
        if strategy.is_chief:
            train(strategy, range(4))
            path = strategy.save(folder, extra={"reader.json": {"at": 7}})
            train(strategy, range(4, 7))
            np.savez(folder + "/expected.npz", **{n: v.numpy() for n, v in variables.items()})
            with open(folder + "/facts.json", "w") as file:
                json.dump({"path": path, "step": int(strategy.global_step)}, file)
        workers.barrier()
"""
RESTORE = """
        path = ParameterServerStrategy.latest_checkpoint(folder)
        step = strategy.restore(path)
        assert step == 8, step
        workers.barrier()
        if strategy.is_chief:
            train(strategy, range(4, 7))
            np.savez(folder + "/found.npz", **{n: v.numpy() for n, v in variables.items()})
            assert int(strategy.global_step) == 14
        workers.barrier()
"""
FAULTS = """
        def failure(call):
            try:
                call()
            except (mpidist.Error, OSError) as error:
                return f"{type(error).__name__}: {error}"
        path = ParameterServerStrategy.latest_checkpoint(folder)
        found = [failure(lambda: strategy.restore(folder + "/step-99"))]
        found.append(failure(lambda: strategy.restore(folder + "/damaged")))
        with strategy.scope():
            get_variable("added", 3)
        found.append(failure(lambda: strategy.restore(path)))
        found.append(failure(lambda: strategy.save(folder + "/facts.json/below")))
        with open(folder + "/found.json", "w") as file:
            json.dump(found, file)
"""


def job(tmp_path, folder, name, layout, body):
    source = SCRIPT.format(folder=str(folder), body=body.strip())
    ended = run_job(tmp_path / name, layout, source, timeout_s=60)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(("first", "second"), [(("2", "1"), ("1", "2")), (("1", "2"), ("2", "1"))])
def test_another_number_of_servers_goes_on_as_the_first_would(tmp_path, first, second):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    job(tmp_path, folder, "save", ("--ps", first[0], "--worker", first[1]), SAVE)
    facts = json.loads((folder / "facts.json").read_text())
    assert facts == {"path": str(folder / "step-8"), "step": 14}
    files = {path.name for path in (folder / "step-8").iterdir()}
    parts = {f"ps-{n}-of-{first[0]}.safetensors" for n in range(int(first[0]))}
    assert files == parts | {"index.json", "reader.json"}
    assert json.loads((folder / "step-8" / "reader.json").read_text()) == {"at": 7}
    job(tmp_path, folder, "restore", ("--ps", second[0], "--worker", second[1]), RESTORE)
    with np.load(folder / "expected.npz") as expected, np.load(folder / "found.npz") as found:
        assert set(found) == set(expected)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
            assert not (found[name] == 0.5).any()


def test_what_cannot_be_restored(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    job(tmp_path, folder, "save", ("--ps", "1", "--worker", "1"), SAVE)
    damaged = folder / "damaged"
    damaged.mkdir()
    (damaged / "index.json").write_text((folder / "step-8" / "index.json").read_text())
    whole = (folder / "step-8" / "ps-0-of-1.safetensors").read_bytes()
    (damaged / "ps-0-of-1.safetensors").write_bytes(whole[: len(whole) // 2])
    job(tmp_path, folder, "faults", ("--ps", "1", "--worker", "1"), FAULTS)
    missing, broken, absent, unwritable = json.loads((folder / "found.json").read_text())
    assert missing.startswith("NotFoundError: ")
    assert "step-99' is not a checkpoint" in missing
    assert broken.startswith("DataLossError: ")
    assert "damaged/ps-0-of-1.safetensors" in broken
    assert absent.startswith("NotFoundError: ")
    assert "does not have ['added']" in absent
    assert "facts.json/below" in unwritable


@pytest.fixture
def folder(world):
    """One folder for all ranks."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory()) if world.rank == 0 else None
        yield world.bcast(own)


def in_turn(strategy, workers, call):
    """Each worker in turn; what it gave, or the error that it got."""
    result = None
    for worker in range(strategy.num_workers):
        if worker == strategy.worker_index:
            try:
                result = call()
            except errors.OpError as error:
                result = error
        workers.barrier()
    return result


@pytest.mark.ranks(4)
def test_workers_that_restore_different_checkpoints(world, folder):

    def train(strategy, workers):
        with strategy.scope():
            made = [get_variable(f"v{n}", size, initializer=0) for n, size in enumerate(SIZES)]
        paths = [f"{folder}/{name}/step-0" for name in ("one", "two")]
        if strategy.worker_index == 1:
            for value, path in enumerate(paths, 1):
                for v in made:
                    v.assign(value)
                strategy.save(path.removesuffix("/step-0"))
        workers.barrier()
        mine = paths[strategy.worker_index]
        first = in_turn(strategy, workers, lambda: strategy.restore(mine))
        again = in_turn(strategy, workers, lambda: strategy.restore(paths[0]))
        values = {float(x) for v in made for x in np.unique(v)}
        return strategy.worker_index, paths, first, again, values

    worker, paths, first, again, values = on_cluster(world, 2, train) or (None,) * 5
    if worker is not None:
        assert (again, values) == (0, {1.0})
    if worker == 0:
        assert first == 0
    if worker == 1:
        assert isinstance(first, errors.InvalidArgumentError)
        for part in ("the chief", "worker 1", *paths):
            assert part in first.message


@pytest.mark.ranks(4)
def test_of_workers_that_restore_different_checkpoints_at_once_one_goes_on(world, folder):
    rounds = 10

    def train(strategy, workers):
        with strategy.scope():
            made = [get_variable(f"v{n}", size, initializer=0) for n, size in enumerate(SIZES)]
        mine = f"{folder}/{strategy.worker_index}/step-0"
        for worker in range(strategy.num_workers):
            if worker == strategy.worker_index:
                for v in made:
                    v.assign(worker)
                strategy.save(mine.removesuffix("/step-0"))
            workers.barrier()
        found = []
        for _ in range(rounds):
            workers.barrier()
            try:
                strategy.restore(mine)
                failed = None
            except errors.InvalidArgumentError:
                failed = strategy.worker_index
                strategy.restore(f"{folder}/{1 - failed}/step-0")
            workers.barrier()
            found.append((failed, {float(x) for v in made for x in np.unique(v)}))
        return found

    results = world.allgather(on_cluster(world, 2, train))
    for (failed_0, values_0), (failed_1, values_1) in zip(*results[2:], strict=True):
        assert {failed_0, failed_1} in ({None, 0}, {None, 1})
        winner = 1.0 if failed_0 == 0 else 0.0
        assert values_0 == values_1 == {winner}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("change", ["shape", "missing"])
@pytest.mark.parametrize("name", ["v0", "v1", "v2"])
def test_what_does_not_fit_on_one_server_changes_nothing_on_any(world, folder, name, change):
    sizes = {f"v{n}": size for n, size in enumerate(SIZES)}
    other = {k: v + 1 if k == name else v for k, v in sizes.items()}
    if change == "missing":
        del other[name]

    def create(strategy, sizes, value):
        with strategy.scope():
            return [get_variable(n, size, initializer=value) for n, size in sizes.items()]

    def save(strategy, workers):
        create(strategy, other, 1)
        if strategy.is_chief:
            strategy.save(folder)
        workers.barrier()

    def restore(strategy, workers):
        made = create(strategy, sizes, 7)
        servers = {id(v.remotes[0].connection) for v in made}
        error = in_turn(strategy, workers, lambda: strategy.restore(f"{folder}/step-0"))
        return error, len(servers), {float(x) for v in made for x in np.unique(v)}

    on_cluster(world, 2, save)
    error, servers, values = on_cluster(world, 2, restore) or (None,) * 3
    if servers is not None:
        kind = errors.NotFoundError if change == "missing" else errors.InvalidArgumentError
        assert isinstance(error, kind)
        assert f"'{name}'" in error.message
        assert (servers, values) == (2, {7.0})


@pytest.mark.ranks(4)
def test_workers_that_save_at_once_make_one_checkpoint_a_round(world, folder):
    rounds = 20

    def train(strategy, workers):
        with strategy.scope():
            made = [get_variable(f"v{n}", size, initializer=0) for n, size in enumerate(SIZES)]
        sgd, found, refusals = optimizers.SGD(1.0), [], []
        for _ in range(rounds):
            workers.barrier()
            try:
                path = strategy.save(folder, keep=1, extra={"state": b"x" * 100_000})
            except errors.FailedPreconditionError as error:
                refusals.append(error.message)
                path = None
            workers.barrier()
            found.append((path, os.listdir(folder)))
            if strategy.is_chief:
                sgd.apply_gradients([(np.ones(v.shape), v) for v in made]).wait()
        workers.barrier()
        step = strategy.restore(strategy.latest_checkpoint(folder))
        return found, refusals, step, {float(x) for v in made for x in np.unique(v)}

    results = world.allgather(on_cluster(world, 2, train))
    for number in range(rounds):
        paths = [found[number][0] for found, *_ in results[2:]]
        assert set(paths) - {None} == {f"{folder}/step-{number}"}
        for found, *_ in results[2:]:
            assert found[number][1] == [f"step-{number}"]
    for _, refusals, step, values in results[2:]:
        assert all("is being saved already" in message for message in refusals)
        assert (step, values) == (rounds - 1, {1.0 - rounds})


def test_a_child_that_is_forked_during_a_save_ends_with_an_error(tmp_path):
    """The child inherits the held lock of saves, and must not wait for it."""
    script = (
        STRATEGY
        + """
def train(server):
    strategy = ParameterServerStrategy()
    with strategy.scope():
        get_variable("v", 1 << 23, initializer="zeros")
    checkpoints = strategy.checkpoints(FOLDER / "saved", every=1)
    checkpoints.step()
    child = os.fork()
    if not child:
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    checkpoints.close()
serve(train)
"""
    )
    ended = run_job(tmp_path, ["--ps", "1", "--worker", "1"], script)
    assert ended.status == 0, ended.err
    assert ended.out == "1\n"
    assert "was forked from process" in ended.err
