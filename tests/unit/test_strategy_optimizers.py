"""Optimizers of a single worker."""

import gc
import inspect
import itertools
import weakref

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgumentError
from strategy import (
    IndexedSlices,
    ParameterServerStrategy,
    get_variable,
    optimizers,
    partitioners,
    schedules,
)
from strategy.rules import Update, on_arrays

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.fixture
def strategy():
    """Yield a strategy with an open scope."""
    with mpidist.Server(CLUSTER, "worker", 0):
        strategy = ParameterServerStrategy()
        with strategy.scope():
            yield strategy


KINDS = tuple(optimizers.BY_NAME)


@pytest.mark.parametrize("value", [0, -0.1, float("nan")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(kind, name) for kind in KINDS for name in ("clipnorm", "global_clipnorm", "clipvalue")],
        *[(k, "epsilon") for k in KINDS if k not in ("SGD", "Ftrl", "Lion", "Adafactor")],
        *[("Adafactor", name) for name in ("epsilon_2", "clip_threshold")],
    ],
)
def test_what_must_be_positive(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        getattr(optimizers, kind)(**{name: value})


@pytest.mark.parametrize("value", [-0.1, float("nan")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(kind, "weight_decay") for kind in KINDS if kind != "Ftrl"],
        ("Adagrad", "initial_accumulator_value"),
        *[
            ("Ftrl", name)
            for name in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta")
        ],
    ],
)
def test_what_must_not_be_negative(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} must not be negative"):
        getattr(optimizers, kind)(**{name: value})


@pytest.mark.parametrize("value", [1, 1.5, -0.1, float("nan")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Adam", "beta_1"), ("Adam", "beta_2"), ("AdamW", "beta_1"), ("SGD", "momentum"),
        ("RMSprop", "rho"), ("RMSprop", "momentum"),
    ],
)  # fmt: skip
def test_what_must_be_a_part(kind, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\)"):
        getattr(optimizers, kind)(**{name: value})
    assert getattr(optimizers, kind)(**{name: 0}).hyperparameters[name] == 0


def test_other_arguments_that_cannot_be():
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        optimizers.SGD(nesterov=True)
    for name in ("", "a:b", "a/b"):
        with pytest.raises(ValueError, match="needs a name without"):
            optimizers.SGD(name=name)
    with pytest.raises(TypeError, match="must be a function"):
        optimizers.Function(3)
    for slots in ("momentum", ["a:b"], [""], ["a", "a"], [1]):
        with pytest.raises(ValueError, match="slots are a list of different names"):
            optimizers.Function(print, slots)


def test_hyperparameters_and_repr():
    adam = optimizers.Adam(1e-2)
    assert adam.hyperparameters == {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "weight_decay": 0,
        "amsgrad": 0,
    }
    assert repr(adam) == (
        "Adam(learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-07, weight_decay=0, "
        "amsgrad=0)"
    )
    assert repr(optimizers.SGD()) == (
        "SGD(learning_rate=0.01, momentum=0, nesterov=0, weight_decay=0)"
    )
    decay = schedules.PolynomialDecay(0.1, 5)
    assert repr(optimizers.SGD(decay)).startswith(f"SGD(learning_rate={decay!r}, momentum=0")


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
            np.testing.assert_array_equal(v, np.full(2, -1.25 - first.learning_rate))


def test_gradients_of_several_strategies():
    with mpidist.Server(CLUSTER, "worker", 0) as server:
        strategies = [ParameterServerStrategy(server=server, name=name) for name in "ab"]
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


def test_optimizers_of_other_names_do_not(strategy):
    v = get_variable("v", 2, np.float64, "zeros")
    for number, name in enumerate(("one", "two"), 1):
        optimizers.Adam(0.5, name=name).apply_gradients([(np.ones(2), v)])
        np.testing.assert_allclose(v, np.full(2, -0.5 * number), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [7, 300_000])
