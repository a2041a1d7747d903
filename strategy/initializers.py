"""Initial values of variables. Pure.

An initializer is a name, a callable ``(shape, dtype) -> array``, an array, a number, or None. None
stands for ``"glorot_uniform"``, and for ``"zeros"`` if the dtype is an integer or bool. A callable
with the arguments ``partition_shape`` and ``partition_offset`` is called for each part of a
partitioned variable. Other callables compute the whole variable.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.errors import did_you_mean
from strategy.array_like import in_dtype
from strategy.protocol.partition import Part, Shape

_MODES = ("fan_in", "fan_out", "fan_avg")
_DISTRIBUTIONS = ("normal", "truncated_normal", "uniform")
_DEVIATION = 0.8796256610342398  # standard deviation of a standard normal number between -2 and 2

Array = NDArray[Any]
Initializer = Callable[..., Array]


def _by_parts(make: Callable[[Shape, np.dtype[Any], Shape, Shape], Array]) -> Initializer:
    """Return an initializer that computes the whole variable, or only one part.

    Args:
        make: Called with the shape of the result, the dtype, the shape of the whole variable, and
            the offset of the part.
    """

    def initialize(
        shape: Shape,
        dtype: np.dtype[Any],
        partition_shape: Shape | None = None,
        partition_offset: Shape = (),
    ) -> Array:
        return make(
            shape if partition_shape is None else partition_shape, dtype, shape, partition_offset
        )

    # functools.wraps would also make inspect.signature show the arguments of make.
    initialize.__name__ = initialize.__qualname__ = make.__name__
    initialize.__doc__ = make.__doc__
    return initialize


@_by_parts
def zeros(size: Shape, dtype: np.dtype[Any], shape: Shape, offset: Shape) -> Array:
    """Return an array of zeros."""
    return np.zeros(size, dtype)


@_by_parts
def ones(size: Shape, dtype: np.dtype[Any], shape: Shape, offset: Shape) -> Array:
    """Return an array of ones."""
    return np.ones(size, dtype)


def constant(value: float = 0) -> Initializer:
    """Return an initializer with one value, which must fit the dtype of the variable."""

    def make(size: Shape, dtype: np.dtype[Any], shape: Shape, offset: Shape) -> Array:
        return np.full(size, in_dtype(value, dtype), dtype)

    return _by_parts(make)


def random_uniform(
    minval: float = -0.05, maxval: float = 0.05, seed: int | None = None
) -> Initializer:
    """Return an initializer with uniform values from ``minval`` to ``maxval``.

    Without a seed, the values differ at each call.
    """
    return _of_elements(lambda size, random, _: random.uniform(minval, maxval, size), seed)


def random_normal(mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> Initializer:
    """Return an initializer with normally distributed values.

    Without a seed, the values differ at each call.
    """
    return _of_elements(lambda size, random, _: mean + stddev * random.standard_normal(size), seed)


def truncated_normal(
    mean: float = 0.0, stddev: float = 0.05, seed: int | None = None
) -> Initializer:
    """Return an initializer with normal values within two ``stddev`` of the mean.

    Values outside are drawn again. Without a seed, the values differ at each call.
    """
    return _of_elements(lambda size, random, _: mean + stddev * _within_two(size, random), seed)


def orthogonal(gain: float = 1.0, seed: int | None = None) -> Initializer:
    """Return an initializer with a random orthogonal matrix times ``gain``.

    The rows are orthonormal if there are fewer rows than columns. Otherwise the columns are
    orthonormal. All axes but the last count as rows. For a partitioned variable, the whole matrix
    is computed. Source: Saxe, McClelland and Ganguli, ICLR 2014.

    The initializer raises ValueError for variables with fewer than two axes.
    """

    def initialize(shape: Shape, dtype: np.dtype[Any]) -> Array:
        if len(shape) < 2:
            raise ValueError(f"an orthogonal matrix has at least two axes, not the shape {shape}")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        size = max(rows, columns), min(rows, columns)
        q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal(size))
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # so that all matrices are equally likely
        return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(dtype)

    return initialize


def identity(gain: float = 1.0) -> Initializer:
    """Return an initializer with ``gain`` on the diagonal of a matrix of any size, and 0 elsewhere.

    The initializer raises ValueError for variables without exactly two axes.
    """

    def initialize(shape: Shape, dtype: np.dtype[Any]) -> Array:
        if len(shape) != 2:
            raise ValueError(f"an identity matrix has two axes, not the shape {shape}")
        return (gain * np.eye(*shape)).astype(dtype)

    return initialize


def variance_scaling(
    scale: float, mode: str, distribution: str, seed: int | None = None
) -> Initializer:
    """Return an initializer with random values of variance ``scale / n``.

    Sources: Glorot and Bengio, AISTATS 2010; He et al., ICCV 2015.

    Args:
        scale: Numerator of the variance.
        mode: The number of connections n: ``"fan_in"``, ``"fan_out"``, or their mean ``"fan_avg"``.
        distribution: ``"normal"``, ``"truncated_normal"`` or ``"uniform"``.
        seed: Seed of the random numbers; None for values that differ at each call.

    Raises:
        ValueError: The mode or the distribution is unknown.

    Example:
        >>> import numpy as np
        >>> from strategy import get_variable, initializers
        >>> he = initializers.variance_scaling(2.0, "fan_in", "truncated_normal", seed=0)
        >>> kernel = get_variable("kernel", shape=(1000, 10), initializer=he)
        >>> round(float(kernel.numpy().var()), 4)  # 2 / 1000
        0.002
    """
    if mode not in _MODES or distribution not in _DISTRIBUTIONS:
        raise ValueError(
            f"mode {mode!r} and distribution {distribution!r} must be among {_MODES} "
            f"and {_DISTRIBUTIONS}"
        )

    def draw(size: Shape, random: np.random.Generator, shape: Shape) -> Array:
        fan_in, fan_out = _fans(shape)
        n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        deviation = math.sqrt(scale / max(n, 1))
        if distribution == "normal":
            return random.standard_normal(size) * deviation
        if distribution == "truncated_normal":
            return _within_two(size, random) * deviation / _DEVIATION
        limit = deviation * math.sqrt(3)
        return random.uniform(-limit, limit, size)

    return _of_elements(draw, seed)


def glorot_uniform(seed: int | None = None) -> Initializer:
    """Return Glorot's uniform initializer for tanh and sigmoid layers."""
    return variance_scaling(1.0, "fan_avg", "uniform", seed)


