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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from mpidist import errors
from strategy.checkpoints.carried import Reader, Stored, joined, read_into, tensors_in, unreadable
from strategy.shared.parts import Origin, Part, Shape, whole
from strategy.shared.shard import WIDE

if TYPE_CHECKING:
    from strategy.server.owned_shard import OwnedShard

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
        data: Its value.
        slots: Optimizer state by ``<kind>/<slot>``.
        steps: Updates so far, by kind.
        initials: What slots are full of at first, where that is not 0.
    """

    data: Stored
    slots: dict[str, Stored]
    steps: dict[str, int]
    initials: dict[str, float]


@dataclass
class _Piece:
    """A part of a variable in a file.

    Attributes:
        path: The file.
        name: The name there.
        part: What of the variable it is.
        dtypes: Names of the dtypes of its tensors, by what comes after the name: ``data``, ...
        starts: Where these begin in the file, likewise.
        steps: Updates so far, by kind.
        initials: What slots are full of at first, where that is not 0.
    """

    path: str
    name: str
    part: Part
    dtypes: dict[str, str]
    starts: dict[str, int]
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
    """Local. Find variables, or parts of them, in the files of a checkpoint.

    The parts need not be those that were saved.

    Args:
        paths: All files of the checkpoint.
        wanted: What of which variables, by any names.

    Yields:
        What was found, with its name of those; no variables that the files have not.

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
        }
        saved = Saved(arrays.pop("data"), {}, {}, {})
        saved.slots = {kind.removeprefix("slot:"): array for kind, array in arrays.items()}
        for piece in pieces:
            saved.initials |= piece.initials
            saved.steps |= {
                kind: max(steps, saved.steps.get(kind, 0)) for kind, steps in piece.steps.items()
            }
        yield name, saved


def needed_tensors(paths: Sequence[str], wanted: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    """Local. What arrays of :func:`read_shards` are read from, as files say at their head.

    Args:
        paths: All files of the checkpoint.
        wanted: What of which variables, by any names.

    Yields:
        A file, and the name of a tensor in it; some more than once.
    """
    for name, pieces in _wanted_pieces(paths, wanted).items():
        part = _like_saved(wanted[name].part, pieces)
        stretches = [piece.part.along(part.axis) for piece in pieces]
        apart = None in stretches  # then what is needed may be anywhere
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
                sizes = {math.prod(shapes[f"{name}:{kind}"]) for kind in kinds}
                if sizes != {math.prod(origin.part.shape)}:
                    raise ValueError(f"tensors of {name!r} are not equally large")
                for kind in kinds.keys() - {"data"}:  # that one is compared with the program's
                    np.dtype(kinds[kind])
                starts = {kind: places[f"{name}:{kind}"][0] for kind in kinds}
                steps = {kind: int(n) for kind, n in facts["steps"][name].items()}
                initials = {k: float(v) for k, v in facts["initials"].get(name, {}).items()}
                piece = _Piece(path, name, origin.part, kinds, starts, steps, initials)
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


def _like_saved(part: Part, pieces: Sequence[_Piece]) -> Part:
    """A part as a stretch along the axis along which the saved ones are, if it is one."""
    return part.along(pieces[0].part.axis) or part


def _reader(pieces: Sequence[_Piece], part: Part, kind: str) -> Reader:
    """What reads the tensors of a kind as that of a part of the variable."""
    initials = {key: value for piece in pieces for key, value in piece.initials.items()}
    initial = initials.get(kind.removeprefix("slot:"), 0.0)
    axes = {piece.part.along(part.axis) is not None for piece in pieces}
    axis = part.axis if axes == {True} else pieces[0].part.axis
    sources = [
        (stretch, _piece_reader(piece, kind, initial))
        for piece in pieces
        if (stretch := piece.part.along(axis)) is not None  # they all are
    ]
    if axis != part.axis:  # by way of the elements in the order of the whole variable
        sources = [(_all_of(pieces, part.axis), joined(_all_of(pieces, axis), sources))]
    return joined(part, sources)


def _piece_reader(piece: _Piece, kind: str, initial: float) -> Reader:
    """What reads a tensor of a piece.

    A slot that only other pieces have, since a push was under way when they were saved, is as it is
    at first.
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
    """A file of a checkpoint, and facts by name; what fails with it is a DataLossError."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            facts = {key: json.loads(metadata.get(key, "{}")) for key in ("initials", "parts")}
            yield file, facts | {"steps": json.loads(metadata["steps"])}
    except Exception as error:
        raise unreadable(path, error) from error


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
