"""Pulls of several variables at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from strategy.connection.remote import pull_into
from strategy.gpus import landing
from strategy.replicas import get_replica_context
from strategy.variable import Variable


def read_values(
    variables: Iterable[Variable], out: Sequence[Any] | None = None, *, consistent: bool = True
) -> list[Any]:
    """Pull several variables at once.

    Variables in memory that this process cannot read are pulled by messages at the same time. Small
    variables come in one message from each server. Each value has a version of its own, as in a
    separate pull. Afterwards the ``version`` of each variable is the version of its value. With
    ``consistent=False``, only pulls by message update ``version``.

    Args:
        variables: The variables.
        out: One output array or None for each variable; see :meth:`Variable.read_value`.
        consistent: See :meth:`Variable.read_value`.

    Returns:
        The values, in order. On a replica with a GPU, fresh arrays are CuPy arrays on that GPU.

    Raises:
        ValueError: ``out`` has another length, or one of its arrays does not fit.
        TypeError: An argument is not a variable, or a value would be on a GPU, but CuPy has no such
            dtype.
    """
    wanted = list(variables)
    for variable in wanted:
        if not isinstance(variable, Variable):
            raise TypeError(f"read_values takes variables, not {variable!r}")
    given = [None] * len(wanted) if out is None else list(out)
    if len(given) != len(wanted):
        raise ValueError(f"out has {len(given)} arrays for {len(wanted)} variables")
    context = get_replica_context()
    gpu = None if context is None else context.gpu
    places = [
        landing(f"variable {one.name!r}", one.shape, one.dtype, where, gpu)
        for one, where in zip(wanted, given, strict=True)
    ]
    arrays: list[Any] = [None] * len(wanted)
    for group in _groups(wanted, gpu):
        targets = [
            place for number in group for place in wanted[number].places_in(places[number][0])
        ]
        pull_into(targets, consistent)
        for number in group:
            arrays[number] = places[number][1]()
    return arrays


def _groups(variables: Sequence[Variable], gpu: int | None) -> list[list[int]]:
    """Return groups of variables to pull together, as lists of positions.

    With a GPU, each variable in memory that this process can read is a group, so that its upload
    overlaps the next copy. The other variables are one group.
    """
    numbers = list(range(len(variables)))
    if gpu is None:
        return [numbers]
    near = [all(remote.shared is not None for remote in one.remotes) for one in variables]
    far = [number for number in numbers if not near[number]]
    return [[number] for number in numbers if near[number]] + [far]
