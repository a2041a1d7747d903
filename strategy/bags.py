"""Embedding lookup of bags: rows of a variable, combined bag by bag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.array_like import IndexedSlices, on_host
from strategy.protocol.layout import HALVES
from strategy.protocol.rows import distinct, sums
from strategy.replicas.context import get_replica_context
from strategy.replicas.gpu import brought
from strategy.variable import Variable

Array = NDArray[Any]

COMBINERS = ("sum", "mean", "sqrtn")


class Bags:
    """Bags of row numbers, of different sizes, for an embedding lookup.

    Like TensorFlow's ``embedding_lookup_sparse`` and torch's ``EmbeddingBag``.

    Args:
        ids: One list of row numbers per bag. With ``offsets``, the row numbers of all bags in one
            array, bag after bag.
        weights: Weights of the rows, in the form of ``ids``. The default is 1.
        combiner: ``"sum"`` adds the weighted rows. ``"mean"`` divides the sum by the sum of the
            weights, ``"sqrtn"`` by the root of the sum of their squares. Empty bags give zeros.
        offsets: Index in ``ids`` at which each bag begins, ascending from 0.

    Attributes:
        ids: Row numbers of all bags, bag after bag; int64.
        combiner: Name of the combiner.

    Raises:
        TypeError: Row numbers are not integers.
        ValueError: The combiner is unknown, or the weights or offsets do not fit.

    Example:
        >>> import numpy as np
        >>> from strategy import Bags, get_variable, optimizers
        >>> words = get_variable("words", initializer=np.arange(8.0).reshape(4, 2))
        >>> bags = Bags([[0, 2], [], [3]], combiner="mean")
        >>> bags.lookup(words)
        array([[2., 3.],
               [0., 0.],
               [6., 7.]])
        >>> of_bags = np.ones((3, 2))  # the gradient of the three rows
        >>> push = optimizers.SGD(1.0).apply_gradients([(bags.gradient(of_bags), words)])
    """

    def __init__(
        self,
        ids: Any,
        weights: Any = None,
        combiner: str = "mean",
        *,
        offsets: Sequence[int] | None = None,
    ) -> None:
        if combiner not in COMBINERS:
            raise ValueError(f"unknown combiner {combiner!r}; the known ones are {COMBINERS}")
        self.combiner = combiner
        ids, weights, offsets = on_host(ids), on_host(weights), on_host(offsets)
        if offsets is None:
            lengths = [len(bag) for bag in ids]
            if weights is not None and [len(bag) for bag in weights] != lengths:
                raise ValueError("weights must be lists as long as those of the row numbers")
            ids, weights = _joined(ids), None if weights is None else _joined(weights)
            self._starts = np.cumsum([0, *lengths])
        else:
            ids = np.asarray(ids)
            self._starts = np.append(np.asarray(offsets, np.int64), len(ids))
            if not len(offsets) or self._starts[0] != 0 or (np.diff(self._starts) < 0).any():
                raise ValueError(
                    f"offsets must ascend from 0 to at most {len(ids)}, the number of row numbers"
                )
        if ids.dtype.kind not in "iu" and ids.size:
            raise TypeError(f"row numbers must be integers, not {ids.dtype}")
        self.ids: Array = ids.astype(np.int64)
        self._weights = np.ones(len(ids)) if weights is None else np.asarray(weights, np.float64)
        if self._weights.shape != self.ids.shape:
            raise ValueError(f"{len(ids)} row numbers need as many weights, not {weights!r}")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def lookup(self, variable: Variable) -> Any:
        """Pull the rows, each once, and combine them.

        All rows belong to one version, or to one version for each part of a divided variable.

        Args:
            variable: The embedding table. A table of integers needs ``"sum"`` and whole weights.

        Returns:
            One row per bag, shape ``(len(bags), *variable.shape[1:])``, a CuPy array on a replica
            with a GPU. Tables of float16 and bfloat16 give float32 rows, other tables rows of their
            own dtype.

        Raises:
            IndexError: A row number is out of range.
            TypeError: The variable has integers or bools, but the weights or the combiner need
                fractions.
        """
        if variable.dtype.kind in "biu" and not self._keeps_integers():
            raise TypeError(
                f"variable {variable.name!r} of {variable.dtype} cannot be combined by "
                f"{self.combiner!r} with these weights, which takes fractions: use 'sum' with "
                "whole weights, or a variable of a floating dtype"
            )
        unique, places = distinct(self.ids)
        rows = variable.gather(unique, np.empty((len(unique), *variable.shape[1:]), variable.dtype))
        dtype = np.dtype(np.float32) if variable.dtype in HALVES else variable.dtype
        parts = _times(rows.take(places, axis=0).astype(dtype, copy=False), self._factors(dtype))
        combined = np.zeros((len(self), *variable.shape[1:]), dtype)
        filled = np.diff(self._starts) > 0
        if filled.any():
            starts = self._starts[:-1][filled]
            combined[filled] = sums(parts, np.arange(len(parts)), starts)
        context = get_replica_context()
        return combined if context is None else brought(combined, context.gpu)

    def gradient(self, upstream: Any) -> IndexedSlices:
        """Return the gradient of the rows for a gradient of the combined rows.

        Args:
            upstream: Gradient of the result of :meth:`lookup`, shape ``(len(bags), ...)``.

        Returns:
            Slices with the dtype of ``upstream``, but float32 in place of float16 and bfloat16, and
            float64 in place of integers that are multiplied by fractions.
        """
        given = np.asarray(on_host(upstream))
        if given.dtype in HALVES:
            given = given.astype(np.float32)  # as in lookup
        elif given.dtype.kind in "biu" and not self._keeps_integers():
            given = given.astype(np.float64)
        if given.shape[:1] != (len(self),):
            raise ValueError(f"{len(self)} bags need as many gradients, not {given.shape[:1]}")
        spread = np.repeat(given, np.diff(self._starts), axis=0)
        return IndexedSlices(_times(spread, self._factors(given.dtype)), self.ids)

    def _keeps_integers(self) -> bool:
        """Return whether all factors of rows are whole numbers."""
        return self.combiner == "sum" and bool((self._weights % 1 == 0).all())

    def _factors(self, dtype: np.dtype[Any]) -> Array:
        """Return the factor of each row in the sum of its bag."""
        weights = self._weights
        if self.combiner != "sum":
            squares = self.combiner == "sqrtn"
            bag_of = np.repeat(np.arange(len(self)), np.diff(self._starts))
            sums = np.bincount(bag_of, weights**2 if squares else weights, minlength=len(self))
            weights = weights / (np.sqrt(sums) if squares else sums)[bag_of]
        return weights.astype(dtype)


def _joined(lists: Sequence[Any]) -> Array:
    parts: list[Array] = [np.asarray(on_host(one)).reshape(-1) for one in lists if len(one)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _times(rows: Array, factors: Array) -> Array:
    return rows * factors.reshape(-1, *(1,) * (rows.ndim - 1))
