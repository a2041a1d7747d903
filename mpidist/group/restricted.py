"""Building objects from pickles of whom one does not trust: data, and nothing that runs code.

Python's unpickler calls what a pickle names, and lets objects set their own state; with NumPy's
classes both are enough to read any memory. Here every name stands for a function of this module,
and the state of dtypes and arrays is looked at before it is used. A pickle can still ask for more
memory than there is.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

_ML_DTYPES = {
    name: getattr(ml_dtypes, name)
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name[-1].isalnum()
    and issubclass(getattr(ml_dtypes, name), np.generic)
}  # fmt: skip
# Booleans, numbers, text, bytes and times; neither objects nor records.
_KINDS = frozenset("?bhilqBHILQefdgFDGSUmM")


class _Name:
    """What a pickle may name but not call."""


_NDARRAY = _Name()


def load_data(data: memoryview | bytes) -> Any:
    """Local. The object of a pickle of numbers, text, bytes, containers and NumPy arrays.

    Args:
        data: The pickle; what follows its end is left alone.

    Raises:
        UnpicklingError: It holds anything else.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # of whatever a pickle that nobody wrote may lead to
        raise pickle.UnpicklingError(f"the pickle cannot be read: {error!r}") from error


def _refuse(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"an object holds {what}, which weights_only does not let in")


def _dtype(name: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
    if not isinstance(name, str) and name not in _ML_DTYPES.values():
        raise _refuse("a dtype that is no plain one")
    # One of its own, whose byte order can differ.
    dtype: np.dtype[Any] = np.dtype(name, copy=True)
    if dtype.type not in _ML_DTYPES.values() and dtype.char not in _KINDS:
        raise _refuse(f"dtype {dtype}")
    return dtype


def _with_state(dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """A dtype in the byte order of its state, which may say nothing else but units of time."""
    _, order, subarray, names, fields, size, *rest = state
    if subarray is not None or names is not None or fields is not None:
        raise _refuse("a dtype with fields")
    if dtype.kind in "SU":
        length = size // (4 if dtype.kind == "U" else 1)
        dtype = np.dtype(f"{dtype.kind}{int(length)}")
    if dtype.kind in "mM" and len(rest) > 2:
        unit, count, *_ = rest[2][1]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        if not unit.isalpha():
            raise _refuse("a time of no unit")
        dtype = np.dtype(f"{dtype.kind}8[{int(count)}{unit}]")
    return dtype.newbyteorder(order)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, np.dtype):
        raise _refuse("an array without memory of its own")
    flat = np.frombuffer(buffer, dtype)
    if order == "K" and axes is not None:  # of NumPy from 2.4 on: neither in C nor in Fortran order
        return flat.reshape(shape).transpose(axes)
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _array(kind: Any, shape: Any, code: Any) -> Any:
    if kind is not _NDARRAY:
        raise _refuse("an array of another class")
    return np.empty(0, np.uint8)


def _fill(array: Any, state: Any) -> None:
    _, shape, dtype, fortran, raw = state
    whole = isinstance(dtype, np.dtype) and isinstance(raw, bytes | bytearray)
    lengths = [int(n) for n in shape]
    if not whole or min(lengths, default=0) < 0 or len(raw) != math.prod(lengths) * dtype.itemsize:
        raise _refuse("an array that is not whole")
    array.__setstate__((1, tuple(lengths), dtype, bool(fortran), bytes(raw)))


def _scalar(dtype: Any, raw: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(raw, bytes):
        raise _refuse("a number that is not whole")
    return np.frombuffer(raw, dtype, 1)[0]


def _bytearray(*given: Any) -> bytearray:
    if any(isinstance(one, int) for one in given):
        raise _refuse("an empty bytearray of some length")
    return bytearray(*given)


_KNOWN: Mapping[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in (complex, frozenset, range, set, slice)},
    ("builtins", "bytearray"): _bytearray,
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): _NDARRAY,
    **{("ml_dtypes", name): kind for name, kind in _ML_DTYPES.items()},
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _array),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}


class _Unpickler(pickle._Unpickler):
    """Python's own in Python, of which every step can be replaced."""

    stack: list[Any]
    memo: dict[int, Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _refuse(f"{module}.{name}")
        return _KNOWN[module, name]

    def load_build(self) -> None:
        """Set the state of the object below it on the stack."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, np.dtype):
            built = _with_state(target, state)
            self.stack[-1] = built
            for key in [key for key, known in self.memo.items() if known is target]:
                self.memo[key] = built
        elif type(target) is np.ndarray:
            _fill(target, state)
        else:
            raise _refuse(f"the state of a {type(target).__name__}")

    dispatch[pickle.BUILD[0]] = load_build
