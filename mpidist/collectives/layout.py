"""Where the ranks of a device mesh stand: an array of world ranks, and names of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class Layout:
    """A checked layout, made by :func:`laid_out` or :func:`in_order`.

    Attributes:
        device_type: One of ``DEVICE_TYPES``.
        mesh: World ranks, each once at most; read-only.
        names: Of the dimensions, or None.
    """

    device_type: str
    mesh: NDArray[np.int64]
    names: tuple[str, ...] | None

    def key(self) -> tuple[Any, ...]:
        """Local. What equal layouts have in common."""
        return self.device_type, self.names, self.mesh.shape, tuple(self.mesh.ravel().tolist())

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Local. Where a world rank stands; None if it is not there."""
        found = np.argwhere(self.mesh == rank)
        return tuple(found[0].tolist()) if len(found) else None

    def axis(self, dim: int | str) -> int:
        """Local. The number of a dimension.

        Args:
            dim: Its name, or its number; a negative one counts from the end.

        Raises:
            KeyError: There is no such name.
            IndexError: There is no such number.
        """
        if isinstance(dim, str):
            if dim not in (self.names or ()):
                raise KeyError(f"{self} has no dimension {dim!r}; the names are {self.names}")
            return (self.names or ()).index(dim)
        if not -self.mesh.ndim <= dim < self.mesh.ndim:
            raise IndexError(f"{self} has no dimension {dim}; it has {self.mesh.ndim}")
        return dim % self.mesh.ndim

    def axes(self, names: str | Sequence[str]) -> list[int]:
        """Local. The numbers of dimensions that a part of the mesh keeps.

        Raises:
            KeyError: No name is given, one is unknown, or they are not in the order of the mesh.
        """
        axes = [self.axis(str(name)) for name in ([names] if isinstance(names, str) else names)]
        if not axes or sorted(set(axes)) != axes:
            raise KeyError(
                f"a part of {self} needs one or more of its names, in their order there, not "
                f"{names!r}"
            )
        return axes

    def rows(self, axis: int) -> list[list[int]]:
        """Local. The world ranks along a dimension, for each place in the others."""
        rows: list[list[int]] = np.moveaxis(self.mesh, axis, -1).reshape(
            -1, self.mesh.shape[axis]
        ).tolist()  # fmt: skip
        return rows

    def part(self, axes: Sequence[int], coordinate: Sequence[int]) -> Layout:
        """Local. The dimensions given, through one place in all others."""
        index = tuple(slice(None) if a in axes else at for a, at in enumerate(coordinate))
        names = None if self.names is None else tuple(self.names[axis] for axis in axes)
        return Layout(self.device_type, self.mesh[index], names)

    def flat(self, name: str | None) -> Layout:
        """Local. All ranks in one dimension, of a name or of the joined names of all."""
        given = name or "_".join(self.names or ())
        ranks = self.mesh.reshape(-1)
        ranks.flags.writeable = False
        return Layout(self.device_type, ranks, (given,) if given else None)

    def __str__(self) -> str:
        sizes: Sequence[object] = self.mesh.shape
        if self.names is not None:
            sizes = [f"{n}={size}" for n, size in zip(self.names, sizes, strict=True)]
        ranks = np.array2string(self.mesh, separator=", ", threshold=64, edgeitems=2)
        return (
            f"DeviceMesh(({', '.join(map(str, sizes))}), {self.device_type!r}, "
            f"{' '.join(ranks.split())})"
        )


def laid_out(
    device_type: str, mesh: Any, mesh_dim_names: Sequence[str] | None, world_size: int
) -> Layout:
    """Local. The layout that a mesh of ranks describes.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh: Nested lists of world ranks, or an array of integers.
        mesh_dim_names: A name for each dimension, or None.
        world_size: Number of ranks of the world.

    Raises:
        TypeError: The ranks are not integers, or a name is not a string.
        ValueError: The device type is unknown, a rank is there twice or not in the world, the mesh
            is empty, or the names are too many, too few, or not distinct.
    """
    if device_type not in DEVICE_TYPES:
        raise ValueError(
            f"unknown device_type {device_type!r}; the known ones are {', '.join(DEVICE_TYPES)}, "
            "without a number"
        )
    given = np.asarray(mesh)
    if not given.size or not given.ndim:
        raise ValueError(f"a mesh needs at least one dimension and one rank, not {mesh!r}")
    if given.dtype.kind not in "iu":
        raise TypeError(f"a mesh needs ranks as integers, not {given.dtype}")
    ranks = given.astype(np.int64)  # a copy: the caller may change his own
    distinct, counts = np.unique(ranks, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"rank(s) {distinct[counts > 1].tolist()} are in the mesh more than once")
    outside = distinct[(distinct < 0) | (distinct >= world_size)].tolist()
    if outside:
        raise ValueError(f"rank(s) {outside} of the mesh are not in a world of {world_size}")
    ranks.flags.writeable = False
    return Layout(device_type, ranks, _checked_names(mesh_dim_names, ranks.ndim))


def in_order(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None,
    world_size: int,
) -> Layout:
    """Local. The layout of all ranks of the world in their order, the last dimension fastest.

    Raises:
        TypeError: A size is not an integer; see also :func:`laid_out`.
        ValueError: The sizes do not multiply to that of the world; see also :func:`laid_out`.
    """
    shape = tuple(mesh_shape)
    if not all(isinstance(size, int | np.integer) for size in shape):
        raise TypeError(f"mesh_shape needs integers, not {shape}")
    if not shape or min(shape) < 1 or math.prod(shape) != world_size:
        raise ValueError(
            f"mesh_shape {shape} has room for {math.prod(shape)} ranks, and the world has "
            f"{world_size}; for a part of the world, give DeviceMesh the ranks"
        )
    ranks = np.arange(world_size).reshape(shape)
    return laid_out(device_type, ranks, mesh_dim_names, world_size)


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"mesh_dim_names needs a tuple of strings, not {names!r}")
    if len(names) != ndim or len(set(names)) != ndim or not all(names):
        raise ValueError(
            f"a mesh of {ndim} dimension(s) needs as many distinct mesh_dim_names, not "
            f"{tuple(names)}"
        )
    return tuple(names)
