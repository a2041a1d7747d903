"""Rounds and clocks of workers, and means of the values that several workers push."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategy.protocol.layout import Layout
from strategy.protocol.rounds import Clocks, Decision, Rounds
from strategy.server.shard import Scratch, mean_of_blocks, mean_of_rows


def test_a_step_is_made_when_all_have_come():
    rounds = Rounds(range(3), 0)
    assert rounds.enter(2, 0, "two") == []
    assert rounds.enter(0, 0, "zero") == []
    assert rounds.missing() == [1]
    assert dict(rounds.enter(1, 0, "one")) == dict.fromkeys(
        ("zero", "one", "two"), Decision(0, (0, 1, 2))
    )
    assert rounds.missing() == [0, 1, 2]


def test_who_comes_too_late_goes_on_with_the_step_that_is_open():
    rounds = Rounds(range(3), 1)
    for step in range(4):
        rounds.enter(0, step, 0)
        assert [w for w, _ in rounds.enter(2, step, 2)] == [0, 2]
    assert rounds.enter(1, 0, 1) == [(1, Decision(4, ()))]
    assert rounds.enter(1, 4, 1) == []
    assert rounds.enter(2, 4, 2) == [(1, Decision(4, (1, 2))), (2, Decision(4, (1, 2)))]


def test_who_leaves_is_not_waited_for():
    rounds = Rounds(range(4), 1)
    assert rounds.enter(3, 0, 3) == []
    assert rounds.leave(0) == []
    assert rounds.leave(1) == []
    assert rounds.leave(2) == [(3, Decision(0, (3,)))]
    assert rounds.enter(3, 1, 3) == [(3, Decision(1, (3,)))]
    assert rounds.leave(3) == []


def test_who_has_nothing_is_no_member():
    rounds = Rounds(range(3), 0)
    for worker in (0, 2):
        assert rounds.enter(worker, 0, worker, gives="w" if worker == 2 else None) == []
    assert dict(rounds.enter(1, 0, 1, "w")) == {
        0: Decision(1, ()),
        1: Decision(0, (1, 2)),
        2: Decision(0, (1, 2)),
    }
    for worker in range(2):
        assert rounds.enter(worker, 1, worker, gives=None) == []
    assert set(dict(rounds.enter(2, 1, 2, gives=None)).values()) == {Decision(1, ())}
    assert rounds.enter(0, 1, 0) == []


def test_who_has_nothing_takes_no_place_of_those_who_have():
    rounds = Rounds(range(3), 1)
    assert rounds.enter(0, 0, 0, None) == []
    assert rounds.enter(1, 0, 1) == []
    assert dict(rounds.enter(2, 0, 2)) == {
        0: Decision(1, ()),
        1: Decision(0, (1, 2)),
        2: Decision(0, (1, 2)),
    }


def test_who_gives_what_does_not_belong_together():
    rounds = Rounds(range(3), 0)
    rounds.enter(2, 0, 2, "a, b")
    rounds.enter(0, 0, 0, None)
    answers = dict(rounds.enter(1, 0, 1, "b, a"))
    assert {decision.step for decision in answers.values()} == {0}
    for decision in answers.values():
        assert decision.members == ()
        assert "worker 1 gives gradients of b, a, and worker 2 of a, b" in decision.problem
    for worker in (0, 1):
        rounds.enter(worker, 0, worker, "a")
    assert len(rounds.enter(2, 0, 2, "a")) == 3


def test_who_leaves_while_it_waits():
    rounds = Rounds(range(3), 0)
    rounds.enter(0, 0, "zero")
    assert rounds.leave(0) == []
    rounds.enter(1, 0, "one")
    assert dict(rounds.enter(2, 0, "two")) == dict.fromkeys(("one", "two"), Decision(0, (1, 2)))


@pytest.mark.parametrize("step", [0, 1])
def test_a_worker_that_comes_twice_or_too_early(step):
    rounds = Rounds(range(2), 0)
    rounds.enter(0, 0, "first")
    with pytest.raises(ValueError, match=f"worker 0 gives gradients for step {step} again"):
        rounds.enter(0, step, "second")
    assert len(rounds.enter(1, 0, "other")) == 2


@given(st.data(), st.integers(1, 5))
def test_every_order_of_workers_makes_every_step(data, workers):
    backups = data.draw(st.integers(0, workers - 1))
    rounds, at, waiting = Rounds(range(workers), backups), [0] * workers, set()
    decided = []
    while len(decided) < 6:
        free = sorted(set(range(workers)) - waiting)
        worker = data.draw(st.sampled_from(free))
        waiting.add(worker)
        for one, decision in rounds.enter(worker, at[worker], worker):
            waiting.discard(one)
            at[one] = decision.step + 1 if decision.members else decision.step
            if decision.members and one == decision.members[0]:
                decided.append(decision.step)
                assert len(decision.members) == workers - backups
    assert decided == list(range(6))


@given(st.data(), st.integers(1, 4), st.integers(0, 3))
def test_no_clock_is_too_far_ahead(data, workers, bound):
    clocks, at, running = Clocks(range(workers), bound), [0] * workers, set(range(workers))
    while min(at) < 5:
        worker = data.draw(st.sampled_from(sorted(running)))
        assert at[worker] - min(at) <= bound
        at[worker] += 1
        running.discard(worker)
        running |= set(clocks.advance(worker, at[worker], worker))
        assert running, "all wait for each other"
        assert set(clocks.missing()) == {n for n in range(workers) if at[n] == min(at)}


def test_clocks_of_workers_that_leave():
    clocks = Clocks(range(3), 0)
    assert clocks.advance(0, 1, "zero") == []
    assert clocks.leave(1) == []
    assert clocks.missing() == [2]
    assert clocks.leave(2) == ["zero"]
    assert clocks.advance(0, 2, "zero") == ["zero"]
    assert clocks.leave(0) == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int64"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_means_of_blocks(dtype, count):
    layout = Layout((10,), dtype)
    random = np.random.default_rng(1)
    arrays = [(100 * random.standard_normal((2, 5))).astype(dtype) for _ in range(count)]
    means = mean_of_blocks([iter(array) for array in arrays], layout, Scratch())
    result = np.concatenate([mean.copy() for mean in means])
    if count == 1:
        expected = arrays[0]
    elif dtype == "int64":
        expected = sum(arrays) // count
    else:
        wide = np.dtype(dtype if dtype in ("float32", "float64") else "float32")
        expected = arrays[0].astype(wide)
        for array in arrays[1:]:
            expected = expected + array.astype(wide)
        expected = expected / wide.type(count)
    np.testing.assert_array_equal(result, expected.reshape(-1))
    assert result.dtype == expected.dtype


def test_a_whole_block_of_halves():
    layout = Layout((1 << 19,), np.float16)
    blocks = [iter([np.full(1 << 19, value, np.float16)]) for value in (1, 3)]
    (mean,) = mean_of_blocks(blocks, layout, Scratch())
    np.testing.assert_array_equal(mean, np.full(1 << 19, 2, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_rows_are_in_the_order_of_the_workers(dtype):
    """Rounding makes the order visible: no other order gives these sums."""
    layout = Layout((2, 8), dtype)
    large = 2.0 ** (53 if dtype == "float64" else 24)
    values = [np.full(8, value, dtype) for value in (large, 1, 1, -large)]
    _, rows = mean_of_rows([(np.array([1]), value) for value in values], layout)
    np.testing.assert_array_equal(rows, np.zeros(8))
    _, zeros = mean_of_rows([(np.array([1]), -np.zeros(8, dtype))] * 2, layout)
    assert np.signbit(zeros).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_means_of_rows(dtype):
    layout = Layout((9, 2), dtype)
    each = [
        (np.array([1, 5]), np.array([1, 2, 3, 4], dtype)),
        (np.array([5, 7]), np.array([10, 20, 30, 40], dtype)),
        (np.array([], np.int64), np.array([], dtype)),
    ]
    ids, rows = mean_of_rows(each, layout)
    np.testing.assert_array_equal(ids, [1, 5, 7])
    expected = np.array([1, 2, 13, 24, 30, 40], np.float32) / np.float32(3)
    np.testing.assert_array_equal(rows, expected)
    assert mean_of_rows(each[:1], layout) is each[0]
    ids, rows = mean_of_rows([each[2]] * 2, layout)
    assert (ids.size, rows.size) == (0, 0)


def test_the_next_strategies_of_a_name_begin_with_all_workers():
    rounds, clocks = Rounds(range(2), 0), Clocks(range(2), 1)
    for step in range(3):
        rounds.enter(0, step, "zero")
        assert len(rounds.enter(1, step, "one")) == 2
        for worker in range(2):
            clocks.advance(worker, step + 1, "free")
    for worker in range(2):
        rounds.leave(worker)
        clocks.leave(worker)
    assert rounds.join(0) == clocks.join(0) == 3
    assert rounds.enter(0, 3, "zero") == []  # waits for worker 1
    assert rounds.missing() == [1]
    assert clocks.advance(0, 4, "zero") == ["zero"]
    assert clocks.advance(0, 5, "zero") == []
    assert clocks.missing() == [1]
