"""Device meshes of torch.distributed: an array of ranks, and a group along each dimension."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.collectives.backends import Backend, BackendName
from mpidist.collectives.default import (
    Group,
    get_rank,
    given,
    init_process_group,
    is_initialized,
    keep,
)
from mpidist.collectives.groups import check_options
from mpidist.collectives.layout import DeviceType, Layout, layout_of_ranks, layout_of_shape
from mpidist.group import ProcessGroup, split
from mpidist.mpi import world

# torch gives a backend alone or with its options, which must be None here.
_Override = BackendName | Backend | tuple[BackendName | Backend, None]


class DeviceMesh:
    """Collective over the world. An array of ranks, with a group along each of its dimensions.

    The group of a rank along a dimension has the ranks of one row, in the order of the row. The
    group rank is the index in the row. A row that is the whole world in its order is the default
    group. The other groups are new, and are destroyed together with the default group. Without a
    default group, :func:`init_process_group` is called first. Ranks that are not in the mesh make
    the call, too.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``. The groups are the same for both.
        mesh: World ranks, each once at most, as nested lists or as an array of integers.
        mesh_dim_names: One name per dimension. The default is no names.

    Raises:
        TypeError: The ranks are not integers, or a name is not a string.
        ValueError: The device type is unknown, a rank is given twice or is not in the world, the
            mesh is empty, the names do not match the dimensions or are not distinct, or the ranks
            give different meshes. If one rank raises, all ranks raise.
    """

    _layout: Layout
    _coordinate: tuple[int, ...] | None
    _groups: list[ProcessGroup]

    def __init__(
        self, device_type: DeviceType, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None
    ) -> None:
        self._make(_agreed(lambda size: layout_of_ranks(device_type, mesh, mesh_dim_names, size)))

    @staticmethod
    def from_group(
        group: Group | Sequence[Group],
        device_type: DeviceType,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh of existing groups of this rank, one group per dimension.

        Args:
            group: The groups in the order of the dimensions, or a single group.
            device_type: ``"cpu"`` or ``"cuda"``.
            mesh: World ranks. For a single group the default is its ranks.
            mesh_dim_names: One name per dimension. The default is no names.

        Raises:
            ValueError: The mesh is missing, the groups do not match the rows of the mesh, or this
                rank is outside a group; see also :class:`DeviceMesh`.
        """
        groups = [given(one) for one in (group if isinstance(group, Sequence) else [group])]
        if mesh is None:
            if len(groups) != 1:
                raise ValueError(f"a mesh of {len(groups)} groups needs the mesh of their ranks")
            mesh = groups[0].ranks
        layout = layout_of_ranks(device_type, mesh, mesh_dim_names, world().size)
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
        """World ranks, as a read-only array."""
        return self._layout.mesh

    @property
    def device_type(self) -> DeviceType:
        """Type of the devices, ``"cpu"`` or ``"cuda"``."""
        return self._layout.device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the dimensions, or None."""
        return self._layout.names

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each dimension."""
        return self.mesh.shape

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks of the mesh, or along a dimension.

        Args:
            mesh_dim: Name or number of the dimension. The default is the whole mesh.

        Raises:
            KeyError: The mesh has no such name.
            IndexError: The mesh has no such number.
        """
        return self.mesh.size if mesh_dim is None else self.shape[self._layout.axis(mesh_dim)]

    def get_rank(self) -> int:
        """Return the world rank of this process."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the indices of this rank in the mesh, or None if it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the index of this rank along a dimension.

        Args:
            mesh_dim: Name or number of the dimension, as in :meth:`get_group`.

        Raises:
            ValueError: This rank is not in the mesh, or the dimension is missing.
            KeyError: The mesh has no such name.
            IndexError: The mesh has no such number.
        """
        return self._place()[self._axis(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group of this rank along a dimension.

        Args:
            mesh_dim: Name or number of the dimension. It may be left out if there is one dimension.

        Raises:
            ValueError: This rank is not in the mesh, or the dimension is missing.
            KeyError: The mesh has no such name.
            IndexError: The mesh has no such number.
        """
        self._place()
        return self._groups[self._axis(mesh_dim)]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the groups of this rank, in the order of the dimensions.

        Raises:
            ValueError: This rank is not in the mesh.
        """
        self._place()
        return list(self._groups)

    def __getitem__(self, mesh_dim_names: str | Sequence[str]) -> DeviceMesh:
        """Return the submesh of some dimensions that contains this rank.

        Args:
            mesh_dim_names: One or more names, in the order of the mesh.

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
        """Collective over the ranks of this mesh. Return a mesh of one dimension.

        Args:
            name: Name of the dimension. The default joins the names of this mesh by ``_``.

        Raises:
            ValueError: This rank is not in the mesh.
        """
        self._place()
        flat = self._layout.flat(name)
        if self.ndim == 1 and flat.names == self.mesh_dim_names:
            return self
        return DeviceMesh._made(flat)

    def __eq__(self, other: object) -> bool:
        """Return whether two meshes have the same array of ranks, names and device type."""
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
        """Return the mesh of a layout. Collective over its ranks, unless the groups are given."""
        mesh = cls.__new__(cls)
        mesh._make(layout, groups)
        return mesh

    def _make(self, layout: Layout, groups: list[ProcessGroup] | None = None) -> None:
        self._layout = layout
        self._coordinate = layout.coordinate(world().rank)
        if groups is None:
            # All ranks take the dimensions in the same order, so no two wait for each other.
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
    device_type: DeviceType,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, _Override] | None = None,
) -> DeviceMesh:
    """Collective. Make the mesh of all ranks of the world, in C order.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``. The groups are the same for both.
        mesh_shape: Number of ranks along each dimension.
        mesh_dim_names: One name per dimension. The default is no names.
        backend_override: Backend of a dimension, by its name or number. Dimensions have the
            backend of the default group in any case.

    Returns:
        The mesh; see :class:`DeviceMesh`.

    Raises:
        TypeError: A size is not an integer, or a name is not a string.
        ValueError: The product of the sizes is not the number of ranks, the device type or a
            backend is unknown, the names do not match the dimensions or are not distinct, or the
            ranks give different meshes. If one rank raises, all ranks raise.
        KeyError: backend_override has an unknown name. The other ranks raise ValueError.
        IndexError: backend_override has an unknown number. The other ranks raise ValueError.
    """

    def layout_for(world_size: int) -> Layout:
        layout = layout_of_shape(device_type, mesh_shape, mesh_dim_names, world_size)
        for dim, choice in (backend_override or {}).items():
            layout.axis(dim)
            backend, options = choice if isinstance(choice, tuple) else (choice, None)
            check_options(backend, pg_options=options)
        return layout

    return DeviceMesh._made(_agreed(layout_for))


def _group_along(layout: Layout, axis: int) -> ProcessGroup | None:
    """Return the group of this rank's row along a dimension. Collective over each row."""
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
    """Return the layout that all ranks give, or raise on all ranks. Collective over the world."""
    whole = given(None) if is_initialized() else init_process_group()
    problem: Exception | None = None
    said, digest = "", b""
    try:
        layout = layout_for(whole.size())
        said, digest = str(layout), hashlib.sha256(repr(layout.key()).encode()).digest()
    except Exception as error:  # the other ranks learn of it before it is raised
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
