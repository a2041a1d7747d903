"""CUDA sources of kernels for rows of variables and for half precision.

The sources need no header. The kernels convert float16 and bfloat16 from and to bits themselves, so
they work with a CuPy without bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mpidist.gpu import HALVES_TEXT
from strategy.shared.shard import HALVES

DType = np.dtype[Any]

NAME = "work"
"""Name of the function in every source."""


def wide_dtype(dtype: DType) -> DType:
    """Return the dtype of the updates and slots of a variable: float32 for half precision."""
    return np.dtype(np.float32) if dtype in HALVES else dtype


@cache
def merge_text(grad: DType) -> str:
    """Return the kernel that adds up rows with the same number, in order, and divides the sums.

    The arguments of the kernel are the number of elements of all sums, the number of elements of a
    row, the row numbers (unused), the index of the first gradient row of each sum and the end of
    the last sum, the divisor, the address of the gradient, and the address of the sums.
    """
    given = ["Index size", "Index width", "const Index* ids", "const Index* starts", "T divisor"]
    given += [f"const {_type(grad)}* grad", "T* sums"]
    lines = [_function(wide_dtype(grad), given), f"    {_summed(grad)}", "    sums[at] = g;", "}"]
    return HALVES_TEXT + "\n".join(lines) + "\n"


@cache
def rows_text(itemsize: int, put: bool) -> str:
    """Return the kernel that gathers rows of a table in an array, or scatters the array back.

    The arguments of the kernel are the number of elements, the number of elements of a row, the row
    numbers, the table, and the array of rows.

    Args:
        itemsize: Size of an element in bytes: 2, 4 or 8.
        put: Scatter the rows into the table.
    """
    kind = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[itemsize]
    given = ["Index size", "Index width", "const Index* ids", "T* table", "T* rows"]
    places = ("table[here]", "rows[at]") if put else ("rows[at]", "table[here]")
    lines = [_function(kind, given), f"    {_PLACE}", f"    {places[0]} = {places[1]};", "}"]
    return HALVES_TEXT + "\n".join(lines) + "\n"


@cache
def convert_text(source: DType, target: DType) -> str:
    """Return the kernel that converts half precision to float32, or back.

    The arguments of the kernel are the number of elements, the source, and the target.
    """
    given = ["Index size", f"const {_type(source)}* source", f"{_type(target)}* target"]
    value = _written(target, _read(source, "source[at]"))
    return (
        HALVES_TEXT
        + "\n".join([_function("float", given), f"    target[at] = {value};", "}"])
        + "\n"
    )


_PLACE = """const Index row = at / width, column = at - row * width;
    const Index here = ids[row] * width + column;"""


def _summed(grad: DType) -> str:
    """Return the statements that sum the gradient's values for one element, and divide the sum."""
    first, further = (_read(grad, f"grad[{n} * width + column]") for n in ("starts[row]", "n"))
    return f"""{_PLACE}
    T g = {first};
    for (Index n = starts[row] + 1; n < starts[row + 1]; n++) g = g + {further};
    if (divisor != 1) g = g / divisor;"""


def _function(wide: DType | str, given: Sequence[str]) -> str:
    kind = wide if isinstance(wide, str) else _type(wide)
    return f"""
typedef {kind} T;

extern "C" __global__ void {NAME}({", ".join(given)}) {{
    const Index at = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= size) return;"""


def _type(dtype: DType) -> str:
    return {"float32": "float", "float64": "double"}.get(dtype.name, "Bits")


def _read(dtype: DType, value: str) -> str:
    return f"of_{dtype.name}({value})" if dtype in HALVES else value


def _written(dtype: DType, value: str) -> str:
    return f"to_{dtype.name}({value})" if dtype in HALVES else value
