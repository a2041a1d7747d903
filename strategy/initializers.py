"""First values of variables. Pure.

An initializer is a name, a callable ``(shape, dtype) -> array``, an array, a number, or None:
``"glorot_uniform"``, and of integers and bools ``"zeros"``. A callable that also takes
``partition_shape`` and ``partition_offset`` is asked for each part of a variable in parts, in place
of the whole; so the initializers here are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.array_like import in_dtype
from strategy.shared.parts import Part, Shape

_MODES = ("fan_in", "fan_out", "fan_avg")
_DISTRIBUTIONS = ("normal", "truncated_normal", "uniform")
_DEVIATION = 0.8796256610342398  # of a standard normal number between -2 and 2

Array = NDArray[Any]
Initializer = Callable[..., Array]


def zeros(
    shape: Shape,
    dtype: np.dtype[Any],
    partition_shape: Shape | None = None,
    partition_offset: Shape = (),
) -> Array:
    """Local. All 0."""
    return np.zeros(shape if partition_shape is None else partition_shape, dtype)


def ones(
    shape: Shape,
    dtype: np.dtype[Any],
    partition_shape: Shape | None = None,
    partition_offset: Shape = (),
) -> Array:
    """Local. All 1."""
    return np.ones(shape if partition_shape is None else partition_shape, dtype)


def constant(value: float = 0) -> Initializer:
    """Local. All of one value, which must be one of the variable's dtype."""

    def initialize(
        shape: Shape,
        dtype: np.dtype[Any],
        partition_shape: Shape | None = None,
        partition_offset: Shape = (),
    ) -> Array:
        own = in_dtype(value, dtype)
        return np.full(shape if partition_shape is None else partition_shape, own, dtype)

    return initialize


def random_uniform(
    minval: float = -0.05, maxval: float = 0.05, seed: int | None = None
) -> Initializer:
    """Local. Uniform values from ``minval`` to ``maxval``; the seed None takes fresh ones."""
    return _of_elements(lambda size, random: random.uniform(minval, maxval, size), seed)


def random_normal(mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> Initializer:
    """Local. Normal values; the seed None takes fresh ones."""
    return _of_elements(lambda size, random: mean + stddev * random.standard_normal(size), seed)


def truncated_normal(
    mean: float = 0.0, stddev: float = 0.05, seed: int | None = None
) -> Initializer:
    """Local. Normal values, drawn again where they are more than two ``stddev`` from the mean."""
    return _of_elements(lambda size, random: mean + stddev * _within_two(size, random), seed)


def orthogonal(gain: float = 1.0, seed: int | None = None) -> Initializer:
    """Local. A random matrix with orthonormal rows or columns, whichever are fewer, times ``gain``.

    More than two axes count as one but for the last. The whole is made for each part of a variable.
    Source: Saxe, McClelland and Ganguli, ICLR 2014.

    Raises:
        ValueError: Made for fewer than two axes.
    """

    def initialize(shape: Shape, dtype: np.dtype[Any]) -> Array:
        if len(shape) < 2:
            raise ValueError(f"an orthogonal matrix has at least two axes, not the shape {shape}")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        size = max(rows, columns), min(rows, columns)
        q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal(size))
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # so that all such matrices are as likely
        return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(dtype)

    return initialize


def identity(gain: float = 1.0) -> Initializer:
    """Local. ``gain`` on the diagonal of a matrix, which need not be square; 0 elsewhere.

    Raises:
        ValueError: Made for other than two axes.
    """

    def initialize(shape: Shape, dtype: np.dtype[Any]) -> Array:
        if len(shape) != 2:
            raise ValueError(f"an identity matrix has two axes, not the shape {shape}")
        return (gain * np.eye(*shape)).astype(dtype)

    return initialize


def variance_scaling(
    scale: float, mode: str, distribution: str, seed: int | None = None
) -> Initializer:
    """Local. Random values whose variance is ``scale / n``, n from the number of connections.

    Args:
        scale: See above.
        mode: What n counts: ``"fan_in"``, ``"fan_out"``, or ``"fan_avg"``, their mean.
        distribution: ``"normal"``, ``"truncated_normal"`` or ``"uniform"``.
        seed: Of the random numbers; None takes fresh ones.

    Raises:
        ValueError: The mode or the distribution is unknown.

    Returns:
        An initializer. Sources: Glorot and Bengio, AISTATS 2010; He et al., ICCV 2015.
    """
    if mode not in _MODES or distribution not in _DISTRIBUTIONS:
        raise ValueError(
            f"mode {mode!r} and distribution {distribution!r} must be among {_MODES} "
            f"and {_DISTRIBUTIONS}"
        )

    def initialize(
        shape: Shape,
        dtype: np.dtype[Any],
        partition_shape: Shape | None = None,
        partition_offset: Shape = (),
    ) -> Array:
        fan_in, fan_out = _fans(shape)
        n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        deviation = math.sqrt(scale / max(n, 1))
        # Each part of a variable has random numbers of its own.
        generator = np.random.default_rng(None if seed is None else (seed, *partition_offset))
        size = shape if partition_shape is None else partition_shape
        if distribution == "normal":
            return (generator.standard_normal(size) * deviation).astype(dtype)
        if distribution == "truncated_normal":
            return (_within_two(size, generator) * deviation / _DEVIATION).astype(dtype)
        limit = deviation * math.sqrt(3)
        return generator.uniform(-limit, limit, size).astype(dtype)

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


