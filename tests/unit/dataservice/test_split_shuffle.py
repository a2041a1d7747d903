"""shuffle under 'distributed_epoch': one that shuffles all is an order of the source's indices."""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
from _cases.data_readers import MADE, counted, numbers
from _cases.dealt import all_indices, context_of
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from dataservice.dataset.shuffling import LISTED, Permutation

MODE = "distributed_epoch"


def at(order, places):
    return np.array([order[place] for place in places], np.int64)


@pytest.mark.parametrize("listed", [-1, LISTED])
@given(st.one_of(st.integers(0, 300), st.integers(65_530, 70_000)), st.integers(0, 99), st.data())
def test_an_order_has_every_number_once(listed, length, seed, data):
    order = Permutation(length, (seed,), listed)
    whole = at(order, range(length))
    assert np.array_equal(np.sort(whole), np.arange(length))
    start = data.draw(st.integers(0, length))
    step = data.draw(st.integers(1, 5))
    some = range(start, length, step)
    assert np.array_equal(at(Permutation(length, (seed,), listed), some), whole[start::step])


@pytest.mark.parametrize("length", [65_537, (1 << 21) + 1, (1 << 40) - 1, 1 << 62])
def test_large_orders_are_inside_and_without_repetition(length):
    found = at(Permutation(length, (1, 2)), range(length - 50_000, length))
    assert len(np.unique(found)) == 50_000
    assert 0 <= found.min() <= found.max() < length
    # Neighbours are as far from each other as at random: a third of the length on average.
    gaps = np.abs(np.diff(found.astype(np.float64))) / length
    assert abs(gaps.mean() - 1 / 3) < 0.01
    other = at(Permutation(length, (1, 3)), range(length - 50_000, length))
    assert not np.array_equal(found, other)


def test_small_orders_are_all_as_likely():
    found = Counter(tuple(at(Permutation(4, (seed,)), range(4))) for seed in range(24_000))
    assert len(found) == 24
    assert max(abs(count - 1000) for count in found.values()) < 200  # six deviations


def by_index(dataset, epoch=0, part=()):
    node = dataset.node
    context = context_of(node, all_indices(node), epoch=epoch, part=part)
    return numbers(node.iterate(context))


def test_what_an_order_depends_on():
    seeded, without, fixed = (
        Dataset.range(50).shuffle(50, seed=3),
        Dataset.range(50).shuffle(50),
        Dataset.range(50).shuffle(50, seed=4, reshuffle_each_iteration=False),
    )
    for dataset in (seeded, without, fixed):
        assert dataset.node.indexed_length() == 50
        assert sorted(by_index(dataset)) == list(range(50)) != by_index(dataset)
        # What tells workers from each other must not show.
        assert by_index(dataset, part=(1,)) == by_index(dataset, part=(2,))
        assert (by_index(dataset) == by_index(dataset, 1)) == (dataset is fixed)


def test_a_shuffle_of_less_than_all_stays_in_its_part():
    node = Dataset.range(50).shuffle(49).node
    assert node.indexed_length() is None
    assert node.source_length() == 50


def test_nothing_is_made_before_its_turn():
    MADE.clear()
    node = Dataset.range(1000).map(counted).shuffle(1000).node
    elements = node.iterate(context_of(node, range(1000)))
    first = numbers(itertools.islice(elements, 5))
    assert first == MADE


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_of_a_service(make_service, workers):
    target = make_service(workers).target
    dataset = Dataset.range(100).shuffle(100, seed=1).batch(8).repeat(2)
    found = [batch.tolist() for batch in dataset.apply(distribute(MODE, target))]
    assert sorted(map(len, found)) == [4, 4, *[8] * 24]
    assert Counter(itertools.chain(*found)) == Counter(list(range(100)) * 2)


def test_a_fixed_order_does_not_depend_on_the_number_of_parts(make_service):
    target = make_service(2).target
    fixed = partial(distribute, MODE, target, deterministic=True)
    dataset = Dataset.range(100).shuffle(100, seed=1).batch(8).map(str)
    orders = [
        [str(batch) for batch in dataset.apply(fixed(num_shards=parts))] for parts in (1, 3, 16)
    ]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == 13


def test_an_order_for_all_passes_is_in_the_state_unless_it_has_a_seed():
    def make():
        return Dataset.range(20).shuffle(20, reshuffle_each_iteration=False).node

    before, after = (node.iterate(context_of(node, range(20))) for node in (make(), make()))
    found = numbers(itertools.islice(before, 10))
    after.set_state(before.get_state())
    assert sorted(found + numbers(after)) == list(range(20))


def test_a_shuffle_for_all_passes_may_be_kept():
    dataset = Dataset.range(20).shuffle(20, 1, reshuffle_each_iteration=False).cache()
    orders = [by_index(dataset, number) for number in range(2)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(20))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.map(counted, 4),
        lambda d: d.map(counted),
        lambda d: d.map(counted).prefetch(1),
        lambda d: d.map(counted).batch(1).map(lambda batch: batch[0]),
    ],
)
def test_a_shuffle_of_what_is_kept_makes_the_rest(make):
    MADE.clear()
    dataset = make(Dataset.range(500)).cache()
    list(dataset.node.iterate(context_of(dataset.node, range(250))))
    MADE.clear()
    shuffled = dataset.shuffle(500, seed=1)
    assert sorted(by_index(shuffled)) == list(range(500))
    assert sorted(MADE) == list(range(250, 500))


def test_passes_have_the_orders_of_a_repeat():
    dataset = Dataset.range(30).shuffle(30, seed=3)
    passes = [numbers(dataset) for _ in range(3)]
    assert [n for each in passes for n in each] == numbers(dataset.repeat(3))
    assert passes[0] != passes[1] != passes[2]
    buffered = Dataset.range(30).shuffle(7, seed=3)
    passes = [numbers(buffered) for _ in range(3)]
    assert [n for each in passes for n in each] == numbers(buffered.repeat(3))
