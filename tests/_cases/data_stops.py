"""Datasets that signal their progress, with states that can wait in pickling.

Workers import the functions of this module by name, so they share its events with the tests.
"""

import itertools
import queue
import threading

import numpy as np

LIMIT_S = 30.0
ASKED = queue.Queue()
"""The number of each element of :func:`large` that a worker has begun to make."""
CLOSED = threading.Event()
"""Set when a pass over :func:`large` has been closed."""
HOLDS = threading.Event()
"""Set by a test to make states of :class:`Held` wait in pickling."""
PICKLING = threading.Event()
"""Set when a worker has begun to pickle a state of :class:`Held`."""
GO_ON = threading.Event()
"""Set by a test to let the worker finish pickling."""


def large():
    """Yield arrays of 40 MiB. Buffers on both sides hold two of them."""
    try:
        for number in itertools.count():
            ASKED.put(number)
            yield np.full(5 << 20, number)
    finally:
        CLOSED.set()


class Held:
    """An endless source. While HOLDS is set, pickling its state waits for GO_ON."""

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
