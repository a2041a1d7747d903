"""What checkpoints have of variables, read in whatever parts the program has them.

A file's tensors are ``<name>:data`` and ``<name>:slot:<slot>``; its metadata has, as JSON, the
``steps`` of each name, and of parts of variables what of which variable each is (``parts``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from mpidist import errors
from strategy.owned_shard import WIDE, OwnedShard
from strategy.parts import Origin, Part, Shape, whole

Array = NDArray[Any]

# What files call dtypes, and what NumPy does.
_DTYPES = {"BOOL": "bool", "BF16": "bfloat16"} | {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
}


@dataclass
class Saved:
    """A variable, or a part of one, as a checkpoint has it.

    Attributes:
        data: Its value, flat.
        slots: Optimizer state, flat, by ``<kind>/<slot>``.
        steps: Updates so far, by kind.
        initials: What slots are full of at first, where that is not 0.
    """

    data: Array
    slots: dict[str, Array] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    initials: dict[str, float] = field(default_factory=dict)


@dataclass
class _Piece:
    """A part of a variable in a file.

    Attributes:
        path: The file.
        name: The name there.
        part: What of the variable it is.
        dtypes: Names of the dtypes of its tensors, by what comes after the name: ``data``, ...
        steps: Updates so far, by kind.
        initials: What slots are full of at first, where that is not 0.
    """

    path: str
    name: str
    part: Part
    dtypes: dict[str, str]
    steps: dict[str, int]
    initials: dict[str, float]


def read_layouts(
    paths: Sequence[str], wanted: Mapping[str, Origin]
) -> dict[str, tuple[Shape, str]]:
    """Local. Read what variables are like, without their data.

    Args:
        paths: All files of the checkpoint.
        wanted: Of which variables, by any names.

    Returns:
        Shape of the whole variable and name of the dtype, by those names; without variables that
        the files have not.

    Raises:
        DataLossError: A file is missing or damaged.
    """
    return {
        name: (pieces[0].part.whole, pieces[0].dtypes["data"])
        for name, pieces in _wanted_pieces(paths, wanted).items()
    }


def read_shards(paths: Sequence[str], wanted: Mapping[str, Origin]) -> Iterator[tuple[str, Saved]]:
    """Local. Read variables, or parts of them, from the files of a checkpoint, one by one.

    The parts need not be those that were saved. Where a part is a stretch of another kind than
    those, the whole variable is put together first.

    Args:
        paths: All files of the checkpoint.
        wanted: What of which variables, by any names.

    Yields:
        What was found, with its name of those; no variables that the files have not.

    Raises:
        DataLossError: A file is missing or damaged.
    """
    last = ""
    whole_of_last: dict[str, Array] = {}
    for name, pieces in _wanted_pieces(paths, wanted).items():
        part, axis = wanted[name].part, pieces[0].part.axis
        variable = wanted[name].variable
        if part.is_whole:
            part = _all_of(pieces, axis)
        if all(piece.part.along(part.axis) for piece in pieces):
            arrays = _assembled(pieces, part)
        else:
            if variable != last:  # its parts come one after the other
                last, whole_of_last = variable, _assembled(pieces, _all_of(pieces, axis))
            arrays = {
                kind: part.of(array.reshape(part.whole)).copy()
                for kind, array in whole_of_last.items()
            }
        flat = {kind: np.ravel(array) for kind, array in arrays.items()}
        saved = Saved(flat.pop("data"))
        saved.slots = {kind.removeprefix("slot:"): array for kind, array in flat.items()}
        for piece in pieces:
            saved.initials |= piece.initials
            saved.steps |= {
                kind: max(steps, saved.steps.get(kind, 0)) for kind, steps in piece.steps.items()
            }
        yield name, saved


def needed_tensors(paths: Sequence[str], wanted: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    """Local. What :func:`read_shards` would read, from what files say of themselves at their head.

    Args:
        paths: All files of the checkpoint.
        wanted: What of which variables, by any names.

    Yields:
        A file, and the name of a tensor in it; some more than once.
    """
    for name, pieces in _wanted_pieces(paths, wanted).items():
        part = wanted[name].part
        part = _all_of(pieces, pieces[0].part.axis) if part.is_whole else part
        stretches = [piece.part.along(part.axis) for piece in pieces]
        apart = None in stretches  # then the whole variable is put together
        for piece, source in zip(pieces, stretches, strict=True):
            if apart or source is None or (source.start < part.stop and part.start < source.stop):
                yield from ((piece.path, f"{piece.name}:{kind}") for kind in piece.dtypes)


def _wanted_pieces(paths: Sequence[str], wanted: Mapping[str, Origin]) -> dict[str, list[_Piece]]:
    """The parts that files have of the variables that are wanted, in order, by the wanted names."""
    variables = {origin.variable for origin in wanted.values()}
    found: dict[str, list[_Piece]] = {}
    for path in paths:
        with _opened(path) as (file, facts):
            dtypes: dict[str, dict[str, str]] = {}
            shapes: dict[str, list[int]] = {}
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
                sizes = {math.prod(shapes[f"{name}:{kind}"]) for kind in kinds}
                if sizes != {math.prod(origin.part.shape)}:
                    raise ValueError(f"tensors of {name!r} are not equally large")
                own = (facts["steps"][name], facts["initials"].get(name, {}))
                piece = _Piece(path, name, origin.part, kinds, *own)
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
    """DataLossError unless parts are all of a variable, once, and belong together."""
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


def _assembled(pieces: Sequence[_Piece], part: Part) -> dict[str, Array]:
    """A part of a variable, put together from stretches along the same axis.

    Slots that only some of them have, since a push was under way when they were saved, are as they
    are at first elsewhere.
    """
    dtypes = {kind: dtype for piece in pieces for kind, dtype in piece.dtypes.items()}
    initials = {kind: value for piece in pieces for kind, value in piece.initials.items()}
    arrays = {kind: np.empty(part.shape, dtype) for kind, dtype in dtypes.items()}
    for piece in pieces:
        source = piece.part.along(part.axis)
        assert source is not None
        start, stop = max(source.start, part.start), min(source.stop, part.stop)
        if start >= stop and part.stop:
            continue
        stretch = Part(part.whole, part.axis, start, stop)
        with _opened(piece.path) as (file, _):
            for kind, array in arrays.items():
                target = stretch.within(part, array)
                if kind in piece.dtypes:
                    target[...] = _read(file, f"{piece.name}:{kind}", source, stretch)
                elif kind.endswith(WIDE):
                    target[...] = _read(file, f"{piece.name}:data", source, stretch)
                else:
                    target[...] = initials.get(kind.removeprefix("slot:"), 0.0)
    return arrays


def _read(file: Any, key: str, source: Part, stretch: Part) -> Array:
    """A stretch of what a file has of a longer one; no more than it is read, if that can be."""
    tensor = file.get_slice(key)
    shape = tensor.get_shape()
    row = math.prod(shape[1:])
    width = 1 if source.axis is None else math.prod(source.shape[1:])
    start, stop = ((end - source.start) * width for end in (stretch.start, stretch.stop))
    if not source.axis and start < stop and shape and start % row == stop % row == 0:
        values: Array = tensor[start // row : stop // row]
        return values.reshape(stretch.shape)
    return stretch.within(source, file.get_tensor(key).reshape(source.shape))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, dict[str, dict[str, Any]]]]:
    """A file of a checkpoint, and facts by name; what fails with it is a DataLossError."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            facts = {key: json.loads(metadata.get(key, "{}")) for key in ("initials", "parts")}
            yield file, facts | {"steps": json.loads(metadata["steps"])}
    except Exception as error:
        raise errors.DataLossError(
            f"cannot read {path!r} of a checkpoint ({error}); restore an older one"
        ) from error


def check_fits(name: str, shape: Shape, dtype: str, shard: OwnedShard) -> None:
    """Local. InvalidArgumentError unless a checkpoint has a server's variable as the program has.

    Args:
        name: Of what the server has.
        shape: Of the whole variable, in the checkpoint.
        dtype: Its name, in the checkpoint.
        shard: What the server has.
    """
    here = (shard.origin.part.whole, shard.layout.dtype.name)
    if (shape, dtype) != here:
        raise errors.InvalidArgumentError(
            f"the checkpoint has {name!r} as {dtype}{list(shape)}, and the program as "
            f"{here[1]}{list(here[0])}"
        )
