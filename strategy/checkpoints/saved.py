"""Readers of checkpoints: the variables in their files, in any partitioning."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from mpidist.checkpoints.tensor_file import StoredTensor, read_header, read_into
from strategy.protocol.layout import WIDE
from strategy.protocol.partition import Origin, Part, Shape, whole

logger = logging.getLogger(__name__)

Array = NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """An array in the files of a checkpoint.

    Attributes:
        dtype: The dtype.
        read: Reads the array, flat. Raises DataLossError if a file is damaged.
    """

    dtype: np.dtype[Any]
    read: Callable[[], Array]


@dataclass
class Saved:
    """A variable, or a part of a variable, in a checkpoint.

    Attributes:
        data: The values.
        slots: Optimizer slots by ``<name of the optimizer>/<slot>``.
        steps: Number of updates by each optimizer.
    """

    data: Stored
    slots: dict[str, Stored]
    steps: dict[str, int]


@dataclass
class _Piece:
    """A part of a variable in a file of a checkpoint.

    Attributes:
        path: Path of the file.
        part: The part.
        tensors: Its tensors by kind: ``data`` or ``slot:<slot>``.
        steps: See :class:`Saved`.
    """

    path: str
    part: Part
    tensors: dict[str, StoredTensor]
    steps: dict[str, int]

    def has_all_elements(self, kind: str) -> bool:
        """Return whether there is a tensor with an element for each element of the part."""
        return kind in self.tensors and self.tensors[kind].size == self.tensors["data"].size

    def read(self, kind: str) -> Array:
        """Read a tensor, flat."""
        tensor = self.tensors[kind]
        out = _empty((tensor.size,), tensor.dtype)
        self.read_into(out, kind)
        return _native(out)

    def read_into(self, out: Array, kind: str, first: int = 0) -> None:
        """Read elements of a tensor, from an index on, into a contiguous little-endian array.

        Raises:
            DataLossError: The file cannot be read, or is too short.
        """
        start = self.tensors[kind].start + first * out.itemsize
        try:
            read_into(self.path, start, out)
        except OSError as error:
            raise unreadable(self.path, error) from error


def _empty(shape: Shape, dtype: str) -> Array:
    """Return a new array for the data of a safetensors file, which are little-endian."""
    return np.empty(shape, np.dtype(dtype).newbyteorder("<"))


def _native(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def unreadable(path: str, why: object) -> errors.DataLossError:
    """Return the error for a file of a checkpoint that cannot be read."""
    return errors.DataLossError(
        f"cannot read {path!r} of a checkpoint ({why}); restore an older one"
    )


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
        name: (pieces[0].part.whole, pieces[0].tensors["data"].dtype)
        for name, pieces in _wanted_pieces(paths, wanted).items()
    }


def read_shards(paths: Sequence[str], wanted: Mapping[str, Origin]) -> Iterator[tuple[str, Saved]]:
    """Find variables or parts of variables in a checkpoint, in any partitioning.

    Slots that do not have an element for each element of the variable, as those of Adafactor,
    cannot be divided anew. Neither can slots that only some of the saved parts have, because a ps
    task had no memory for the slot or a worker was interrupted in a push. If the partitioning
    differs, all slots of such an optimizer and its numbers of updates are left out.

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
        part = wanted[name].part
        dtypes = {kind: one.dtype for piece in pieces for kind, one in piece.tensors.items()}
        arrays: dict[str, Stored] = {}
        for kind, dtype in dtypes.items():
            if all(piece.has_all_elements(kind) for piece in pieces):
                arrays[kind] = Stored(np.dtype(dtype), partial(_read_part, pieces, part, kind))
                continue
            for piece in pieces:  # at most one is equal to the part
                if piece.part == part and kind in piece.tensors:
                    arrays[kind] = Stored(np.dtype(dtype), partial(piece.read, kind))
        # The ps task makes missing float32 copies of halves from the values.
        left = [kind for kind in dtypes.keys() - arrays.keys() if not kind.endswith(WIDE)]
        anew = {_optimizer_of(kind) for kind in left}
        saved = Saved(arrays.pop("data"), {}, {})
        saved.slots = {
            kind.removeprefix("slot:"): array
            for kind, array in arrays.items()
            if kind.endswith(WIDE) or _optimizer_of(kind) not in anew
        }
        for piece in pieces:
            saved.steps |= {
                optimizer: max(steps, saved.steps.get(optimizer, 0))
                for optimizer, steps in piece.steps.items()
            }
        for optimizer in anew:
            logger.warning(
                "optimizer %r begins anew for %r: its slots in the checkpoint are of other parts "
                "of the variable",
                optimizer,
                name,
            )
            saved.steps.pop(optimizer, None)
        yield name, saved


