"""First values of variables. Pure.

An initializer is a name, a callable ``(shape, dtype) -> array``, an array, or a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]
Initializer = Callable[[Shape, np.dtype[Any]], Array]


def zeros(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Local. All 0."""
    return np.zeros(shape, dtype)


def ones(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Local. All 1."""
    return np.ones(shape, dtype)


def variance_scaling(
    scale: float, mode: str, distribution: str, seed: int | None = None
) -> Initializer:
    """Local. Random values whose variance is ``scale / n``, n from the number of connections.

    Args:
        scale: See above.
        mode: What n counts: ``"fan_in"``, ``"fan_out"``, or ``"fan_avg"``, their mean.
        distribution: ``"normal"`` or ``"uniform"``.
        seed: Of the random numbers; None takes fresh ones.

    Returns:
        An initializer. Sources: Glorot and Bengio, AISTATS 2010; He et al., ICCV 2015.
    """

    def initialize(shape: Shape, dtype: np.dtype[Any]) -> Array:
        fan_in, fan_out = _fans(shape)
        n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        deviation = math.sqrt(scale / max(n, 1))
        generator = np.random.default_rng(seed)
        if distribution == "normal":
            return (generator.standard_normal(shape) * deviation).astype(dtype)
        limit = deviation * math.sqrt(3)
        return generator.uniform(-limit, limit, shape).astype(dtype)

    return initialize


def glorot_uniform(seed: int | None = None) -> Initializer:
    """Local. Uniform values for tanh and sigmoid layers."""
    return variance_scaling(1.0, "fan_avg", "uniform", seed)


def glorot_normal(seed: int | None = None) -> Initializer:
    """Local. Normal values for tanh and sigmoid layers."""
    return variance_scaling(1.0, "fan_avg", "normal", seed)


def he_uniform(seed: int | None = None) -> Initializer:
    """Local. Uniform values for ReLU layers."""
    return variance_scaling(2.0, "fan_in", "uniform", seed)


def he_normal(seed: int | None = None) -> Initializer:
    """Local. Normal values for ReLU layers."""
    return variance_scaling(2.0, "fan_in", "normal", seed)


_BY_NAME: Mapping[str, Initializer] = {
    "zeros": zeros,
    "ones": ones,
    "glorot_uniform": glorot_uniform(),
    "glorot_normal": glorot_normal(),
    "he_uniform": he_uniform(),
    "he_normal": he_normal(),
}


def initial_value(initializer: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Local. The first value of a variable.

    Args:
        initializer: A name, a callable ``(shape, dtype) -> array``, an array, or a number.
        shape: Of the variable.
        dtype: Of the variable.

    Returns:
        A C-contiguous array of this shape and dtype.

    Raises:
        ValueError: The name is unknown, or the value has another shape.
    """
    if isinstance(initializer, str):
        if initializer not in _BY_NAME:
            known = ", ".join(_BY_NAME)
            raise ValueError(f"unknown initializer {initializer!r}; the known ones are {known}")
        initializer = _BY_NAME[initializer]
    if callable(initializer):
        initializer = initializer(shape, dtype)
    value = np.asarray(initializer, dtype)
    if value.ndim == 0 and shape:
        value = np.full(shape, value, dtype)
    if value.shape != shape:
        raise ValueError(f"the initial value has shape {value.shape}, and the variable {shape}")
    return np.asarray(value, order="C")


def _fans(shape: Shape) -> tuple[float, float]:
    """Connections into and out of a unit: the last two axes, times the size of the others."""
    if not shape:
        return 1.0, 1.0
    if len(shape) == 1:
        return float(shape[0]), float(shape[0])
    field = math.prod(shape[:-2])
    return float(shape[-2] * field), float(shape[-1] * field)
