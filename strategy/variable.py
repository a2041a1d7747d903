"""Variables, as a training script has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from mpidist import host_view
from strategy.change import Change, check_change
from strategy.client import Remote, pull
from strategy.proto import parameter_server_pb2 as pb

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
        elif out.shape != self.shape or out.dtype != self.dtype or not out.flags.carray:
            raise ValueError(
                f"out must be a writable C-contiguous {self.dtype}{list(self.shape)} for variable "
                f"{self.name!r}, not {out.dtype}{list(out.shape)}"
            )
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

    def change(self, rule: int, value: Any) -> Change:
        """Local. A checked change of this variable, for those who push.

        Args:
            rule: See :class:`strategy.change.Change`.
            value: Any array in host memory, or a number for all elements.
        """
        if isinstance(value, int | float | complex | np.generic):
            if not np.can_cast(np.result_type(self.dtype, value), self.dtype, "same_kind"):
                raise TypeError(
                    f"{value!r} cannot become {self.dtype}, the dtype of variable {self.name!r}"
                )
            data = np.full(self.shape, value, self.dtype)
        else:
            data = host_view(value)
        check_change(self.name, self.remote.layout, data)
        return Change(self.remote, rule, data)

    def _change(self, rule: int, value: Any) -> int:
        if isinstance(value, list | tuple):
            array = np.asarray(value)
            # Integers of Python become those of any dtype that holds them.
            whole = array.dtype.kind in "iu" and self.dtype.kind in "iu"
            value = np.asarray(value, self.dtype) if whole else array
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
