"""sample_from_datasets under 'distributed_epoch': element i of a mixture is drawn, whoever asks."""

import numpy as np
import pytest
from _cases.data_readers import numbers
from _cases.dealt import Dealt, all_indices, context_of
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from dataservice.dataset import mixing
from dataservice.dataset.base import Context
from dataservice.dataset.mixing import Draws
from mpidist.errors import UnimplementedError

MODE = "distributed_epoch"


def drawn_one_by_one(lengths, weights, entropy):
    random = np.random.default_rng(entropy)
    counts, ended, found = [0] * len(lengths), [False] * len(lengths), []
    while True:
        left = np.cumsum(np.where(ended, 0.0, weights))
        if not left[-1]:
            return found
        which = int(np.searchsorted(left, random.random() * left[-1], "right"))
        if counts[which] == lengths[which]:
            ended[which] = True
        else:
            found.append((which, counts[which]))
            counts[which] += 1


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from([0.0, 0.01, 1.0, 3.0])), min_size=1, max_size=5
).filter(lambda pairs: any(weight for _, weight in pairs))


@given(SEQUENCES, st.integers(0, 99), st.integers(1, 9), st.data())
def test_draws_from_any_place_are_those_drawn_one_by_one(pairs, seed, block, data):
    lengths, weights = zip(*pairs, strict=True)
    expected = drawn_one_by_one(lengths, weights, (seed,))
    draws = Draws(lengths, weights, (seed,), block)
    for number in data.draw(st.lists(st.integers(0, len(expected) // block + 1), max_size=6)):
        sequences, places = draws.block(number)
        part = expected[number * block : (number + 1) * block]
        assert list(zip(sequences.tolist(), places.tolist(), strict=True)) == part


def test_blocks_are_forgotten_and_drawn_again(monkeypatch):
    monkeypatch.setattr("dataservice.dataset.mixing._KEPT", 2)
    draws = Draws([50, 70], [1.0, 2.0], (1,), 5)
    expected = drawn_one_by_one([50, 70], [1.0, 2.0], (1,))
    for number in (23, 3, 22, 0, 11, 23):
        found = zip(*(each.tolist() for each in draws.block(number)), strict=True)
        assert list(found) == expected[number * 5 : (number + 1) * 5]


@given(SEQUENCES, st.integers(1, 4), st.booleans(), st.sampled_from([3, 1 << 14]))
def test_parts_have_the_elements_of_the_whole_in_order(pairs, parts, seeded, block):
    sources = [Dataset.range(100 * i, 100 * i + length) for i, (length, _) in enumerate(pairs)]
    weights = [weight for _, weight in pairs]
    dataset = Dataset.sample_from_datasets(sources, weights, seed=7 if seeded else None)
    node = dataset.node
    whole = numbers(node.iterate(Context((1,), 5)))
    assert len(whole) == node.source_length() == len(dataset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "Draws", lambda *args: Draws(*args, block))
        for part in range(parts):
            indices = all_indices(node)[part::parts]
            # Unless a seed is given, what tells one process from another must not show.
            context = context_of(node, indices, epoch=5, part=(part,))
            assert numbers(node.iterate(context)) == whole[part::parts]


@pytest.mark.parametrize("ahead", [0, 3])
def test_no_split_is_taken_long_before_its_turn(ahead, no_thread_is_left_behind):
    few = Dataset.range(1000, 1005)
    few = few.prefetch(ahead) if ahead else few
    node = Dataset.sample_from_datasets([Dataset.range(400), few], [1, 0.01], seed=3).node
    deal = Dealt(*(range(start, start + 9) for start in range(0, 405, 9)))
    with node.iterate(context_of(node, deal)) as elements:
        found = []
        for index in range(405):
            found.append(int(next(elements)))
            assert max(deal.asked) <= index // 9 + 1 + 64 // 9 + 1
    assert found == numbers(node.iterate(Context((1,))))


def test_many_that_end_soon():
    sources = [Dataset.range(i, i + 3) for i in range(3000)]
    node = Dataset.sample_from_datasets(sources, seed=1).node
    part = range(8990, 9000)
    mine = numbers(node.iterate(context_of(node, part)))
    assert mine == numbers(node.iterate(Context((1,))))[8990:]


def test_mixtures_without_seed_are_not_alike():
    def mixture():
        return Dataset.sample_from_datasets([Dataset.range(40), Dataset.range(100, 140)])

    copies = [numbers(mixture().node.iterate(Context((1,), part=(part,)))) for part in (1, 2)]
    assert copies[0] != copies[1]
    both = numbers(mixture().concatenate(mixture()).node.iterate(Context((1,))))
    assert both[:80] != both[80:]


@pytest.mark.parametrize("weights", [[5e-324] * 2, [1e308] * 2, [np.nan, 1], [1]])
def test_weights_that_cannot_be_drawn_by(weights):
    with pytest.raises(ValueError, match="weights must be"):
        Dataset.sample_from_datasets([Dataset.range(2)] * 2, weights)


@pytest.mark.parametrize("calls", [None, 2])
def test_an_element_that_cannot_be_made_is_one(calls, no_thread_is_left_behind):
    bad = Dataset.range(9).map(lambda i: 12 // int(i - 4), calls)
    node = Dataset.sample_from_datasets([bad, Dataset.range(100, 109)], seed=2).ignore_errors().node
    whole = numbers(node.iterate(Context((1,))))
    deal = Dealt(range(4), range(4, 13), range(13, 18))
    assert numbers(node.iterate(context_of(node, deal))) == whole
    assert len(whole) == 17


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: Dataset.sample_from_datasets([a, b], stop_on_empty_dataset=True),
        lambda a, b: Dataset.sample_from_datasets([a, b.filter(bool)]),
        lambda a, b: Dataset.choose_from_datasets([a, b], Dataset.range(9).map(lambda i: i % 2)),
    ],
)
def test_mixtures_without_numbers_cannot_be_split(make):
    with pytest.raises(UnimplementedError, match="cannot be split between workers"):
        make(Dataset.range(5), Dataset.range(9)).node.source_length()


@pytest.mark.parametrize("workers", [1, 3])
def test_of_a_service(make_service, workers):
    target = make_service(workers).target
    sources = [Dataset.range(200), Dataset.range(1000, 1050).map(lambda i: i * 2, 2)]
    mixture = Dataset.sample_from_datasets(sources, [0.8, 0.2], seed=1).repeat(2)
    found = numbers(mixture.apply(distribute(MODE, target)))
    assert sorted(found) == sorted(numbers(mixture))
    fixed = numbers(mixture.batch(1).unbatch().apply(distribute(MODE, target)))
    assert sorted(fixed) == sorted(found)


def test_a_fixed_order_is_that_of_one_process(make_service):
    target = make_service(2).target
    sources = [Dataset.range(90), Dataset.range(1000, 1050)]
    mixture = Dataset.sample_from_datasets(sources, seed=1).batch(7).map(str)
    apply = distribute(MODE, target, deterministic=True, num_shards=5)
    assert [str(each) for each in mixture.apply(apply)] == [str(each) for each in mixture]
