"""Device meshes of torch.distributed: an array of ranks, and a group along each dimension."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mpidist.collectives.backends import Backend, BackendName, check_options
from mpidist.collectives.default import (
    Group,
    get_rank,
    group_or_default,
    init_process_group,
    is_initialized,
)
from mpidist.collectives.groups import make_groups
from mpidist.group import ProcessGroup
from mpidist.mpi import world

DeviceType = Literal["cpu", "cuda"]

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

    _device_type: DeviceType
    _mesh: NDArray[np.int64]
    _names: tuple[str, ...] | None
    _coordinate: tuple[int, ...] | None
    _groups: list[ProcessGroup]

    def __init__(
        self, device_type: DeviceType, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None
    ) -> None:
        self._agree(lambda: self._lay_out(device_type, mesh, mesh_dim_names))
        self._make_groups()

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
        groups = [
            group_or_default(one) for one in (group if isinstance(group, Sequence) else [group])
        ]
        if mesh is None:
            if len(groups) != 1:
                raise ValueError(f"a mesh of {len(groups)} groups needs the mesh of their ranks")
            mesh = groups[0].ranks
        made = DeviceMesh.__new__(DeviceMesh)
        made._lay_out(device_type, mesh, mesh_dim_names)
        made._groups = groups
        if made.ndim != len(groups):
            raise ValueError(f"{made} needs {made.ndim} groups, not {len(groups)}")
        for axis, one in enumerate(groups):
            row = None if made._coordinate is None else made._part([axis]).tolist()
            if row != list(one.ranks):
                raise ValueError(
                    f"group {one.name!r} has ranks {list(one.ranks)}, and dimension {axis} of "
                    f"{made} has {row} on rank {world().rank}"
                )
        return made

    @property
    def mesh(self) -> NDArray[np.int64]:
        """World ranks, as a read-only array."""
        return self._mesh

    @property
    def device_type(self) -> DeviceType:
        """Type of the devices, ``"cpu"`` or ``"cuda"``."""
        return self._device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the dimensions, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each dimension."""
        return self._mesh.shape

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks of the mesh, or along a dimension.

        Args:
            mesh_dim: Name or number of the dimension. The default is the whole mesh.

        Raises:
            KeyError: The mesh has no such name.
            IndexError: The mesh has no such number.
        """
        return self._mesh.size if mesh_dim is None else self.shape[self._axis(mesh_dim)]

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
        names = [mesh_dim_names] if isinstance(mesh_dim_names, str) else mesh_dim_names
        axes = [self._axis(str(name)) for name in names]
        if not axes or sorted(set(axes)) != axes:
            raise KeyError(
                f"a part of {self} needs one or more of its names, in their order there, not "
                f"{mesh_dim_names!r}"
            )
        if len(axes) == self.ndim:
            return self
        part = self._derived(self._part(axes), tuple(str(name) for name in names))
        part._groups = [self._groups[axis] for axis in axes]
        return part

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """Collective over the ranks of this mesh. Return a mesh of one dimension.

        Args:
            name: Name of the dimension. The default joins the names of this mesh by ``_``.

        Raises:
            ValueError: This rank is not in the mesh.
        """
        self._place()
        name = name or "_".join(self._names or ())
        names = (name,) if name else None
        if self.ndim == 1 and names == self._names:
            return self
        flat = self._derived(self._mesh.reshape(-1), names)
        flat._make_groups()
        return flat

    def __eq__(self, other: object) -> bool:
        """Return whether two meshes have the same array of ranks, names and device type."""
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        sizes: Sequence[object] = self.shape
        if self._names is not None:
            sizes = [f"{n}={size}" for n, size in zip(self._names, sizes, strict=True)]
        ranks = np.array2string(self._mesh, separator=", ", threshold=64, edgeitems=2)
        return (
            f"DeviceMesh(({', '.join(map(str, sizes))}), {self._device_type!r}, "
            f"{' '.join(ranks.split())})"
        )

    # Inside

    def _lay_out(self, device_type: DeviceType, mesh: Any, names: Sequence[str] | None) -> None:
        """Set the device type, the ranks and the names, without the groups.

        Raises:
            TypeError: The ranks are not integers, or a name is not a string.
            ValueError: See :class:`DeviceMesh`.
        """
        known = get_args(DeviceType)
        if device_type not in known:
            raise ValueError(
                f"unknown device_type {device_type!r}; the known ones are {', '.join(known)}, "
                "without a number"
            )
        ranks = np.array(mesh)  # a copy: the caller may change the array
        if not ranks.size or not ranks.ndim:
            raise ValueError(f"a mesh needs at least one dimension and one rank, not {mesh!r}")
        if ranks.dtype.kind not in "iu":
            raise TypeError(f"a mesh needs ranks as integers, not {ranks.dtype}")
        ranks = ranks.astype(np.int64)
        distinct, counts = np.unique(ranks, return_counts=True)
        if (counts > 1).any():
            twice = distinct[counts > 1].tolist()
            raise ValueError(f"rank(s) {twice} are in the mesh more than once")
        world_size = world().size
        outside = distinct[(distinct < 0) | (distinct >= world_size)].tolist()
        if outside:
            raise ValueError(f"rank(s) {outside} of the mesh are not in a world of {world_size}")
        if names is not None:
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"mesh_dim_names needs a tuple of strings, not {names!r}")
            if len(names) != ranks.ndim or len(set(names)) != ranks.ndim or not all(names):
                raise ValueError(
                    f"a mesh of {ranks.ndim} dimension(s) needs as many distinct mesh_dim_names, "
                    f"not {tuple(names)}"
                )
            names = tuple(names)
        self._set(device_type, ranks, names)

    def _set(
        self, device_type: DeviceType, ranks: NDArray[np.int64], names: tuple[str, ...] | None
    ) -> None:
        ranks.flags.writeable = False
        self._device_type, self._mesh, self._names = device_type, ranks, names
        found = np.argwhere(ranks == world().rank)
        self._coordinate = tuple(found[0].tolist()) if len(found) else None

    def _agree(self, lay_out: Callable[[], None]) -> None:
        """Lay the mesh out as all ranks do, or raise on all ranks. Collective over the world."""
        whole = group_or_default(None) if is_initialized() else init_process_group()
        problem: Exception | None = None
        digest = b""
        try:
            lay_out()
            said, digest = str(self), hashlib.sha256(repr(self._key()).encode()).digest()
        except Exception as error:  # the other ranks learn of it before it is raised
            problem, said = error, f"no mesh, for {error}"
        facts: list[Any] = [None] * whole.size()
        whole.all_gather_object(facts, (digest, said))
        if problem is not None:
            raise problem
        for rank, (digest_there, said_there) in enumerate(facts):
            if digest_there != digest:
                raise ValueError(
                    f"all ranks must give one mesh: rank {whole.rank()} gives {said}, and rank "
                    f"{rank} {said_there}"
                )

    def _make_groups(self) -> None:
        """Make the groups of this rank. Collective over the ranks of the mesh."""
        whole = group_or_default(None)
        self._groups = []
        # All ranks take the dimensions in the same order, so no two wait for each other.
        for axis, length in enumerate(self.shape):
            rows = np.moveaxis(self._mesh, axis, -1).reshape(-1, length).tolist()
            if rows == [list(whole.ranks)]:
                self._groups.append(whole)
                continue
            name = f"mesh {self._names[axis] if self._names else axis}"
            self._groups += [group for group in make_groups(whole, rows, name) if group]

    def _derived(self, ranks: NDArray[np.int64], names: tuple[str, ...] | None) -> DeviceMesh:
        """Return a mesh of some ranks of this one, without its groups."""
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh._set(self._device_type, ranks, names)
        return mesh

    def _key(self) -> tuple[object, ...]:
        return self._device_type, self._names, self.shape, tuple(self._mesh.ravel().tolist())

    def _part(self, axes: Sequence[int]) -> NDArray[np.int64]:
        """Return the world ranks along some dimensions that contain this rank."""
        index = [slice(None) if a in axes else at for a, at in enumerate(self._place())]
        return self._mesh[tuple(index)]

    def _axis(self, mesh_dim: int | str | None) -> int:
        """Return the number of a dimension, from 0 on."""
        if mesh_dim is None:
            if self.ndim > 1:
                raise ValueError(f"{self} has {self.ndim} dimensions: say which, by mesh_dim")
            return 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self._names or ()):
                raise KeyError(f"{self} has no dimension {mesh_dim!r}; the names are {self._names}")
            return (self._names or ()).index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"{self} has no dimension {mesh_dim}; it has {self.ndim}")
        return mesh_dim % self.ndim

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

    Example:
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> shape = (1, dist.get_world_size())
        >>> mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=["replica", "shard"])
        >>> mesh["shard"].get_group().size()
        1
    """
    mesh = DeviceMesh.__new__(DeviceMesh)

    def lay_out() -> None:
        shape, world_size = tuple(mesh_shape), world().size
        if not all(isinstance(size, int | np.integer) for size in shape):
            raise TypeError(f"mesh_shape needs integers, not {shape}")
        if not shape or min(shape) < 1 or math.prod(shape) != world_size:
            raise ValueError(
                f"mesh_shape {shape} has room for {math.prod(shape)} ranks, and the world has "
                f"{world_size}; for a part of the world, give DeviceMesh the ranks"
            )
        mesh._lay_out(device_type, np.arange(world_size).reshape(shape), mesh_dim_names)
        for dim, choice in (backend_override or {}).items():
            mesh._axis(dim)
            backend, options = choice if isinstance(choice, tuple) else (choice, None)
            check_options(backend, pg_options=options)

    mesh._agree(lay_out)
    mesh._make_groups()
    return mesh
