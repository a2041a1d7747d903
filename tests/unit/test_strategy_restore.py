"""Saving and restoring a strategy."""

import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.checkpoints import tensor_file
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.partitioners import FlatPartitioner, fixed_size_partitioner

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.fixture
def program():
    """``program(**variables)``: a strategy in a new Server, and its variables."""
    servers = []

    def start(partitioner=None, **values):
        for server in servers:
            server.stop()
        servers.append(mpidist.Server(CLUSTER, "worker", 0))
        strategy = ParameterServerStrategy(variable_partitioner=partitioner)
        with strategy.scope():
            made = [get_variable(name, initializer=v) for name, v in values.items()]
        return strategy, made

    yield start
    servers[-1].stop()


def train(optimizer, v, steps):
    for step in steps:
        grad = np.asarray(np.random.default_rng(step).random(v.shape)).astype(v.dtype)
        optimizer.apply_gradients([(grad, v)])
    return v.read_value()


@pytest.mark.parametrize("shape", [(), (3,), (2, 200_000)])
@pytest.mark.parametrize("new_process", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Ftrl"])
def test_training_resumes_bit_for_bit(program, tmp_path, shape, new_process, dtype, kind):
    start, optimizer = np.full(shape, 0.5, dtype), getattr(optimizers, kind)(0.1)
    strategy, (v,) = program(v=start)
    train(optimizer, v, range(3))
    path = strategy.save(str(tmp_path))
    saved = v.read_value()
    goal = train(optimizer, v, range(3, 6))
    if new_process:
        strategy, (v,) = program(v=start - 7)
    assert strategy.restore(path) == int(strategy.global_step) == 3
    np.testing.assert_array_equal(v, saved)
    np.testing.assert_array_equal(train(optimizer, v, range(3, 6)), goal)
    assert int(strategy.global_step) == 6


WAYS = {
    "whole": None,
    "rows": fixed_size_partitioner(3),
    "columns": fixed_size_partitioner(3, axis=1),
    "flat": FlatPartitioner(3),
}


@pytest.mark.parametrize("slots", ["the same", "none", "others"])
@pytest.mark.parametrize(
    ("first", "then"),
    [("whole", "whole"), ("whole", "columns"), ("columns", "flat"), ("flat", "columns"),
     ("columns", "rows"), ("columns", "columns")],
)  # fmt: skip
def test_a_restore_takes_memory_for_new_slots_and_one_array(program, tmp_path, first, then, slots):
    shape, own = (2048, 4096), np.ones((1, 4096), np.float32)  # 32 MiB
    grad = np.broadcast_to(own, shape)
    strategy, (v,) = program(WAYS[first], v=np.zeros(shape, np.float32))
    optimizers.Adam(0.1).apply_gradients([(grad, v)]).wait()
    path = strategy.save(str(tmp_path))
    del strategy, v
    strategy, (v,) = program(WAYS[then], v=np.ones(shape, np.float32))
    tracemalloc.start()
    try:
        if slots != "none":
            kind = optimizers.Adam if slots == "the same" else optimizers.Adagrad
            kind(0.1).apply_gradients([(grad, v)]).wait()
        tracemalloc.reset_peak()
        strategy.restore(path)
        nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert nbytes < (2 * 32 + 32 + 24) << 20  # with the slots
    np.testing.assert_allclose(v.read_value()[::97, ::101], -0.1, rtol=1e-5)


def test_state_that_the_checkpoint_does_not_have_is_gone(program, tmp_path):
    strategy, (v,) = program(v=np.zeros(4))
    path = strategy.save(str(tmp_path))
    adam = optimizers.Adam(0.1)
    first = train(adam, v, range(3))
    strategy.restore(path)
    np.testing.assert_array_equal(v, np.zeros(4))
    np.testing.assert_array_equal(train(adam, v, range(3)), first)


def test_the_latest_of_none(program, tmp_path):
    strategy, _ = program(v=np.zeros(4))
    with pytest.raises(NotFoundError, match="there is no checkpoint to restore"):
        strategy.restore(strategy.latest_checkpoint(str(tmp_path)))


def test_a_checkpoint_may_have_more_than_the_program(program, tmp_path):
    strategy, _ = program(a=np.ones(2), b=np.full(2, 2.0))
    path = strategy.save(str(tmp_path))
    strategy, (b,) = program(b=np.zeros(2))
    strategy.restore(path)
    np.testing.assert_array_equal(b, [2, 2])


def test_a_variable_that_the_checkpoint_does_not_have(program, tmp_path):
    strategy, _ = program(a=np.ones(2))
    path = strategy.save(str(tmp_path))
    strategy, _ = program(a=np.ones(2), b=np.ones(2), c=np.ones(1))
    with pytest.raises(NotFoundError, match=r"does not have \['b', 'c'\]"):
        strategy.restore(path)


@pytest.mark.parametrize("other", [np.full(3, 5.0), np.full((1, 2), 5.0), np.full(2, 5.0, "f4")])
def test_a_variable_of_another_shape_or_dtype(program, tmp_path, other):
    strategy, _ = program(a=np.ones(2), b=np.ones(2), c=np.ones(2))
    path = strategy.save(str(tmp_path))
    before = {"a": np.full(2, 5.0), "b": other, "c": np.full(2, 5.0)}
    strategy, made = program(**before)
    with pytest.raises(InvalidArgumentError, match="the checkpoint has 'b' as float64"):
        strategy.restore(path)
    for v, value in zip(made, before.values(), strict=True):
        np.testing.assert_array_equal(v, value)


def test_an_older_one_can_be_taken_when_one_is_damaged(program, tmp_path):
    strategy, (v,) = program(v=np.zeros(2))
    good = strategy.save(str(tmp_path))
    train(optimizers.SGD(1.0), v, [1])
    bad = strategy.save(str(tmp_path))
    assert strategy.latest_checkpoint(str(tmp_path)) == bad
    (file,) = (name for name in os.listdir(bad) if name.endswith(".safetensors"))
    with open(os.path.join(bad, file), "r+b") as content:
        content.truncate(10)
    with pytest.raises(DataLossError, match="restore an older one"):
        strategy.restore(bad)
    assert strategy.restore(good) == 0
    np.testing.assert_array_equal(v, [0, 0])


def test_what_is_no_checkpoint(program, tmp_path):
    strategy, _ = program()
    with pytest.raises(NotFoundError, match="is not a checkpoint"):
        strategy.restore(str(tmp_path))
    assert strategy.latest_checkpoint(str(tmp_path)) is None
    assert strategy.latest_checkpoint(str(tmp_path / "absent")) is None


def test_names_and_extra_files(program, tmp_path):
    strategy, (v,) = program(v=np.zeros(2))
    for step in range(5):
        more = {"data.json": {"step": step}, "iterator": bytes([step, 0, 255])}
        path = strategy.save(str(tmp_path), keep=2, extra=more)
        assert path == str(tmp_path / f"step-{step}")
        train(optimizers.SGD(1.0), v, [step])
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
    assert (tmp_path / "step-4" / "data.json").read_text() == '{"step": 4}'
    assert (tmp_path / "step-4" / "iterator").read_bytes() == b"\4\0\xff"
    with pytest.raises(ValueError, match="at least 1"):
        strategy.save(str(tmp_path), keep=0)


def test_a_save_has_all_earlier_pushes(program, tmp_path):
    strategy, (v,) = program(v=np.zeros(300_000))
    optimizer = optimizers.SGD(1.0)
    for _ in range(10):
        optimizer.apply_gradients([(np.ones(300_000), v)])
    path = strategy.save(str(tmp_path))
    v.assign(0)
    assert strategy.restore(path) == 10
    np.testing.assert_array_equal(v, np.full(300_000, -10.0))


def test_a_save_that_fails_leaves_nothing(program, tmp_path, monkeypatch):
    strategy, (v,) = program(v=np.ones(2))

    def fail(*arguments, **options):
        raise OSError("the disk is full")

    monkeypatch.setattr(tensor_file, "_write", fail)
    with pytest.raises(FailedPreconditionError, match="the disk is full"):
        strategy.save(str(tmp_path))
    assert os.listdir(tmp_path) == []
    np.testing.assert_array_equal(v, [1, 1])


def test_a_full_disk_at_the_worker(program, tmp_path, monkeypatch):
    strategy, (v,) = program(v=np.ones(2))
    path = strategy.save(str(tmp_path))
    train(optimizers.SGD(1.0), v, [1])
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file.os, "fsync", _full)
        with pytest.raises(FailedPreconditionError, match=r"step-1': .*No space left.* be room"):
            strategy.save(str(tmp_path), extra={"state": bytes(1000)})
    assert os.listdir(tmp_path) == ["step-0"]
    assert strategy.restore(path) == 0


def _full(_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["../x.json", "index.json", "ps-0-of-1.safetensors", "a/b"])
def test_extra_files_stay_within_the_checkpoint(program, tmp_path, name):
    strategy, _ = program(v=np.ones(2))
    with pytest.raises(ValueError, match=repr(name)):
        strategy.save(str(tmp_path / "new"), extra={"good.json": 1, name: 2})
    assert os.listdir(tmp_path) == []


def test_an_extra_file_that_is_not_json_leaves_nothing(program, tmp_path):
    strategy, _ = program(v=np.ones(2))
    with pytest.raises(TypeError, match="JSON"):
        strategy.save(str(tmp_path), extra={"x.json": object()})
    assert os.listdir(tmp_path) == []
