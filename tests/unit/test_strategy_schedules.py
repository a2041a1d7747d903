"""Learning rates that change with the steps."""

import math

import pytest

from strategy import schedules


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (schedules.ExponentialDecay(0.5, 10, 0.01), {0: 0.5, 5: 0.05, 10: 0.005, 20: 0.00005}),
        (schedules.ExponentialDecay(0.5, 10, 0.1, staircase=True), {0: 0.5, 9: 0.5, 10: 0.05}),
        (schedules.InverseTimeDecay(1.0, 10, 2.0), {0: 1.0, 5: 0.5, 10: 1 / 3}),
        (schedules.InverseTimeDecay(1.0, 10, 2.0, staircase=True), {9: 1.0, 10: 1 / 3}),
        (schedules.PolynomialDecay(1.0, 10, 0.2), {0: 1.0, 5: 0.6, 10: 0.2, 99: 0.2}),
        (schedules.PolynomialDecay(1.0, 10, 0.0, power=2.0), {5: 0.25}),
        (schedules.PolynomialDecay(1.0, 10, 0.0, cycle=True), {0: 1.0, 10: 0.0, 15: 0.25, 20: 0.0}),
        (schedules.CosineDecay(1.0, 10), {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0}),
        (schedules.CosineDecay(1.0, 10, alpha=0.2), {5: 0.6, 10: 0.2}),
        (
            schedules.CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=4),
            {0: 0.0, 1: 0.25, 4: 1.0, 9: 0.5, 14: 0.0},
        ),
        (
            schedules.PiecewiseConstantDecay([2, 5], [1.0, 0.5, 0.1]),
            {0: 1.0, 2: 1.0, 3: 0.5, 5: 0.5, 6: 0.1},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rates(schedule, rates):
    for step, rate in rates.items():
        assert math.isclose(schedule(step), rate, abs_tol=1e-12), step


@pytest.mark.parametrize(
    "make",
    [
        lambda steps: schedules.ExponentialDecay(1.0, steps, 0.5),
        lambda steps: schedules.InverseTimeDecay(1.0, steps, 0.5),
        lambda steps: schedules.PolynomialDecay(1.0, steps),
        lambda steps: schedules.CosineDecay(1.0, steps),
    ],
)
def test_lengths_that_cannot_be(make):
    for steps in (0, -1):
        with pytest.raises(ValueError, match="decay_steps must be positive"):
            make(steps)


def test_pieces_that_do_not_fit():
    with pytest.raises(ValueError, match="2 boundaries need one value more, not 2"):
        schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2])
    with pytest.raises(ValueError, match="must ascend"):
        schedules.PiecewiseConstantDecay([2, 1], [0.1, 0.2, 0.3])