def test_every_kind_on_a_server(strategy, kind, size):
    """The updates on a server equal the rule applied to the whole array at once."""
    optimizer = getattr(optimizers, kind)(0.1)
    start, grads = np.linspace(-1, 1, size), [np.linspace(2, -1, size), np.linspace(-1, 3, size)]
    v = get_variable("v", size, np.float64, start)
    apply, initial = on_arrays(optimizer.formula()), optimizer.initial()
    slots = [np.full(size, initial.get(name, 0.0)) for name in optimizer.slots()]
    for step, grad in enumerate(grads, 1):
        optimizer.apply_gradients([(grad, v)])
        apply(Update(start, grad, slots, optimizer.numbers(0.1, step)))
    np.testing.assert_allclose(v, start, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [3, 600_000])
def test_half_precision_adds_up_what_is_less_than_its_last_digit(strategy, dtype, size):
    v = get_variable("v", size, dtype, "ones")
    sgd, tiny = optimizers.SGD(1.0), np.full(size, 2.0**-13, dtype)
    for _ in range(64):
        sgd.apply_gradients([(tiny, v)])
    np.testing.assert_array_equal(v, np.full(size, 1 - 64 * 2.0**-13, dtype))
    assert v.dtype == dtype


def test_half_precision_goes_on_from_what_was_assigned(strategy):
    v = get_variable("v", 4, np.float16, "ones")
    sgd = optimizers.SGD(0.5)
    for number in range(3):
        v.assign(np.full(4, number, np.float16))
        sgd.apply_gradients([(np.ones(4, np.float16), v)])
        np.testing.assert_array_equal(v, np.full(4, number - 0.5))
        v.assign_add(np.ones(4, np.float16))
        optimizers.Adam(1.0).apply_gradients([(np.ones(4, np.float16), v)])
        np.testing.assert_allclose(np.array(v, float), np.full(4, number - 0.5), atol=1e-3)
        sgd.apply_gradients([(np.zeros(4, np.float16), v)])
        np.testing.assert_allclose(np.array(v, float), np.full(4, number - 0.5), atol=1e-3)


def test_schedules_follow_the_steps_of_the_variable(strategy):
    v, w = (get_variable(name, 1, np.float64, "zeros") for name in "vw")
    rates = [1.0, 10.0, 100.0]
    sgd = optimizers.SGD(lambda step: rates[step])
    for total in (1, 11, 111):
        sgd.apply_gradients([(-np.ones(1), v)])
        assert float(v[0]) == total
    sgd.apply_gradients([(-np.ones(1), w)])
    assert float(w[0]) == 1
    with pytest.raises(
        InvalidArgumentError, match=r"schedule of optimizer 'SGD', .*, raised IndexError"
    ):
        sgd.apply_gradients([(-np.ones(1), v)]).wait()
    assert float(v[0]) == 111


def test_a_schedule_of_this_package(strategy):
    v = get_variable("v", 1, np.float64, "zeros")
    sgd = optimizers.SGD(schedules.PiecewiseConstantDecay([1], [1.0, 0.25]))
    for _ in range(3):
        sgd.apply_gradients([(-np.ones(1), v)])
    assert float(v[0]) == 2.25


@pytest.mark.parametrize("size", [5, 300_000])
def test_a_rule_of_the_users_own(strategy, size):
    def sign_with_memory(param, grad, slots, learning_rate, step):
        slots["sum"] += grad
        param -= learning_rate * step * np.sign(slots["sum"])

    v = get_variable("v", size, np.float32, "zeros")
    rule = optimizers.Function(sign_with_memory, ["sum"], 0.5, name="Signs")
    signs = np.where(np.arange(size) % 2, 1.0, -1.0)
    for grad in (signs, -3 * signs):
        rule.apply_gradients([(grad, v)])
    np.testing.assert_array_equal(v, 0.5 * (2 * signs - signs))


