"""Errors of pushes are raised once; checkpoints are named by the step that they contain."""

import os
import time
import types
from contextlib import ExitStack

import numpy as np
import pytest
from _cases.servers import Cluster

from mpidist import errors
from strategy import get_variable, optimizers
from strategy.server.shard import Neighbors


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


def test_a_bug_in_the_change_of_a_bucket_is_an_error_of_the_push(cluster, monkeypatch):
    """The variable after the bucket in the push is changed nevertheless."""
    strategy = cluster.worker(0, transport="p2p")
    with strategy.scope():
        small = [get_variable(name, 4, np.float64, 0.0) for name in "ab"]
        large = get_variable("c", 4000, np.float64, 0.0)
    pairs = [*((np.ones(4), v) for v in small), (np.full(4000, 2.0), large)]

    def broken(*_):
        raise AttributeError("a programming error")

    sgd = optimizers.SGD(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Neighbors, "change", broken)
        with pytest.raises(errors.Error, match="a programming error"):
            sgd.apply_gradients(pairs).wait()
    np.testing.assert_array_equal(small, np.zeros((2, 4)))
    np.testing.assert_allclose(large, np.full(4000, -0.2))
    sgd.apply_gradients(pairs).wait()
    np.testing.assert_allclose(small, np.full((2, 4), -0.1))
    np.testing.assert_allclose(large, np.full(4000, -0.4))


SIZES = {"small": [4, 5], "large": [200_000, 300_000], "mixed": [4, 200_000, 5, 300_000]}


@pytest.mark.parametrize("transport", ["shared", "p2p"])
@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.Adam])
def test_a_schedule_that_fails_once_leaves_out_its_variable_alone(
    cluster, transport, sizes, call, kind
):
    """It fails in some call of it: that variable stays, and the push says so."""
    strategy = cluster.worker(0, transport=transport)
    with strategy.scope():
        made = [get_variable(f"v{n}", size, np.float64, 0.0) for n, size in enumerate(SIZES[sizes])]
    FAILING.calls, FAILING.bad = 0, call
    work = kind(failing_once).apply_gradients([(np.ones(v.shape), v) for v in made])
    problem = work.exception() if work.block(time.monotonic() + 30) is None else None
    values = [v.read_value() for v in made]
    changed = [bool(value[0]) for value in values]
    assert all(np.ptp(value) == 0 for value in values)
    assert work.is_completed()
    if call < FAILING.calls:
        assert isinstance(problem, errors.InvalidArgumentError)
        assert "fails now" in str(problem)
        assert changed.count(False) >= 1
    else:
        assert problem is None
        assert all(changed)


FAILING = types.SimpleNamespace(calls=0, bad=0)


def failing_once(step):
    """Servers share this process, and import it."""
    FAILING.calls += 1
    if FAILING.calls == FAILING.bad + 1:
        raise RuntimeError("fails now")
    return 0.5


def test_closing_tells_of_its_own_error_beside_that_of_the_block(cluster):
    strategy = cluster.worker(0)
    v = made(strategy)
    optimizers.SGD(bad).apply_gradients([(np.ones(4), v)])
    with pytest.raises(ZeroDivisionError) as caught, strategy:
        raise ZeroDivisionError
    assert any("bad schedule" in note for note in caught.value.__notes__)


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
