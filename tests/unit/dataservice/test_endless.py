"""Sources that never end."""

import itertools

import numpy as np
import pytest
from _cases.data_readers import goes_on_from, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import UnimplementedError

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


# Of a service

SOURCES = {"counter": Dataset.counter(5, 3)}


@pytest.mark.parametrize("name", SOURCES)
def test_one_worker_makes_them(make_service, name):
    remote = SOURCES[name].apply(distribute("distributed_epoch", make_service(3).target))
    assert plain(list(remote.take(50))) == plain(list(SOURCES[name].take(50)))
    assert remote.cardinality() == -1


@pytest.mark.parametrize("name", SOURCES)
def test_every_worker_makes_its_copy(make_service, name):
    remote = SOURCES[name].take(50).apply(distribute("parallel_epochs", make_service(2).target))
    assert sorted(plain(list(remote))) == sorted(plain(list(SOURCES[name].take(50))) * 2)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("options", [{}, {"deterministic": True, "num_shards": 3}])
def test_states_of_a_service(make_service, name, options):
    def elements():
        apply = distribute("distributed_epoch", make_service(2).target, **options)
        return iter(SOURCES[name].apply(apply))

    with elements() as before:
        found = [next(before) for _ in range(20)]
        state = before.get_state()
    with elements() as after:
        after.set_state(state)
        found += [next(after) for _ in range(20)]
    assert plain(found) == plain(list(SOURCES[name].take(40)))


@pytest.mark.parametrize("name", SOURCES)
def test_a_part_of_them_cannot_be_dealt_out(name):
    with pytest.raises(UnimplementedError, match="take to its own part"):
        SOURCES[name].take(9).apply(distribute("distributed_epoch", "localhost:1"))
