"""Device meshes of torch.distributed: a group for each row of an array of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.collectives.default import (
    Group,
    get_rank,
    given,
    init_process_group,
    is_initialized,
    keep,
)
from mpidist.collectives.groups import check_options
from mpidist.collectives.layout import Layout, in_order, laid_out
from mpidist.group import ProcessGroup, split
from mpidist.runtime import world


class DeviceMesh:
    """Collective over the world. Ranks in an array, and a group along each of its dimensions.

    A rank's group along a dimension has the ranks that stand in one row with it, in the order of
    the row: its group rank is its place there. A row of the whole world in its order is the default
    group; the other groups are made now, and end with the default group. Without a default group,
    init_process_group() is called first. Ranks that are not in the mesh call this too.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; it says of what kind the devices are, and no more.
        mesh: World ranks, each once at most: nested lists, or an array of integers.
        mesh_dim_names: A name for each dimension.

    Raises:
        TypeError: The ranks are not integers, or a name is not a string.
        ValueError: The device type is unknown, a rank is there twice or not in the world, the mesh
            is empty, the names are too many, too few or not distinct, or ranks give different
            meshes. All ranks raise if one does.
    """

    _layout: Layout
    _coordinate: tuple[int, ...] | None
    _groups: list[ProcessGroup]

    def __init__(
        self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None
    ) -> None:
        self._make(_agreed(lambda size: laid_out(device_type, mesh, mesh_dim_names, size)))

    @staticmethod
    def from_group(
        group: Group | Sequence[Group],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Local. The mesh of existing groups of this rank, one for each dimension.

        Args:
            group: The groups, by dimension; or a single one.
            device_type: ``"cpu"`` or ``"cuda"``.
            mesh: World ranks; of a single group they are its members, and need not be given.
            mesh_dim_names: A name for each dimension.

        Raises:
            ValueError: The mesh is missing, has not a dimension for each group or not the members
                of each in their order, or this rank is no member; see also :class:`DeviceMesh`.
        """
        groups = [given(one) for one in (group if isinstance(group, Sequence) else [group])]
        if mesh is None:
            if len(groups) != 1:
                raise ValueError(f"a mesh of {len(groups)} groups needs the mesh of their ranks")
            mesh = groups[0].ranks
        layout = laid_out(device_type, mesh, mesh_dim_names, world().size)
        if layout.mesh.ndim != len(groups):
            raise ValueError(f"{layout} needs {layout.mesh.ndim} groups, not {len(groups)}")
        coordinate = layout.coordinate(world().rank)
        for axis, one in enumerate(groups):
            row = None if coordinate is None else layout.part([axis], coordinate).mesh.tolist()
            if row != list(one.ranks):
                raise ValueError(
                    f"group {one.name!r} has ranks {list(one.ranks)}, and dimension {axis} of "
                    f"{layout} has {row} on rank {world().rank}"
                )
        return DeviceMesh._made(layout, groups)

    @property
    def mesh(self) -> NDArray[np.int64]:
        """Local. World ranks, by place; read-only."""
        return self._layout.mesh

    @property
    def device_type(self) -> str:
        """Local. ``"cpu"`` or ``"cuda"``."""
        return self._layout.device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Local. Names of the dimensions, or None."""
        return self._layout.names

    @property
    def ndim(self) -> int:
        """Local. Number of dimensions."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Number of ranks along each dimension."""
        return self.mesh.shape

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Local. Number of ranks in the mesh, or along a dimension."""
        return self.mesh.size if mesh_dim is None else self.shape[self._layout.axis(mesh_dim)]

    def get_rank(self) -> int:
        """Local. World rank of this process."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Local. Where this rank stands; None if it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Local. Where this rank stands along a dimension; see :meth:`get_group`."""
        return self._place()[self._axis(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Local. The group of this rank along a dimension.

        Args:
            mesh_dim: Name or number of the dimension; None if there is only one.

        Raises:
            ValueError: This rank is not in the mesh, or the dimension is missing.
            KeyError: There is no such name.
            IndexError: There is no such number.
        """
        self._place()
        return self._groups[self._axis(mesh_dim)]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Local. The groups of this rank, by dimension; ValueError if it is not in the mesh."""
        self._place()
        return list(self._groups)

    def __getitem__(self, mesh_dim_names: str | Sequence[str]) -> DeviceMesh:
        """Local. The part of the mesh that spans some dimensions, through this rank.

        Args:
            mesh_dim_names: Names of one or more dimensions, in their order in the mesh.

        Raises:
            ValueError: This rank is not in the mesh.
            KeyError: A name is unknown, or the names are in another order.
        """
        axes = self._layout.axes(mesh_dim_names)
        if len(axes) == self.ndim:
            return self
        part = self._layout.part(axes, self._place())
        return DeviceMesh._made(part, [self._groups[axis] for axis in axes])

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """Collective over the ranks of this mesh. The same ranks along one dimension.

        Args:
            name: Of the dimension; by default the names of this mesh, joined by ``_``.

        Raises:
            ValueError: This rank is not in the mesh.
        """
        self._place()
        flat = self._layout.flat(name)
        if self.ndim == 1 and flat.names == self.mesh_dim_names:
            return self
        return DeviceMesh._made(flat)

    def __eq__(self, other: object) -> bool:
        """Local. Whether both have the same ranks in the same places, names and device type."""
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._layout.key() == other._layout.key()

    def __hash__(self) -> int:
        return hash(self._layout.key())

    def __repr__(self) -> str:
        return str(self._layout)

    # Inside

    @classmethod
    def _made(cls, layout: Layout, groups: list[ProcessGroup] | None = None) -> DeviceMesh:
        """Collective over the ranks of the layout, unless the groups exist."""
        mesh = cls.__new__(cls)
        mesh._make(layout, groups)
        return mesh

    def _make(self, layout: Layout, groups: list[ProcessGroup] | None = None) -> None:
        self._layout = layout
        self._coordinate = layout.coordinate(world().rank)
        if groups is None:
            # All ranks go through the dimensions in one order: so no two wait for each other.
            made = [_group_along(layout, axis) for axis in range(layout.mesh.ndim)]
            groups = [group for group in made if group is not None]
        self._groups = groups

    def _axis(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None and self.ndim > 1:
            raise ValueError(f"{self} has {self.ndim} dimensions: say which, by mesh_dim")
        return self._layout.axis(0 if mesh_dim is None else mesh_dim)

    def _place(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise ValueError(f"rank {world().rank} is not in {self}: only its ranks can ask this")
        return self._coordinate


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Collective. The mesh of all ranks of the world in their order, the last dimension fastest.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; it says of what kind the devices are, and no more.
        mesh_shape: Number of ranks along each dimension.
        mesh_dim_names: A name for each dimension.
        backend_override: By name or number of a dimension, ``"mpi"``: there is no other backend.

    Returns:
        The mesh; see :class:`DeviceMesh`.

    Raises:
        TypeError: A size is not an integer, or a name is not a string.
        ValueError: The sizes do not multiply to that of the world, the device type or a backend is
            unknown, the names are too many, too few or not distinct, or ranks give different
            meshes. All ranks raise if one does.
        KeyError: backend_override names an unknown dimension; the other ranks raise ValueError.
        IndexError: backend_override has an unknown number; the other ranks raise ValueError.
    """

    def layout_for(world_size: int) -> Layout:
        layout = in_order(device_type, mesh_shape, mesh_dim_names, world_size)
        for dim, choice in (backend_override or {}).items():
            layout.axis(dim)
            backend, options = choice if isinstance(choice, tuple) else (choice, None)
            check_options(backend, pg_options=options)
        return layout

    return DeviceMesh._made(_agreed(layout_for))


def _group_along(layout: Layout, axis: int) -> ProcessGroup | None:
    """Collective over the ranks of each row of a dimension. The group of this rank's row."""
    whole = given(None)
    rows = layout.rows(axis)
    if rows == [list(whole.ranks)]:
        return whole
    name = f"mesh {layout.names[axis] if layout.names else axis}"
    group = next((group for group in split(whole, rows, name) if group is not None), None)
    if group is not None:
        keep(group)
    return group


def _agreed(layout_for: Callable[[int], Layout]) -> Layout:
    """Collective over the world. What layout_for gives, the same on all ranks; or all raise."""
    whole = given(None) if is_initialized() else init_process_group()
    problem: Exception | None = None
    said, digest = "", b""
    try:
        layout = layout_for(whole.size())
        said, digest = str(layout), hashlib.sha256(repr(layout.key()).encode()).digest()
    except Exception as error:  # told to the others before it is raised
        problem, said = error, f"no mesh, for {error}"
    facts: list[Any] = [None] * whole.size()
    whole.all_gather_object(facts, (digest, said))
    if problem is not None:
        raise problem
    for rank, (digest_there, said_there) in enumerate(facts):
        if digest_there != digest:
            raise ValueError(
                f"all ranks must give one mesh: rank {whole.rank()} gives {said}, and rank {rank} "
                f"{said_there}"
            )
    return layout
