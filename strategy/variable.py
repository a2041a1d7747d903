"""Variables, as a training script has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from mpidist import host_view
from strategy.change import Change, check_change
from strategy.proto import parameter_server_pb2 as pb
from strategy.remote import Remote, pull
from strategy.slices import IndexedSlices, merged, row_numbers

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy

Array = NDArray[Any]


class Variable(NDArrayOperatorsMixin):
    """An array that lives on a ps task; made by :func:`get_variable`.

    It acts as an array wherever one is expected: each use pulls its value. A worker always sees
    its own earlier pushes. Neither reading nor changing it is collective.

    Args:
        strategy: Whose it is.
        remote: Where it lives.
        trainable: Whether optimizers are meant to change it.

    Attributes:
        name: Unique among the strategy's variables.
        shape: Its shape.
        dtype: Its dtype.
        trainable: Whether optimizers are meant to change it.
        strategy: Whose it is.
    """

    def __init__(self, strategy: ParameterServerStrategy, remote: Remote, trainable: bool) -> None:
        self.strategy = strategy
        self.remote = remote
        self.name = remote.name
        self.shape = remote.layout.shape
        self.dtype = remote.layout.dtype
        self.trainable = trainable

    @property
    def version(self) -> int:
        """Version of the last pull or push: how often the variable had been changed."""
        return self.remote.known

    def read_value(self, out: Array | None = None, *, consistent: bool = True) -> Array:
        """Local. Pull.

        Args:
            out: Filled and returned if given: writable, C-contiguous, the variable's shape and
                dtype. Otherwise a fresh array is.
            consistent: Whether all of it must belong to one version; otherwise each block of
                1 MiB may belong to its own.

        Returns:
            The value.

        Raises:
            ValueError: ``out`` does not fit.
        """
        if out is None:
            out = np.empty(self.shape, self.dtype)
        else:
            self._check_out(out, self.shape)
        pull(self.remote, out, consistent=consistent)
        return out

    def numpy(self) -> Array:
        """Local. A fresh copy of the value."""
        return self.read_value()

    def assign(self, value: Any) -> int:
        """Local. Replace the value.

        Args:
            value: An array of the variable's shape, or a number for all elements.

        Returns:
            The new version, once it has been applied.

        Raises:
            ValueError: The shape differs.
            TypeError: The dtype cannot become the variable's.
        """
        return self._change(pb.ASSIGN, value)

    def assign_add(self, delta: Any) -> int:
        """Local. Add to the value; see :meth:`assign`."""
        return self._change(pb.ADD, delta)

    def assign_sub(self, delta: Any) -> int:
        """Local. Subtract from the value; see :meth:`assign`."""
        return self._change(pb.SUB, delta)

    def gather(self, indices: Any, out: Array | None = None) -> Array:
        """Local. Pull some rows, all of one version.

        Args:
            indices: Which, along the first axis, in any order and as often as wanted: integers of
                any shape.
            out: Filled and returned if given: writable, C-contiguous, the variable's dtype, shape
                ``(*indices.shape, *variable.shape[1:])``. Otherwise a fresh array is.

        Returns:
            The rows, in the order of ``indices``.

        Raises:
            IndexError: There is no such row.
            TypeError: The indices are no integers.
            ValueError: ``out`` does not fit, or the variable has no axes.
        """
        ids = row_numbers(self.name, self.shape, indices)
        shape = (*ids.shape, *self.shape[1:])
        if out is None:
            out = np.empty(shape, self.dtype)
        else:
            self._check_out(out, shape)
        flat = ids.reshape(-1)
        pull(self.remote, out.reshape(len(flat), *self.shape[1:]), flat)
        return out

    sparse_read = gather
    """TensorFlow's name for :meth:`gather`."""

    def scatter_update(self, indices: Any, values: Any = None) -> int:
        """Local. Replace some rows.

        Args:
            indices: Which, along the first axis; or :class:`IndexedSlices`. Of several values for
                one row the last counts.
            values: Shape ``(len(indices), *variable.shape[1:])``, or a number.

        Returns:
            The new version, once it has been applied.

        Raises:
            IndexError: There is no such row.
            TypeError: The indices are no integers, or the values' dtype cannot become the
                variable's.
            ValueError: The shapes do not fit.
        """
        return self._scatter(pb.ASSIGN, indices, values, None)

    def scatter_add(self, indices: Any, values: Any = None) -> int:
        """Local. Add to some rows, all that is given for each; see :meth:`scatter_update`."""
        return self._scatter(pb.ADD, indices, values, np.add)

    def scatter_sub(self, indices: Any, values: Any = None) -> int:
        """Local. Subtract from some rows all that is given; see :meth:`scatter_update`."""
        return self._scatter(pb.SUB, indices, values, np.add)

    def scatter_mul(self, indices: Any, values: Any = None) -> int:
        """Local. Multiply some rows with all that is given; see :meth:`scatter_update`."""
        return self._scatter(pb.MUL, indices, values, np.multiply)

    def scatter_div(self, indices: Any, values: Any = None) -> int:
        """Local. Divide some rows by all that is given; see :meth:`scatter_update`.

        TypeError, too, for variables of integers.
        """
        if self.dtype.kind in "biu":
            raise TypeError(f"variable {self.name!r} of {self.dtype} cannot be divided in place")
        return self._scatter(pb.DIV, indices, values, np.multiply)

    def scatter_min(self, indices: Any, values: Any = None) -> int:
        """Local. Take the least of some rows and what is given; see :meth:`scatter_update`."""
        return self._scatter(pb.MIN, indices, values, np.minimum)

    def scatter_max(self, indices: Any, values: Any = None) -> int:
        """Local. Take the greatest of some rows and what is given; see :meth:`scatter_update`."""
        return self._scatter(pb.MAX, indices, values, np.maximum)

    def _scatter(self, rule: int, indices: Any, values: Any, combine: np.ufunc | None) -> int:
        if isinstance(indices, IndexedSlices):
            if values is not None:
                raise ValueError("IndexedSlices have their values: give no others")
            indices, values = indices.indices, indices.values
        ids = row_numbers(self.name, self.shape, indices).reshape(-1)
        if isinstance(values, int | float | complex | np.generic):
            values = np.full((len(ids), *self.shape[1:]), self._number(values))
        change = self._change_of_rows(rule, ids, host_view(_as_array(values, self.dtype)), combine)
        ((version, _),) = self.remote.connection.push([change]).result()
        return int(version)

    def _change_of_rows(
        self, rule: int, ids: Array, rows: Array, combine: np.ufunc | None
    ) -> Change:
        check_change(self.name, self.remote.layout, rows, len(ids))
        # Before they are merged: sums of small integers would not fit their own type.
        ids, rows = merged(ids, rows.astype(self.dtype, copy=False), combine)
        return Change(self.remote, rule, rows, ids=ids.copy())

    def change(self, rule: int, value: Any) -> Change:
        """Local. A checked change of this variable, for those who push.

        Args:
            rule: See :class:`strategy.change.Change`.
            value: Any array in host memory, a number for all elements, or :class:`IndexedSlices`
                whose values for one row add up.
        """
        if isinstance(value, IndexedSlices):
            ids = row_numbers(self.name, self.shape, value.indices).reshape(-1)
            return self._change_of_rows(rule, ids, host_view(value.values), np.add)
        if isinstance(value, int | float | complex | np.generic):
            data = np.full(self.shape, self._number(value))
        else:
            data = host_view(value)
        check_change(self.name, self.remote.layout, data)
        return Change(self.remote, rule, data)

    def _check_out(self, out: Array, shape: tuple[int, ...]) -> None:
        if out.shape != shape or out.dtype != self.dtype or not out.flags.carray:
            raise ValueError(
                f"out must be a writable C-contiguous {self.dtype}{list(shape)} for variable "
                f"{self.name!r}, not {out.dtype}{list(out.shape)}"
            )

    def _number(self, value: Any) -> Any:
        """A number in the variable's dtype; TypeError if it cannot become that."""
        if not np.can_cast(np.result_type(self.dtype, value), self.dtype, "same_kind"):
            raise TypeError(
                f"{value!r} cannot become {self.dtype}, the dtype of variable {self.name!r}"
            )
        return np.asarray(value, self.dtype)

    def _change(self, rule: int, value: Any) -> int:
        if isinstance(value, IndexedSlices):
            raise TypeError(f"rows of variable {self.name!r} are changed by its scatter_ methods")
        value = _as_array(value, self.dtype)
        ((version, _),) = self.remote.connection.push([self.change(rule, value)]).result()
        return int(version)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"variable {self.name!r} lives on a ps: its value is always a copy")
        value = self.read_value()
        return value if dtype is None else value.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, Variable) for out in kwargs.get("out", ())):
            return NotImplemented  # v += x must say assign_add: it would look like a local change
        arrays = [x.read_value() if isinstance(x, Variable) else x for x in inputs]
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

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {self.dtype}{list(self.shape)}>"


def _as_array(value: Any, dtype: np.dtype[Any]) -> Any:
    """Lists as an array: integers of Python become those of any dtype that holds them."""
    if not isinstance(value, list | tuple):
        return value
    array = np.asarray(value)
    whole = array.dtype.kind in "iu" and dtype.kind in "iu"
    return np.asarray(value, dtype) if whole else array
