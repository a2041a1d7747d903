"""batch under 'distributed_epoch': batches are numbered, and dealt out whole."""

import gc
import weakref

import numpy as np
import pytest
from _cases.data_readers import MADE, counted
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from dataservice.dataset.node import Context
from dataservice.dataset.source import Whole
from mpidist.errors import InvalidArgumentError, UnavailableError

MODE = "distributed_epoch"
SIZES = st.integers(1, 7)


def lists(batches):
    return [batch.tolist() for batch in batches]


@given(st.integers(0, 40), SIZES, st.booleans(), st.integers(1, 3), st.sampled_from([None, 2]))
def test_parts_have_the_batches_of_the_whole(length, size, drop, parts, calls):
    dataset = Dataset.range(length).map(counted, calls).batch(size, drop_remainder=drop)
    expected = lists(dataset)
    assert len(dataset) == len(expected) == len(dataset.node.source_indices())
    for part in range(parts):
        MADE.clear()
        indices = dataset.node.source_indices()[part::parts]
        context = Context((1,), (0,), lambda passes, indices=indices: Whole(indices))
        with dataset.node.iterate(context) as batches:
            assert lists(batches) == expected[part::parts]
        assert len(MADE) == sum(map(len, expected[part::parts]))


@pytest.mark.parametrize("calls", [None, 2])
def test_an_element_that_cannot_be_made_fails_its_batch_alone(calls, no_thread_is_left_behind):
    node = Dataset.range(11).map(lambda i: 12 // int(i - 4), calls).batch(3).ignore_errors().node
    context = Context((1,), (0,), lambda passes: Whole(node.source_indices()))
    assert lists(node.iterate(context)) == [[-3, -4, -6], [6, 4, 3], [2, 2]]
    with node.parent.iterate(context) as batches:
        next(batches)
        with pytest.raises(ZeroDivisionError):
            next(batches)
        assert lists(batches) == [[6, 4, 3], [2, 2]]


def test_elements_that_differ_fail_their_batch_alone():
    node = Dataset.range(9).map(lambda i: np.zeros(2 if i == 4 else 1)).batch(3).node
    context = Context((1,), (0,), lambda passes: Whole(node.source_indices()))
    with node.iterate(context) as batches:
        next(batches)
        with pytest.raises(InvalidArgumentError, match="cannot batch"):
            next(batches)
        assert next(batches).shape == (3, 1)


def test_a_batch_that_failed_leaves_nothing():
    node = Dataset.range(6).map(lambda i: 1 // int(i)).batch(3).node
    context = Context((1,), (0,), lambda passes: Whole(node.source_indices()))
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


class Unreachable:
    """Splits of which the second cannot be had at first."""

    def __init__(self):
        self.failures = 1

    def __call__(self, passes):
        return self

    def split(self, number):
        if number == 1 and self.failures:
            self.failures -= 1
            raise UnavailableError("no dispatcher")
        return (range(2), range(2, 4), range(0))[number]

    def mark(self, number):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.prefetch(9).batch(2),
        lambda d: d.batch(2),
        lambda d: d.prefetch(9).window(2).flat_map(lambda window: window.batch(2)),
    ],
)
def test_splits_that_could_not_be_had_are_asked_for_again(make, no_thread_is_left_behind):
    found, failed = [], 0
    with make(Dataset.range(8)).node.iterate(Context((1,), (0,), Unreachable())) as batches:
        while True:
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                break
            except UnavailableError:
                failed += 1
    assert (found, failed) == ([[0, 1], [2, 3], [4, 5], [6, 7]], 1)


@pytest.mark.parametrize("calls", [None, 2])
def test_a_long_pass_holds_no_list_of_what_it_has_read(calls):
    node = Dataset.range(4000).map(abs, calls).batch(2).node
    context = Context((1,), (0,), lambda passes: Whole(node.source_indices()[::2]))
    with node.iterate(context) as batches:
        for _ in range(900):
            next(batches)
        assert len(batches._chosen._runs._runs) < 100


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
