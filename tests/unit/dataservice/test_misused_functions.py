"""User functions with results that do not fit the transformation."""

import numpy as np
import pytest

from dataservice import Dataset
from mpidist.errors import InvalidArgumentError


def forgets(i):
    """Return nothing."""


@pytest.mark.parametrize(
    "more", [{}, {"num_parallel_calls": 2}, {"num_parallel_calls": 1, "processes": True}]
)
def test_a_function_of_map_that_gives_nothing(more):
    with pytest.raises(InvalidArgumentError, match="function forgets given to map returned None"):
        list(Dataset.range(2).map(forgets, **more))


def test_a_generator_that_gives_nothing():
    def gives_nothing():
        yield 1
        yield None
        yield 2

    dataset = Dataset.from_generator(gives_nothing)
    with pytest.raises(InvalidArgumentError, match="gives_nothing returned None"):
        list(dataset)
    assert list(dataset.ignore_errors()) == [1, 2]


ANSWERS = [True, np.True_, np.array(True), 1, np.uint8(3), np.array(2)]


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_of_a_predicate(answer):
    assert len(list(Dataset.range(2).filter(lambda i: answer))) == 2
    assert list(Dataset.range(2).filter(lambda i: answer * 0)) == []


@pytest.mark.parametrize(
    "answer", [None, "no", b"", [], [[1], [1, 2]], np.array([True]), np.array([]), 1.0, object()]
)
def test_answers_that_are_no_bool(answer):
    dataset = Dataset.range(2).filter(lambda i: answer)
    with pytest.raises(InvalidArgumentError, match=r"given to filter returned .* return a bool"):
        list(dataset)


@pytest.mark.parametrize("choice", [0.0, 0.7, "0", b"0", np.array([0]), np.True_, (0, 1)])
def test_choices_that_are_no_whole_numbers(choice):
    dataset = Dataset.choose_from_datasets([Dataset.range(2)], Dataset.from_source([choice]))
    with pytest.raises(InvalidArgumentError, match="is not a whole number"):
        list(dataset)


def test_choices_that_are_whole_numbers():
    choices = Dataset.from_source([np.uint8(0), np.array(1), 0, np.int64(1)])
    parents = [Dataset.range(2), Dataset.range(5, 7)]
    assert list(Dataset.choose_from_datasets(parents, choices)) == [0, 5, 1, 6]
