"""Placements under TensorFlow's names; pure.

There they choose the device of an operation; here the ps task of a variable, which is all that is
placed. They are called with the name, the shape and the dtype of a new variable in place of its
operation, and are given as a strategy's ``placement``. Each worker makes its own: they count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from hashlib import md5
from typing import Any

import numpy as np

from mpidist import ClusterSpec
from strategy.devices import parse
from strategy.placement import Place
from strategy.shared.numbers import whole_number

Load = Callable[[str, tuple[int, ...], "np.dtype[np.generic]"], float]
"""From the name, shape and dtype of a variable to how much work it is for its ps task."""

# What TensorFlow calls the operations that make variables.
_VARIABLES = {"Variable", "VariableV2", "VarHandleOp"}


class GreedyLoadBalancingStrategy:
    """Local. Places a variable on the ps task with the least load so far.

    Args:
        num_tasks: Number of ps tasks.
        load_fn: The load of a variable, from its name, shape and dtype, in any unit; such as
            :func:`byte_size_load_fn`.

    Raises:
        TypeError: ``load_fn`` is no function.
        ValueError: There is no ps task.
    """

    def __init__(self, num_tasks: int, load_fn: Load) -> None:
        if not callable(load_fn):
            raise TypeError(f"load_fn is {load_fn!r}, not a function of name, shape and dtype")
        self._loads = [0.0] * _tasks(num_tasks=num_tasks)
        self._load_of = load_fn

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """Local. Index of the ps task for a new variable; of several with the same load the first.

        Args:
            name: Of the variable.
            shape: Of the variable.
            dtype: Of the variable.
        """
        task = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[task] += self._load_of(name, shape, dtype)
        return task


class RandomStrategy:
    """Local. Places a variable by a hash of its name: on all workers alike.

    Args:
        num_ps_tasks: Number of ps tasks.
        seed: Another one places otherwise.

    Raises:
        ValueError: There is no ps task.
    """

    def __init__(self, num_ps_tasks: int, seed: int = 0) -> None:
        self._count = _tasks(num_ps_tasks=num_ps_tasks)
        self._seed = whole_number(seed=seed)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """Local. Index of the ps task for a new variable: that which TensorFlow's chooses.

        Args:
            name: Of the variable.
            shape: Of no meaning.
            dtype: Of no meaning.
        """
        digest = md5(f"{name}_{self._seed}".encode(), usedforsecurity=False).digest()
        return int.from_bytes(digest, "big") % self._count


def byte_size_load_fn(name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Local. The bytes of a variable, as a load for :class:`GreedyLoadBalancingStrategy`.

    Args:
        name: Of no meaning.
        shape: Of the variable.
        dtype: Of the variable.
    """
    return math.prod(shape) * dtype.itemsize


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Any = None,
    ps_ops: Collection[str] | None = None,
    ps_strategy: Place | None = None,
) -> Place | None:
    """Local. A placement with the arguments of TensorFlow's function of this name.

    Args:
        ps_tasks: Number of ps tasks, if there is no ``cluster``.
        ps_device: A device of job ``ps``.
        worker_device: No effect: operations run on the worker that calls them.
        merge_devices: No effect: there are no other scopes that place variables.
        cluster: A ClusterSpec, a ClusterDef or a dict; its ps tasks are counted.
        ps_ops: Of TensorFlow's types of operations; those of variables must be among them. No
            effect: only variables are placed.
        ps_strategy: A function of name, shape and dtype to the index of a ps task; by default one
            task after the other.

    Returns:
        A strategy's ``placement``; None if there is no ps task, which is the default placement.

    Raises:
        TypeError: ``cluster`` is none, or ``ps_strategy`` is no function.
        ValueError: A device is none, or ``ps_device`` not of job ``ps``; ``ps_tasks`` is negative;
            or ``ps_ops`` has no variables.
    """
    if parse(ps_device or "").job != "ps":
        raise ValueError(
            f"ps_device is {ps_device!r}: variables live on tasks of job 'ps', and on no others"
        )
    parse(worker_device or "")
    if ps_ops is not None and not _VARIABLES & set(ps_ops):
        raise ValueError(
            f"ps_ops {list(ps_ops)} have none of {sorted(_VARIABLES)}: only variables are placed, "
            "and they live on ps tasks"
        )
    if ps_strategy is not None and not callable(ps_strategy):
        raise TypeError(f"ps_strategy is {ps_strategy!r}, not a function of name, shape and dtype")
    if cluster is not None:
        spec = ClusterSpec(cluster)
        ps_tasks = spec.num_tasks("ps") if "ps" in spec.jobs else 0
    if not ps_tasks:
        return None
    turns = itertools.cycle(range(_tasks(ps_tasks=ps_tasks)))
    return ps_strategy or (lambda name, shape, dtype: next(turns))


def _tasks(**named: int) -> int:
    """The number of ps tasks, given by its name; ValueError unless there is one."""
    ((name, value),) = named.items()
    count = whole_number(**named)
    if count < 1:
        raise ValueError(f"{name} is {value}, and at least one ps task is needed")
    return count
