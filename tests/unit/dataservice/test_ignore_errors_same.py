"""Passes that go on after an error that is one and the same object for several elements."""

import itertools

import numpy as np
import pytest
from _cases.dealt import all_indices, context_of

from dataservice import Dataset

THE_ERROR = OSError("always the same")


def fail_the_same_at(*numbers):
    def function(x):
        if int(x) in numbers:
            raise THE_ERROR
        return x

    return function


SAME = Dataset.range(9).map(fail_the_same_at(2, 3, 4, 7, 8))
OTHERS = [0, 1, 5, 6]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (SAME, OTHERS),
        (SAME.prefetch(1), OTHERS),
        (SAME.prefetch(9).map(abs, num_parallel_calls=2).prefetch(2), OTHERS),
        (Dataset.range(9).map(fail_the_same_at(2, 3, 4, 7, 8), num_parallel_calls=3), OTHERS),
        (Dataset.range(9).filter(fail_the_same_at(0, *range(3, 9))), [1, 2]),
        (Dataset.from_source(range(9)).map(fail_the_same_at(*range(8))), [8]),
        (Dataset.from_generator(range, (9,)).map(fail_the_same_at(*range(8))), [8]),
        (Dataset.range(9).batch(2).map(lambda b: fail_the_same_at(0, 2, 4)(b[0])), [6, 8]),
        (SAME.batch(2), [[0, 1]]),
        (SAME.repeat(2), OTHERS * 2),
        (SAME.concatenate(SAME), OTHERS * 2),
        (Dataset.zip(SAME, Dataset.range(9)).map(lambda a, b: b), OTHERS),
        (
            Dataset.range(9).flat_map(lambda x: Dataset.range(fail_the_same_at(2, 3, 4)(x), 7)),
            [*range(7), *range(1, 7), 5, 6, 6],
        ),
        (Dataset.range(2).interleave(lambda _: SAME, 2), [0, 0, 1, 1, 5, 5, 6, 6]),
        (SAME.cache(), OTHERS),
        (SAME.take_while(lambda x: x < 6), [0, 1, 5]),
        (Dataset.range(9).take_while(lambda x: fail_the_same_at(2, 3, 4)(x) < 6), [0, 1, 5]),
        (Dataset.range(9).scan(0, lambda n, x: (fail_the_same_at(*range(8))(x), x)), [8]),
        (SAME.unique(), OTHERS),
        (SAME.batch(2).rebatch(1), [[0], [1]]),
        (
            Dataset.range(3).group_by_window(lambda x: 0, lambda key, group: SAME, 3),
            OTHERS,
        ),
        (
            Dataset.range(9).group_by_window(
                fail_the_same_at(*range(8)), lambda _, group: group, 3
            ),
            [8],
        ),
        (SAME.ignore_errors(limit=3), [0, 1, 5, 6]),
        (SAME.shuffle(1), OTHERS),
    ],
)
def test_a_function_that_raises_the_same_error_of_several_elements(dataset, expected):
    with iter(dataset.ignore_errors()) as elements:
        assert [np.asarray(element).tolist() for element in elements] == expected


def test_an_iterator_that_cannot_go_on_below_a_function_that_raises_the_same():
    own_error = OSError("of the iterator")

    class Broken:
        def __init__(self):
            self._numbers = itertools.count()

        def __iter__(self):
            return self

        def __next__(self):
            number = next(self._numbers)
            if number >= 6:
                raise own_error
            return number

    for above in (lambda d: d, lambda d: d.prefetch(3), lambda d: d.map(abs, 2)):
        dataset = above(Dataset.from_generator(Broken).map(fail_the_same_at(2, 3)))
        elements = iter(dataset.ignore_errors())
        assert [int(next(elements)) for _ in range(4)] == [0, 1, 4, 5]
        for _ in range(2):
            with pytest.raises(OSError, match="of the iterator"):
                next(elements)
        elements.close()


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        (lambda d: d, [0, 1, 2, 3, 9, 10, 11]),
        (lambda d: d.prefetch(2).map(abs, 2), [0, 1, 2, 3, 9, 10, 11]),
        (lambda d: d.batch(2).map(lambda b: b[0]), [0, 2, 10]),
        (lambda d: d.window(2, 1).flat_map(lambda w: w.take(1)), [0, 1, 2, 9, 10, 11]),
        (lambda d: d.prefetch(2).shuffle(20, seed=1), [0, 1, 2, 3, 9, 10, 11]),
        (lambda d: d.cache(), [0, 1, 2, 3, 9, 10, 11]),
        (
            lambda d: Dataset.sample_from_datasets([d, d], [1.0, 0.0], seed=1),
            [0, 1, 2, 3, 9, 10, 11],
        ),
    ],
)
def test_a_function_that_raises_the_same_on_workers(above, expected):
    dataset = above(Dataset.range(12).map(fail_the_same_at(*range(4, 9))))
    node = dataset.ignore_errors().node
    with node.iterate(context_of(node, all_indices(node))) as elements:
        assert sorted(map(int, elements)) == expected
