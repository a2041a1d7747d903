"""``Dataset.group_by_window`` against plain Python."""

import numpy as np
import pytest
from _cases.data_readers import goes_on_from, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import InvalidArgumentError

numbers = st.lists(st.integers(0, 30), max_size=20)
place = st.integers(0, 25)
STEPS = {
    "as they are": lambda key, group: group,
    "batches": lambda key, group: group.batch(2),
    "shuffled": lambda key, group: group.shuffle(3),
    "reversed, with the key": lambda key, group: Dataset.zip(
        group.map(lambda x: -x), Dataset.from_tensors(key).repeat()
    ),
    "some are empty": lambda key, group: group.take(int(key)),
    "made ahead": lambda key, group: group.map(lambda x: x, num_parallel_calls=2).prefetch(1),
}


def of(values):
    return Dataset.from_tensor_slices(np.array(values, np.int64))


def groups(values, key, size):
    """Keys and elements, in the order in which groups are full; what is left goes by keys."""
    left, found = {}, []
    for value in values:
        left.setdefault(key(value), []).append(value)
        if len(left[key(value)]) == size(key(value)):
            found.append((key(value), left.pop(key(value))))
    return found + sorted(left.items())


@settings(deadline=None)
@given(numbers, st.integers(1, 4), st.integers(1, 5), place)
def test_groups(values, keys, size, taken):
    dataset = of(values).group_by_window(
        lambda x: x % keys - 1,
        lambda key, group: group.batch(99).map(lambda batch: (key, batch)),
        window_size=size,
    )
    expected = groups(values, lambda x: x % keys - 1, lambda key: size)
    assert goes_on_from(dataset, taken) == expected
    assert goes_on_from(dataset.repeat(2), taken) == expected * 2
    assert dataset.cardinality() == (-2 if values else 0)


@settings(deadline=None)
@given(numbers, st.sampled_from(sorted(STEPS)), place, st.integers(1, 5))
def test_what_groups_become(values, name, taken, size):
    step = STEPS[name]
    dataset = of(values).group_by_window(lambda x: x % 3, step, window_size=size)
    found = goes_on_from(dataset, taken)
    expected = [
        element
        for key, group in groups(values, lambda x: x % 3, lambda key: size)
        for element in plain(list(step(np.int64(key), of(group))))
    ]
    assert (sorted(found), len(found)) == (sorted(expected), len(expected))
    assert name == "shuffled" or found == expected


@settings(deadline=None)
@given(numbers, place)
def test_sizes_of_keys(values, taken):
    asked = []
    dataset = of(values).group_by_window(
        key_func=lambda x: x % 4,
        reduce_func=lambda key, group: group.batch(9),
        window_size_func=lambda key: asked.append(int(key)) or key + 1,
    )
    expected = [found for _, found in groups(values, lambda x: x % 4, lambda key: key + 1)]
    assert plain(list(dataset)) == expected
    assert sorted(asked) == sorted({value % 4 for value in values})
    assert goes_on_from(dataset, taken) == expected


def test_shuffles_of_groups_differ():
    dataset = Dataset.range(200).group_by_window(
        lambda x: np.int32(0), lambda key, group: group.shuffle(50, seed=1).batch(50), 50
    )
    orders = {tuple((batch % 50).tolist()) for batch in dataset}
    assert len(orders) == 4


def test_elements_of_any_structure_and_what_never_ends():
    pairs = Dataset.zip(Dataset.range(9), Dataset.range(9).map(lambda x: {"y": x % 2})).repeat()
    dataset = pairs.group_by_window(lambda x, y: y["y"], lambda key, group: group.batch(3), 3)
    assert plain(list(dataset.take(2))) == [
        ([0, 2, 4], {"y": [0, 0, 0]}), ([1, 3, 5], {"y": [1, 1, 1]}),
    ]  # fmt: skip
    assert dataset.cardinality() == -1
    assert dataset.element_spec == (
        ArraySpec((3,), np.int64),
        {"y": ArraySpec((3,), np.int64)},
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, STEPS["batches"], 1), TypeError, "a function as key_func, not 1"),
        ((int, 1, 1), TypeError, "a function as reduce_func, not 1"),
        ((int, STEPS["batches"], 1.5), TypeError, "a whole number as window_size, not 1.5"),
        ((int, STEPS["batches"], None, 1), TypeError, "a function as window_size_func, not 1"),
        ((int, STEPS["batches"], 0), ValueError, "a window_size of at least 1, not 0"),
        ((int, STEPS["batches"]), ValueError, "either window_size or window_size_func"),
        ((int, STEPS["batches"], 1, int), ValueError, "either window_size or window_size_func"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.range(3).group_by_window(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (lambda x: 1.5, STEPS["batches"], 1),
            InvalidArgumentError,
            "returned 1.5: it must return a whole",
        ),
        (
            (lambda x: x > 1, STEPS["batches"], 1),
            InvalidArgumentError,
            "returned .*False.*: it must return",
        ),
        ((int, lambda key, group: key, 1), TypeError, "returned int64, not a Dataset"),
        ((int, STEPS["batches"], None, float), InvalidArgumentError, "returned 0.0: it must"),
        ((int, STEPS["batches"], None, int), InvalidArgumentError, "not 0 for key 0"),
    ],
)
def test_what_functions_must_not_give(arguments, error, message):
    with pytest.raises(error, match=message):
        list(Dataset.range(3).group_by_window(*arguments))


def fail_at(number):
    def function(x):
        if int(x) == number:
            raise ZeroDivisionError
        return x

    return function


@pytest.mark.parametrize(
    ("below", "key", "within", "expected"),
    [
        (3, 9, 9, [[0, 2, 4], [1, 5, 7], [6, 8]]),
        (9, 3, 9, [[0, 2, 4], [1, 5, 7], [6, 8]]),
        (9, 9, 3, [[0, 2, 4], [6, 8], [7]]),
        (9, 9, 9, [[0, 2, 4], [1, 3, 5], [6, 8], [7]]),
    ],
)
def test_passes_that_go_on_after_an_error(below, key, within, expected):
    fails = fail_at(key)
    dataset = Dataset.range(9).map(fail_at(below))
    dataset = dataset.group_by_window(
        lambda x: fails(x) % 2, lambda key, group: group.map(fail_at(within)).batch(3), 3
    )
    assert plain(list(dataset.ignore_errors())) == expected


@pytest.mark.usefixtures("no_thread_is_left_behind")
def test_a_pass_that_is_closed_ends_that_over_a_group():
    dataset = Dataset.range(9).prefetch(2).group_by_window(int, lambda key, g: g.prefetch(2), 1)
    for taken in (0, 1, 9):
        with iter(dataset) as elements:
            for _ in range(taken):
                next(elements)
    elements = iter(dataset)
    next(elements)


# Of a service


def by_parity(d):
    return d.group_by_window(lambda x: x % 2, lambda key, group: group.batch(4), 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_copies_of_workers(make_service, workers):
    dataset = by_parity(Dataset.range(50))
    remote = dataset.apply(distribute("parallel_epochs", make_service(workers).target))
    assert sorted(plain(list(remote))) == sorted(plain(list(dataset)) * workers)


def test_workers_group_what_they_have(make_service):
    remote = by_parity(Dataset.range(50)).apply(
        distribute("distributed_epoch", make_service(2).target)
    )
    found = plain(list(remote))
    assert all(len({x % 2 for x in batch}) == 1 for batch in found)
    assert sorted(x for batch in found for x in batch) == [*range(50)]
