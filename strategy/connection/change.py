"""Changes of variables, and pushes of changes to several servers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Work, gather_works
from strategy.shared.push_layout import copy_scaled
from strategy.shared.ranges import check_range

if TYPE_CHECKING:
    from strategy.connection.connection import Connection
    from strategy.connection.remote import Remote
    from strategy.shared.rounds import Decision

Array = NDArray[Any]


@dataclass(slots=True)
class Change:
    """One change of one variable.

    Attributes:
        remote: The variable.
        rule: A ``Rule`` of ``parameter_server.proto``, or a number of :meth:`Connection.rule_of`.
        data: The values, with any strides, in the shape of the variable, rows or elements. They are
            converted when they are sent.
        scale: A factor for the values.
        ids: Unique row numbers of ``data``, int64; None for the whole variable.
        wire: The dtype in which the values are sent; None for the dtype of the variable.
        places: Indices of the elements of ``data`` in the flattened variable, ascending, int64. The
            other elements are 0. None if ``data`` has all elements.
        rate: The learning rate. 0 if the rule is no optimizer, or if a schedule computes the rate.
    """

    remote: Remote
    rule: int
    data: Array
    scale: float = 1.0
    ids: Array | None = None
    wire: np.dtype[Any] | None = None
    places: Array | None = None
    rate: float = 0.0

    @property
    def travels_in(self) -> np.dtype[Any]:
        """The dtype in which the values are sent."""
        return self.remote.layout.dtype if self.wire is None else self.wire

    @property
    def is_whole(self) -> bool:
        """True if ``data`` has all elements of the variable."""
        return self.ids is None and self.places is None


def check_change(
    name: str, shape: tuple[int, ...], dtype: np.dtype[Any], data: Array, rows: int | None = None
) -> None:
    """Check that an array can change a variable.

    Args:
        name: Name of the variable.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        data: The array.
        rows: Number of rows that the array changes; None for all.

    Raises:
        ValueError: The shape differs, or a value does not fit the dtype.
        TypeError: The dtype cannot be converted.
    """
    shape = shape if rows is None else (rows, *shape[1:])
    if data.shape != shape:
        what = "the variable" if rows is None else f"{rows} rows of the variable"
        raise ValueError(
            f"the change of variable {name!r} has shape {data.shape}, and {what} {shape}"
        )
    # np.can_cast lets complex numbers become bfloat16.
    if data.dtype.kind == "c" or not np.can_cast(data.dtype, dtype, "same_kind"):
        raise TypeError(
            f"the change of variable {name!r} has dtype {data.dtype}, which cannot become {dtype}"
        )
    check_range(data, dtype, f"variable {name!r}")


def converted(change: Change) -> Array:
    """Return a flat, scaled copy of the values in the dtype in which they are sent."""
    flat = np.empty(change.data.size, change.travels_in)
    copy_scaled(flat.reshape(change.data.shape), change.data, change.scale)
    return flat


def global_norm(changes: Sequence[Change]) -> float:
    """Return the Euclidean norm of all changes together.

    Raises:
        ValueError: The norm of a change is infinite or NaN.
    """
    norms = [_norm(np.ravel(change.data)) for change in changes]
    for change, norm in zip(changes, norms, strict=True):
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradient of variable {change.remote.name!r} cannot be clipped: its norm is "
                f"{norm}"
            )
    return math.hypot(*norms)


def _norm(flat: Array) -> float:
    if flat.dtype not in (np.float32, np.float64):
        wide = flat.dtype.kind in "iu" or flat.itemsize > 4
        flat = flat.astype(np.float64 if wide else np.float32)
    square = float(np.vdot(flat, flat))
    # The sum of squares may overflow or underflow.
    if 1e-30 < square < math.inf or not flat.any():
        return math.sqrt(square)
    largest = float(np.abs(flat).max())
    if not 0 < largest < math.inf:
        return largest
    scaled = flat / flat.dtype.type(largest)
    return largest * math.sqrt(float(np.vdot(scaled, scaled)))


def push_all(
    changes: Sequence[Change],
    to: Sequence[Connection] = (),
    decision: Decision | None = None,
) -> Work:
    """Push changes to the servers of their variables; see :meth:`Connection.push`.

    Args:
        changes: Changes of variables on any servers.
        to: Connections that get a push even without changes. They come first, in this order.
        decision: See :meth:`Connection.push`.

    Returns:
        A Work whose result is the list of (version, staleness) after each change, in order.
    """
    by_server: dict[Connection, list[int]] = {connection: [] for connection in to}
    for position, change in enumerate(changes):
        by_server.setdefault(change.remote.connection, []).append(position)
    order = [position for positions in by_server.values() for position in positions]
    first = next(iter(by_server))
    # A push names the last pushes to all servers, so pushes to several servers must not mix.
    with first.pushing_to_all if len(first.siblings) > 1 else contextlib.nullcontext():
        for connection in by_server:
            connection.make_room()
        sent = [connection.sequence + (connection in by_server) for connection in first.siblings]
        works = []
        try:
            for connection, positions in by_server.items():
                own = [changes[position] for position in positions]
                works.append(connection.push(own, decision, sent))
        except BaseException as error:  # Ctrl-C too
            _pass_by(first, by_server, sent)
            for work in works:
                work.add_done_callback(partial(_attach, error))
            raise
    if len(works) == 1:
        return works[0]
    whole = gather_works("push", works)
    whole.add_done_callback(lambda _: _tell_once(works))
    return whole.then(
        lambda results: _in_order([pair for result in results for pair in result], order)
    )


def _pass_by(first: Connection, to: Iterable[Connection], sent: Sequence[int]) -> None:
    """Send empty pushes to servers that miss their part of a push that another server got."""
    pairs = [(one, last) for one, last in zip(first.siblings, sent, strict=True) if one in to]
    if any(one.sequence >= last for one, last in pairs):
        for one, last in pairs:
            if one.sequence < last:
                one.pass_by(sent)


def _attach(cause: BaseException, work: Work) -> None:
    """Mark the error of a part of a push as caused by an error that is raised already."""
    if work.error is not None:
        work.error.__context__ = cause


def _tell_once(works: Sequence[Work]) -> None:
    """Combine the errors of several servers: the first error gets the others as notes."""
    problems = [error for error in (work.error for work in works) if error is not None]
    for other in problems[1:]:
        problems[0].add_note(f"Another server says: {other}")
        other.__context__ = problems[0]


def _in_order(pairs: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return results sorted by their positions in ``order``."""
    result = [None] * len(pairs)
    for position, pair in zip(order, pairs, strict=True):
        result[position] = pair
    return result
