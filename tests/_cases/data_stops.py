"""Datasets whose evaluation tells where it is, and whose states wait before they are pickled.

Workers get the functions of this module by name, so they see the same events as the tests.
"""

import itertools
import queue
import threading

import numpy as np

LIMIT_S = 30.0
ASKED = queue.Queue()
"""The number of each element of :func:`large` that a worker has begun to make."""
CLOSED = threading.Event()
"""A pass over :func:`large` has been closed."""
HOLDS = threading.Event()
"""States of :class:`Held` wait from now on when they are pickled."""
PICKLING = threading.Event()
"""A worker has begun to pickle a state of :class:`Held`."""
GO_ON = threading.Event()
"""The worker may finish that."""


def large():
    """Yield arrays of 40 MiB, of which buffers on both sides hold two."""
    try:
        for number in itertools.count():
            ASKED.put(number)
            yield np.full(5 << 20, number)
    finally:
        CLOSED.set()


class Held:
    """An endless source whose state waits for :data:`GO_ON` when it is pickled, if it shall."""

    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def get_state(self):
        return HeldState()

    def set_state(self, state):
        pass


class HeldState:
    """The state of :class:`Held`."""

    def __reduce__(self):
        if HOLDS.is_set():
            PICKLING.set()
            assert GO_ON.wait(LIMIT_S)
        return HeldState, ()
