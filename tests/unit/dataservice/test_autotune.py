"""Numbers that need not be given, and elements that interleave makes ahead."""

import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import AUTOTUNE, Dataset, distribute


def values(dataset):
    return [int(element) for element in dataset]


def test_it_is_tensorflows_number():
    assert AUTOTUNE == -1


def test_map_works_on_as_many_as_there_are_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 5, 7})
    together = threading.Barrier(3)

    def meet(x):
        together.wait(20)
        return x

    dataset = Dataset.range(6).map(meet, num_parallel_calls=AUTOTUNE)
    assert dataset.node.summary() == Dataset.range(6).map(meet, np.int64(-1)).node.summary()
    assert values(dataset) == list(range(6))


def test_a_state_fits_another_number_of_cores(monkeypatch):
    dataset = Dataset.range(40).map(abs, num_parallel_calls=AUTOTUNE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    with iter(dataset) as elements:
        assert values(itertools.islice(elements, 5)) == list(range(5))
        state = elements.get_state()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    with iter(dataset) as elements:
        elements.set_state(state)
        assert values(elements) == list(range(5, 40))


def test_map_in_processes():
    assert values(Dataset.range(4).map(abs, AUTOTUNE, processes=True)) == list(range(4))


def test_prefetch_makes_two_ahead():
    made = []
    third = threading.Event()

    def make(x):
        made.append(int(x))
        if x == 2:
            third.set()
        return x

    with iter(Dataset.range(9).map(make).prefetch(AUTOTUNE)) as elements:
        next(elements)
        assert third.wait(20)
        assert made == [0, 1, 2]


@pytest.mark.parametrize("size", [0, -2])
def test_other_numbers_are_refused(size):
    for make in (
        lambda: Dataset.range(3).prefetch(size),
        lambda: Dataset.range(3).map(abs, num_parallel_calls=size),
        lambda: Dataset.range(3).interleave(lambda x: x, size),
        lambda: Dataset.range(3).interleave(lambda x: x, 2, num_parallel_calls=size),
        lambda: Dataset.range(3).interleave(lambda x: x, 2, num_parallel_calls=3),
    ):
        with pytest.raises(ValueError, match=r"at least 1|from 1 to"):
            make()


# interleave


def slowly(size):
    return lambda n: Dataset.range(int(n) * 10, int(n) * 10 + size)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 7),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.data(),
)
def test_the_order_stays_and_so_do_states(count, size, cycle, block, data):
    calls = data.draw(st.sampled_from([AUTOTUNE, *range(1, cycle + 1)]))
    alone = Dataset.range(count).interleave(slowly(size), cycle, block)
    ahead = Dataset.range(count).interleave(slowly(size), cycle, block, calls)
    expected = values(alone)
    place = data.draw(st.integers(0, len(expected)))
    with iter(ahead) as elements, iter(ahead) as again:
        assert values(itertools.islice(elements, place)) == expected[:place]
        again.set_state(elements.get_state())
        assert values(elements) == values(again) == expected[place:]


def test_datasets_make_their_next_elements_at_once():
    together = threading.Barrier(3)

    def meet(x):
        if x >= 1:  # the first is made when a dataset's first turn comes
            together.wait(20)
        return x

    dataset = Dataset.range(3).interleave(
        lambda _: Dataset.range(2).map(meet), cycle_length=AUTOTUNE, num_parallel_calls=AUTOTUNE
    )
    assert values(dataset) == [0, 0, 0, 1, 1, 1]


def test_a_pass_that_is_dropped_leaves_no_thread(no_thread_is_left_behind):
    elements = iter(Dataset.range(9).interleave(slowly(5), 3, num_parallel_calls=2))
    assert values(itertools.islice(elements, 4)) == [0, 10, 20, 1]


def test_errors_come_in_their_places():
    def fail(x):
        if x == 11:
            raise ZeroDivisionError
        return x

    dataset = Dataset.range(2).interleave(lambda n: slowly(3)(n).map(fail), 2, 1, AUTOTUNE)
    assert values(dataset.ignore_errors()) == [0, 10, 1, 12, 2]


def test_on_a_worker(make_service):
    dataset = (
        Dataset.range(4)
        .interleave(slowly(3), AUTOTUNE, num_parallel_calls=AUTOTUNE)
        .map(abs, num_parallel_calls=AUTOTUNE)
        .prefetch(AUTOTUNE)
    )
    service = make_service(1)
    for mode in ("parallel_epochs", "distributed_epoch"):
        distributed = dataset.apply(distribute(mode, service.target))
        assert sorted(values(distributed)) == sorted(values(dataset))
