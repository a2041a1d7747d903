"""Optimizers as a worker makes them."""

import numpy as np
import pytest

import mpidist
from strategy import ParameterServerStrategy, get_variable, optimizers

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.mark.parametrize("value", [0, -0.1, float("nan")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("SGD", "learning_rate"), ("Adam", "learning_rate"), ("Adam", "epsilon")],
)
def test_what_must_be_positive(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        getattr(optimizers, kind)(**{name: value})


@pytest.mark.parametrize("value", [1, 1.5, -0.1, float("nan")])
@pytest.mark.parametrize("name", ["beta_1", "beta_2"])
def test_decays(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\)"):
        optimizers.Adam(**{name: value})
    assert optimizers.Adam(**{name: 0}).values[name] == 0


def test_values_and_repr():
    adam = optimizers.Adam(1e-2)
    assert adam.values == {
        "learning_rate": 1e-2,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
    }
    adam.values["beta_1"] = 5
    assert repr(adam) == "Adam(learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-07)"
    assert repr(optimizers.SGD()) == "SGD(learning_rate=0.01)"


def test_one_optimizer_on_several_strategies():
    optimizer, other = optimizers.SGD(1.0), optimizers.SGD(0.25)
    for first in (optimizer, other):
        with mpidist.Server(CLUSTER, "worker", 0):
            strategy = ParameterServerStrategy()
            with strategy.scope():
                v = get_variable("v", 2, initializer="zeros")
            first.apply_gradients([(np.ones(2), v)])
            optimizer.apply_gradients([(np.ones(2), v)])
            other.apply_gradients([(np.ones(2), v)])
            np.testing.assert_array_equal(v, np.full(2, -1.25 - first.values["learning_rate"]))


def test_gradients_of_several_strategies():
    with mpidist.Server(CLUSTER, "worker", 0) as server:
        strategies = ParameterServerStrategy(), ParameterServerStrategy(server=server)
        pairs = [(np.array(1), strategy.global_step) for strategy in strategies]
        with pytest.raises(ValueError, match="belong to one strategy"):
            optimizers.SGD(1.0).apply_gradients(pairs)


def test_optimizers_of_one_kind_share_their_state():
    with mpidist.Server(CLUSTER, "worker", 0):
        with ParameterServerStrategy().scope():
            v, w = (get_variable(name, 2, np.float64, "zeros") for name in "vw")
        fast, slow = optimizers.Adam(0.5), optimizers.Adam(0.25)
        for _ in range(2):
            fast.apply_gradients([(np.ones(2), v)])
        fast.apply_gradients([(np.ones(2), w)])
        slow.apply_gradients([(np.ones(2), w)])
        np.testing.assert_allclose(v, [-1, -1], rtol=1e-6)
        np.testing.assert_allclose(w, [-0.75, -0.75], rtol=1e-6)
