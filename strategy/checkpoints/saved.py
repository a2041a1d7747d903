"""Readers of checkpoints: the index of a folder, and the arrays in its files."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from mpidist import errors
from strategy.protocol.layout import BLOCK_BYTES, WIDE
from strategy.protocol.partition import Origin, Part, Shape, whole
from strategy.protocol.push_message import SLICE_BYTES

logger = logging.getLogger(__name__)

Array = NDArray[Any]

Reader = Callable[[Array, int], None]
"""Fills a flat array with the elements of a stored array, from an index on."""

_LENGTH = struct.Struct("<Q")
_FACTS = ("initials", "parts", "reduced")


@dataclass(frozen=True)
class Stored:
    """A flat array in the files of a checkpoint.

    Attributes:
        size: Number of elements.
        dtype: The dtype.
        read: Reads some of the elements. Raises DataLossError if a file is damaged.
    """

    size: int
    dtype: np.dtype[Any]
    read: Reader

    def slices(self) -> list[tuple[int, int]]:
        """Return the first and last index of each slice; see :data:`SLICE_BYTES`."""
        step = SLICE_BYTES // self.dtype.itemsize
        starts = range(0, max(self.size, 1), step)  # an empty array has one slice
        return [(start, min(start + step, self.size)) for start in starts]

    def part(self, start: int, stop: int) -> Array:
        """Read the elements from one index to another."""
        values = np.empty(stop - start, self.dtype)
        self.read(values, start)
        return values


def tensors_in(path: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last offset of each tensor of a safetensors file, by name.

    The file begins with the length of a JSON text, in 8 bytes, and the text. The text has offsets
    from its own end.
    """
    with open(path, "rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        described: dict[str, Any] = json.loads(file.read(length))
    base = _LENGTH.size + length
    return {
        name: (base + one["data_offsets"][0], base + one["data_offsets"][1])
        for name, one in described.items()
        if name != "__metadata__"
    }


def read_into(out: Array, path: str, start: int) -> None:
    """Fill an array with the bytes of a file from an offset on. The file is not mapped.

    Raises:
        DataLossError: The file cannot be read, or is too short.
    """
    view = out.view(np.uint8).data  # of NumPy's bfloat16 there is none
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while view.nbytes and (count := file.readinto(view)):
                view = view[count:]
    except OSError as error:
        raise unreadable(path, error) from error
    if view.nbytes:
        raise unreadable(path, "it has become shorter")


def unreadable(path: str, why: object) -> errors.DataLossError:
    """Return the error for a file of a checkpoint that cannot be read."""
    return errors.DataLossError(
        f"cannot read {path!r} of a checkpoint ({why}); restore an older one"
    )


def joined(part: Part, sources: Sequence[tuple[Part, Reader]]) -> Reader:
    """Return a reader of a part of a variable, made of readers of other parts along the same axis.

    A part is read as a table with one row for each index before the axis. Each source has adjacent
    columns of the table.
    """
    inner = 1 if part.axis is None else math.prod(part.whole[part.axis + 1 :])
    width = (part.stop - part.start) * inner
    places = [
        ((source.start - part.start) * inner, (source.stop - part.start) * inner, read)
        for source, read in sources
    ]

    def read(out: Array, first: int) -> None:
        for row, column, table in _rectangles(out, first, width):
            for start, stop, source in places:
                low, high = max(start, column), min(stop, column + table.shape[1])
                if low < high:
                    target = table[:, low - column : high - column]
                    _read_columns(target, source, stop - start, row, low - start)

    return read


def _rectangles(flat: Array, first: int, width: int) -> Iterator[tuple[int, int, Array]]:
    """Divide elements of a table into rectangles: the end of a row, whole rows, the start of a row.

    Yields:
        The first row, the first column, and the elements of a rectangle.
    """
    place = 0
    while place < flat.size:
        row, column = divmod(first + place, width)
        rows = 1 if column else max((flat.size - place) // width, 1)
        count = min(rows * width - column, flat.size - place)
        yield row, column, flat[place : place + count].reshape(rows, -1)
        place += count


def _read_columns(target: Array, read: Reader, width: int, row: int, column: int) -> None:
    """Fill a table from a wider table, beginning at a row and a column of the wider table."""
    rows, count = target.shape
    step = BLOCK_BYTES // (width * target.itemsize)
    if rows == 1 or step <= 1:
        for number, values in enumerate(target, row):
            read(values, number * width + column)
        return
    for begin in range(0, rows, step):
        here = target[begin : begin + step]
        table = np.empty((len(here), width), target.dtype)
        read(table.reshape(-1), (row + begin) * width)
        here[...] = table[:, column : column + count]


# NumPy's names of dtypes, by the names in safetensors files.
_DTYPES = {"BOOL": "bool", "BF16": "bfloat16"} | {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
}


@dataclass
class Saved:
    """A variable, or a part of a variable, in a checkpoint.

    Attributes:
        data: The values.
        slots: Optimizer slots by ``<name of the optimizer>/<slot>``.
        steps: Number of updates by each optimizer.
        initials: Initial value of each slot that does not begin with 0.
    """

    data: Stored
    slots: dict[str, Stored]
    steps: dict[str, int]
    initials: dict[str, float]


@dataclass
class _Piece:
    """A part of a variable in a file of a checkpoint.

    Attributes:
        path: Path of the file.
        name: Name of the part in the file.
        part: The part.
        dtypes: Name of each tensor's dtype, by kind: ``data`` or ``slot:<slot>``.
        starts: Offset of each tensor in the file in bytes, by kind.
        sizes: Number of elements of each tensor, by kind.
        steps: See :class:`Saved`.
        initials: See :class:`Saved`.
    """

    path: str
    name: str
    part: Part
    dtypes: dict[str, str]
    starts: dict[str, int]
    sizes: dict[str, int]
    steps: dict[str, int]
    initials: dict[str, float]

    def has_all_elements(self, kind: str) -> bool:
        """Return whether a tensor has an element for each element of the part."""
        return self.sizes.get(kind) in (None, self.sizes["data"])


def read_layouts(
    paths: Sequence[str], wanted: Mapping[str, Origin]
) -> dict[str, tuple[Shape, str]]:
    """Read the shapes and dtypes of variables, without their data.

    Args:
        paths: Paths of all files of the checkpoint.
        wanted: The variables, by any names.

    Returns:
        The shape of the whole variable and the name of the dtype, by the names of ``wanted``.
        Variables that the checkpoint lacks are left out.

    Raises:
        DataLossError: A file is missing or damaged.
    """
    return {
        name: (pieces[0].part.whole, pieces[0].dtypes["data"])
        for name, pieces in _wanted_pieces(paths, wanted).items()
    }


def read_shards(paths: Sequence[str], wanted: Mapping[str, Origin]) -> Iterator[tuple[str, Saved]]:
    """Find variables or parts of variables in a checkpoint, in any partitioning.

    Slots that do not have an element for each element of the variable, as those of Adafactor,
    cannot be divided anew. If the partitioning differs, they and the numbers of updates are left
    out.

    Args:
        paths: See :func:`read_layouts`.
        wanted: The variables or parts, by any names.

    Yields:
        A name of ``wanted``, and its variable or part. Variables that the checkpoint lacks are left
        out.

    Raises:
        DataLossError: A file is missing or damaged.
    """
    for name, pieces in _wanted_pieces(paths, wanted).items():
        part = _like_saved(wanted[name].part, pieces)
        size = math.prod(part.shape)
        dtypes = {kind: dtype for piece in pieces for kind, dtype in piece.dtypes.items()}
        arrays = {
            kind: Stored(size, np.dtype(dtype), _reader(pieces, part, kind))
            for kind, dtype in dtypes.items()
            if all(piece.has_all_elements(kind) for piece in pieces)
        }
        same = [piece for piece in pieces if piece.part == wanted[name].part]
        for kind in dtypes.keys() - arrays.keys():
            for piece in [piece for piece in same if kind in piece.dtypes]:
                dtype, size = np.dtype(piece.dtypes[kind]), piece.sizes[kind]
                arrays[kind] = Stored(size, dtype, _piece_reader(piece, kind, 0.0))
        found = set(arrays)
        saved = Saved(arrays.pop("data"), {}, {}, {})
        saved.slots = {kind.removeprefix("slot:"): array for kind, array in arrays.items()}
        for piece in pieces:
            saved.initials |= piece.initials
            saved.steps |= {
                kind: max(steps, saved.steps.get(kind, 0)) for kind, steps in piece.steps.items()
            }
        for optimizer in {
            kind.removeprefix("slot:").split("/")[0] for kind in dtypes.keys() - found
        }:
            logger.warning(
                "optimizer %r begins anew for %r: its slots in the checkpoint are of other parts "
                "of the variable",
                optimizer,
                name,
            )
            saved.steps.pop(optimizer, None)
        yield name, saved


def _wanted_pieces(paths: Sequence[str], wanted: Mapping[str, Origin]) -> dict[str, list[_Piece]]:
    """Return the saved parts of the wanted variables, in order, by the names of ``wanted``."""
    variables = {origin.variable for origin in wanted.values()}
    found: dict[str, list[_Piece]] = {}
    for path in paths:
        with _opened(path) as (file, facts):
            dtypes: dict[str, dict[str, str]] = {}
            shapes: dict[str, list[int]] = {}
            places = tensors_in(path)
            for key in file.keys():  # noqa: SIM118 - not a dict
                name, _, kind = key.partition(":")
                tensor = file.get_slice(key)
                dtype = tensor.get_dtype()
                dtypes.setdefault(name, {})[kind] = _DTYPES.get(dtype, dtype)
                shapes[key] = tensor.get_shape()
            for name, kinds in dtypes.items():
                origin = _origin(name, tuple(shapes[f"{name}:data"]), facts["parts"].get(name))
                if origin.variable not in variables:
                    continue
                sizes = {kind: math.prod(shapes[f"{name}:{kind}"]) for kind in kinds}
                reduced = {f"slot:{key}" for key in facts["reduced"].get(name, ())}
                equal = {sizes[kind] for kind in kinds.keys() - reduced}
                if equal != {math.prod(origin.part.shape)}:
                    raise ValueError(f"tensors of {name!r} are not equally large")
                # NumPy must know the dtypes of the slots. check_fits compares the data's dtype.
                for kind in kinds.keys() - {"data"}:
                    np.dtype(kinds[kind])
                starts = {kind: places[f"{name}:{kind}"][0] for kind in kinds}
                steps = {kind: int(n) for kind, n in facts["steps"][name].items()}
                initials = {k: float(v) for k, v in facts["initials"].get(name, {}).items()}
                piece = _Piece(path, name, origin.part, kinds, starts, sizes, steps, initials)
                found.setdefault(origin.variable, []).append(piece)
    for variable, pieces in found.items():
        pieces.sort(key=lambda piece: piece.part.start)
        _check_complete(variable, pieces)
    return {
        name: found[origin.variable] for name, origin in wanted.items() if origin.variable in found
    }


def _origin(name: str, shape: Shape, told: Mapping[str, Any] | None) -> Origin:
    if told is None:
        return Origin(name, whole(shape))
    part = told["part"]
    return Origin(told["variable"], Part(**{**part, "whole": tuple(part["whole"])}))


def _check_complete(variable: str, pieces: Sequence[_Piece]) -> None:
    """Raise DataLossError unless the parts match and cover the variable exactly once."""
    first = pieces[0]
    kinds = {(piece.part.whole, piece.part.axis) for piece in pieces}
    dtypes = {pair for piece in pieces for pair in piece.dtypes.items()}
    alike = len(kinds) == 1 and len(dtypes) == len(dict(dtypes))
    ends = [0, *(piece.part.stop for piece in pieces)]
    starts = [*(piece.part.start for piece in pieces), _all_of(pieces, first.part.axis).stop]
    if not alike or ends != starts:
        raise errors.DataLossError(
            f"the checkpoint {os.path.dirname(first.path)!r} does not have all parts of variable "
            f"{variable!r}, or parts that do not belong together; restore an older one"
        )


def _all_of(pieces: Sequence[_Piece], axis: int | None) -> Part:
    part = whole(pieces[0].part.whole).along(axis)
    assert part is not None
    return part


def _like_saved(part: Part, pieces: Sequence[_Piece]) -> Part:
    """Return a part along the axis of the saved parts if possible, else the part itself."""
    return part.along(pieces[0].part.axis) or part


def _reader(pieces: Sequence[_Piece], part: Part, kind: str) -> Reader:
    """Return a reader of one kind of tensor of a part, made of readers of the saved parts."""
    initials = {key: value for piece in pieces for key, value in piece.initials.items()}
    initial = initials.get(kind.removeprefix("slot:"), 0.0)
    axes = {piece.part.along(part.axis) is not None for piece in pieces}
    axis = part.axis if axes == {True} else pieces[0].part.axis
    sources = [
        (stretch, _piece_reader(piece, kind, initial))
        for piece in pieces
        if (stretch := piece.part.along(axis)) is not None  # true for all
    ]
    # Readers along another axis are joined to the whole variable, whose order has no axis.
    if axis != part.axis:
        sources = [(_all_of(pieces, part.axis), joined(_all_of(pieces, axis), sources))]
    return joined(part, sources)


def _piece_reader(piece: _Piece, kind: str, initial: float) -> Reader:
    """Return a reader of one kind of tensor of a saved part.

    If the save ran during a push, a slot may exist in other parts only. The reader then fills
    in the initial value of the slot.
    """
    if kind not in piece.dtypes and not kind.endswith(WIDE):
        return lambda out, _: out.fill(initial)
    source = kind if kind in piece.dtypes else "data"
    dtype, start = np.dtype(piece.dtypes[source]).newbyteorder("<"), piece.starts[source]

    def read(out: Array, first: int) -> None:
        values = out if out.dtype == dtype else np.empty(out.size, dtype)
        read_into(values, piece.path, start + first * dtype.itemsize)
        if values is not out:
            out[...] = values

    return read


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, dict[str, dict[str, Any]]]]:
    """Open a file of a checkpoint. Raise any error of the ``with`` block as a DataLossError.

    Yields:
        The file and its metadata.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            facts = {key: json.loads(metadata.get(key, "{}")) for key in _FACTS}
            yield file, facts | {"steps": json.loads(metadata["steps"])}
    except Exception as error:
        raise unreadable(path, error) from error


def check_fits(name: str, shape: Shape, dtype: str, origin: Origin, own: np.dtype[Any]) -> None:
    """Raise InvalidArgumentError if a variable has another shape or dtype in a checkpoint.

    Args:
        name: Name of the variable, or of a part of it.
        shape: Shape of the whole variable in the checkpoint.
        dtype: Name of the dtype in the checkpoint.
        origin: The variable or part in the program.
        own: The dtype in the program.
    """
    here = (origin.part.whole, own.name)
    if (shape, dtype) != here:
        raise errors.InvalidArgumentError(
            f"the checkpoint has {name!r} as {dtype}{list(shape)}, and the program as "
            f"{here[1]}{list(here[0])}"
        )