def glorot_normal(seed: int | None = None) -> Initializer:
    """Return Glorot's normal initializer for tanh and sigmoid layers."""
    return variance_scaling(1.0, "fan_avg", "normal", seed)


def he_uniform(seed: int | None = None) -> Initializer:
    """Return He's uniform initializer for ReLU layers."""
    return variance_scaling(2.0, "fan_in", "uniform", seed)


def he_normal(seed: int | None = None) -> Initializer:
    """Return He's normal initializer for ReLU layers."""
    return variance_scaling(2.0, "fan_in", "normal", seed)


def lecun_uniform(seed: int | None = None) -> Initializer:
    """Return a uniform initializer for SELU layers (LeCun et al., Efficient BackProp, 1998)."""
    return variance_scaling(1.0, "fan_in", "uniform", seed)


def lecun_normal(seed: int | None = None) -> Initializer:
    """Return a normal initializer for SELU layers (LeCun et al., Efficient BackProp, 1998)."""
    return variance_scaling(1.0, "fan_in", "normal", seed)


class InitialValue:
    """The initial value of a variable, computed on request.

    Args:
        initializer: A name, a callable, an array, a number, or None; see the module.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        name: Name of the variable, for messages.
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
        """Return a part of the initial value, C-contiguous.

        Raises:
            ValueError: The name is unknown, the value has another shape, or an integer does not fit
                the dtype.
            TypeError: The value cannot be converted to the dtype.
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
                hint = did_you_mean(given, _BY_NAME)
                raise ValueError(f"unknown initializer {given!r}{hint}; the known ones are {known}")
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
    draw: Callable[[Shape, np.random.Generator, Shape], Array], seed: int | None
) -> Initializer:
    """Return an initializer with independent elements.

    Args:
        draw: Called with the shape of the result, a generator, and the shape of the whole variable.
        seed: Seed of the generator; None for values that differ at each call.
    """

    def make(size: Shape, dtype: np.dtype[Any], shape: Shape, offset: Shape) -> Array:
        # Each part of a variable has random numbers of its own.
        random = np.random.default_rng(None if seed is None else (seed, *offset))
        return draw(size, random, shape).astype(dtype)

    return _by_parts(make)


def _within_two(size: Shape, random: np.random.Generator) -> Array:
    """Return standard normal numbers. Numbers beyond -2 and 2 are drawn again."""
    values = np.asarray(random.standard_normal(size))
    while (beyond := np.abs(values) > 2).any():
        values[beyond] = random.standard_normal(int(beyond.sum()))
    return values


def _takes_parts(function: Initializer) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function in C may have no signature
        return False
    return "partition_shape" in parameters and "partition_offset" in parameters


def _fans(shape: Shape) -> tuple[float, float]:
    """Return fan-in and fan-out: the last two axes, each times the size of the other axes."""
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
