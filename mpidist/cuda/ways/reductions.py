"""Kernels that make one array of those of several ranks, in one pass, in order of rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.cuda.kernels import HALVES_TEXT
from mpidist.cuda.library import cupy

if TYPE_CHECKING:
    from mpidist.cuda.device_array import DeviceArray

MOST = 64  # arrays in one kernel: more parameters would not fit
_INTEGERS = "bhilqBHILQ"
_FLOATS = "efd"
_SIGNS = {"SUM": "+", "AVG": "+", "PRODUCT": "*"}
_NAMES = {"MIN": "min", "MAX": "max"}


def can_reduce(dtype: np.dtype[Any], op: str) -> bool:
    """Local. Whether there is a kernel that reduces arrays of a dtype.

    Args:
        dtype: Which.
        op: SUM, AVG, PRODUCT, MIN or MAX; of others there is none.
    """
    if op not in _SIGNS and op not in _NAMES:
        return False
    if not dtype.isnative:
        return False
    if dtype.char in _FLOATS or is_bfloat16(dtype):
        return True
    if dtype.char in "FD":
        return op in ("SUM", "AVG")
    return op != "AVG" and (dtype.char == "?" or dtype.char in _INTEGERS)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Local. Whether it is that of ml_dtypes."""
    return bool(dtype.name == "bfloat16")


def is_half(dtype: np.dtype[Any]) -> bool:
    """Local. Whether it is reduced in float32."""
    return dtype.char == "e" or is_bfloat16(dtype)


def numbers(array: DeviceArray) -> Any:
    """Local. The numbers of a contiguous array, as kernels take them.

    Returns:
        A flat CuPy array over its memory: of complex numbers twice as many floats, of bools uint8,
        of bfloat16 its bits.
    """
    return array.flat.view(stored_as(array.dtype))


def numbers_at(pointer: int, nbytes: int, dtype: np.dtype[Any], device: int) -> Any:
    """Local. The same of memory that may be another process's; the caller keeps it.

    Args:
        pointer: Its address, in this process.
        nbytes: How long it is.
        dtype: Of the elements.
        device: The one that works with it, wherever it lies.
    """
    cuda, dtype = cupy().cuda, stored_as(dtype)
    memory = cuda.UnownedMemory(pointer, nbytes, None, device)
    shape = (nbytes // dtype.itemsize,)
    return cupy().ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. The dtype of which kernels take the elements of another."""
    if dtype.char in "FD":
        return np.dtype(dtype.char.lower())
    if dtype.char == "?" or is_bfloat16(dtype):
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def combine(parts: Sequence[Any], out: Any, dtype: np.dtype[Any], op: str) -> None:
    """Local. Reduce arrays of the current device, on the current stream.

    Args:
        parts: As :func:`numbers` gives them; at most ``MOST``.
        out: Such an array; one of the parts, or one that overlaps none.
        dtype: Of the elements.
        op: See :func:`can_reduce`.

    Raises:
        CompileException: The kernel cannot be compiled.
    """
    names = _elements("a", len(parts), dtype)
    if dtype.char == "?":  # not bitwise: whatever is not 0 is true
        op = {"SUM": "MAX", "PRODUCT": "MIN"}.get(op, op)
    if op in _SIGNS:
        value = f" {_SIGNS[op]} ".join(names)
    else:
        value = names[0]
        for name in names[1:]:
            value = f"{_NAMES[op]}({value}, {name})"
    if op == "AVG":
        value = f"({value}) / {len(parts)}"
    kernel = _kernel(len(parts), _stored(value, dtype), f"{op.lower()}_{dtype.name}")
    kernel(*parts, out)


def widened(part: Any, dtype: np.dtype[Any]) -> Any:
    """Local. Halves, as :func:`numbers` gives them, in a new array of float32."""
    (name,) = _elements("a", 1, dtype)
    out = cupy().empty(part.shape, np.dtype("f4"))
    _kernel(1, f"out = {name}", f"widen_{dtype.name}")(part, out)
    return out


def divided(part: Any, out: Any, dtype: np.dtype[Any], count: int) -> None:
    """Local. Numbers through how many ranks there are, and back to halves from float32.

    Args:
        part: Of the dtype, as :func:`numbers` gives them; of halves, float32.
        out: As :func:`numbers` gives it; may be the part.
        dtype: Of the elements.
        count: 1 leaves the values as they are.
    """
    value = f"a0 / {count}" if count > 1 else "a0"
    kernel = _kernel(1, _stored(value, dtype), f"divide_{count}_{dtype.name}")
    kernel(part, out)


def _elements(letter: str, count: int, dtype: np.dtype[Any]) -> list[str]:
    form = "of_bfloat16({})" if is_bfloat16(dtype) else "float({})" if dtype.char == "e" else "{}"
    return [form.format(f"{letter}{number}") for number in range(count)]


def _stored(value: str, dtype: np.dtype[Any]) -> str:
    return f"out = to_bfloat16({value})" if is_bfloat16(dtype) else f"out = {value}"


@cache
def _kernel(count: int, operation: str, name: str) -> Any:
    """CuPy compiles it when it is called, and keeps it on disk, too."""
    inputs = ", ".join(f"T a{number}" for number in range(count))
    preamble = HALVES_TEXT if "bfloat16" in name else ""
    return cupy().ElementwiseKernel(
        inputs, "U out", operation, f"mpidist_{name}_{count}", preamble=preamble
    )
