"""Assignments of several replicas to a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strategy.aggregation import VariableAggregation
from strategy.reductions import reduced
from strategy.replicas import get_replica_context

if TYPE_CHECKING:
    from strategy.variable import Variable

Version = int | tuple[int, ...]
"""The number of changes of a variable; for a divided variable, a tuple with one per part."""


def check_first_only(variable: Variable, what: str) -> None:
    """Raise ValueError if a change by several replicas would have to be added up.

    Args:
        variable: The variable that the replicas change.
        what: The change, for the message.
    """
    context = get_replica_context()
    several = context is not None and context.num_replicas_in_sync > 1
    if several and variable.aggregation not in (
        VariableAggregation.NONE,
        VariableAggregation.ONLY_FIRST_REPLICA,
    ):
        raise ValueError(
            f"{what} of variable {variable.name!r} on several replicas needs aggregation "
            f"ONLY_FIRST_REPLICA, not {variable.aggregation.name}: rows can only be added up for "
            "scatter_add and scatter_sub"
        )


def of_all_replicas(variable: Variable, push: Callable[[Any], Version], value: Any) -> Version:
    """Push a value. On several replicas, aggregate their values and push the result once.

    Args:
        variable: The variable to assign to.
        push: Pushes one value.
        value: Value of this replica, in host memory: other replicas would not wait for its GPU.

    Raises:
        ValueError: Several replicas assign to a variable with aggregation NONE.
        RuntimeError: The replicas assign to different variables.
    """
    context = get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return push(value)
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"variable {variable.name!r} is assigned to on several replicas, and has aggregation "
            "NONE: give it SUM, MEAN or ONLY_FIRST_REPLICA, or assign in a merge_call"
        )
    given = (push, value, variable.name, variable.aggregation)
    version: Version = context.merge_call(_aggregate, given)
    return version


def _aggregate(_: Any, pushes: Any, values: Any, names: Any, aggregations: Any) -> Version:
    if len(set(names.values)) > 1:
        raise RuntimeError(
            f"replicas assign to different variables at a time: {list(names.values)}"
        )
    push: Callable[[Any], Version] = pushes.values[0]
    aggregation = aggregations.values[0]
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return push(values.values[0])
    return push(reduced(aggregation.name, values))
