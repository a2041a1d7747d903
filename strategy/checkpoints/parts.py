"""The part of a checkpoint that one server writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist.checkpoints.folder import reported
from mpidist.checkpoints.tensor_file import read_header, read_tensor, write_tensors

if TYPE_CHECKING:
    from strategy.server.shard import Shard

Array = NDArray[Any]
_ALIGNMENT = 64


@dataclass(frozen=True)
class PartState:
    """The variables and slots of a server.

    Attributes:
        variables: For each variable its arrays: ``"data"``, and ``"slot:<key>"`` for each slot.
        metadata: Facts about the arrays, as JSON by name.
    """

    variables: Mapping[str, Mapping[str, Array]]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Size of a copy in bytes."""
        arrays = (array for parts in self.variables.values() for array in parts.values())
        return sum(_aligned(array.nbytes) for array in arrays)

    def empty_like(self, memory: NDArray[np.uint8]) -> PartState:
        """Return a state with uninitialized arrays of the same names, shapes and dtypes.

        Args:
            memory: Buffer of ``nbytes`` bytes for the arrays.
        """
        placed: dict[str, dict[str, Array]] = {}
        start = 0
        for variable, parts in self.variables.items():
            placed[variable] = {}
            for name, array in parts.items():
                part = memory[start : start + array.nbytes]
                placed[variable][name] = part.view(array.dtype).reshape(array.shape)
                start += _aligned(array.nbytes)
        return PartState(placed, self.metadata)

    def write(self, path: str) -> None:
        """Write the arrays to a file.

        Raises:
            FailedPreconditionError: The file cannot be written.
        """
        tensors = {
            f"{variable}:{name}": array
            for variable, parts in self.variables.items()
            for name, array in parts.items()
        }
        with reported(path):
            write_tensors(path, tensors, self.metadata)


def state_of(shards: Iterable[Shard]) -> PartState:
    """Return the variables and slots of all shards of a server."""
    variables: dict[str, dict[str, Array]] = {}
    steps: dict[str, dict[str, int]] = {}
    parts: dict[str, dict[str, Any]] = {}
    reduced: dict[str, list[str]] = {}  # slots without an element for each element of the variable
    for shard in shards:
        if not shard.version:  # no worker has pushed the initial value
            continue
        arrays = variables[shard.name] = {"data": shard.data}
        steps[shard.name] = dict(shard.steps)
        for key, slot in shard.slots_on_host().items():
            arrays[f"slot:{key}"] = slot
            if slot.size != shard.layout.size:
                reduced.setdefault(shard.name, []).append(key)
        if shard.origin.variable != shard.name:
            parts[shard.name] = asdict(shard.origin)
    facts = {"steps": steps, "parts": parts, "reduced": reduced}
    return PartState(variables, {key: json.dumps(fact) for key, fact in facts.items()})


def step_in(paths: Iterable[str], name: str, default: int) -> int:
    """Return the global step in the files of a checkpoint.

    Other workers may have pushed between the begin of the save and its consistent cut.

    Args:
        paths: The files of the servers.
        name: Name of the variable of the global step.
        default: The step, if no file has the variable.
    """
    for path in paths:
        with reported(path):
            tensors, _ = read_header(path)
            found = tensors.get(f"{name}:data")
            if found is not None:
                return int(read_tensor(path, found).item())
    return default


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
