"""Mode sync compares the rates of schedules: equal rates agree, and different rates are refused."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import cloudpickle
import numpy as np
import pytest
from _cases.servers import Cluster

from mpidist import errors
from strategy import get_variable, optimizers, schedules


def decay(rate, step):
    return rate / (1 + step)


def constant(rate):
    return lambda step: rate


def of_globals(rate):
    """Return a function with constant code that reads its rate from the globals of its module."""
    space = {"RATE": rate}
    exec("def schedule(step):\n    return RATE", space)
    return space["schedule"]


def later(rate):
    """Return a function that gives the rate only after ten updates."""
    return lambda step: 0.5 if step < 10 else rate


def failing(rate):
    """Return a function that raises an error at a late step, which depends on the rate."""
    rates = [rate] * (2 if rate == 0.5 else 11)
    return lambda step: rates[step]


class Warmup:
    """A schedule object with a lock, which shows its address and cannot be pickled."""

    def __init__(self, rate):
        self.rate, self.lock = np.float32(rate), threading.Lock()

    def __call__(self, step):
        return self.rate

    def __getstate__(self):
        return {"rate": self.rate}

    def __setstate__(self, state):
        self.__init__(state["rate"])


KINDS = {
    "closure": constant,
    "global": of_globals,
    "late difference": later,
    "errors": failing,
    "partial": lambda rate: functools.partial(decay, rate),
    "object": Warmup,
    "bound method": lambda rate: Warmup(rate).__call__,
    "wrapped": lambda rate: functools.wraps(decay)(constant(rate)),
    "pickled copy": lambda rate: cloudpickle.loads(cloudpickle.dumps(constant(rate))),
    "of this package": lambda rate: schedules.ExponentialDecay(rate, 10, 0.5),
}


def update(param, grad, slots, rate, step):
    param -= rate * grad


def rule(body):
    """Return another function named "update"."""
    space = {"__name__": __name__, "np": np}
    exec(f"def update(param, grad, slots, rate, step):\n    {body}", space)
    return space["update"]


def train(makers):
    """Run one step of two workers in mode sync with an optimizer each. Return the results."""

    def work(index):
        strategy = cluster.worker(index, mode="sync")
        with strategy.scope():
            v = get_variable("v", 3, np.float64, 0.0)
        try:
            makers[index]().apply_gradients([(np.ones(3), v)]).wait()
            return v.read_value()
        except errors.InvalidArgumentError as error:
            return error.message
        finally:
            strategy.finish()

    with ExitStack() as stack:
        cluster = Cluster(stack)
        with ThreadPoolExecutor(2) as pool:
            return [future.result(60) for future in [pool.submit(work, n) for n in range(2)]]


def with_schedule(make, rate):
    return lambda: optimizers.SGD(make(rate), name="sgd")


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rates_of_two_workers_agree(kind):
    for value in train([with_schedule(KINDS[kind], 0.5)] * 2):
        np.testing.assert_array_equal(value, np.full(3, -0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_different_rates_of_two_workers_are_refused_on_both(kind):
    for message in train([with_schedule(KINDS[kind], rate) for rate in (0.5, 0.25)]):
        assert message.count("learning rate schedule ") == 2
        assert "with the same learning rates" in message


def test_the_message_names_both_schedules_and_their_rates():
    one, other = train([with_schedule(constant, 0.5), with_schedule(failing, 0.25)])
    assert one == other
    name = "learning rate schedule constant.<locals>.<lambda>"
    assert f"{name} with rates {', '.join(['0.5'] * 7)} after 0, 1, 10, ... 100000 updates" in one
    rates = ", ".join(["0.25"] * 3 + ["IndexError"] * 4)
    assert f"learning rate schedule failing.<locals>.<lambda> with rates {rates} after" in one


def test_a_number_and_a_schedule_of_that_rate_differ():
    def number():
        return optimizers.SGD(0.5, name="sgd")

    for message in train([number, with_schedule(constant, 0.5)]):
        assert "learning rate 0.5, and worker 1" in message


def test_a_schedule_is_named_in_the_repr_of_the_optimizer():
    assert repr(optimizers.SGD(constant(0.5))).startswith(
        "SGD(learning_rate=constant.<locals>.<lambda>, "
    )
    assert repr(optimizers.SGD(Warmup(0.5))).startswith("SGD(learning_rate=Warmup, ")


FUNCTIONS = {
    "code": (lambda: update, lambda: rule("param += rate * grad")),
    "constant": (lambda: rule("param -= 0.5 * grad"), lambda: rule("param -= 0.25 * grad")),
    "name in the code": (
        lambda: rule("np.add(param, grad, out=param)"),
        lambda: rule("np.subtract(param, grad, out=param)"),
    ),
    "name": (lambda: update, lambda: functools.partial(update)),
}


@pytest.mark.parametrize("makers", FUNCTIONS.values(), ids=FUNCTIONS)
def test_user_functions_of_two_workers_must_have_the_same_code(makers):
    makers = [lambda make=make: optimizers.Function(make()) for make in makers]
    for message in train(makers):
        assert message.count("for Function 'Function' with ") == 2
    for make in makers:
        for value in train([make] * 2):
            assert np.all(value != 0)


def test_user_functions_of_two_workers_must_have_the_same_slots():
    makers = [lambda slots=slots: optimizers.Function(update, slots) for slots in ((), ("m",))]
    for message in train(makers):
        assert "and slots ()" in message
        assert "and slots ('m',)" in message


def test_functions_without_python_code_agree():
    for value in train([lambda: optimizers.Function(functools.partial(update))] * 2):
        assert np.all(value < 0)
