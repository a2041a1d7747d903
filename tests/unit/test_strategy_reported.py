"""Errors of pushes are raised once; checkpoints are named by the step that they contain."""

import os
from contextlib import ExitStack

import numpy as np
import pytest
from _cases.servers import Cluster

from mpidist import errors
from strategy import get_variable, optimizers


@pytest.fixture
def cluster():
    with ExitStack() as stack:
        yield Cluster(stack)


def made(strategy, name="v"):
    with strategy.scope():
        return get_variable(name, 4, np.float64, 0.0)


def bad(step):
    raise RuntimeError("bad schedule")


def wait(work):
    with pytest.raises(errors.InvalidArgumentError):
        work.wait()


READS = {
    "exception": lambda work: work.exception(),
    "wait": wait,
    "future": lambda work: work.get_future().exception(30),
    "then": lambda work: work.then(lambda result: result).exception(),
}


@pytest.mark.parametrize("read", READS)
def test_an_error_that_was_read_is_not_raised_again(cluster, read):
    strategy = cluster.worker(0)
    v = made(strategy)
    work = optimizers.SGD(bad).apply_gradients([(np.ones(4), v)])
    work.block(float("inf"))
    READS[read](work)
    np.testing.assert_array_equal(v.read_value(), np.zeros(4))
    optimizers.SGD(1.0).apply_gradients([(np.ones(4), v)]).wait()


def test_an_error_that_nobody_has_read_is_raised_by_the_next_read(cluster):
    strategy = cluster.worker(0)
    v = made(strategy)
    work = optimizers.SGD(bad).apply_gradients([(np.ones(4), v)])
    work.block(float("inf"))
    with pytest.raises(errors.InvalidArgumentError, match="bad schedule"):
        v.read_value()
    np.testing.assert_array_equal(v.read_value(), np.zeros(4))


@pytest.mark.parametrize("method", ["add", "change"])
def test_a_bug_in_joint_changes_is_an_error_of_the_push(cluster, monkeypatch, method):
    from strategy.server.joint import Joint

    strategy = cluster.worker(0, transport="p2p")
    v = made(strategy)

    def broken(*_):
        raise AttributeError("a programming error")

    monkeypatch.setattr(Joint, method, broken)
    work = optimizers.Adam(0.1).apply_gradients([(np.ones(4), v)])
    with pytest.raises(errors.Error, match="a programming error"):
        work.wait()


class Pushes(dict):
    """A file of a checkpoint, during whose writing another worker makes a step."""

    def __init__(self, push):
        super().__init__(a=1)
        self._push = push

    def items(self):
        self._push()
        return super().items()


def test_a_checkpoint_is_named_by_the_step_that_it_contains(cluster, tmp_path):
    saver, trainer = cluster.worker(0), cluster.worker(1)
    made(saver)
    v, optimizer = made(trainer), optimizers.SGD(1.0)

    def push():
        optimizer.apply_gradients([(np.ones(4), v)]).wait()

    path = saver.save(str(tmp_path), extra={"note": Pushes(push)})
    assert int(saver.global_step) == 1
    push()
    assert saver.restore(path) == 1
    assert os.path.basename(path) == "step-1"
    assert os.listdir(tmp_path) == ["step-1"]