def _optimizer_of(kind: str) -> str:
    return kind.removeprefix("slot:").split("/")[0]


def _wanted_pieces(paths: Sequence[str], wanted: Mapping[str, Origin]) -> dict[str, list[_Piece]]:
    """Return the saved parts of the wanted variables, in order, by the names of ``wanted``."""
    variables = {origin.variable for origin in wanted.values()}
    found: dict[str, list[_Piece]] = {}
    for path in paths:
        try:
            for variable, piece in _pieces_in(path, variables):
                found.setdefault(variable, []).append(piece)
        except Exception as error:
            raise unreadable(path, error) from error
    for variable, pieces in found.items():
        pieces.sort(key=lambda piece: piece.part.start)
        _check_complete(variable, pieces)
    return {
        name: found[origin.variable] for name, origin in wanted.items() if origin.variable in found
    }


def _pieces_in(path: str, variables: set[str]) -> Iterator[tuple[str, _Piece]]:
    """Find the parts of variables in a file.

    Yields:
        The name of a variable, and a part of it.

    Raises:
        Exception: The file is damaged.
    """
    tensors, metadata = read_header(path)
    facts = {key: json.loads(metadata.get(key, "{}")) for key in ("parts", "reduced")}
    steps = json.loads(metadata["steps"])
    by_name: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.partition(":")
        by_name.setdefault(name, {})[kind] = tensor
    for name, own in by_name.items():
        origin = _origin(name, own["data"].shape, facts["parts"].get(name))
        if origin.variable not in variables:
            continue
        reduced = {f"slot:{key}" for key in facts["reduced"].get(name, ())}
        if {own[kind].size for kind in own.keys() - reduced} != {math.prod(origin.part.shape)}:
            raise ValueError(f"tensors of {name!r} are not equally large")
        # NumPy must know the dtypes of the slots. check_fits compares the data's dtype.
        for kind in own.keys() - {"data"}:
            np.dtype(own[kind].dtype)
        own_steps = {optimizer: int(n) for optimizer, n in steps[name].items()}
        yield origin.variable, _Piece(path, origin.part, own, own_steps)


def _origin(name: str, shape: Shape, told: Mapping[str, Any] | None) -> Origin:
    if told is None:
        return Origin(name, whole(shape))
    part = told["part"]
    return Origin(told["variable"], Part(**{**part, "whole": tuple(part["whole"])}))


def _check_complete(variable: str, pieces: Sequence[_Piece]) -> None:
    """Raise DataLossError unless the parts match and cover the variable exactly once."""
    first = pieces[0]
    kinds = {(piece.part.whole, piece.part.axis) for piece in pieces}
    dtypes = {(kind, one.dtype) for piece in pieces for kind, one in piece.tensors.items()}
    alike = len(kinds) == 1 and len(dtypes) == len(dict(dtypes))
    ends = [0, *(piece.part.stop for piece in pieces)]
    starts = [*(piece.part.start for piece in pieces), _all_of(first.part).stop]
    if not alike or ends != starts:
        raise errors.DataLossError(
            f"the checkpoint {os.path.dirname(first.path)!r} does not have all parts of variable "
            f"{variable!r}, or parts that do not belong together; restore an older one"
        )


def _all_of(part: Part) -> Part:
    """Return the whole variable of a part, along the axis of the part."""
    everything = whole(part.whole).along(part.axis)
    assert everything is not None
    return everything


def _read_part(pieces: Sequence[_Piece], part: Part, kind: str) -> Array:
    """Read one kind of tensor of a part of a variable, flat, from the saved parts."""
    axis = pieces[0].part.axis or None  # rows are a range of the flattened elements, too
    own = part.along(axis)
    if own is None:  # no range of the saved parts' axis: take the part out of the whole variable
        values = _read_part(pieces, _all_of(pieces[0].part), kind)
        return np.ascontiguousarray(part.of(values.reshape(part.whole))).reshape(-1)
    out = _empty(own.shape, pieces[0].tensors[kind].dtype)
    for piece in pieces:
        source = piece.part.along(axis)
        assert source is not None
        start, stop = max(source.start, own.start), min(source.stop, own.stop)
        if start >= stop:
            continue
        overlap = Part(part.whole, axis, start, stop)
        target = overlap.within(own, out)
        if axis is None:  # only the range, because the variable may be much larger
            piece.read_into(target, kind, start - source.start)
        else:
            target[...] = overlap.within(source, piece.read(kind).reshape(source.shape))
    return _native(out).reshape(-1)


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
