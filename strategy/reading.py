"""Several variables pulled at once."""

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
    """Local. Pull several variables at once.

    Those that are not in memory which this process sees come in one message from each server, if
    they are small, and all at the same time. Each is of a version of its own, as if it had been
    pulled by itself; afterwards its ``version`` says which.

    Args:
        variables: Which.
        out: Filled and returned if given: an array for each, or None, as for
            :meth:`Variable.read_value`.
        consistent: See :meth:`Variable.read_value`.

    Returns:
        Their values, in order; on a replica with a GPU fresh ones are CuPy arrays there.

    Raises:
        ValueError: ``out`` has another length, or one of its arrays does not fit.
        TypeError: What is given is no variable, or shall be on a GPU, and CuPy does not have its
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
    """Which are pulled together, by their numbers: those by message.

    Others go up to a GPU while the next is copied from memory that this process sees.
    """
    numbers = list(range(len(variables)))
    if gpu is None:
        return [numbers]
    near = [all(remote.shared is not None for remote in one.remotes) for one in variables]
    far = [number for number in numbers if not near[number]]
    return [[number] for number in numbers if near[number]] + [far]
