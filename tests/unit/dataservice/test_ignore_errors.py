"""Passes that go on after an error."""

import gc
import itertools
import logging
import os
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
from _cases.dealt import Dealt, context_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import Dataset
from dataservice.dataset.base import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    Failure,
    Scope,
    SplitsFailed,
)
from dataservice.dataset.dataset import DatasetIterator
from mpidist import task_metrics
from mpidist.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnknownError,
)


def fail_at(*numbers):
    def function(x):
        if int(x) in numbers:
            raise ZeroDivisionError(int(x))
        return x

    return function


def values(dataset):
    return [np.asarray(element).tolist() for element in dataset.ignore_errors()]


BAD = Dataset.range(12).map(fail_at(3, 7))
GOOD = [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (BAD, GOOD),
        (BAD.prefetch(1), GOOD),
        (BAD.prefetch(5).map(abs).prefetch(2), GOOD),
        (Dataset.range(12).map(fail_at(3, 7), num_parallel_calls=3), GOOD),
        (BAD.map(fail_at(5), num_parallel_calls=3), [x for x in GOOD if x != 5]),
        (Dataset.range(12).filter(fail_at(3, 7)), GOOD[1:]),
        (BAD.batch(2), [[0, 1], [4, 5], [8, 9], [10, 11]]),
        (BAD.batch(5, drop_remainder=True), []),
        (BAD.padded_batch(2), [[0, 1], [4, 5], [8, 9], [10, 11]]),
        (Dataset.range(6).map(lambda x: np.zeros(2 if x == 1 else 1)).batch(3), [[[0]] * 3]),
        (BAD.batch(2).unbatch(), [0, 1, 4, 5, 8, 9, 10, 11]),
        (BAD.window(2).flat_map(lambda w: w.batch(2)), [[0, 1], [4, 5], [8, 9], [10, 11]]),
        (BAD.bucket_by_sequence_length(fail_at(5), [1], [4, 9]), [[0], [1, 2, 4, 6, 8, 9, 10, 11]]),
        (BAD.shuffle(1), GOOD),
        (BAD.repeat(2), GOOD * 2),
        (BAD.take(5), GOOD[:4]),
        (BAD.skip(5), [5, 6, 8, 9, 10, 11]),
        (BAD.shard(3, 1), [1, 4, 10]),
        (BAD.enumerate().map(lambda i, x: x - i), [0] * 10),
        (BAD.cache(), GOOD),
        (BAD.concatenate(Dataset.range(2).map(fail_at(0))), [*GOOD, 1]),
        (Dataset.zip(BAD, Dataset.range(20)).map(lambda a, b: b - a), [0] * 10),
        (Dataset.zip(Dataset.range(20), BAD).map(lambda a, b: b - a), [0] * 10),
        (Dataset.zip(Dataset.range(20).map(fail_at(2)), Dataset.range(2)), [[0, 0], [1, 1]]),
        (Dataset.range(5).flat_map(lambda x: Dataset.range(fail_at(3)(x))), [0, 0, 1, 0, 1, 2, 3]),
        (BAD.flat_map(lambda x: Dataset.range(x, x + 1)), GOOD),
        (
            Dataset.choose_from_datasets(
                [BAD, Dataset.range(20, 30)], Dataset.from_source([0, 1, 5] * 4 + [0])
            ),
            [0, 20, 1, 21, 2, 22, 23, 4],
        ),
        (Dataset.from_source([1, {1}, 2]).map(lambda x: x + 1), [2, 3]),
    ],
)
def test_who_can_go_on(dataset, expected):
    assert values(dataset) == expected


def test_the_function_of_processes():
    dataset = Dataset.range(6).map(fail_at(3), num_parallel_calls=2, processes=True)
    with iter(dataset.ignore_errors()) as elements:
        assert [int(element) for element in elements] == [0, 1, 2, 4, 5]
        assert elements.ignored == 1


@pytest.mark.parametrize(
    "above", [lambda d: d.map(abs, num_parallel_calls=3), lambda d: d.prefetch(3)]
)
def test_errors_stay_in_their_places(above):
    with iter(above(Dataset.range(6).map(fail_at(2, 5)))) as elements:
        for expected in (0, 1, 2, 3, 4, 5):
            again = iter(above(Dataset.range(6).map(fail_at(2, 5))))
            again.set_state(elements.get_state())
            for each in (elements, again):
                if expected in (2, 5):
                    with pytest.raises(ZeroDivisionError, match=str(expected)):
                        next(each)
                else:
                    assert next(each) == expected
            again.close()


