"""Sources that never end."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from _cases.data_readers import goes_on_from, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import ArraySpec, Dataset, ShardingPolicy, distribute

whole = st.integers(-9, 9)


@settings(deadline=None)
@given(whole, whole, st.integers(0, 30))
def test_counter(start, step, taken):
    found = goes_on_from(Dataset.counter(start, step), taken, 30)
    assert found == list(itertools.islice(itertools.count(start, step), 30))


def test_counter_by_default_and_what_it_says_of_itself():
    numbers = Dataset.counter()
    assert plain(list(numbers.take(3))) == [0, 1, 2]
    assert all(type(number) is np.int64 for number in numbers.take(3))
    assert numbers.cardinality() == -1
    assert numbers.element_spec == ArraySpec((), np.int64)
    assert repr(Dataset.counter(3, -1)) == "<Dataset counter(3, -1)>"
    assert len(Dataset.zip(numbers, Dataset.range(4))) == 4


def test_counter_goes_on_far_away_at_once():
    elements, later = iter(Dataset.counter(step=2)), iter(Dataset.counter(step=2))
    for _ in range(10_000):
        next(elements)
    assert len(elements.get_state()) < 500
    later.set_state(elements.get_state())
    assert plain([next(later), next(later)]) == [20_000, 20_002]


seeds = st.none() | st.integers(0, 3)


def first(dataset, count=40):
    return plain(list(dataset.take(count)))


@settings(deadline=None)
@given(seeds, st.booleans(), st.sampled_from([0, 1, 19, 1023, 1024, 1025]))
def test_random_numbers_go_on_from_any_state(seed, rerandomize, taken):
    dataset = Dataset.random(seed, rerandomize)
    found = goes_on_from(dataset, taken, 1040)
    assert len(set(found)) == 1040
    assert 0 <= min(found) < 2**28 < 2**31 < max(found) < 2**32


@pytest.mark.parametrize("seed", [None, 7])
def test_passes_of_random_numbers(seed):
    same, other = (Dataset.random(seed, each).take(20) for each in (False, True))
    assert first(same.take(20)) == first(same.take(20))
    assert plain(list(same)) == plain(list(same))
    assert plain(list(other)) != plain(list(other))
    for dataset, expected in ((same, 1), (other, 2)):
        twice = Dataset.range(2).flat_map(lambda _, dataset=dataset: dataset.take(9))
        found = first(twice, 18)
        assert len({tuple(found[:9]), tuple(found[9:])}) == expected


@pytest.mark.parametrize("rerandomize", [False, True])
def test_a_state_has_the_randomness_of_its_pass(rerandomize):
    with iter(Dataset.random(None, rerandomize)) as elements:
        next(elements)
        state, rest = elements.get_state(), plain([next(elements) for _ in range(9)])
    with iter(Dataset.random(None, rerandomize)) as elements:  # as in another run
        elements.set_state(state)
        assert plain([next(elements) for _ in range(9)]) == rest


def test_runs_repeat_what_has_a_seed():
    for rerandomize in (False, True):
        one, other, third = (Dataset.random(seed, rerandomize).take(20) for seed in (1, 1, 2))
        for _ in range(2):
            numbers = plain(list(one))
            assert plain(list(other)) == numbers != plain(list(third))
    assert first(Dataset.random()) != first(Dataset.random())


def test_random_numbers_are_alike():
    numbers = np.array(first(Dataset.random(seed=0), 20_000))
    counts = np.bincount(numbers >> 28, minlength=16)
    assert len(counts) == 16
    assert 1100 < counts.min() < counts.max() < 1400


def test_random_says_of_itself():
    assert Dataset.random().cardinality() == -1
    assert Dataset.random().element_spec == ArraySpec((), np.int64)
    assert repr(Dataset.random(3)) == "<Dataset random(3, False)>"
    with pytest.raises(ValueError, match="a seed cannot be negative: -1"):
        Dataset.random(-1)


# Of a service

SOURCES = {"counter": Dataset.counter(5, 3), "random": Dataset.random(seed=5)}


@pytest.mark.parametrize("name", SOURCES)
def test_workers_share_them(make_service, name):
    remote = SOURCES[name].apply(distribute("distributed_epoch", make_service(3).target))
    assert remote.cardinality() == -1
    found = [int(number) for number in remote.take(500)]
    assert len(set(found)) == len(found)
    known = [int(number) for number in SOURCES[name].take(20_000)]
    assert set(found) <= set(known)


@pytest.mark.parametrize("name", SOURCES)
def test_the_first_ones_are_a_part(make_service, name):
    remote = SOURCES[name].take(900).apply(distribute("distributed_epoch", make_service(2).target))
    assert sorted(plain(list(remote))) == sorted(plain(list(SOURCES[name].take(900))))


@pytest.mark.parametrize("name", SOURCES)
def test_every_worker_makes_its_copy(make_service, name):
    remote = SOURCES[name].take(50).apply(distribute("parallel_epochs", make_service(2).target))
    assert sorted(plain(list(remote))) == sorted(plain(list(SOURCES[name].take(50))) * 2)


@pytest.mark.parametrize("name", SOURCES)
def test_states_of_a_service(make_service, name):
    def elements():
        target = make_service(2).target
        apply = distribute("distributed_epoch", target, deterministic=True, num_shards=3)
        return iter(SOURCES[name].apply(apply))

    with elements() as before:
        found = [next(before) for _ in range(20)]
        state = before.get_state()
    with elements() as after:
        after.set_state(state)
        found += [next(after) for _ in range(20)]
    assert plain(found) == plain(list(SOURCES[name].take(40)))


LET_THROUGH = SimpleNamespace(left=0)


def is_let_through(x):
    LET_THROUGH.left -= 1
    return LET_THROUGH.left >= 0


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("policy", [ShardingPolicy.DYNAMIC, ShardingPolicy.OFF])
def test_workers_end_the_repetition_after_a_pass_without_elements(make_service, policy, workers):
    LET_THROUGH.left = 8
    target = make_service(workers).target
    dataset = Dataset.range(8).filter(is_let_through).repeat().apply(distribute(policy, target))
    assert len(list(dataset)) == 8


def test_a_worker_that_got_nothing_of_a_pass_goes_on(make_service):
    """Each pass is one element, which one of the three workers gets."""
    target = make_service(3).target
    dataset = Dataset.range(1).repeat().apply(distribute(ShardingPolicy.DYNAMIC, target))
    with iter(dataset) as elements:
        assert [int(next(elements)) for _ in range(50)] == [0] * 50
