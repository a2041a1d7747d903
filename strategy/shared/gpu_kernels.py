"""The update rules of the optimizers as text for CUDA's compiler: one pass over their arrays. Pure.

They take the same steps as those of :mod:`strategy.shared.rules`, operation by operation, and are
compiled without fused multiplications and additions: so the results are the same to the last bit.
One thing differs: CuPy has the device take numbers of float32 below 1.2e-38 for zero.

The text needs no header. Halves are bits, which it converts itself, so that a CuPy that has no
bfloat16 does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from mpidist.gpu import HALVES_TEXT
from strategy.shared.rules import Values, adam_rates
from strategy.shared.shard import HALVES

DType = np.dtype[Any]

NAME = "work"
"""Of the function in every text."""

# What is kept beside a variable, as the steps below call it.
_NAMES = {"momentum": "velocity", "accumulator": "squares"}

_DECAYED = "if (decay != 0) g = p * decay + g;"

# What becomes of an element p, and of what is kept beside it, by its gradient g.
_STEPS = {
    "SGD": f"""
    {_DECAYED}
#ifdef KEEPS_VELOCITY
    velocity = velocity * momentum + g;
    g = nesterov != 0 ? velocity * momentum + g : velocity;
#endif
    p = p - g * rate;
""",
    "Adagrad": f"""
    {_DECAYED}
    squares = squares + g * g;
    p = p - g / (sqrt(squares) + epsilon) * rate;
""",
    "RMSprop": f"""
    {_DECAYED}
    squares = squares * rho + g * g * rest;
    T spread = squares;
#ifdef KEEPS_MEAN
    mean = mean * rho + g * rest;
    spread = squares - mean * mean;
    if (spread < 0) spread = 0;
#endif
    T step = g / (sqrt(spread) + epsilon);
#ifdef KEEPS_VELOCITY
    velocity = velocity * momentum + step;
    step = velocity;
#endif
    p = p - step * rate;
""",
    "Adam": f"""
    p = p * shrink;
    {_DECAYED}
    v = v * beta_2 + g * g * rest_2;
    m = m * beta_1 + g * rest_1;
    p = p - m / (sqrt(v) + epsilon) * rate;
""",
    "Ftrl": """
    const T before = sqrt(squares);
    squares = squares + g * g;
    const T root = sqrt(squares);
    linear = linear + (g - ((root - before) / rate - shrinkage) * p);
    T clipped = linear;
    if (clipped < -l1) clipped = -l1;
    if (clipped > l1) clipped = l1;
    T scale = (root + beta) / rate + l2;
    if (scale < least) scale = least;
    p = (clipped - linear) / scale;
