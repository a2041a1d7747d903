"""The overloads of torch's methods that take one tensor, a reduction, a root and a time limit.

torch's own functions call the methods of a group with lists of tensors and with options. Scripts
also call ``group.allreduce(tensor, op)`` or ``group.broadcast(tensor, root, timeout=limit)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from mpidist.torch.work import MpidistWork

# By method: the class of its options, and the arguments of torch's overload in their order.
_OVERLOADS = {
    "allreduce": (c10d.AllreduceOptions, ("tensor", "op", "timeout")),
    "reduce": (c10d.ReduceOptions, ("tensor", "root", "op", "timeout")),
    "reduce_scatter": (c10d.ReduceScatterOptions, ("output", "input", "op", "timeout")),
    "broadcast": (c10d.BroadcastOptions, ("tensor", "root", "timeout")),
    "allgather": (c10d.AllgatherOptions, ("output_tensors", "input_tensor", "timeout")),
    "gather": (c10d.GatherOptions, ("output_tensors", "input_tensor", "root", "timeout")),
    "scatter": (c10d.ScatterOptions, ("output_tensor", "input_tensors", "root", "timeout")),
    "all_to_all_single": (
        c10d.AllToAllOptions,
        ("output", "input", "output_split_sizes", "input_split_sizes", "timeout"),
    ),
    "barrier": (c10d.BarrierOptions, ("timeout",)),
}
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def call_overload(group: Any, method: str, given: Sequence[Any], **named: Any) -> MpidistWork:
    """Collective. Call a method of a group with lists and options, in place of an overload.

    Args:
        group: The group.
        method: Name of the method.
        given: The positional arguments. None stands for a missing argument.
        **named: The arguments by keyword.

    Returns:
        The Work. It has the time limit of the call, if one is given.

    Raises:
        TypeError: There are too many arguments, or one is missing.
    """
    options_class, names = _OVERLOADS[method]
    if any(value is not None for value in given[len(names) :]):
        raise TypeError(f"{method}() takes {', '.join(names)}, and no more arguments")
    pairs = [*zip(names, given, strict=False), *named.items()]
    values = {name: value for name, value in pairs if value is not None}
    tensors = [values[name] for name in names if name in values and name not in _FIELDS]
    one_tensor = method != "all_to_all_single" and any(
        isinstance(tensor, torch.Tensor) for tensor in tensors
    )
    if len(tensors) < len(set(names) - _FIELDS.keys()):
        raise TypeError(f"{method}() needs {', '.join(names)}")
    if one_tensor:
        if "root" in names and "root" not in values:
            raise TypeError(f"{method}() of one tensor needs the argument 'root'")
        tensors = [[value] if isinstance(value, torch.Tensor) or value else [] for value in tensors]
    options = options_class()
    for name, field in _FIELDS.items():
        if name in values:
            setattr(options, field, values[name])
    work: MpidistWork = getattr(group, method)(*tensors, options)
    work.limit = values.get("timeout")
    return work
