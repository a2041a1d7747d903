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

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from mpidist import errors
from strategy.owned_shard import OwnedShard
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
    """

    data: Array
    slots: dict[str, Array] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


@dataclass
class _Piece:
    """A part of a variable in a file.

    Attributes:
        path: The file.
        key: The name there.
        part: What of the variable it is.
        dtype: Its dtype's name.
    """

    path: str
    key: str
    part: Part
    dtype: str


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
    pieces = _pieces(paths)
    return {
        name: (found[0].part.whole, found[0].dtype)
        for name, origin in wanted.items()
        if (found := pieces.get(origin.variable))
    }


def read_shards(paths: Sequence[str], wanted: Mapping[str, Origin]) -> dict[str, Saved]:
    """Local. Read variables, or parts of them, from the files of a checkpoint.

    The parts need not be those that were saved.

    Args:
        paths: All files of the checkpoint.
        wanted: What of which variables, by any names.

    Returns:
        What was found, by those names; without variables that the files have not.

    Raises:
        DataLossError: A file is missing or damaged.
    """
    pieces = _pieces(paths)
    return {
        name: _assembled(found, origin.part)
        for name, origin in wanted.items()
        if (found := pieces.get(origin.variable))
    }


def _pieces(paths: Sequence[str]) -> dict[str, list[_Piece]]:
    """All that is in files, by variable."""
    found: dict[str, list[_Piece]] = {}
    for path in paths:
        with _opened(path) as (file, _):
            origins = json.loads(file.metadata().get("parts", "{}"))
            for key in file.keys():  # noqa: SIM118 - not a dict
                name, _, kind = key.partition(":")
                if kind != "data":
                    continue
                data = file.get_slice(key)
                variable, part = name, whole(tuple(data.get_shape()))
                if name in origins:
                    variable, saved = origins[name]["variable"], origins[name]["part"]
                    part = Part(**{**saved, "whole": tuple(saved["whole"])})
                dtype = _DTYPES.get(data.get_dtype(), data.get_dtype())
                found.setdefault(variable, []).append(_Piece(path, name, part, dtype))
    for variable, pieces in found.items():
        if sum(math.prod(piece.part.shape) for piece in pieces) != math.prod(pieces[0].part.whole):
            raise errors.DataLossError(
                f"the checkpoint {os.path.dirname(paths[0])!r} does not have all parts of variable "
                f"{variable!r}; restore an older one"
            )
    return found


def _assembled(pieces: Sequence[_Piece], part: Part) -> Saved:
    """A part of a variable, put together from those that were saved."""
    saved = Saved(np.empty(0))
    # Where a part is a stretch of another kind than those saved, there has to be the whole first.
    alike = all(piece.part.along(part.axis) for piece in pieces)
    target = part if alike else whole(part.whole)
    arrays: dict[str, Array] = {}
    for piece in pieces:
        source = piece.part.along(part.axis) if alike else piece.part
        assert source is not None
        if alike and target.stop and not source.meets(target):
            continue
        with _opened(piece.path) as (file, steps):
            saved.steps |= steps[piece.key]
            for key in file.keys():  # noqa: SIM118 - not a dict
                name, _, kind = key.partition(":")
                if name != piece.key:
                    continue
                values = file.get_tensor(key).reshape(source.shape)
                array = arrays.setdefault(kind, np.empty(target.shape, values.dtype))
                if alike:
                    source.copy_common(values, target, array)
                else:
                    source.of(array.reshape(part.whole))[...] = values
    shaped = {
        kind: (array if alike else part.of(array.reshape(part.whole))).flatten()
        for kind, array in arrays.items()
    }
    saved.data = shaped.pop("data")
    saved.slots = {kind.removeprefix("slot:"): array for kind, array in shaped.items()}
    return saved


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, dict[str, dict[str, int]]]]:
    """A file of a checkpoint, and its variables' steps; what fails with it is a DataLossError."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file, json.loads(file.metadata()["steps"])
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
