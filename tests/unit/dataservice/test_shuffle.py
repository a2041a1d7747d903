from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset


def values(dataset):
    return [int(element) for element in dataset]


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 9))
def test_a_permutation_within_the_buffer(count, size, seed):
    order = values(Dataset.range(count).shuffle(size, seed))
    assert sorted(order) == list(range(count))
    # An element can come early by less than the buffer's size, and late by any distance.
    assert all(element - position < size for position, element in enumerate(order))


def test_a_seed_fixes_the_order_of_a_run():
    def run():
        dataset = Dataset.range(50).shuffle(50, seed=3)
        return [values(dataset) for _ in range(3)]

    first, again = run(), run()
    assert first == again
    assert len({tuple(order) for order in first}) == 3


def test_without_a_seed_runs_differ():
    assert values(Dataset.range(50).shuffle(50)) != values(Dataset.range(50).shuffle(50))


def test_not_reshuffled():
    for seed in (None, 4):
        dataset = Dataset.range(50).shuffle(50, seed, reshuffle_each_iteration=False)
        order = values(dataset)
        assert order == values(dataset) != list(range(50))
        assert values(dataset.repeat(2)) == 2 * order


def test_repetitions_differ():
    for seed in (None, 4):
        twice = values(Dataset.range(50).shuffle(50, seed).repeat(2))
        assert sorted(twice[:50]) == sorted(twice[50:]) == list(range(50))
        assert twice[:50] != twice[50:]


def test_two_shuffles_do_not_cancel_or_repeat_each_other():
    dataset = Dataset.range(50)
    once, twice = values(dataset.shuffle(50, 1)), values(dataset.shuffle(50, 1).shuffle(50, 1))
    assert once != twice


def test_every_place_is_equally_likely():
    first = Counter(values(Dataset.range(4).shuffle(4, seed))[0] for seed in range(2000))
    assert all(400 < first[element] < 600 for element in range(4))
