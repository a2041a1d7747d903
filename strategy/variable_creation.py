"""The function that makes variables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist import Server, errors
from strategy.aggregation import VariableSynchronization, member
from strategy.array_like import on_host
from strategy.local import local_host
from strategy.parameter_server_strategy import ParameterServerStrategy
from strategy.replicas import get_replica_context
from strategy.replicated import current_strategy
from strategy.scopes import Reuse, get_variable_scope
from strategy.shared.parts import Partitioner
from strategy.variable import Variable


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
    """Local. Make a variable of the strategy whose scope is open; a local one without a scope.

    All workers make the same variables in the same order. The first worker to come gives the
    first value. In a function that runs on several replicas the first replica to come makes it, and
    the others get it.

    Args:
        name: Unique; without ``:``. In a :func:`variable_scope` that scope's name comes before it.
        shape: Its shape; may be left out if the initializer is an array or a number.
        dtype: Its dtype; by default that of an initializer array, else float32.
        initializer: A name (``"zeros"``, ``"glorot_uniform"``, ...), a callable
            ``(shape, dtype) -> array``, an array, another variable, or a number. None, the default:
            ``"glorot_uniform"``; integers are 0 and bools False.
        trainable: Whether optimizers are meant to change it; by default they are.
        partitioner: Into how many parts it is divided; see :mod:`strategy.partitioners`. By default
            the strategy's ``variable_partitioner``.
        aggregation: What happens when all replicas of a worker assign to it: a
            :class:`VariableAggregation` or its name. NONE, the default: an error.
        synchronization: A :class:`VariableSynchronization` or its name. There is one copy of a
            variable, and all mean the same; ON_READ ones are not trainable.

    Returns:
        The variable; a :class:`ShardedVariable` if it is divided.

    Raises:
        ValueError: The name is missing or taken, or in a scope that reuses variables not there, or
            the shape is missing or wrong, or an argument is unknown, or the initializer has an
            integer that does not fit the dtype.
        TypeError: The dtype is not bool, an integer, bfloat16, float16, float32 or float64, or the
            initializer's values cannot become it.
        DeadlineExceededError: The ps task has no room for it, and workers of its node, with whom
            it would make some, have not made the variable; the message names them.
        InvalidArgumentError: Another worker made it otherwise; the message names both.
        ResourceExhaustedError: The ps task has no room for it.
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
    known = None if scope.reuse is Reuse.NEVER else owner.find_variable(full_name)
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
    if trainable is None:
        when = member(VariableSynchronization, synchronization)
        trainable = when is not VariableSynchronization.ON_READ

    def create() -> Variable:
        return owner.create_variable(
            full_name,
            axes,
            dtype or np.float32,
            initializer,
            trainable,
            partitioner,
            aggregation,
            synchronization,
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
    """The strategy of local mode; with a warning where there is a cluster."""
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
    return ParameterServerStrategy(server=local_host())
