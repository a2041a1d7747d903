"""Reading datasets of a data service."""

import pickle
from contextlib import ExitStack, contextmanager
from itertools import islice

import cloudpickle
import numpy as np


@contextmanager
def reading(*datasets):
    """Iterators over datasets, closed at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(iter(dataset)) for dataset in datasets]


def read(elements, count):
    return [next(elements) for _ in range(count)]


def numbers(elements):
    """The numbers in elements, batched or not."""
    return [int(n) for element in elements for n in np.ravel(element)]


MADE = []


def counted(element):
    """The element; MADE has it, too. Functions of this module are not copied on their way."""
    MADE.append(int(element))
    return element


def plain(elements):
    """Elements as Python's numbers, text and lists, in their dicts and tuples."""
    if isinstance(elements, dict):
        return {key: plain(value) for key, value in elements.items()}
    if isinstance(elements, tuple):
        return tuple(map(plain, elements))
    if isinstance(elements, list):
        return [plain(element) for element in elements]
    return np.asarray(elements).tolist()


def goes_on_from(dataset, place, most=200):
    """The elements of a dataset; the rest comes again from the state after some of them.

    It comes as often as is asked for, also where nothing is kept in memory, and changing nothing.
    """
    with iter(dataset) as elements:
        found = [plain(element) for element in islice(elements, min(place, most))]
        state = elements.get_state()
        rest = [plain(element) for element in islice(elements, most - len(found))]
    for again in (dataset, dataset, pickle.loads(cloudpickle.dumps(dataset))):
        with iter(again) as later:
            later.set_state(state)
            assert later.get_state() == state
            assert [plain(element) for element in islice(later, len(rest))] == rest
            if len(found) + len(rest) < most:
                assert next(later, "over") == "over"
                assert next(later, "over") == "over"
    return found + rest