""",
}
_STEPS["AdamW"] = _STEPS["Adam"]

# The numbers that they take, in this order.
_NUMBERS = {
    "SGD": ("rate", "decay", "momentum", "nesterov"),
    "Adagrad": ("rate", "decay", "epsilon"),
    "RMSprop": ("rate", "decay", "epsilon", "rho", "rest", "momentum"),
    "Adam": ("rate", "decay", "shrink", "epsilon", "beta_1", "rest_1", "beta_2", "rest_2"),
    "Ftrl": ("rate", "beta", "l1", "l2", "shrinkage", "least"),
}
_NUMBERS["AdamW"] = _NUMBERS["Adam"]


def can_fuse(kind: str) -> bool:
    """Local. Whether there is a kernel for an optimizer of this kind."""
    return kind in _STEPS


def wide_dtype(dtype: DType) -> DType:
    """Local. The dtype in which a variable is changed, and in which its slots are."""
    return np.dtype(np.float32) if dtype in HALVES else dtype


@cache
def update_text(kind: str, slots: tuple[str, ...], dtype: DType, grad: DType, rows: bool) -> str:
    """Local. The kernel that changes a variable, or rows of it, by a gradient; see the module.

    Its arguments are the number of elements that are changed and, of rows, those of a row, the
    numbers of the rows, where in the gradient the rows of each begin (one more than there are, each
    sum is taken in this order), and what the sums are divided by. Then addresses: of the variable's
    values or, of a half, of those in float32; of the gradient; of each slot; of a half's own
    values; and, of rows, of where the new ones go, one behind the other. Then :func:`numbers`.

    Args:
        kind: Of the optimizer; see :func:`can_fuse`.
        slots: What it keeps.
        dtype: Of the variable.
        grad: Of the gradient: the variable's, or the wide one.
        rows: Whether it is of some rows.
    """
    wide, half = wide_dtype(dtype), dtype in HALVES
    kept = [_NAMES.get(slot, slot) for slot in slots]
    given = ["Index size"]
    if rows:
        given += ["Index width", "const Index* ids", "const Index* starts", "T divisor"]
    arrays = ["T* param", f"const {_type(grad)}* grad", *(f"T* {name}_of" for name in kept)]
    arrays += [f"{_type(dtype)}* half"] * half + [f"{_type(dtype)}* changed"] * rows
    given += [array.replace("*", "* __restrict__") for array in arrays]
    given += [f"T {name}" for name in _NUMBERS[kind]]
    place = (
        _summed(grad) if rows else f"const Index here = at;\n    T g = {_read(grad, 'grad[at]')};"
    )
    written = _written(dtype, "p")
    lines = [
        *(f"#define KEEPS_{name.upper()}" for name in kept),
        _function(wide, given),
        f"    {place}",
        "    T p = param[here];",
        *(f"    T {name} = {name}_of[here];" for name in kept),
        _STEPS[kind],
        "    param[here] = p;",
        *(f"    {name}_of[here] = {name};" for name in kept),
        *[f"    half[here] = {written};"] * half,
        *[f"    changed[at] = {written};"] * rows,
        "}",
    ]
    return HALVES_TEXT + "\n".join(lines) + "\n"


@cache
def merge_text(grad: DType) -> str:
    """Local. The kernel that adds up rows: see :func:`update_text` for its arguments and the order.

    They are size, width, ids (not looked at), starts, divisor, the gradient, and the sums.
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


def numbers(kind: str, values: Values, step: int, dtype: DType) -> list[Any] | None:
    """Local. The numbers of a step, in the order in which the kernel takes them.

    Args:
        kind: Of the optimizer.
        values: The optimizer's numbers.
        step: Which update of the variable it is, from 1.
        dtype: In which the variable is changed.

    Returns:
        Numbers of this dtype; None where the step changes nothing at all.
    """
    made = _MAKERS[kind](values, step)
    if made is None:
        return None
    found = {"rate": values["learning_rate"], "decay": values.get("weight_decay", 0.0)} | made
    if kind == "Ftrl":
        found["least"] = float(np.finfo(dtype).tiny)
    return [dtype.type(found.get(name, values.get(name))) for name in _NUMBERS[kind]]


def _rmsprop(values: Values, _: int) -> dict[str, float]:
    return {"rest": 1.0 - values["rho"]}


def _adam(values: Values, step: int) -> dict[str, float]:
    rate, epsilon = adam_rates(values, step)
    rests = {f"rest_{n}": 1.0 - values[f"beta_{n}"] for n in (1, 2)}
    return {"rate": rate, "epsilon": epsilon, "shrink": 1.0, **rests}


def _adamw(values: Values, step: int) -> dict[str, float]:
    shrink = 1.0 - values["learning_rate"] * values["weight_decay"]
    return _adam(values, step) | {"decay": 0.0, "shrink": shrink}


def _ftrl(values: Values, _: int) -> dict[str, float] | None:
    if not values["learning_rate"]:
        return None
    return {"l2": 2.0 * values["l2"], "shrinkage": 2.0 * values["l2_shrinkage"]}


_MAKERS: Mapping[str, Callable[[Values, int], dict[str, float] | None]] = {
    "SGD": lambda *_: {},
    "Adagrad": lambda *_: {},
    "RMSprop": _rmsprop,
    "Adam": _adam,
    "AdamW": _adamw,
    "Ftrl": _ftrl,
}

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
