"""batch under 'distributed_epoch': batches are numbered, and dealt out whole."""

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from _cases.data_readers import MADE, counted
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from dataservice.dataset import runs
from dataservice.dataset.context import Context
from dataservice.dataset.runs import Remembered
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
    """Splits of four batches each, of which one cannot be had at first."""

    def __init__(self, indices, missing):
        self.indices, self.missing = indices, missing

    def __call__(self, passes):
        return self

    def split(self, number):
        if number == self.missing:
            self.missing = None
            raise UnavailableError("no dispatcher")
        return self.indices[4 * number : 4 * number + 4]

    def mark(self, number):
        pass


PIPELINES = {
    "batch": lambda d: d.batch(2),
    "prefetch and batch": lambda d: d.prefetch(9).batch(2),
    "batches of batches": lambda d: d.map(abs, 2).batch(2).batch(2),
    "batches of what is ahead": lambda d: d.prefetch(9).batch(2).prefetch(9).batch(1),
    "shuffled batches": lambda d: d.map(abs, 2).batch(2).shuffle(99, seed=1),
    "shuffled twice": lambda d: d.prefetch(9).shuffle(99, 1).prefetch(9).shuffle(99, 2),
    "numbers": lambda d: d.map(abs, 3).enumerate().batch(1),
    "a zip": lambda d: Dataset.zip(d.prefetch(9), d).batch(2),
    "windows": lambda d: d.prefetch(9).window(2).map(lambda window: list(map(int, window))),
    "windows of batches": lambda d: d.map(abs, 2).batch(2).window(2).map(lambda w: len(list(w))),
    "a mixture": lambda d: Dataset.sample_from_datasets([d.map(abs, 2).batch(2), d], seed=1),
    "concatenates": lambda d: d.map(abs, 2).concatenate(d.prefetch(3)).batch(1),
    "parts of concatenates": lambda d: d.skip(3).concatenate(d.take(7)).shard(2, 1).batch(3),
    "windows of a concatenate": lambda d: (
        d.concatenate(d.take(7))
        .window(2, 2)
        .map(lambda window: np.array([*window, -1][:2]))
        .batch(1)
    ),
    "what is kept": lambda d: d.map(abs, 2).batch(2).cache().batch(2),
}


@pytest.mark.parametrize("missing", range(3))
@pytest.mark.parametrize("name", PIPELINES)
def test_splits_that_could_not_be_had_are_asked_for_again(name, missing, no_thread_is_left_behind):
    node = PIPELINES[name](Dataset.range(32)).node
    deal = Unreachable(node.source_indices(), missing)
    found, failed = [], 0
    with node.iterate(Context((1,), (0,), deal)) as elements:
        while True:
            try:
                found.append(str(next(elements)))
            except StopIteration:
                break
            except UnavailableError:
                failed += 1
    whole = node.iterate(Context((1,), (0,), lambda passes: Whole(node.source_indices())))
    assert found == [str(element) for element in whole]
    assert failed == 1 or (failed == 0 and 4 * missing >= len(node.source_indices()))


def test_what_is_ready_does_not_wait_for_the_next_split():
    asked, go = threading.Event(), threading.Event()

    class Slow(Unreachable):
        def split(self, number):
            if number == 1:
                asked.set()
                assert go.wait(20)
            return super().split(number)

    for make in (lambda d: d.prefetch(9).batch(2), lambda d: d.prefetch(9).shuffle(99, seed=1)):
        asked.clear()
        go.clear()
        node = make(Dataset.range(16)).node
        with node.iterate(Context((1,), (0,), Slow(node.source_indices(), None))) as elements:
            first = [next(elements) for _ in range(4)]
            assert asked.wait(20)
            go.set()
            assert len(first + list(elements)) == len(node.source_indices())


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.batch(1).shuffle(4000, seed=1),
        lambda d: d.shuffle(4000, 1).shuffle(4000, 2),
        lambda d: d.batch(2).batch(1).enumerate(),
        lambda d: Dataset.sample_from_datasets([d.batch(1), d.shuffle(4000, 1)], seed=1),
    ],
)
def test_nothing_is_held_of_splits_that_have_been_read(make, monkeypatch):
    made = []

    class Counted(Remembered):
        def __init__(self, splits):
            super().__init__(splits)
            made.append(self)

    monkeypatch.setattr(runs, "Remembered", Counted)
    node = make(Dataset.range(4000)).node
    deal = Unreachable(node.source_indices(), None)
    with node.iterate(Context((1,), (0,), deal)) as elements:
        for _ in range(1500):
            next(elements)
    assert made
    assert max(len(splits._known) for splits in made) < 40


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


def test_a_concatenate_that_has_come_to_its_end_ahead_of_its_reader():
    node = PIPELINE_AHEAD.node
    splits = [range(start, start + 2) for start in range(0, 12, 2)]
    deal = Marked(splits)
    before = node.iterate(Context((1,), (0,), deal))
    found = [next(before)]
    for thread in threading.enumerate():
        if thread.name == "dataservice-prefetch":
            thread.join(20)  # it ends when what is below has
    state = before.get_state()
    before.close()
    deal.first = deal.marked
    with node.iterate(Context((1,), (0,), deal)) as after:
        after.set_state(state)
        found += list(after)
    assert found == [0, 1, 2, 10, 11, 12, *range(20, 26)]


PIPELINE_AHEAD = (
    Dataset.range(3)
    .concatenate(Dataset.range(10, 13))
    .prefetch(20)
    .concatenate(Dataset.range(20, 26))
)


class Marked:
    """Splits, none of which may be asked for once it has been left behind."""

    def __init__(self, splits):
        self.splits, self.first, self.marked = splits, 0, 0

    def __call__(self, passes):
        return self

    def split(self, number):
        assert number >= self.first
        return self.splits[number] if number < len(self.splits) else range(0)

    def mark(self, number):
        self.marked = number


@pytest.mark.parametrize(
    "make",
    [
        lambda d: Dataset.zip(d.prefetch(2).batch(2), d.map(abs, 2)).batch(2),
        lambda d: d.map(abs, 4).batch(2).map(lambda batch: batch * 2, 2).batch(1),
        lambda d: d.prefetch(2).shuffle(100, 1).prefetch(2).shuffle(100, 2),
        lambda d: Dataset.sample_from_datasets([d.prefetch(2), d.map(abs, 2)], seed=1).batch(2),
    ],
)
def test_a_pass_that_is_dropped_after_a_failure_that_nobody_saw(make, no_thread_is_left_behind):
    node = make(Dataset.range(100)).node
    deal = Unreachable(node.source_indices(), 2)
    elements = node.iterate(Context((1,), (0,), deal))
    for _ in range(4):
        next(elements)
    while deal.missing is not None:  # those who read ahead have been told
        try:
            next(elements)
        except UnavailableError:
            continue
    watched = weakref.ref(elements)
    del elements
    assert watched() is None


def test_splits_are_forgotten_while_others_ask():
    every = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        node = Dataset.range(9).prefetch(3).shuffle(10, seed=1).shuffle(10, seed=6).node
        context = Context((1,), (0,), lambda passes: Whole(node.source_indices()))
        whole = list(node.iterate(context))
        for _ in range(300):
            with node.iterate(context) as elements:
                assert list(elements) == whole
    finally:
        sys.setswitchinterval(every)
