"""Training steps on a GPU, with copies that overlap the computation or wait for it."""

import math
import time

import numpy as np

from mpidist.gpu import cupy
from strategy import get_variable, optimizers, read_values, to_host_ahead

AT_ONCE = 16  # steps of one timed call; its first pull and last push overlap with nothing
MOST_PRODUCTS = 2000


class Steps:
    """Steps that pull one square matrix, multiply it with itself, and push a gradient.

    Args:
        strategy: Strategy with a GPU.
        nbytes: Approximate size of the matrix.

    Attributes:
        products: Number of products in a step. They take as long as the pull and the push, with at
            most MOST_PRODUCTS products.
    """

    def __init__(self, strategy, nbytes):
        self.strategy, self.products = strategy, 1
        side = math.isqrt(nbytes // 4)
        with strategy.scope():
            start = np.eye(side, dtype="f4")  # products of the identity stay finite
            self.variable = get_variable(f"step {nbytes}", initializer=start)
        self.sgd = optimizers.SGD(1e-12)
        self.values = strategy.run(self._pulled)
        self.gradient = self._computed(self.values)
        _finish()
        travel = _seconds(self.pull) + _seconds(self.push)
        self.products = min(max(1, round(travel / _seconds(self.compute))), MOST_PRODUCTS)

    def sides(self):
        """Return the timed functions by name.

        A call of "overlapped" runs AT_ONCE steps.
        """
        return {
            "pull": self.pull,
            "push": self.push,
            "compute": self.compute,
            "one by one": self.one_by_one,
            "overlapped": lambda: self.strategy.run(self._overlapped),
        }

    def pull(self):
        """Pull the matrix to the GPU and wait."""
        self.values = self.strategy.run(self._pulled)
        _finish()

    def push(self):
        """Push a gradient from the GPU and wait."""
        self.sgd.apply_gradients([(self.gradient, self.variable)]).wait()

    def compute(self):
        """Compute a gradient and wait."""
        self.gradient = self._computed(self.values)
        _finish()

    def one_by_one(self):
        """Pull, compute and push, and wait after each part."""
        self.pull()
        self.compute()
        self.push()

    def _overlapped(self):
        """Run steps that push the last gradient and pull values during the products."""
        values, leaving = self._pulled(), None
        for _ in range(AT_ONCE):
            gradient = self._computed(values)
            if leaving is not None:
                self.sgd.apply_gradients([(leaving, self.variable)])
            leaving = to_host_ahead(gradient)
            values = self._pulled()
        self.sgd.apply_gradients([(leaving, self.variable)]).wait()

    def _pulled(self):
        return read_values([self.variable])[0]

    def _computed(self, values):
        result = values
        for _ in range(self.products):
            result = result @ values
        return result


def _finish():
    cupy().cuda.get_current_stream().synchronize()


def _seconds(function):
    """Return the shortest time of a call.

    On a loaded machine most calls take longer.
    """
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)
