"""Reading datasets of a data service."""

from contextlib import ExitStack, contextmanager

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
