"""Kernels for rows of variables and for halves on a GPU, as text for CUDA's compiler.

The text needs no header. Halves are bits, which the kernels convert themselves, so they work with a
CuPy without bfloat16.
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
"""Of the function in every text."""


def wide_dtype(dtype: DType) -> DType:
    """Local. The dtype in which a variable is changed, and in which its slots are."""
    return np.dtype(np.float32) if dtype in HALVES else dtype


@cache
def merge_text(grad: DType) -> str:
    """Return the kernel that adds up rows with the same number, and divides the sums.

    Rows are added up in their order.

    Its arguments are the number of elements of all sums, that of a row, the row numbers (unused),
    the first row of each sum in the gradient (one more than there are sums), the divisor, the
    address of the gradient, and that of the sums.
    """
    given = ["Index size", "Index width", "const Index* ids", "const Index* starts", "T divisor"]
    given += [f"const {_type(grad)}* grad", "T* sums"]
    lines = [_function(wide_dtype(grad), given), f"    {_summed(grad)}", "    sums[at] = g;", "}"]
    return HALVES_TEXT + "\n".join(lines) + "\n"


@cache
def rows_text(itemsize: int, put: bool) -> str:
    """Local. The kernel that takes rows out of a table, one behind the other, or puts them there.

    Its arguments are the number of elements, those of a row, the numbers of the rows, the table,
    and the rows.
    """
    kind = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[itemsize]
    given = ["Index size", "Index width", "const Index* ids", "T* table", "T* rows"]
    places = ("table[here]", "rows[at]") if put else ("rows[at]", "table[here]")
    lines = [_function(kind, given), f"    {_PLACE}", f"    {places[0]} = {places[1]};", "}"]
    return HALVES_TEXT + "\n".join(lines) + "\n"


@cache
def convert_text(source: DType, target: DType) -> str:
    """Local. The kernel that converts halves to float32, or back; of size, source and target."""
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
    """An element of a row, and the sum of what the gradient has for it, divided."""
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