def lecun_uniform(seed: int | None = None) -> Initializer:
    """Local. Uniform values for SELU layers (LeCun et al., Efficient BackProp, 1998)."""
    return variance_scaling(1.0, "fan_in", "uniform", seed)


def lecun_normal(seed: int | None = None) -> Initializer:
    """Local. Normal values for SELU layers (LeCun et al., Efficient BackProp, 1998)."""
    return variance_scaling(1.0, "fan_in", "normal", seed)


class InitialValue:
    """The first value of a variable, as far as it is asked for.

    Args:
        initializer: A name, a callable, an array, a number, or None; see above.
        shape: Of the variable.
        dtype: Of the variable.
        name: Of the variable, for messages.
    """

    def __init__(
        self, initializer: Any, shape: Shape, dtype: np.dtype[Any], name: str = ""
    ) -> None:
        if initializer is None:
            initializer = "zeros" if dtype.kind in "biu" else "glorot_uniform"
        self._initializer = initializer
        self._shape = shape
        self._dtype = dtype
        self._whose = f"variable {name!r}" if name else "the variable"
        self._whole: Array | None = None

    def part(self, part: Part) -> Array:
        """Local. A part, C-contiguous.

        Raises:
            ValueError: The name is unknown, or the value has another shape, or an integer that does
                not fit the dtype.
            TypeError: The value is of a kind that cannot become the dtype.
        """
        function = self._function()
        if function is not None and not part.is_whole and _takes_parts(function):
            place = {"partition_shape": part.shape, "partition_offset": part.offset}
            return self._checked(function(self._shape, self._dtype, **place), part.shape)
        if self._whole is None:
            value = self._initializer
            if function is not None:
                value = self._called(function)
            self._whole = self._checked(value, self._shape)
        return np.asarray(part.of(self._whole), order="C")

    def _called(self, function: Initializer) -> Any:
        try:
            return function(self._shape, self._dtype)
        except TypeError as error:
            error.add_note(f"The initializer of {self._whose} is called with (shape, dtype).")
            raise

    def _function(self) -> Initializer | None:
        given = self._initializer
        if isinstance(given, str):
            if given not in _BY_NAME:
                known = ", ".join(_BY_NAME)
                raise ValueError(f"unknown initializer {given!r}; the known ones are {known}")
            return _BY_NAME[given]
        return given if callable(given) else None

    def _checked(self, given: Any, shape: Shape) -> Array:
        value = in_dtype(given, self._dtype, self._whose)
        if value.ndim == 0 and shape:
            value = np.full(shape, value, self._dtype)
        if value.shape != shape:
            raise ValueError(
                f"the initial value has shape {value.shape}, and {self._whose} {shape}"
            )
        return value


def _of_elements(
    draw: Callable[[Shape, np.random.Generator], Array], seed: int | None
) -> Initializer:
    """An initializer whose elements do not depend on each other."""

    def initialize(
        shape: Shape,
        dtype: np.dtype[Any],
        partition_shape: Shape | None = None,
        partition_offset: Shape = (),
    ) -> Array:
        # Each part of a variable has random numbers of its own.
        random = np.random.default_rng(None if seed is None else (seed, *partition_offset))
        return draw(shape if partition_shape is None else partition_shape, random).astype(dtype)

    return initialize


def _within_two(size: Shape, random: np.random.Generator) -> Array:
    """Standard normal numbers, those beyond 2 drawn again."""
    values = np.asarray(random.standard_normal(size))
    while (beyond := np.abs(values) > 2).any():
        values[beyond] = random.standard_normal(int(beyond.sum()))
    return values


def _takes_parts(function: Initializer) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of functions in C, which have none
        return False
    return "partition_shape" in parameters and "partition_offset" in parameters


def _fans(shape: Shape) -> tuple[float, float]:
    """Connections into and out of a unit: the last two axes, times the size of the others."""
    if not shape:
        return 1.0, 1.0
    if len(shape) == 1:
        return float(shape[0]), float(shape[0])
    field = math.prod(shape[:-2])
    return float(shape[-2] * field), float(shape[-1] * field)


_BY_NAME: Mapping[str, Initializer] = {
    "zeros": zeros,
    "ones": ones,
    "glorot_uniform": glorot_uniform(),
    "glorot_normal": glorot_normal(),
    "he_uniform": he_uniform(),
    "he_normal": he_normal(),
    "lecun_uniform": lecun_uniform(),
    "lecun_normal": lecun_normal(),
    "random_uniform": random_uniform(),
    "random_normal": random_normal(),
    "truncated_normal": truncated_normal(),
    "orthogonal": orthogonal(),
    "identity": identity(),
}
