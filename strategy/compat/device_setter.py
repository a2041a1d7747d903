"""Placements with TensorFlow's names. Pure.

In TensorFlow they choose the device of an operation. Here they choose the ps task of a variable, by
its name, shape and dtype. Pass them to a strategy as ``placement``. They count variables, so each
worker makes its own placement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from hashlib import md5
from typing import Any

import numpy as np

from mpidist import ClusterSpec
from strategy.placement import Place, parse
from strategy.protocol.checks import whole_number

Load = Callable[[str, tuple[int, ...], "np.dtype[np.generic]"], float]
"""A function of the name, shape and dtype of a variable that returns its load on a ps task."""

# TensorFlow's types of operations that make variables.
_VARIABLES = {"Variable", "VariableV2", "VarHandleOp"}


class GreedyLoadBalancingStrategy:
    """Placement of variables on the ps task with the least load so far.

    Args:
        num_tasks: Number of ps tasks.
        load_fn: A function of name, shape and dtype that returns the load of a variable in any
            unit, such as :func:`byte_size_load_fn`.

    Raises:
        TypeError: ``load_fn`` is not a function.
        ValueError: There is no ps task.
    """

    def __init__(self, num_tasks: int, load_fn: Load) -> None:
        if not callable(load_fn):
            raise TypeError(f"load_fn is {load_fn!r}, not a function of name, shape and dtype")
        self._loads = [0.0] * _tasks(num_tasks=num_tasks)
        self._load_of = load_fn

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """Return the index of the ps task for a new variable; the first one in a tie.

        Args:
            name: Name of the variable.
            shape: Shape of the variable.
            dtype: Dtype of the variable.
        """
        task = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[task] += self._load_of(name, shape, dtype)
        return task


class RandomStrategy:
    """Placement of variables by a hash of their names, equal on all workers.

    Args:
        num_ps_tasks: Number of ps tasks.
        seed: Seed of the hash.

    Raises:
        ValueError: There is no ps task.
    """

    def __init__(self, num_ps_tasks: int, seed: int = 0) -> None:
        self._count = _tasks(num_ps_tasks=num_ps_tasks)
        self._seed = whole_number(seed=seed)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
        """Return the index of the ps task for a new variable, as TensorFlow's RandomStrategy does.

        Args:
            name: Name of the variable.
            shape: No effect.
            dtype: No effect.
        """
        digest = md5(f"{name}_{self._seed}".encode(), usedforsecurity=False).digest()
        return int.from_bytes(digest, "big") % self._count


def byte_size_load_fn(name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Return the size of a variable in bytes, as the load for GreedyLoadBalancingStrategy.

    Args:
        name: No effect.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
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
    """Return a placement for the arguments of TensorFlow's function of this name.

    Args:
        ps_tasks: Number of ps tasks. No effect if ``cluster`` is given.
        ps_device: A device of job ``ps``.
        worker_device: No effect: operations run on the worker that calls them.
        merge_devices: No effect: no other scopes place variables.
        cluster: A ClusterSpec, ClusterDef or dict that gives the number of ps tasks.
        ps_ops: Names of TensorFlow's types of operations, which must include a type of variables.
            No effect otherwise: only variables are placed.
        ps_strategy: A function of name, shape and dtype that returns the index of a ps task; by
            default round robin.

    Returns:
        The ``placement`` for a strategy. None, the default placement, if there is no ps task.

    Raises:
        TypeError: ``cluster`` is not a cluster, or ``ps_strategy`` is not a function.
        ValueError: A device name is not valid, ``ps_device`` is not of job ``ps``, ``ps_tasks`` is
            negative, or ``ps_ops`` has no variables.
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
    """Return the number of ps tasks in one keyword argument. Raise ValueError if it is below 1."""
    ((name, value),) = named.items()
    count = whole_number(**named)
    if count < 1:
        raise ValueError(f"{name} is {value}, and at least one ps task is needed")
    return count
