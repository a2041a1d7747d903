"""The layout of a device mesh: an array of world ranks, and names of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

DeviceType = Literal["cpu", "cuda"]
DEVICE_TYPES: tuple[DeviceType, ...] = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class Layout:
    """The checked layout of a mesh, made by :func:`layout_of_ranks` or :func:`layout_of_shape`.

    Attributes:
        device_type: Type of the devices.
        mesh: World ranks, each once at most; read-only.
        names: Names of the dimensions, or None.
    """

    device_type: DeviceType
    mesh: NDArray[np.int64]
    names: tuple[str, ...] | None

    def key(self) -> tuple[Any, ...]:
        """Return a value that is equal for equal layouts."""
        return self.device_type, self.names, self.mesh.shape, tuple(self.mesh.ravel().tolist())

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the indices of a world rank in the mesh, or None if the mesh lacks it."""
        found = np.argwhere(self.mesh == rank)
        return tuple(found[0].tolist()) if len(found) else None

    def axis(self, dim: int | str) -> int:
        """Return the number of a dimension.

        Args:
            dim: Name of the dimension, or its number. A negative number counts from the end.

        Raises:
            KeyError: The mesh has no such name.
            IndexError: The mesh has no such number.
        """
        if isinstance(dim, str):
            if dim not in (self.names or ()):
                raise KeyError(f"{self} has no dimension {dim!r}; the names are {self.names}")
            return (self.names or ()).index(dim)
        if not -self.mesh.ndim <= dim < self.mesh.ndim:
            raise IndexError(f"{self} has no dimension {dim}; it has {self.mesh.ndim}")
        return dim % self.mesh.ndim

    def axes(self, names: str | Sequence[str]) -> list[int]:
        """Return the numbers of the dimensions that a submesh keeps.

        Raises:
            KeyError: No name is given, a name is unknown, or the names are not in the order of the
                mesh.
        """
        axes = [self.axis(str(name)) for name in ([names] if isinstance(names, str) else names)]
        if not axes or sorted(set(axes)) != axes:
            raise KeyError(
                f"a part of {self} needs one or more of its names, in their order there, not "
                f"{names!r}"
            )
        return axes

    def rows(self, axis: int) -> list[list[int]]:
        """Return the world ranks along a dimension, for each index in the other dimensions."""
        rows: list[list[int]] = np.moveaxis(self.mesh, axis, -1).reshape(
            -1, self.mesh.shape[axis]
        ).tolist()  # fmt: skip
        return rows

    def part(self, axes: Sequence[int], coordinate: Sequence[int]) -> Layout:
        """Return the submesh of some dimensions that contains the rank at a coordinate."""
        index = tuple(slice(None) if a in axes else at for a, at in enumerate(coordinate))
        names = None if self.names is None else tuple(self.names[axis] for axis in axes)
        return Layout(self.device_type, self.mesh[index], names)

    def flat(self, name: str | None) -> Layout:
        """Return the mesh of one dimension. The default name joins the names of all dimensions."""
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


def layout_of_ranks(
    device_type: DeviceType, mesh: Any, mesh_dim_names: Sequence[str] | None, world_size: int
) -> Layout:
    """Return the layout of an array of world ranks.

    Args:
        device_type: Type of the devices.
        mesh: World ranks, as nested lists or as an array of integers.
        mesh_dim_names: One name per dimension, or None.
        world_size: Number of ranks of the world.

    Raises:
        TypeError: The ranks are not integers, or a name is not a string.
        ValueError: The device type is unknown, a rank is given twice or is not in the world, the
            mesh is empty, or the names do not match the dimensions or are not distinct.
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
    ranks = given.astype(np.int64)  # a copy: the caller may change the array
    distinct, counts = np.unique(ranks, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"rank(s) {distinct[counts > 1].tolist()} are in the mesh more than once")
    outside = distinct[(distinct < 0) | (distinct >= world_size)].tolist()
    if outside:
        raise ValueError(f"rank(s) {outside} of the mesh are not in a world of {world_size}")
    ranks.flags.writeable = False
    return Layout(device_type, ranks, _checked_names(mesh_dim_names, ranks.ndim))


def layout_of_shape(
    device_type: DeviceType,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None,
    world_size: int,
) -> Layout:
    """Return the layout of all ranks of the world in C order.

    Raises:
        TypeError: A size is not an integer; see also :func:`layout_of_ranks`.
        ValueError: The product of the sizes is not the number of ranks; see also
            :func:`layout_of_ranks`.
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
    return layout_of_ranks(device_type, ranks, mesh_dim_names, world_size)


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
