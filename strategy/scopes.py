"""Scopes of variable names like TensorFlow's: get_variable, variable_scope and AUTO_REUSE."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist import Server, errors
from strategy.array_like import on_host
from strategy.base import current_strategy
from strategy.creation import Use
from strategy.parameter_server_strategy import ParameterServerStrategy
from strategy.protocol.partition import Partitioner
from strategy.replicas.context import get_replica_context
from strategy.server.parameter_server import LocalHost
from strategy.variable import Variable


class Reuse(enum.Enum):
    """The rule of a scope for existing variables: never, always or automatic reuse."""

    NEVER = 0
    ALWAYS = 1
    AUTO = 2


AUTO_REUSE = Reuse.AUTO
"""Return a variable if it exists, and create it otherwise."""


@dataclass
class VariableScope:
    """A scope for the names of variables.

    Attributes:
        name: Full name, with the names of the scopes around this scope.
        reuse: The rule for existing variables.
    """

    name: str = ""
    reuse: Reuse = Reuse.NEVER

    def full_name(self, name: str) -> str:
        """Return the full name of a variable in this scope."""
        return f"{self.name}/{name}" if self.name else name

    def reuse_variables(self) -> None:
        """Make :func:`get_variable` return only existing variables of this scope from now on."""
        self.reuse = Reuse.ALWAYS


_scope: ContextVar[VariableScope | None] = ContextVar("variable_scope", default=None)


def get_variable_scope() -> VariableScope:
    """Return the open scope. Without an open scope, return a new scope without a name."""
    return _scope.get() or VariableScope()


@contextmanager
def variable_scope(
    name: str | VariableScope, reuse: bool | Reuse | None = None
) -> Iterator[VariableScope]:
    """Prefix the names of variables that are created in the block with ``<name>/``.

    Args:
        name: Name of the scope, which may have slashes. Or an earlier scope, which is opened again
            with its full name, independent of the scopes around the block, and with its ``reuse``.
        reuse: With True, :func:`get_variable` returns existing variables and creates none. With
            :data:`AUTO_REUSE`, it returns or creates variables. With None or False, it creates
            variables, unless the outer scope reuses variables: then the inner scope does, too.

    Yields:
        The scope.

    Raises:
        ValueError: The name is empty or has a colon.

    Example:
        >>> from strategy import get_variable, variable_scope
        >>> with variable_scope("layer1"):
        ...     bias = get_variable("bias", shape=(3,), initializer="zeros")
        >>> bias.name
        'layer1/bias'
        >>> with variable_scope("layer1", reuse=True):
        ...     get_variable("bias") is bias
        True
    """
    outer = get_variable_scope()
    if isinstance(name, VariableScope):
        outer, full_name = name, name.name
    elif not name or ":" in name:
        raise ValueError(f"a variable scope needs a name without ':', not {name!r}")
    else:
        full_name = outer.full_name(name)
    asked = reuse if isinstance(reuse, Reuse) else Reuse.ALWAYS if reuse else Reuse.NEVER
    inherits = asked is Reuse.NEVER and outer.reuse is not Reuse.NEVER
    inner = VariableScope(full_name, outer.reuse if inherits else asked)
    token = _scope.set(inner)
    try:
        yield inner
    finally:
        _scope.reset(token)


def get_variable(
    name: str,
    shape: Sequence[int] | int | None = None,
    dtype: DTypeLike | None = None,
    initializer: Any = None,
    trainable: bool | None = None,
    partitioner: Partitioner | None = None,
    *,
    aggregation: Any = None,
    synchronization: Any = None,
) -> Variable:
    """Create a variable of the strategy whose scope is open; without a scope, in local mode.

    Workers may create variables in any order. The first worker that creates a variable decides the
    parts and the ps tasks of the variable, and pushes the initial value. In a function that runs on
    several replicas, the first replica creates the variable, and the other replicas get it.

    Args:
        name: Unique name without ``:``. The name of the open :func:`variable_scope` is prefixed.
        shape: Shape. May be omitted if the initializer is an array or a number.
        dtype: Dtype. The default is the dtype of an initializer array, else float32.
        initializer: A name (``"zeros"``, ``"glorot_uniform"``, ...), a callable
            ``(shape, dtype) -> array``, an array, another variable, or a number. The default is
            ``"glorot_uniform"``; for integers 0, and for bools False.
        trainable: True if optimizers are meant to change the variable. The default is True, except
            with ON_READ.
        partitioner: Partitioner that divides the variable; see :mod:`strategy.partitioners`. The
            default is the strategy's ``variable_partitioner``.
        aggregation: The way to combine values if all replicas of a worker assign to the variable: a
            :class:`VariableAggregation` or its name. With NONE, the default, this is an error.
        synchronization: A :class:`VariableSynchronization` or its name. Has no effect on values,
            because a variable has one copy. ON_READ makes the variable not trainable, and
            ``trainable=True`` is then an error.

    Returns:
        The variable; a :class:`ShardedVariable` if it is divided.

    Raises:
        ValueError: The name is missing or taken, or does not exist in a scope that only reuses
            variables. The shape is missing or not valid, or an argument is unknown. Or an integer
            of the initializer does not fit the dtype.
        TypeError: The dtype is not bool, an integer, bfloat16, float16, float32 or float64, or the
            values of the initializer cannot be converted to it.
        InvalidArgumentError: Another worker created a different variable of this name. The message
            names both workers.
        ResourceExhaustedError: The ps task has no memory for the variable.

    Example:
        >>> import numpy as np
        >>> from strategy import get_variable
        >>> table = get_variable("table", shape=(3, 2), initializer="ones")
        >>> table.assign_add(np.ones((3, 2)))  # the new version
        2
        >>> table[2]
        array([2., 2.], dtype=float32)
        >>> table.gather([2, 0]).shape
        (2, 2)
    """
    if not isinstance(name, str):
        raise TypeError(f"a variable's name is a str, not {errors.type_name(name)}: {name!r}")
    if not (initializer is None or isinstance(initializer, str) or callable(initializer)):
        value = np.asarray(on_host(initializer))
        shape = value.shape if shape is None else shape
        typed = value.ndim or hasattr(initializer, "dtype")
        dtype = value.dtype if dtype is None and typed else dtype
    owner = current_strategy.get() or _outside_of_scopes(name)
    scope = get_variable_scope()
    full_name = scope.full_name(name)
    known = None if scope.reuse is Reuse.NEVER else owner.creator.by_name.get(full_name)
    if known is not None:
        _check_same(known, shape, dtype)
        return known
    if scope.reuse is Reuse.ALWAYS:
        raise ValueError(
            f"variable {full_name!r} does not exist, and the scope {scope.name!r} reuses variables "
            "only; AUTO_REUSE makes those that are not there"
        )
    if shape is None:
        raise ValueError(f"variable {name!r} needs a shape, or an array as initializer")
    axes = _axes(shape)
    use = Use.of(trainable, aggregation, synchronization)

    def create() -> Variable:
        return owner.creator.create(
            full_name, axes, dtype or np.float32, initializer, use, partitioner
        )

    context = get_replica_context()
    if context is not None and context.strategy is owner:
        return context.first_or_known(full_name, create)
    return create()


def _check_same(known: Variable, shape: Any, dtype: DTypeLike | None) -> None:
    asked = known.dtype if dtype is None else np.dtype(dtype)
    axes = known.shape if shape is None else _axes(shape)
    if (known.shape, known.dtype) != (axes, asked):
        raise ValueError(
            f"variable {known.name!r} is {known.dtype}{list(known.shape)}, and is asked for as "
            f"{asked}{list(axes)}"
        )


def _axes(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)


def _outside_of_scopes(name: str) -> ParameterServerStrategy:
    """Return the strategy of local mode. Warn if this process is a task of a cluster."""
    server = Server.current()
    if server is not None:
        warnings.warn(
            f"variable {name!r} is made outside of strategy.scope() and lives in this process "
            f"alone, though {server.job_name} {server.task_index} is a task of a cluster",
            UserWarning,
            stacklevel=3,
        )
    return _local_strategy()


@cache
def _local_strategy() -> ParameterServerStrategy:
    return ParameterServerStrategy(server=LocalHost())
