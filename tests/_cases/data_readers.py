"""Helpers that read datasets of a data service."""

import pickle
from contextlib import ExitStack, contextmanager
from itertools import islice

import cloudpickle
import numpy as np


@contextmanager
def reading(*datasets):
    """Open iterators over datasets, and close them at the end of the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(iter(dataset)) for dataset in datasets]


def read(elements, count):
    return [next(elements) for _ in range(count)]


def numbers(elements):
    """Return the numbers in single or batched elements as a list."""
    return [int(n) for element in elements for n in np.ravel(element)]


MADE = []


def counted(element):
    """Record an element in MADE and return the element.

    Functions of this module are pickled by name, so a worker in this process shares MADE.
    """
    MADE.append(int(element))
    return element


def plain(elements):
    """Convert elements to Python numbers, text and lists, within their dicts and tuples."""
    if isinstance(elements, dict):
        return {key: plain(value) for key, value in elements.items()}
    if isinstance(elements, tuple):
        return tuple(map(plain, elements))
    if isinstance(elements, list):
        return [plain(element) for element in elements]
    return np.asarray(elements).tolist()


def goes_on_from(dataset, place, most=200):
    """Return the elements of a dataset, after a check of its iterator state.

    The state is taken after ``place`` elements. The same dataset, twice, and a pickled copy must
    yield the same remaining elements from that state.
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
