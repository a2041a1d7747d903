"""What becomes of values that several replicas assign to a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strategy.aggregation import VariableAggregation
from strategy.reductions import reduced
from strategy.replicas import get_replica_context

if TYPE_CHECKING:
    from strategy.variable import Variable

Version = int | tuple[int, ...]
"""How often a variable has been changed; of one in parts, a number for each."""


def check_first_only(variable: Variable, what: str) -> None:
    """Local. ValueError where what several replicas give cannot be added up.

    Args:
        variable: To which they give it.
        what: What they do, for the message.
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
    """Local. Push a value; of several replicas what the aggregation makes of theirs, once.

    Args:
        variable: To which it is assigned.
        push: Pushes one value.
        value: This replica's, on the host: others would not wait for its GPU.

    Raises:
        ValueError: Several replicas assign to a variable that has aggregation NONE.
        RuntimeError: They assign to different variables.
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
