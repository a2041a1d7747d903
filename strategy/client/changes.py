"""A worker's changes of variables, and the arrays and entries in which they are pushed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strategy.client.pull import RemoteVariable
from strategy.protocol.checks import check_range
from strategy.protocol.layout import HALVES
from strategy.protocol.push_message import (
    ELEMENTS,
    INCREMENT,
    JOINED_BYTES,
    ONE,
    ROWS,
    SLICE_BYTES,
    WHOLE,
    pack_entries,
    wire_number,
)

if TYPE_CHECKING:
    from strategy.client.connection import Connection

Array = NDArray[Any]


@dataclass(slots=True)
class Change:
    """One change of one variable, or of several small variables of one server and dtype.

    Attributes:
        remotes: The variables. Several variables have one flat array of all their values.
        rule: A ``Rule`` of ``parameter_server.proto``, or a number of :meth:`Connection.rule_of`.
        data: The values, with any strides, in the shape of the variable, rows or elements. They are
            converted when they are sent.
        scale: A factor for the values.
        ids: Unique row numbers of ``data``, int64; None for the whole variable.
        wire: The dtype in which the values are sent; None for the dtype of the variable.
        element_ids: Indices of the elements of ``data`` in the flattened variable, ascending,
            int64. The other elements are 0. None if ``data`` has all elements.
        rate: The learning rate. 0 if the rule is not an optimizer, or if it has a schedule.
        entries: The entries of the message for ``remotes``, if they are known.
    """

    remotes: Sequence[RemoteVariable]
    rule: int
    data: Array
    scale: float = 1.0
    ids: Array | None = None
    wire: np.dtype[Any] | None = None
    element_ids: Array | None = None
    rate: float = 0.0
    entries: bytes = b""

    @property
    def connection(self) -> Connection:
        """The connection to the server of the variables."""
        return self.remotes[0].connection

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the variables."""
        return self.remotes[0].layout.dtype

    @property
    def travels_in(self) -> np.dtype[Any]:
        """The dtype in which the values are sent."""
        return self.remotes[0].layout.dtype if self.wire is None else self.wire

    @property
    def is_whole(self) -> bool:
        """True if ``data`` has all elements of the variables."""
        return self.ids is None and self.element_ids is None

    def divided(self) -> Iterator[tuple[RemoteVariable, Array]]:
        """Yield each variable with its values."""
        if len(self.remotes) == 1:
            yield self.remotes[0], self.data
            return
        begin = 0
        for remote in self.remotes:
            end = begin + remote.layout.size
            yield remote, self.data[begin:end]
            begin = end


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
            f"the gradient or value for variable {name!r} has shape {data.shape}, and {what} "
            f"{shape}"
        )
    # np.can_cast lets complex numbers become bfloat16.
    if data.dtype.kind == "c" or not np.can_cast(data.dtype, dtype, "same_kind"):
        raise TypeError(
            f"the gradient or value for variable {name!r} has dtype {data.dtype}, which cannot "
            f"become {dtype}"
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
    norms = []
    # One norm for each variable: sums over more elements would be less accurate in float32.
    for remote, data in [pair for change in changes for pair in change.divided()]:
        norm = _norm(np.ravel(data))
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradient of variable {remote.name!r} cannot be clipped: its norm is {norm}"
            )
        norms.append(norm)
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


def entries_of(change: Change) -> bytes:
    """Return the entries of a push message for a change."""
    kind = WHOLE
    if change.ids is not None:
        kind = ROWS
    elif change.element_ids is not None:
        kind = ELEMENTS
    elif change.data is ONE:
        kind = INCREMENT
    wire = wire_number(change.wire)
    return pack_entries([(remote.number, change.rule, kind, wire) for remote in change.remotes])


def arrays_of(changes: Sequence[Change]) -> list[Array]:
    """Return the C-contiguous arrays of a push. Some may share memory with the given values."""
    arrays: list[Array | list[Change]] = []
    joined: dict[np.dtype[Any], list[Change]] = {}
    for change in changes:
        if change.data is ONE:
            continue
        arrays += [numbers for numbers in (change.ids, change.element_ids) if numbers is not None]
        dtype = change.travels_in
        if len(change.remotes) == 1 and change.data.size * dtype.itemsize >= JOINED_BYTES:
            values = _joined([change])
            arrays += slices_of(values) if change.is_whole else [values]
        elif dtype in joined:
            joined[dtype].append(change)
        else:
            joined[dtype] = [change]
            arrays.append(joined[dtype])
    return [_joined(part) if isinstance(part, list) else part for part in arrays]


def messages_of(arrays: Sequence[Array]) -> list[list[Array]]:
    """Divide arrays into messages of at most :data:`SLICE_BYTES`, unless one array is larger."""
    messages: list[list[Array]] = [[]]
    nbytes = 0
    for array in arrays:
        if messages[-1] and nbytes + array.nbytes > SLICE_BYTES:
            messages.append([])
            nbytes = 0
        messages[-1].append(array)
        nbytes += array.nbytes
    return messages


def slices_of(flat: Array) -> list[Array]:
    """Divide a flat array into slices of at most :data:`SLICE_BYTES`."""
    step = SLICE_BYTES // flat.itemsize
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def _joined(changes: Sequence[Change]) -> Array:
    """Return the values of changes that are sent in one dtype as one flat array.

    The values of a single change are not copied if they can be sent as they are.
    """
    dtype, scale = changes[0].travels_in, changes[0].scale
    is_alike = all(change.data.dtype == dtype and change.scale == scale for change in changes)
    if is_alike:
        parts = [change.data.reshape(-1) for change in changes]
        if scale == 1.0:
            # A reversed array stays a view with negative strides.
            return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
    flat, begin = np.empty(sum([change.data.size for change in changes]), dtype), 0
    with np.errstate(all="ignore"):  # the server does not report overflow either
        if is_alike:
            copy_scaled(np.concatenate(parts, out=flat), flat, scale)
            return flat
        for change in changes:
            part = flat[begin : begin + change.data.size].reshape(change.data.shape)
            copy_scaled(part, change.data, change.scale)
            begin += part.size
    return flat


def copy_scaled(target: Array, source: Array, scale: float) -> None:
    """Copy an array times a factor, converted to the dtype of the target."""
    if scale == 1.0:
        np.copyto(target, source, casting="same_kind")
    else:  # in half precision or integers the factor might round to 0
        kinds = [array.dtype for array in (source, target) if array.dtype not in HALVES]
        wide = np.result_type(np.float32, *kinds)
        np.multiply(source, scale, out=target, dtype=wide, casting="unsafe")