@pytest.mark.parametrize("size", [5, 600_000])
def test_a_rule_that_fails_leaves_a_server_that_works(strategy, size):
    def fail(param, grad, slots, learning_rate, step):
        raise KeyError("typo")

    v = get_variable("v", size, np.float32, "ones")
    match = r"function of optimizer 'Function', .*, raised KeyError: 'typo'; .* half changed"
    with pytest.raises(InvalidArgumentError, match=match):
        optimizers.Function(fail).apply_gradients([(np.ones(size), v)]).wait()
    optimizers.SGD(1.0).apply_gradients([(np.ones(size), v)]).wait()
    np.testing.assert_array_equal(v, np.zeros(size))
    assert v.version == 3


@pytest.mark.parametrize("size", [4, 40_000])
def test_gradients_are_scaled_down_to_a_norm(strategy, size):
    v, w = (get_variable(name, size, np.float64, "zeros") for name in "vw")
    sgd = optimizers.SGD(1.0, global_clipnorm=5.0)
    for factor, expected in ((1.0, 1.0), (10.0, 5.0)):  # joint norms of both gradients
        grads = [np.full(size, -factor * part / np.sqrt(size)) for part in (0.6, 0.8)]
        v.assign(0.0)
        w.assign(0.0)
        sgd.apply_gradients(zip(grads, (v, w), strict=True))
        total = np.sqrt(np.sum(np.square(v)) + np.sum(np.square(w)))
        np.testing.assert_allclose(total, expected, rtol=1e-12)
        np.testing.assert_allclose(np.array(v) * 0.8, np.array(w) * 0.6, rtol=1e-12)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_each_gradient_is_scaled_down_to_a_norm(strategy, num_shards):
    partitioner = partitioners.fixed_size_partitioner(num_shards)
    small, large = (
        get_variable(name, (6, 5), np.float64, "zeros", partitioner=partitioner) for name in "sl"
    )
    sgd = optimizers.SGD(1.0, clipnorm=2.0)
    grad = np.random.default_rng(7).normal(size=(6, 5))
    grads = [-grad / np.linalg.norm(grad) * norm for norm in (1.5, 30)]
    sgd.apply_gradients(zip(grads, (small, large), strict=True))
    np.testing.assert_allclose(np.array(small), -grads[0], rtol=1e-12)
    np.testing.assert_allclose(np.array(large), -grads[1] / 15, rtol=1e-12)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_elements_are_clipped_to_a_value(strategy, num_shards):
    partitioner = partitioners.fixed_size_partitioner(num_shards)
    v = get_variable("v", (6, 5), np.float64, "zeros", partitioner=partitioner)
    grad = np.random.default_rng(7).normal(size=(6, 5))
    given = grad.copy()
    sgd = optimizers.SGD(1.0, clipvalue=0.5)
    sgd.apply_gradients([(given, v)])
    sgd.apply_gradients([(IndexedSlices(grad[:2], [1, 3]), v)])
    expected = -np.clip(grad, -0.5, 0.5)
    expected[[1, 3]] -= np.clip(grad[:2], -0.5, 0.5)
    np.testing.assert_array_equal(v, expected)
    np.testing.assert_array_equal(given, grad)


def test_only_one_limit_is_given():
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    for pair in itertools.combinations(names, 2):
        with pytest.raises(ValueError, match="give clipnorm, global_clipnorm or clipvalue"):
            optimizers.Adam(**dict.fromkeys(pair, 1.0))


def test_arguments_are_named_in_signatures():
    for kind in (*optimizers.BY_NAME.values(), optimizers.Function):
        parameters = inspect.signature(kind).parameters
        assert {"learning_rate", "clipnorm", "global_clipnorm", "clipvalue", "name"} <= set(
            parameters
        )
        assert not {"args", "kwargs"} & set(parameters)
    assert list(inspect.signature(optimizers.SGD).parameters)[:3] == [
        "learning_rate", "momentum", "nesterov",
    ]  # fmt: skip