def test_a_process_that_ends():
    dataset = Dataset.range(4).map(
        lambda x: x if x != 1 else os._exit(3), num_parallel_calls=1, processes=True
    )
    with iter(dataset) as elements:
        next(elements)
        with pytest.raises(UnavailableError):
            next(elements)
        assert [int(element) for element in elements] == [2, 3]
    with iter(dataset.ignore_errors()) as elements:
        assert [int(element) for element in elements] == [0, 2, 3]


def test_lines_and_files(tmp_path):
    names = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for name, text in zip(names, ('1\n{"a\n2\n', "3\n", "4\n", "nonsense\n5"), strict=True):
        name.write_text(text)
    dataset = Dataset.from_files(names)
    names[1].unlink()
    assert values(dataset) == [1, 2, 4, 5]
    elements = iter(dataset)
    assert next(elements) == 1
    for error, following in ((DataLossError, 2), (NotFoundError, 4), (DataLossError, 5)):
        with pytest.raises(error):
            next(elements)
        state = elements.get_state()
        assert next(elements) == following
        again = iter(dataset)
        again.set_state(state)
        assert next(again) == following
        again.close()
    elements.close()


def test_a_file_that_fails_to_be_read_is_given_up(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("1\n2\n")
    dataset = Dataset.from_files(str(tmp_path / "*.txt"))
    from dataservice.dataset.readers import Lines

    read = Lines.read

    def fail(self):
        if self._path.endswith("a.txt") and self.place:
            raise OSError(5, "Input/output error")
        return read(self)

    monkeypatch.setattr(Lines, "read", fail)
    assert [str(line) for line in dataset.ignore_errors()] == ["1", "1", "2"]
    with pytest.raises(DataLossError, match=r"a\.txt' to its end: .*Input/output"):
        list(dataset)


def test_errors_of_other_iterators():
    class Numbers:
        def __init__(self):
            self._numbers = itertools.count()

        def __iter__(self):
            return self

        def __next__(self):
            number = next(self._numbers)
            if number in (2, 3):
                raise OSError(number)
            if number == 6:
                raise StopIteration
            return number

    dataset = Dataset.from_generator(Numbers)
    assert values(dataset) == [0, 1, 4, 5]
    elements = iter(dataset.ignore_errors())
    assert [next(elements) for _ in range(3)] == [0, 1, 4]
    again = iter(dataset.ignore_errors())
    again.set_state(elements.get_state())
    assert [int(element) for element in again] == [5]


def generate():
    yield 1
    raise OSError("gone")


@pytest.mark.parametrize(
    "above",
    [
        lambda d: d,
        lambda d: d.prefetch(3),
        lambda d: d.map(abs, num_parallel_calls=3),
        lambda d: d.repeat(),
        lambda d: d.prefetch(1).repeat().prefetch(9),
        lambda d: d.concatenate(Dataset.range(3)),
        lambda d: Dataset.zip(Dataset.range(9), d),
        lambda d: d.shuffle(5),
        lambda d: d.batch(2),
        lambda d: d.window(2),
        lambda d: Dataset.range(3).flat_map(lambda _: d),
        lambda d: d.ignore_errors(),
    ],
)
def test_a_generator_that_raised_ends_the_pass(above):
    with iter(above(Dataset.from_generator(generate)).ignore_errors()) as elements:
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                list(elements)


@pytest.mark.parametrize("above", [lambda d: d, lambda d: d.prefetch(4)])
def test_a_state_after_the_end_of_a_generator(above):
    dataset = above(Dataset.from_generator(generate))
    elements, again = iter(dataset), iter(dataset)
    with pytest.raises(OSError, match="gone"):
        list(elements)
    again.set_state(elements.get_state())
    for each in (elements, again):
        for _ in range(3):
            with pytest.raises(OSError, match="gone"):
                next(each)
        each.close()


@pytest.mark.parametrize(
    "above",
    [
        lambda d: d.map(fail_at(3), num_parallel_calls=2),
        lambda d: d.map(fail_at(3)).map(abs, num_parallel_calls=2),
        lambda d: d.map(fail_at(3)).prefetch(2),
        lambda d: (
            d.map(fail_at(3)).prefetch(2).map(abs, num_parallel_calls=2).ignore_errors(limit=0)
        ),
    ],
)
def test_a_pass_that_raised_and_is_dropped_is_in_no_circle(above, no_thread_is_left_behind):
    elements = iter(above(Dataset.range(9)))
    assert [int(next(elements)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(elements)


def generate_three():
    yield from range(3)
    raise OSError("gone")


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "above",
    [
        lambda d: d.prefetch(2),
        lambda d: d.prefetch(2).prefetch(2),
        lambda d: d.map(abs, num_parallel_calls=2),
        lambda d: d.map(abs, num_parallel_calls=2, deterministic=False),
        lambda d: d.prefetch(2).map(abs, num_parallel_calls=2),
        lambda d: d.map(abs, num_parallel_calls=2).prefetch(2).ignore_errors(),
    ],
)
def test_a_pass_that_cannot_go_on_is_collected(above, times):
    """Its error is raised again each time, and so is a part of a circle; no thread may hold it."""
    dropped = []

    def use():
        elements = iter(above(Dataset.from_generator(generate_three)))
        dropped.append(weakref.ref(elements._elements))
        for _ in range(times):
            with pytest.raises(OSError, match="gone"):
                list(elements)

    before = set(threading.enumerate())
    use()
    deadline = time.monotonic() + 20
    while dropped[0]() is not None:  # a thread may be about to end
        assert time.monotonic() < deadline
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


# Counts and limits


@pytest.mark.parametrize("ahead", [False, True])
def test_a_limit(ahead):
    dataset = BAD.prefetch(2) if ahead else BAD
    with iter(dataset.ignore_errors(limit=1)) as elements:
        assert [int(next(elements)) for _ in range(6)] == [0, 1, 2, 4, 5, 6]
        with pytest.raises(ZeroDivisionError, match="7") as caught:
            next(elements)
        assert "ignored 1 errors, which is its limit" in caught.value.__notes__[0]
        assert elements.ignored == 1
    assert [int(x) for x in dataset.ignore_errors(limit=2)] == GOOD
    with pytest.raises(ZeroDivisionError, match="3"):
        list(dataset.ignore_errors(limit=0))
    with pytest.raises(ValueError, match="limit"):
        dataset.ignore_errors(limit=-1)


def test_a_limit_is_of_one_pass():
    assert [int(x) for x in BAD.ignore_errors(limit=2).repeat(3)] == GOOD * 3
    with pytest.raises(ZeroDivisionError):
        list(BAD.repeat(3).ignore_errors(limit=2))


def test_the_count_of_a_pass():
    dataset = BAD.ignore_errors().repeat(2).map(fail_at(5)).prefetch(20).ignore_errors().batch(3)
    before = task_metrics("dataset", 0).values["ignored"]
    elements = iter(dataset)
    assert elements.ignored == 0
    list(elements)
    assert elements.ignored == 6
    assert task_metrics("dataset", 0).values["ignored"] == before + 6
    assert iter(dataset).ignored == 0
    assert isinstance(elements, DatasetIterator)


def test_the_count_is_a_part_of_the_state():
    dataset = BAD.ignore_errors(limit=1)
    elements = iter(dataset)
    assert [int(next(elements)) for _ in range(4)] == [0, 1, 2, 4]
    again = iter(dataset)
    again.set_state(elements.get_state())
    assert again.ignored == 1
    assert int(next(again)) == 5
    with pytest.raises(ZeroDivisionError):
        list(again)


def test_warnings(caplog):
    with caplog.at_level(logging.WARNING):
        list(BAD.ignore_errors())
        assert not caplog.records
        list(BAD.ignore_errors(log_warning=True))
    assert [record.getMessage().split(" drops ")[1] for record in caplog.records] == [
        "an element: ZeroDivisionError(3)",
        "an element: ZeroDivisionError(7)",
    ]
    assert "range" in caplog.records[0].getMessage()


# The rest


def test_what_it_says_of_its_elements():
    assert BAD.ignore_errors().cardinality() == UNKNOWN_CARDINALITY
    assert BAD.repeat().ignore_errors().cardinality() == INFINITE_CARDINALITY
    assert BAD.take(0).ignore_errors().cardinality() == 0
    assert BAD.batch(2).ignore_errors().element_spec.shape == (None,)
    first = Dataset.range(3).map(fail_at(0)).ignore_errors()
    assert first.element_spec.dtype == np.int64
    with pytest.raises(ValueError, match="no element"):
        Dataset.range(1).map(fail_at(0)).ignore_errors().element_spec  # noqa: B018


def test_it_is_divided_between_workers():
    assert BAD.ignore_errors().node.source_length() == 12
    node = BAD.ignore_errors().node
    before, after = (Dealt(range(6, 9), range(3, 5)) for _ in range(2))
    elements = node.iterate(context_of(node, before))
    assert [int(next(elements)) for _ in range(2)] == [6, 8]
    again = node.iterate(context_of(node, after))
    again.set_state(elements.get_state())
    assert before.marked == 3
    for each in (elements, again):
        assert [int(element) for element in each] == [4]
    elements.get_state()
    assert before.marked == 5


@pytest.mark.parametrize("above", [lambda d: d, lambda d: d.prefetch(2), lambda d: d.shuffle(9)])
def test_an_error_of_who_deals_out_the_source_is_not_ignored(above):
    class Lost(Dealt):
        def take(self, number):
            if number == 1:
                raise SplitsFailed(UnavailableError("the dispatcher is gone"))

    node = above(Dataset.range(9).map(fail_at(0))).ignore_errors().ignore_errors().node
    with (
        node.iterate(context_of(node, Lost(range(2)))) as elements,
        pytest.raises(SplitsFailed, match="gone"),
    ):
        list(elements)


def test_what_is_no_exception_is_not_ignored():
    def leave(x):
        raise SystemExit(3)

    for dataset in (Dataset.range(2).map(leave), Dataset.range(2).map(leave).prefetch(1)):
        with iter(dataset.ignore_errors()) as elements, pytest.raises(SystemExit):
            next(elements)


def test_an_endless_pass_without_elements_can_be_given_up():
    calls = []
    scope = Scope()

    def fail(x):
        calls.append(x)
        if len(calls) == 5:
            scope.close()
        raise OSError

    node = Dataset.range(3).map(fail).repeat().ignore_errors().node
    assert list(node.iterate(Context((0,), scope=scope))) == []
    assert len(calls) == 5


def test_errors_do_not_keep_what_they_met_alive():
    def errors():
        return [each for each in gc.get_objects() if type(each) is ZeroDivisionError]

    gc.collect()
    gc.disable()
    try:
        before = errors()
        elements = iter(Dataset.range(99).map(fail_at(*range(50))).ignore_errors())
        assert next(elements) == 50
        assert not [each for each in errors() if not any(each is one for one in before)]
    finally:
        gc.enable()


def test_a_cache_file_without_what_cannot_be_kept(tmp_path):
    import threading

    dataset = Dataset.range(4).map(lambda x: x if x != 2 else threading.Lock())
    kept = dataset.cache(str(tmp_path / "cache")).ignore_errors()
    for _ in range(2):
        with iter(kept) as elements:
            assert [int(element) for element in elements] == [0, 1, 3]


class _TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def test_failures_travel():
    error = pickle.loads(pickle.dumps(Failure(InvalidArgumentError("so")))).error
    assert (type(error), str(error)) == (InvalidArgumentError, "so")
    error = pickle.loads(pickle.dumps(Failure(_TwoArguments("so", 1)))).error
    assert type(error) is UnknownError
    assert str(error).startswith("_TwoArguments: so (_TwoArguments itself cannot be pickled")


STEPS = st.sampled_from(
    [
        lambda d: d.map(fail_at(2, 5)),
        lambda d: d.map(fail_at(6), num_parallel_calls=2),
        lambda d: d.filter(fail_at(4, 8)),
        lambda d: d.shuffle(3, seed=1),
        lambda d: d.repeat(2),
        lambda d: d.skip(1),
        lambda d: d.prefetch(1),
        lambda d: d.prefetch(3),
        lambda d: d.batch(2).unbatch(),
        lambda d: d.window(2).flat_map(lambda w: w),
        lambda d: d.concatenate(Dataset.range(9)),
        lambda d: Dataset.zip(d, d.map(fail_at(9))).map(lambda a, b: a + b),
        lambda d: d.interleave(lambda x: Dataset.range(int(x) % 5).map(fail_at(3)), 2),
        lambda d: d.ignore_errors(),
    ]
)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 12), st.lists(STEPS, max_size=5), st.integers(0, 30))
def test_the_rest_and_its_errors_are_what_they_would_have_been(count, steps, place):
    dataset = Dataset.range(count)
    for step in steps:
        dataset = step(dataset)
    whole, elements = (iter(dataset.ignore_errors().take(99)) for _ in range(2))
    whole.set_state(elements.get_state())  # passes are numbered
    given_before = list(itertools.islice(elements, place))
    again = iter(dataset.ignore_errors().take(99))
    again.set_state(elements.get_state())
    rest = [int(element) for element in again]
    assert [int(element) for element in elements] == rest
    assert [int(element) for element in whole] == [*map(int, given_before), *rest]
    if not place:
        assert whole.ignored == elements.ignored
    for each in (whole, elements, again):
        each.close()
