"""batch under 'distributed_epoch': batches are numbered, and dealt out whole."""

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from _cases.data_readers import MADE, counted
from _cases.dealt import Dealt, all_indices, context_of
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from mpidist.errors import InvalidArgumentError

MODE = "distributed_epoch"
SIZES = st.integers(1, 7)


def lists(batches):
    return [batch.tolist() for batch in batches]


@given(st.integers(0, 40), SIZES, st.booleans(), st.integers(1, 3), st.sampled_from([None, 2]))
def test_parts_have_the_batches_of_the_whole(length, size, drop, parts, calls):
    dataset = Dataset.range(length).map(counted, calls).batch(size, drop_remainder=drop)
    expected = lists(dataset)
    assert len(dataset) == len(expected) == dataset.node.source_length()
    for part in range(parts):
        MADE.clear()
        indices = all_indices(dataset.node)[part::parts]
        with dataset.node.iterate(context_of(dataset.node, indices)) as batches:
            assert lists(batches) == expected[part::parts]
        assert len(MADE) == sum(map(len, expected[part::parts]))


@pytest.mark.parametrize("calls", [None, 2])
def test_an_element_that_cannot_be_made_fails_its_batch_alone(calls, no_thread_is_left_behind):
    node = Dataset.range(11).map(lambda i: 12 // int(i - 4), calls).batch(3).ignore_errors().node
    context = context_of(node, all_indices(node))
    assert lists(node.iterate(context_of(node, all_indices(node)))) == [
        [-3, -4, -6],
        [6, 4, 3],
        [2, 2],
    ]
    with node.parent.iterate(context) as batches:
        next(batches)
        with pytest.raises(ZeroDivisionError):
            next(batches)
        assert lists(batches) == [[6, 4, 3], [2, 2]]


def test_elements_that_differ_fail_their_batch_alone():
    node = Dataset.range(9).map(lambda i: np.zeros(2 if i == 4 else 1)).batch(3).node
    context = context_of(node, all_indices(node))
    with node.iterate(context) as batches:
        next(batches)
        with pytest.raises(InvalidArgumentError, match="cannot batch"):
            next(batches)
        assert next(batches).shape == (3, 1)


def test_a_batch_that_failed_leaves_nothing():
    node = Dataset.range(6).map(lambda i: 1 // int(i)).batch(3).node
    context = context_of(node, all_indices(node))
    gc.collect()
    gc.disable()
    try:
        batches = node.iterate(context)
        watched = weakref.ref(batches)
        try:
            next(batches)
        except ZeroDivisionError:
            del batches
        assert watched() is None
    finally:
        gc.enable()


def test_what_is_ready_does_not_wait_for_the_next_split():
    asked, go = threading.Event(), threading.Event()

    class Slow(Dealt):
        def take(self, number):
            if number == 1:
                asked.set()
                assert go.wait(20)

    for make in (lambda d: d.prefetch(9).batch(2), lambda d: d.prefetch(9).shuffle(99, seed=1)):
        asked.clear()
        go.clear()
        node = make(Dataset.range(16)).node
        splits = [range(start, start + 4) for start in range(0, node.source_length(), 4)]
        with node.iterate(context_of(node, Slow(*splits))) as elements:
            first = [next(elements) for _ in range(4)]
            assert asked.wait(20)
            go.set()
            assert len(first + list(elements)) == node.source_length()


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_of_a_service_are_those_of_one_process(make_service, workers):
    target = make_service(workers).target
    dataset = Dataset.range(100).map(lambda i: i * 3, 2).batch(7)
    shared = dataset.apply(distribute(MODE, target))
    assert len(shared) == 15
    assert sorted(lists(shared)) == sorted(lists(dataset))
    fixed = dataset.apply(distribute(MODE, target, deterministic=True, num_shards=4))
    assert lists(fixed) == lists(dataset)
    part = dataset.take(5).apply(distribute(MODE, target))
    assert sorted(lists(part)) == sorted(lists(dataset))[:5]


def test_threads_that_read_ahead_of_each_other():
    every = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        node = Dataset.range(9).prefetch(3).shuffle(10, seed=1).shuffle(10, seed=6).node
        whole = list(node.iterate(context_of(node, all_indices(node))))
        for _ in range(300):
            with node.iterate(context_of(node, all_indices(node))) as elements:
                assert list(elements) == whole
    finally:
        sys.setswitchinterval(every)
