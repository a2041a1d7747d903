"""Groups with other backends of torch for some devices, as ``"cpu:mpidist,cuda:nccl"`` asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mpidist.group import ProcessGroup
from mpidist.torch.process_group import DEVICES, NAMES, MpidistProcessGroup

# The operations that are dispatched by the device of their tensors. torch has two names for some.
_DISPATCHED = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "_reduce_scatter_base", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    "broadcast", "allgather", "allgather_coalesced", "all_gather_single", "_allgather_base",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter",
    "alltoall", "all_to_all_single", "alltoall_base", "send", "recv", "recv_anysource",
    "_start_coalescing", "_end_coalescing",
)  # fmt: skip


class MixedProcessGroup(MpidistProcessGroup):
    """A group that gives the tensors of some devices to other backends of torch.

    torch tells the backends of a group only after it has made the group, so the first call finds
    them. If mpidist is the only backend, the object then gets the class of its base, and later
    calls cost nothing more. Another backend starts with the first operation on its device.

    Args:
        group: The group of mpidist. It belongs to this object.
        store: torch's store of the group.
    """

    def __init__(self, group: ProcessGroup, store: dist.Store) -> None:
        super().__init__(group, store)
        self._names: dict[str, str] | None = None  # of the other backends, by device type
        self._started: dict[str, dist.ProcessGroup] = {}
        self._starting = threading.Lock()

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Collective. Wait until all members have entered, on the device of the options."""
        other = _group_for(self, [getattr(opts, "device", None)])
        if other is None:
            return MpidistProcessGroup.barrier(self, opts, timeout)
        return other.barrier(opts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of every later operation."""
        super().set_timeout(timeout)
        for other in self._started.values():
            other.set_timeout(timeout)

    def shutdown(self) -> None:
        """Collective. Destroy the group, and its groups of other backends."""
        for other in self._end():
            other.shutdown()
        super().shutdown()

    def abort(self) -> None:
        """Refuse every later operation. Pending operations of mpidist stay pending."""
        for other in self._end():
            other.abort()
        super().abort()

    def _end(self) -> list[dist.ProcessGroup]:
        """Return the groups of other backends, and forget them."""
        ended, self._started, self._names = [*self._started.values()], {}, {}
        return ended

    def _get_backend(self, device: torch.device) -> Any:
        other = _group_for(self, [device])
        if other is None:
            return MpidistProcessGroup._get_backend(self, device)
        return other._get_backend(device)

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        others = _other_backends(self)
        served = [name for name in DEVICES if name not in others]
        served += [name for name in others if dist.is_backend_available(others[name])]
        return [torch.device(name) for name in served]

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device of ``init_process_group``; None beside another backend.

        With a device, torch would split NCCL's communicator for each new group. The ranks outside
        the new group would then wait, because NCCL starts later here.
        """
        return None if _other_backends(self) else dist.ProcessGroup.bound_device_id.fget(self)

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        dist.ProcessGroup.bound_device_id.fset(self, device)

    def _start(self, device: str, name: str) -> dist.ProcessGroup:
        """Collective. Start another backend. gloo connects all members.

        Raises:
            RuntimeError: torch lacks the backend, or mpidist cannot start it.
        """
        store = dist.PrefixStore(f"{name} for {device}/", self._store)
        seconds = self.group.timeout
        limit = c10d.default_pg_timeout if seconds is None else timedelta(seconds=seconds)
        rank, size = self.group.rank(), self.group.size()
        backend: Any
        if not dist.is_backend_available(name):
            raise RuntimeError(
                f"this torch has no backend {name!r}, which the group is to use for {device} "
                f"tensors: install a torch that has it, or ask for '{device}:mpidist'"
            )
        if name == "gloo":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=limit)
        elif name == "nccl":
            kind = dist.ProcessGroup.BackendType.NCCL
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            options.global_ranks_in_group = list(self.group.ranks)
            options.group_name = self._name
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            raise RuntimeError(
                f"mpidist cannot start the backend {name!r} for {device} tensors, only 'gloo' and "
                f"'nccl': make a second group with dist.new_group(backend={name!r})"
            )
        backend._set_sequence_number_for_group()
        other = dist.ProcessGroup(store, rank, size)
        other._set_default_backend(kind)
        other._register_backend(torch.device(device), kind, backend)
        other._set_group_name(self._name)
        other._set_group_desc(self._desc)
        return other


def _other_backends(group: MixedProcessGroup) -> dict[str, str]:
    """Return the names of the other backends of a group, by device type."""
    if group._names is None:
        config = c10d._world.pg_backend_config.get(group)
        if config is None:  # torch has not made the whole group yet
            return {}
        pairs = (pair.split(":") for pair in config.split(","))
        group._names = {device: name for device, name in pairs if name not in NAMES}
        if not group._names:
            group.__class__ = MpidistProcessGroup
    return group._names


def _group_for(group: MixedProcessGroup, arguments: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return torch's group for the device of the arguments; None if mpidist serves it.

    The object may get another class meanwhile, so this is no method.
    """
    names = _other_backends(group)
    device = _device_type(arguments) if names else None
    if device not in names:
        return None
    with group._starting:
        if device not in group._started:
            group._started[device] = group._start(device, names[device])
        return group._started[device]


def _device_type(argument: Any) -> str | None:
    """Return the device type of the first tensor or device in an argument, or in nested lists."""
    if isinstance(argument, torch.Tensor):
        return str(argument.device.type)
    if isinstance(argument, torch.device):
        return str(argument.type)
    if isinstance(argument, Iterable) and not isinstance(argument, str):
        return next(filter(None, map(_device_type, argument)), None)
    return None


def _dispatch(name: str) -> Callable[..., Any]:
    own = getattr(MpidistProcessGroup, name)

    def call(self: MixedProcessGroup, *args: Any, **named: Any) -> Any:
        other = _group_for(self, [*args, *named.values()])
        return own(self, *args, **named) if other is None else getattr(other, name)(*args, **named)

    return call


for _name in _DISPATCHED:
    setattr(MixedProcessGroup, _name, _dispatch(_name))
