"""What acts as an array wherever one is expected: each use pulls its value."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

Array = NDArray[Any]


class ArrayLike(NDArrayOperatorsMixin):
    """Base of variables.

    Attributes:
        name: For messages.
        shape: Of the value.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def read_value(self) -> Array:
        """Local. The value, a fresh array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"variable {self.name!r} lives on a ps: its value is always a copy")
        value = self.read_value()
        return value if dtype is None else value.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, ArrayLike) for out in kwargs.get("out", ())):
            return NotImplemented  # v += x must say assign_add: it would look like a local change
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

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without axes")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.read_value())

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())
