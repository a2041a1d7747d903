"""Dataset.with_options and Options."""

import copy
import itertools
import pickle
import threading

import pytest

from dataservice import AUTOTUNE, Dataset, Options, distribute


def options(deterministic=None, threads=None):
    result = Options()
    result.deterministic = deterministic
    result.threading.private_threadpool_size = threads
    return result


def test_only_options_with_an_effect_exist():
    given = Options()
    known = "those with an effect here are deterministic, threading"
    with pytest.raises(AttributeError, match=f"Options has no option 'autotune': {known}"):
        given.autotune.enabled = False
    with pytest.raises(AttributeError, match=f"no option 'experimental_slack': {known}"):
        given.experimental_slack = True
    with pytest.raises(AttributeError, match="effect here are private_threadpool_size"):
        given.threading.max_intra_op_parallelism = 1


@pytest.mark.parametrize("wrong", [1, "False", 0.0])
def test_wrong_values(wrong):
    given = Options()
    with pytest.raises(TypeError, match="deterministic must be True, False or None"):
        given.deterministic = wrong
    with pytest.raises(TypeError, match="threading must be ThreadingOptions"):
        given.threading = wrong
    with pytest.raises(TypeError, match="needs Options as options"):
        Dataset.range(3).with_options(wrong)
    with pytest.raises(TypeError, match="whole number as private_threadpool_size"):
        given.threading.private_threadpool_size = 1.5
    with pytest.raises(ValueError, match="at least 0, not -2"):
        given.threading.private_threadpool_size = -2
    assert given == Options()


def test_options_can_be_copied_and_pickled():
    given = options(False, 3)
    assert copy.deepcopy(given) == pickle.loads(pickle.dumps(given)) == given != options(False, 4)
    assert repr(given) == (
        "Options(deterministic=False, threading=ThreadingOptions(private_threadpool_size=3))"
    )
    with pytest.raises(TypeError, match="unhashable"):
        hash(given)


def test_options_are_those_of_the_datasets_it_was_made_of():
    given = options(False)
    dataset = Dataset.range(4).with_options(given)
    given.deterministic = True
    dataset.options().deterministic = True
    assert dataset.options() == options(False)
    assert Dataset.range(4).options() == Options()
    assert dataset.batch(2).repeat().options() == options(False)
    assert pickle.loads(pickle.dumps(dataset)).options() == options(False)
    again = dataset.with_options(options(threads=2))
    assert again.options() == options(False, 2)
    assert again.with_options(options(True)).options() == options(True, 2)

    other = Dataset.range(4).with_options(options(threads=5))
    choices = Dataset.range(2).with_options(options(True))
    for both in (
        Dataset.zip(dataset, other),
        Dataset.zip({"a": dataset, "b": (other,)}),
        dataset.concatenate(other),
        Dataset.sample_from_datasets(iter([dataset, other])),
    ):
        assert both.options() == options(False, 5)
    chosen = Dataset.choose_from_datasets([dataset, other], choices)
    assert chosen.options() == options(True, 5)


class Late:
    """A function whose call for 0 ends after that for 1, or after the test says so."""

    def __init__(self, released=None):
        self.begun = threading.Event()
        self.released = released or self.begun

    def __call__(self, i):
        if i == 1:
            self.begun.set()
        if i == 0:
            assert self.released.wait(20)
        return i


@pytest.mark.parametrize("after", [False, True])
def test_the_order_of_map(after):
    def elements(function, given, **arguments):
        dataset = Dataset.range(4) if after else Dataset.range(4).with_options(given)
        dataset = dataset.map(function, num_parallel_calls=2, **arguments)
        return iter(dataset.with_options(given).skip(0) if after else dataset)

    def order(given, **arguments):
        return list(elements(Late(), given, **arguments))

    def order_of_ends(given, **arguments):
        released = threading.Event()
        with elements(Late(released), given, **arguments) as found:
            first = [next(found)]
            released.set()
            return first + list(found)

    assert order_of_ends(options(False))[0] != 0
    assert sorted(order(options(False))) == [0, 1, 2, 3]
    assert order(options(False), deterministic=True) == [0, 1, 2, 3]
    assert order_of_ends(options(True), deterministic=False)[0] != 0
    for given in (options(True), options()):
        assert order(given) == [0, 1, 2, 3]


class Concurrency:
    """A function that counts how many calls run at once."""

    def __init__(self, expected):
        self.most = self.now = 0
        self._lock = threading.Lock()
        self._together = threading.Barrier(expected)

    def __call__(self, i):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._together.wait(20)
        with self._lock:
            self.now -= 1
        return i


@pytest.mark.parametrize(
    ("calls", "threads", "expected"),
    [(6, 3, 3), (AUTOTUNE, 3, 3), (2, 3, 2), (4, None, 4), (4, 0, 4)],
)
def test_the_threads_of_map(calls, threads, expected):
    function = Concurrency(expected)
    dataset = Dataset.range(12).map(function, num_parallel_calls=calls)
    assert list(dataset.batch(2).unbatch().with_options(options(threads=threads))) == [*range(12)]
    assert function.most == expected


def test_the_threads_of_interleave():
    def prefetching():
        return sum(thread.name == "dataservice-prefetch" for thread in threading.enumerate())

    dataset = Dataset.range(6).interleave(
        lambda i: Dataset.range(i, i + 3), cycle_length=6, num_parallel_calls=AUTOTUNE
    )
    expected = list(dataset)
    limited = dataset.with_options(options(threads=2))
    before = prefetching()
    with iter(limited) as elements:
        first = list(itertools.islice(elements, 6))
        assert prefetching() - before <= 2
        assert [*first, *elements] == expected


def test_a_dataset_that_is_used_twice_stays_one():
    calls = []

    def note(i):
        calls.append(i)
        return i

    cached = Dataset.range(3).map(note, num_parallel_calls=2).cache()
    both = cached.concatenate(cached).with_options(options(threads=1))
    assert list(both) == [0, 1, 2] * 2
    assert sorted(calls) == [0, 1, 2]


def test_options_that_change_nothing_leave_the_description():
    dataset = Dataset.range(3).map(abs).batch(2)
    assert dataset.with_options(options(False, 4)).node is dataset.node


def test_workers_get_the_description_with_options(make_service):
    dataset = Dataset.range(4).map(abs, num_parallel_calls=4).with_options(options(threads=2))
    there = dataset.apply(distribute("distributed_epoch", make_service(1).target))
    assert there.node.parent.calls == 2
    assert sorted(there) == [0, 1, 2, 3]


def test_options_after_distribute_leave_the_job(make_service):
    dataset = Dataset.range(6).map(abs, num_parallel_calls=4)
    there = dataset.apply(distribute("parallel_epochs", make_service(1).target, job_name="job"))
    limited = there.map(abs, num_parallel_calls=4).with_options(options(False, 1))
    assert limited.node.parent is there.node
    assert limited.node.calls == 1
    assert sorted(limited) == [*range(6)]
