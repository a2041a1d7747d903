"""Objects that behave like arrays, such as variables and slices of rows."""

from __future__ import annotations

import types
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from mpidist import host_view
from mpidist.gpu import Download, lies_on_gpu
from strategy.protocol.checks import check_range
from strategy.protocol.layout import FLOATING

Array = NDArray[Any]

_BASIC = (int, np.integer, slice, types.EllipsisType, types.NoneType)


class ArrayLike(NDArrayOperatorsMixin):
    """Base of variables: an array whose every use pulls its value.

    Attributes:
        name: Name of the variable, for messages.
        shape: Shape of the variable.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def read_value(self) -> Any:
        """Return the value: a fresh host array, or a CuPy array on a replica with a GPU."""

    @abstractmethod
    def numpy(self) -> Array:
        """Return the value in a fresh host array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"variable {self.name!r} lives on a ps: its value is always a copy")
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, ArrayLike) for out in kwargs.get("out", ())):
            return NotImplemented  # v *= x would look like a local change
        arrays = [x.read_value() if isinstance(x, ArrayLike) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __iadd__(self, other: Any) -> Any:
        raise self._not_in_place("+=", "assign_add(...)")

    def __isub__(self, other: Any) -> Any:
        raise self._not_in_place("-=", "assign_sub(...)")

    def _not_in_place(self, operator: str, instead: str) -> TypeError:
        return TypeError(
            f"variable {self.name!r} lives on a ps, and {operator} would look like a local change: "
            f"use {instead}"
        )

    @abstractmethod
    def gather(self, indices: Any) -> Any:
        """Pull some rows, all of one version."""

    def __getitem__(self, key: Any) -> Any:
        row, *rest = key if isinstance(key, tuple) and key else (key,)
        is_row = isinstance(row, int | np.integer) and not isinstance(row, bool)
        # Beside an array index, NumPy treats an integer as an array, too, and reorders the axes.
        if self.shape and is_row and all(isinstance(one, _BASIC) for one in rest):
            number = row + len(self) if -len(self) <= row < 0 else row
            return self.gather(number)[tuple(rest)]
        return self.read_value()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    # == compares elements, so Python would drop the hash. A dict compares keys by identity first.
    __hash__ = object.__hash__

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._not_in_place("[...] =", "assign(...), or scatter_update(...) for rows")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without axes")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())


def read(value: Any) -> Any:
    """Return the value of a variable in host memory, and other values unchanged."""
    return value.numpy() if isinstance(value, ArrayLike) else value


def is_on_gpu(value: Any) -> bool:
    """Return whether a value is an array in the memory of a GPU."""
    return not isinstance(value, np.ndarray) and lies_on_gpu(value)


def on_host(value: Any) -> Any:
    """Return an array of another library as a NumPy array, and other values unchanged.

    The copy of an array on a GPU starts after the work that this thread has queued. For a
    :class:`Download`, wait for the copy. An array without axes, such as a sum on a GPU, becomes a
    number, as in NumPy.
    """
    if isinstance(value, Download):
        return value.result()[()]
    if isinstance(value, np.ndarray) or not (hasattr(value, "__dlpack__") or lies_on_gpu(value)):
        return value
    return np.asarray(host_view(value))[()]


def in_dtype(value: Any, dtype: np.dtype[Any], whose: str = "the variable") -> Array:
    """Return a value as an array with the dtype of a variable.

    Args:
        value: An array, a list, or a number. Integers must fit the dtype by their values. Their own
            dtype does not matter.
        dtype: Dtype of the variable.
        whose: The variable, for messages.

    Raises:
        TypeError: The value is of a kind that cannot be converted, such as floats to integers.
        ValueError: An integer does not fit the dtype.
    """
    floating = dtype in FLOATING
    if isinstance(value, int) and floating:
        value = float(value)  # an int may be too large for an integer array
    array = np.asarray(on_host(value))
    whole = array.dtype.kind in "iu" and dtype.kind in "iu"
    # NumPy does not know all pairs of floating dtypes, so float64 stands for all of them.
    fits = whole or np.can_cast(array.dtype, np.float64 if floating else dtype, "same_kind")
    if array.size and not fits:
        what = f"{value!r}" if array.ndim == 0 else f"an array of {array.dtype}"
        raise TypeError(f"{what} cannot become {dtype}, the dtype of {whose}")
    check_range(array, dtype, whose)
    return np.asarray(array, dtype)


@dataclass(frozen=True)
class IndexedSlices:
    """The gradient, or another change, of some rows of a variable.

    Args:
        values: One value for each row, shape ``(n, *variable.shape[1:])``.
        indices: Row numbers along the first axis of the variable: integers, shape ``(n,)``. All
            values of a repeated row number apply to the row; gradients are added. For
            ``scatter_update`` the last value counts.

    Example:
        >>> import numpy as np
        >>> from strategy import IndexedSlices, get_variable, optimizers
        >>> embeddings = get_variable("embeddings", shape=(4, 2), initializer="zeros")
        >>> gradient = IndexedSlices(np.ones((2, 2), "float32"), np.array([3, 1]))
        >>> push = optimizers.SGD(1.0).apply_gradients([(gradient, embeddings)])
        >>> embeddings.numpy()
        array([[ 0.,  0.],
               [-1., -1.],
               [ 0.,  0.],
               [-1., -1.]], dtype=float32)
    """

    values: Any
    indices: Any


def row_numbers(name: str, shape: tuple[int, ...], indices: Any) -> Array:
    """Return row numbers as a C-contiguous int64 array of the same shape.

    Args:
        name: Name of the variable, for messages.
        shape: Shape of the variable.
        indices: An array or nested lists of integers.

    Raises:
        TypeError: The row numbers are not integers.
        ValueError: The variable has no axes.
        IndexError: A row number is negative, or not less than the number of rows.
    """
    if not shape:
        raise ValueError(f"variable {name!r} has no rows: its shape is ()")
    given = np.asarray(on_host(indices))
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"rows of variable {name!r} are named by integers, not {given.dtype}")
    if given.size:
        lowest, highest = given.min(), given.max()
        if lowest < 0 or highest >= shape[0]:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"variable {name!r} has rows 0 to {shape[0] - 1}, and none {wrong}")
    return np.ascontiguousarray(given, np.int64).reshape(given.shape)