def test_norms_of_large_and_endless_gradients(strategy):
    v = get_variable("v", 3, np.float32, "zeros")
    sgd = optimizers.SGD(1.0, global_clipnorm=1.0)
    sgd.apply_gradients([(np.array([3e30, -4e30, 0], np.float32), v)])
    np.testing.assert_allclose(v, [-0.6, 0.8, 0], rtol=1e-6)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"NaN or infinite elements: \['v'\]"):
            sgd.apply_gradients([(np.array([bad, 0, 0], np.float32), v)])
    np.testing.assert_allclose(v, [-0.6, 0.8, 0], rtol=1e-6)


def test_keywords_that_are_unknown():
    for kind, name in (("SGD", "lr"), ("Adam", "betas"), ("AdamW", "eps"), ("Ftrl", "decay")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            getattr(optimizers, kind)(**{name: 0.1})


def test_pairs_in_the_wrong_order(strategy):
    v = get_variable("v", 2, initializer="zeros")
    with pytest.raises(TypeError, match="pairs of a gradient and its variable"):
        optimizers.SGD().apply_gradients([(v, np.ones(2))])


@pytest.mark.parametrize(
    ("gradient", "limit"),
    [
        (np.array([16, 0], np.int8), 1.0),
        (np.array([12, 0], np.int8), 1.0),
        (np.full(100, 100, np.int8), 1.0),
        (np.full(100_000, 1000, np.int32), 1.0),
        (np.ones(4, bool), 1.0),
        (np.full(4, 6e4, np.float16), 1e-9),
        (np.full(4, 1e-4, np.float16), 1e-9),
        (np.full(300_000, 0.01, np.float16), 1e-3),
        (np.full(4, 1e200), 1e-3),
        (np.full(4, 1e-200), 1e-210),
        (np.zeros(4), 1.0),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_norms_in_every_dtype(strategy, gradient, limit):
    v = get_variable("v", gradient.shape, np.float64, "zeros")
    optimizers.SGD(1.0, global_clipnorm=limit).apply_gradients([(gradient, v)])
    exact = gradient.astype(float)
    largest = abs(exact).max() or 1.0
    norm = largest * np.linalg.norm(exact / largest)
    np.testing.assert_allclose(v, -exact * min(limit / norm, 1.0) if norm else 0, rtol=1e-4)


def test_names_that_the_server_uses_itself(strategy):
    def add_up(param, grad, slots, learning_rate, step):
        slots["float32"] += grad
        param -= learning_rate * slots["float32"]

    for dtype in (np.float32, np.float16):
        v = get_variable(np.dtype(dtype).name, 3, dtype, "zeros")
        rule = optimizers.Function(add_up, ["float32"], 1.0)
        for _ in range(3):
            rule.apply_gradients([(np.ones(3, dtype), v)])
        np.testing.assert_array_equal(v, np.full(3, -6))
        for _ in range(3):
            v.assign(np.zeros(3, dtype))
            v.assign_add(np.zeros(3, dtype))
        for name in ("assign", "add"):
            first = optimizers.SGD(lambda step: float(step == 0), name=name)
            first.apply_gradients([(np.ones(3, dtype), v)])
        np.testing.assert_array_equal(v, np.full(3, -2))


@pytest.mark.parametrize("rate", [float("nan"), -1.0, float("inf")])
def test_rates_that_schedules_must_not_give(strategy, rate):
    v = get_variable("v", 2, initializer="ones")
    sgd = optimizers.SGD(lambda step: rate)
    with pytest.raises(InvalidArgumentError, match=f"gives the learning rate {rate} after 0"):
        sgd.apply_gradients([(np.ones(2), v)]).wait()
    np.testing.assert_array_equal(v, np.ones(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_of_zero_changes_nothing(strategy, kind):
    v = get_variable("v", 3, initializer=[1.0, -2.0, 0.0])
    warm_up = schedules.CosineDecay(0.0, 3, warmup_target=0.1, warmup_steps=2)
    optimizer = getattr(optimizers, kind)(warm_up)
    optimizer.apply_gradients([(np.ones(3, np.float32), v)])
    np.testing.assert_array_equal(v, [1, -2, 0])
    for _ in range(6):  # the last steps are past the end of the schedule, with rate 0 again
        optimizer.apply_gradients([(np.ones(3, np.float32), v)])
    assert np.isfinite(v.read_value()).all()


def test_ftrl_without_an_accumulator(strategy):
    v = get_variable("v", 3, initializer="zeros")
    ftrl = optimizers.Ftrl(0.1, initial_accumulator_value=0.0)
    ftrl.apply_gradients([(np.array([0, 1, 0], np.float32), v)])
    np.testing.assert_allclose(v, [0, -0.1, 0])


@pytest.mark.parametrize(
    "function",
    [
        lambda p, g, s, r, t: s.update(m=s["m"] + g),
        lambda p, g, s, r, t: p - g,
    ],
)
def test_functions_that_change_nothing_in_place(strategy, function):
    v = get_variable("v", 2, initializer="ones")
    with pytest.raises(InvalidArgumentError, match="must change param and slots in place"):
        optimizers.Function(function, ["m"]).apply_gradients([(np.ones(2), v)]).wait()


class WithoutWordsError(Exception):
    """An exception that cannot be converted to text."""

    def __str__(self):
        raise RuntimeError


def test_an_error_that_cannot_be_shown(strategy):
    def fail(*_):
        raise WithoutWordsError

    v = get_variable("v", 2, initializer="ones")
    with pytest.raises(InvalidArgumentError, match=r"raised .*WithoutWordsError"):
        optimizers.Function(fail).apply_gradients([(np.ones(2), v)]).wait()


@pytest.mark.parametrize("transport", ["auto", "rma", "p2p"])
def test_an_update_that_fails_keeps_the_others_in_step(transport):
    """The remaining gradient data of the failed update must not be used by the next update."""
    size = 600_000

    def fail_at_halves(param, grad, slots, learning_rate, step):
        if grad[0] == 60_000:
            raise KeyError("typo")
        param -= grad

    with mpidist.Server(CLUSTER, "worker", 0), ParameterServerStrategy(transport=transport).scope():
        half = get_variable("half", size, np.float16, "zeros")
        v = get_variable("v", size, np.float32, "zeros")
        own, large = optimizers.Function(fail_at_halves), np.full(size, 60_000, np.float16)
        sgd = optimizers.SGD(1.0)
        work = own.apply_gradients([(large, half), (np.full(size, 7, np.float32), v)])
        with pytest.raises(InvalidArgumentError, match="raised KeyError: 'typo'"):
            work.wait()
        np.testing.assert_array_equal(v, np.full(size, -7))
        for count in range(1, 4):
            sgd.apply_gradients([(np.full(size, 100, np.float32), v)]).wait()
            np.testing.assert_array_equal(v, np.full(size, -7 - 100 * count))


@pytest.mark.parametrize("size", [5, 600_000])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_learning_rate_can_be_set(strategy, size, momentum):
    v = get_variable("v", size, np.float64, "zeros")
    sgd, velocity, expected = optimizers.SGD(1.0, momentum), 0.0, 0.0
    for rate in (1.0, 0.25, 0.25, 2.0):
        sgd.learning_rate = rate
        sgd.apply_gradients([(np.ones(size), v)])
        velocity = velocity * momentum + 1.0
        expected -= velocity * rate
    np.testing.assert_array_equal(v, np.full(size, expected))
    assert sgd.learning_rate == 2.0


def test_learning_rates_that_cannot_be_set():
    sgd = optimizers.SGD(0.25)
    for rate in (-1.0, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="learning_rate must be at least 0 and finite"):
            sgd.learning_rate = rate
        with pytest.raises(ValueError, match="learning_rate must be at least 0 and finite"):
            optimizers.Adam(rate)
    sgd.learning_rate = 0
    assert sgd.learning_rate == 0
    sgd.learning_rate = 0.25
    with pytest.raises(TypeError, match="learning_rate must be a number, not 'x'"):
        sgd.learning_rate = "x"
    with pytest.raises(TypeError, match="learning_rate must be a number, not 'x'"):
        optimizers.SGD("x")
    decay = schedules.ExponentialDecay(1.0, 10, 0.5)
    with pytest.raises(TypeError, match="make another optimizer"):
        sgd.learning_rate = decay
    assert sgd.learning_rate == 0.25
    scheduled = optimizers.SGD(decay)
    assert scheduled.learning_rate is decay
    with pytest.raises(TypeError, match="make another optimizer"):
        scheduled.learning_rate = 0.5


def test_other_arguments_cannot_be_set():
    adam = optimizers.Adam()
    for name in ("beta_1", "clipnorm", "name", "lr"):
        with pytest.raises(AttributeError, match=f"not {name!r}: make another optimizer"):
            setattr(adam, name, 0.5)
    with pytest.raises(AttributeError, match="not 'update'"):
        optimizers.Function(print).update = min


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amsgrad": "yes"}, "amsgrad must be True or False, not 'yes'"),
        ({"amsgrad": None}, "amsgrad must be True or False, not None"),
        ({"weight_decay": True}, "weight_decay must be a number, not True"),
        ({"learning_rate": np.array([0.1, 0.2])}, "learning_rate must be a number, not array"),
        ({"clipnorm": np.ones(2)}, "clipnorm must be a number, not array"),
    ],
)
def test_arguments_of_another_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        optimizers.Adam(**arguments)


def test_the_name_is_by_default_that_of_the_class():
    assert optimizers.Adam(name=None).name == optimizers.Adam().name == "Adam"
    with pytest.raises(ValueError, match="needs a name"):
        optimizers.Adam(name=3)


def test_optimizers_that_are_gone_are_not_kept(strategy):
    v = get_variable("v", 2, initializer="zeros")
    made = weakref.WeakSet()
    for _ in range(20):
        optimizer = optimizers.SGD(0.5)
        made.add(optimizer)
        optimizer.apply_gradients([(np.ones(2), v)]).wait()
    del optimizer
    gc.collect()
    assert not made


def test_lamb_takes_the_norms_of_whole_variables():
    """The case has small variables in a bucket, and a variable of several blocks."""
    sizes, lamb = (3, 5, 300_000), optimizers.Lamb(0.1, weight_decay=0.1)
    with ParameterServerStrategy() as strategy, strategy.scope():
        made = [get_variable(f"v{n}", size, np.float64, n + 1.0) for n, size in enumerate(sizes)]
        expected = [v.numpy() for v in made]
        moments = [[0.0, 0.0] for _ in sizes]
        for step in range(1, 4):
            grads = [np.random.default_rng((step, size)).standard_normal(size) for size in sizes]
            applied = lamb.apply_gradients(list(zip(grads, made, strict=True))).result()
            assert applied.versions == (step + 1,) * 3
            for n, (p, g) in enumerate(zip(expected, grads, strict=True)):
                m, v = moments[n] = (
                    0.9 * moments[n][0] + 0.1 * g,
                    0.999 * moments[n][1] + 0.001 * g**2,
                )
                r = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-6) + 0.1 * p
                expected[n] = p - 0.1 * np.linalg.norm(p) / np.linalg.norm(r) * r
        for v, value in zip(made, expected, strict=True):
            np.testing.assert_allclose(v, value, rtol=1e-12)
        with pytest.raises(InvalidArgumentError, match="'Lamb' cannot update rows of variab"):
            lamb.apply_gradients([(IndexedSlices(np.ones(1), [0]), made[0])]).wait()
        zero = get_variable("zero", 4, "float16", 0.0)
        lamb.apply_gradients([(np.ones(4, np.float16), zero)]).wait()  # the variable has norm 0
        np.testing.assert_allclose(zero, np.full(4, -0.1), rtol=1e-3)


def test_numbers_of_numpy_and_what_repr_shows():
    sgd = optimizers.SGD(np.float32(0.5), clipnorm=2)
    sgd.learning_rate = np.float16(0.25)
    assert sgd.learning_rate == 0.25
    assert repr(sgd) == (
        "SGD(learning_rate=0.25, momentum=0, nesterov=0, weight_decay=0, clipnorm=2)"
    )
