"""``Dataset.rejection_resample``: how frequent classes are, and which elements stay."""

from collections import Counter

import numpy as np
import pytest
from _cases.data_readers import goes_on_from, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import InvalidArgumentError

COUNT = 20_000


def classes(shares, count=COUNT):
    """Elements of which so many are of each class, in a random order."""
    found = np.random.default_rng(0).choice(len(shares), count, p=shares)
    return Dataset.from_tensor_slices((found, np.arange(count)))


def frequencies(dataset, number):
    found = np.array([kind for kind, _ in dataset])
    return len(found), np.bincount(found, minlength=number) / len(found)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("initial", "target", "kept"),
    [
        ([0.5, 0.5], [0.5, 0.5], 1.0),
        ([0.8, 0.2], [0.5, 0.5], 0.4),
        ([0.1, 0.6, 0.3], [0.2, 0.2, 0.6], 0.5),
        ([0.5, 0.25, 0.25], [0.5, 0.5, 0], 0.5),
    ],
)
def test_classes_are_as_frequent_as_wanted(known, initial, target, kept):
    dataset = classes(initial).rejection_resample(
        lambda kind, _: kind, target, initial if known else None, seed=1
    )
    count, found = frequencies(dataset, len(target))
    np.testing.assert_allclose(found, target, atol=0.02)
    assert abs(count / COUNT - kept) < 0.03


def test_any_scale_will_do():
    dataset = Dataset.range(100)
    one, other = (
        dataset.rejection_resample(lambda x: x % 2, [1 * n, 3 * n], [n, n], seed=1)
        for n in (0.25, 4)
    )
    assert plain(list(one)) == plain(list(other))
    assert plain(list(dataset.rejection_resample(lambda x: x % 2, [2, 2], [1, 1]))) == [
        (x % 2, x) for x in range(100)
    ]


def test_elements_stay_in_order_with_their_classes():
    pairs = Dataset.zip(Dataset.range(50), Dataset.range(50).map(lambda x: {"y": -x}))
    dataset = pairs.rejection_resample(lambda x, y: np.int32(x % 3), [1, 1, 2])
    found = list(dataset)
    assert all(kind == x % 3 and y == {"y": -x} for kind, (x, y) in found)
    assert all(type(kind) is np.int64 for kind, _ in found)
    numbers = [int(x) for _, (x, _) in found]
    assert numbers == sorted(set(numbers))
    integer = ArraySpec((), np.int64)
    assert dataset.element_spec == (integer, (integer, {"y": integer}))
    assert dataset.cardinality() == -2
    assert pairs.take(0).rejection_resample(lambda x, y: 0, [1]).cardinality() == 0


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any),
    st.booleans(),
    st.integers(0, 20),
)
def test_a_pass_goes_on_from_any_state(values, target, known, taken):
    dataset = Dataset.from_tensor_slices(np.array(values, np.int64)).rejection_resample(
        lambda x: x, target, [1, 2, 3] if known else None, seed=3
    )
    for each in (dataset, dataset.repeat(3)):
        found = goes_on_from(each, taken)
        assert all(kind == x and target[kind] for kind, x in found)


def test_passes_and_runs():
    def made(seed):
        return Dataset.range(60).rejection_resample(lambda x: x % 2, [1, 3], [1, 1], seed)

    with_seed, again, other, without = made(1), made(1), made(2), made(None)
    first, second = (plain(list(with_seed)) for _ in range(2))
    assert first != second
    assert [plain(list(again)) for _ in range(2)] == [first, second]
    assert plain(list(other)) != first
    assert plain(list(without)) != plain(list(without))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, [1]), TypeError, "a function as class_func, not 1"),
        ((int, ["x"]), TypeError, "a list of numbers as target_dist"),
        ((int, [1], 1), TypeError, "a list of numbers as initial_dist, not 1"),
        ((int, [1], None, 1.5), TypeError, "a whole number as seed, not 1.5"),
        ((int, [1], None, -1), ValueError, "a seed cannot be negative"),
        ((int, []), ValueError, "finite numbers .* as target_dist, not"),
        ((int, [0, 0]), ValueError, "finite numbers .* as target_dist, not"),
        ((int, [1, -1]), ValueError, "finite numbers .* as target_dist, not"),
        ((int, [1, np.nan]), ValueError, "finite numbers .* as target_dist, not"),
        ((int, [1, 1], [np.inf, 1]), ValueError, "finite numbers .* as initial_dist, not"),
        ((int, [1, 1], [1]), ValueError, "target_dist has 2 classes, and initial_dist 1"),
        (
            (int, [1, 1], [1, 0]),
            ValueError,
            "has class 1, but its probability in initial_dist is 0",
        ),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.range(3).rejection_resample(*arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x - 1, "class -1 is not in"),
        (lambda x: x + 1, "class 3 is not in"),
        (lambda x: 0.5, r"returned 0\.5: it must return a whole number"),
    ],
)
def test_classes_that_are_none(function, message):
    with pytest.raises(InvalidArgumentError, match=message):
        list(Dataset.range(3).rejection_resample(function, [1, 1, 1]))


def test_an_error_of_a_class_is_that_of_one_element():
    dataset = Dataset.range(6).rejection_resample(lambda x: 1 // (x - 2) * 0, [1])
    with np.errstate(divide="raise"):
        assert plain(list(dataset.ignore_errors())) == [(0, x) for x in (0, 1, 3, 4, 5)]


# Of a service


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_workers_draw_from_what_they_have(make_service, mode):
    dataset = classes([0.7, 0.3], 4000).rejection_resample(lambda kind, _: kind, [0.5, 0.5])
    found = plain(list(dataset.apply(distribute(mode, make_service(2).target))))
    numbers = [number for _, (_, number) in found]
    copies = 2 if mode == "parallel_epochs" else 1
    assert abs(len(numbers) / (copies * 4000) - 0.6) < 0.06
    assert abs(np.mean([kind for kind, _ in found]) - 0.5) < 0.05
    if mode == "distributed_epoch":
        assert len(set(numbers)) == len(numbers)
    else:
        assert 1 in Counter(numbers).values()  # each copy is drawn by itself


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_state_of_a_fixed_order(make_service, taken):
    def elements():
        dataset = classes([0.7, 0.3], 300).rejection_resample(lambda kind, _: kind, [1, 1])
        target = make_service(2).target
        return iter(
            dataset.apply(distribute("distributed_epoch", target, deterministic=True, num_shards=3))
        )

    with elements() as before:
        for _ in range(taken):
            next(before)
        state, rest = before.get_state(), plain(list(before))
    with elements() as after:
        after.set_state(state)
        assert plain(list(after)) == rest
