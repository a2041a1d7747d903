"""Changes of variables, on their way to the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Work, gather_works
from strategy.shard import Layout

if TYPE_CHECKING:
    from strategy.client import Remote

Array = NDArray[Any]


@dataclass(slots=True)
class Change:
    """One change of one variable.

    Attributes:
        remote: The variable.
        rule: See ``Rule`` in the messages, or what :meth:`Connection.configure` gave.
        data: Any strides, the variable's shape; converted to its dtype.
    """

    remote: Remote
    rule: int
    data: Array


def check_change(name: str, layout: Layout, data: Array) -> None:
    """Local. ValueError or TypeError unless an array can change a variable."""
    if data.shape != layout.shape:
        raise ValueError(
            f"the change of variable {name!r} has shape {data.shape}, and the variable "
            f"{layout.shape}"
        )
    if not np.can_cast(data.dtype, layout.dtype, "same_kind"):
        raise TypeError(
            f"the change of variable {name!r} has dtype {data.dtype}, which cannot become "
            f"{layout.dtype}"
        )


def converted(change: Change) -> Array:
    """Local. A flat copy in the variable's dtype: the caller may change its array at once."""
    layout = change.remote.layout
    flat = np.empty(layout.size, layout.dtype)
    np.copyto(flat.reshape(layout.shape), change.data, casting="same_kind")
    return flat


def push_all(changes: Sequence[Change]) -> Work:
    """Local. Push changes to all the servers concerned; see :meth:`Connection.push`.

    Returns:
        A Work whose result is the list of (version, staleness) after each change, in order.
    """
    by_server: dict[int, list[int]] = {}
    for position, change in enumerate(changes):
        by_server.setdefault(id(change.remote.connection), []).append(position)
    works, order = [], []
    for positions in by_server.values():
        part = [changes[position] for position in positions]
        works.append(part[0].remote.connection.push(part))
        order += positions
    if len(works) == 1:
        return works[0]
    return gather_works("push", works).then(
        lambda results: _in_order([pair for result in results for pair in result], order)
    )


def _in_order(pairs: list[Any], order: list[int]) -> list[Any]:
    result = [None] * len(pairs)
    for position, pair in zip(order, pairs, strict=True):
        result[position] = pair
    return result
