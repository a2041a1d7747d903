"""The process groups of ``torch.distributed`` with the backend ``"mpidist"``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

import mpidist
from mpidist.errors import DeadlineExceededError
from mpidist.group import Coalescing, ProcessGroup, make_group
from mpidist.torch.overloads import call_overload
from mpidist.torch.work import MpidistWork
from mpidist.work import Work, gather_works

NAME = "mpidist"
NAMES = [NAME]
"""The names under which the backend is registered with torch."""
DEVICES = ("cpu", "cuda")
_REDUCTIONS = {
    hash(dist.ReduceOp(getattr(dist.ReduceOp, name))): getattr(mpidist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}  # by hash, because torch's objects take 1 us to compare


class MpidistProcessGroup(dist.ProcessGroup):
    """A process group of torch whose operations run on an :class:`mpidist.ProcessGroup`.

    torch calls the methods. Their names and arguments are torch's; ``opts`` are torch's options.
    Ranks are group ranks. An asynchronous operation returns a Work. A blocking operation has ended
    when the method returns, and returns None, as in torch's NCCL backend. Scripts call methods with
    other arguments, such as ``group.allreduce(tensor, op)``. :mod:`mpidist.torch.overloads` has
    these overloads.

    Args:
        group: The group of mpidist. It belongs to this object.
        store: torch's store of the group.

    Attributes:
        group: The group of mpidist, for operations that torch does not have, such as ``scan``.
    """

    supports_coalescing = False
    supports_splitting = True
    supports_shrinking = False
    supports_time_estimate = False
    options = None  # torch 2.13 copies the options of a group that it splits

    def __init__(self, group: ProcessGroup, store: dist.Store) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        self._store = store
        self._name = self._desc = ""
        self._coalescing: tuple[ExitStack, Coalescing] | None = None
        self._messages: list[Work] = []  # started in the coalescing block

    # Reductions

    # The methods of this class that have overloads take no *args and **kwargs: a call of such a
    # function takes 0.1 us longer.

    def allreduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        op: Any = None,
        tensor: Any = None,
    ) -> MpidistWork | None:
        """Collective. Reduce a tensor over all members, in place."""
        if type(opts) is not AllreduceOptions:
            given = (tensors, opts, timeout)
            return call_overload(self, "allreduce", given, op=op, tensor=tensor)
        (tensor,) = tensors
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, _reduction(opts))
            return MpidistWork(None, tensors)
        is_async = opts.asyncOp  # read once, because this is the operation that must be fastest
        work = self.group.all_reduce(_array(tensor), _reduction(opts), is_async)
        return MpidistWork(work, tensors) if is_async else None

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: mpidist.ReduceOp) -> None:
        """Collective. Add the sparse tensors of all members. The call returns after the result.

        Raises:
            ValueError: The reduction is not SUM.
        """
        if op is not mpidist.ReduceOp.SUM:
            raise ValueError(f"sparse tensors can be reduced with SUM only, not with {op!r}")
        own = tensor.coalesce()
        parts = [
            torch.cat([torch.from_numpy(part) for part in self.group.all_gather_ragged(array)], -1)
            for array in (own.indices(), own.values().movedim(0, -1).contiguous())
        ]
        total = torch.sparse_coo_tensor(
            parts[0], parts[1].movedim(-1, 0), tensor.shape, check_invariants=True
        )
        tensor.copy_(total.coalesce())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> MpidistWork | None:
        """Collective. Reduce several tensors over all members, in place."""
        work = self.group.all_reduce_coalesced(_arrays(tensors), _reduction(opts), _is_async(opts))
        return _handle(work, tensors, opts)

    def reduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        root: Any = None,
        tensor: Any = None,
    ) -> MpidistWork | None:
        """Collective. Reduce a tensor to one member."""
        if type(opts) is not ReduceOptions:
            given = (tensors, opts, op, timeout)
            return call_overload(self, "reduce", given, root=root, tensor=tensor)
        (array,) = _arrays(tensors)
        work = self.group.reduce(
            array, op=_reduction(opts), async_op=_is_async(opts), group_dst=opts.rootRank
        )
        return _handle(work, tensors, opts)

    def reduce_scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        op: Any = None,
        output: Any = None,
        input: Any = None,
    ) -> MpidistWork | None:
        """Collective. Reduce a list of tensors. Each member receives one of the results."""
        if type(opts) is not ReduceScatterOptions:
            given = (output_tensors, input_tensors, opts, timeout)
            return call_overload(self, "reduce_scatter", given, op=op, output=output, input=input)
        (destination,), (sources,) = _arrays(output_tensors), input_tensors
        work = self.group.reduce_scatter(
            destination, _arrays(sources), _reduction(opts), async_op=_is_async(opts)
        )
        return _handle(work, output_tensors, opts)

    def reduce_scatter_single(
        self, output: Any, input: Any, opts: Any = None
    ) -> MpidistWork | None:
        """Collective. Reduce a tensor. Each member receives one part of the result."""
        own, source = _arrays((output, input))
        work = self.group.reduce_scatter_tensor(own, source, _reduction(opts), _is_async(opts))
        return _handle(work, [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> MpidistWork | None:
        """Collective. Reduce several tensors. Each member receives one part of each result."""
        pairs = zip(_arrays(outputs), _arrays(inputs), strict=True)
        with self.group.coalesce(async_ops=_is_async(opts)) as begun:
            for output, input in pairs:
                self.group.reduce_scatter_tensor(output, input, _reduction(opts))
        return _handle(begun.work, outputs, opts)

    # Data movement

    def broadcast(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        root: Any = None,
        tensor: Any = None,
    ) -> MpidistWork | None:
        """Collective. Copy a tensor of one member to all."""
        if type(opts) is not BroadcastOptions:
            given = (tensors, opts, timeout)
            return call_overload(self, "broadcast", given, root=root, tensor=tensor)
        (array,) = _arrays(tensors)
        work = self.group.broadcast(array, async_op=_is_async(opts), group_src=opts.rootRank)
        return _handle(work, tensors, opts)

    def allgather(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        input_tensor: Any = None,
    ) -> MpidistWork | None:
        """Collective. Gather a tensor of every member on all."""
        if type(opts) is not AllgatherOptions:
            given = (output_tensors, input_tensors, opts)
            return call_overload(
                self, "allgather", given, timeout=timeout, input_tensor=input_tensor
            )
        (outputs,), (array,) = output_tensors, _arrays(input_tensors)
        work = self.group.all_gather(_arrays(outputs), array, _is_async(opts))
        return _handle(work, outputs, opts)

    def allgather_coalesced(
        self, output_lists: Any, inputs: Any, opts: Any = None
    ) -> MpidistWork | None:
        """Collective. Gather several tensors of every member on all.

        Args:
            output_lists: For each group rank, one tensor for each input.
            inputs: The tensors of this member.
            opts: torch's options.
        """
        lists = [_arrays(outputs) for outputs in output_lists]
        work = self.group.all_gather_coalesced(lists, _arrays(inputs), _is_async(opts))
        return _handle(work, [tensor for outputs in output_lists for tensor in outputs], opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> MpidistWork | None:
        """Collective. Gather a tensor of every member in one tensor."""
        whole, own = _arrays((output, input))
        work = self.group.all_gather_into_tensor(whole, own, _is_async(opts))
        return _handle(work, [output], opts)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> MpidistWork | None:
        """Collective. Gather several tensors of every member, each in one tensor."""
        pairs = zip(_arrays(outputs), _arrays(inputs), strict=True)
        with self.group.coalesce(async_ops=_is_async(opts)) as begun:
            for output, input in pairs:
                self.group.all_gather_into_tensor(output, input)
        return _handle(begun.work, outputs, opts)

    def gather(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        root: Any = None,
        input_tensor: Any = None,
    ) -> MpidistWork | None:
        """Collective. Gather a tensor of every member on one."""
        if type(opts) is not GatherOptions:
            given = (output_tensors, input_tensors, opts, timeout)
            return call_overload(self, "gather", given, root=root, input_tensor=input_tensor)
        (array,) = _arrays(input_tensors)
        outputs = output_tensors[0] if output_tensors else None
        work = self.group.gather(
            array,
            None if outputs is None else _arrays(outputs),
            async_op=_is_async(opts),
            group_dst=opts.rootRank,
        )
        return _handle(work, outputs or [], opts)

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        root: Any = None,
        output_tensor: Any = None,
    ) -> MpidistWork | None:
        """Collective. Send each member one of the tensors of the root."""
        if type(opts) is not ScatterOptions:
            given = (output_tensors, input_tensors, opts, timeout)
            return call_overload(self, "scatter", given, root=root, output_tensor=output_tensor)
        (output,) = _arrays(output_tensors)
        work = self.group.scatter(
            output,
            _arrays(input_tensors[0]) if input_tensors else None,
            async_op=_is_async(opts),
            group_src=opts.rootRank,
        )
        return _handle(work, output_tensors, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> MpidistWork | None:
        """Collective. Send a tensor to every member, and receive one from every member."""
        work = self.group.all_to_all(_arrays(outputs), _arrays(inputs), _is_async(opts))
        return _handle(work, outputs, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MpidistWork | None:
        """Collective. Send a part of a tensor to every member, and receive the parts in another.

        Args:
            output: Receives the parts, in the order of the ranks.
            input: The parts for the members.
            output_split_sizes: Rows from each member; empty for equal parts.
            input_split_sizes: Rows for each member; empty for equal parts.
            opts: torch's options.
            timeout: Time limit of the Work.
        """
        if type(opts) is not AllToAllOptions:
            given = (output, input, output_split_sizes, input_split_sizes, opts)
            return call_overload(self, "all_to_all_single", given, timeout=timeout)
        whole, source = _arrays((output, input))
        work = self.group.all_to_all_single(
            whole, source, output_split_sizes or None, input_split_sizes or None, _is_async(opts)
        )
        return _handle(work, [output], opts)

    def barrier(
        self,
        opts: Any = None,
        timeout: Any = None,
    ) -> MpidistWork | None:
        """Collective. Wait until all members have entered."""
        if type(opts) is not BarrierOptions:
            given = (opts,)
            return call_overload(self, "barrier", given, timeout=timeout)
        # torch gives a negative limit if there is none.
        limit = opts.timeout if opts.timeout > timedelta() else None
        return _handle(self.group.barrier(_is_async(opts), limit), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Collective. Run a barrier that names late ranks.

        Raises:
            DeadlineExceededError: A rank did not come in time. The message begins as gloo's does.
        """
        try:
            self.group.monitored_barrier(timeout, wait_all_ranks)
        except DeadlineExceededError as error:
            late = ", ".join(str(self.group.position(rank)) for rank in error.ranks)
            if self.rank():
                text = (
                    f"Rank {self.rank()} successfully reached monitoredBarrier, but received "
                    "errors while waiting for send/recv from rank 0"
                )
            elif timeout is not None and not timeout:
                text = "Rank 0 timed out in monitoredBarrier"
            else:
                text = f"Rank{'s' * (len(error.ranks) > 1)} {late} failed to pass monitoredBarrier"
            raise DeadlineExceededError(f"{text}: {error}") from error

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> MpidistWork:
        """Point to point. Start to send a tensor to a member."""
        (array,) = _arrays(tensors)
        return self._message(self.group.isend(array, tag=tag, group_dst=dst), tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> MpidistWork:
        """Point to point. Start to receive a tensor from a member."""
        (array,) = _arrays(tensors)
        return self._message(self.group.irecv(array, tag=tag, group_src=src), tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpidistWork:
        """Point to point. Start to receive a tensor from any member."""
        (array,) = _arrays(tensors)
        return self._message(self.group.irecv(array, tag=tag), tensors)

    def _message(self, work: Work, tensors: Any) -> MpidistWork:
        if self._coalescing is not None:
            self._messages.append(work)
        return MpidistWork(work, tensors, self.group.ranks)

    # Coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        stack = ExitStack()
        self._coalescing = stack, stack.enter_context(self.group.coalesce(async_ops=True))

    def _end_coalescing(self, device: torch.device) -> MpidistWork:
        assert self._coalescing is not None
        (stack, begun), self._coalescing = self._coalescing, None
        messages, self._messages = self._messages, []
        stack.close()
        assert begun.work is not None
        return MpidistWork(gather_works("coalesced", [begun.work, *messages]), [])

    # The group

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self.group.rank()

    def size(self) -> int:
        """Return the number of members."""
        return self.group.size()

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of every later operation."""
        self.group.set_timeout(timeout)

    def shutdown(self) -> None:
        """Collective. Destroy the group."""
        if not self.group.freed:
            self.group.free()

    def abort(self) -> None:
        """Refuse every later operation. Pending operations stay pending."""
        self.group.abort()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _get_backend(self, device: torch.device) -> Any:
        # For split_group, torch asks with a device without index. For new_group, torch asks with
        # the device of init_process_group, and takes a backend that supports splitting for NCCL.
        self.supports_splitting = device.index is None or self.bound_device_id is None
        return self  # one backend serves all devices

    get_backend = _get_backend  # torch 2.14 calls it by this name, too

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Set the device of ``init_process_group(device_id=...)``, which split_group needs."""
        self.bound_device_id = device

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> MpidistProcessGroup | None:
        """Collective over the new members. Make a group of some members of this group.

        Args:
            ranks: Ranks in this group, in the order of their ranks in the new group.
            timeout: Time limit of every operation. The default is the time limit of this group.
            opts: None; there are no options.
            group_name: torch's name of the new group.
            group_desc: torch's description of the new group.
            device_types: Ignored. The new group serves the devices of this group.

        Returns:
            The group. Other ranks get None at once.

        Raises:
            ValueError: There are options, or a rank is not a member or is there twice.
        """
        _check_options(opts)
        name = group_name or f"{self._name}:split"
        made = make_group(
            self.group,
            [self.group.ranks[rank] for rank in ranks],
            f"torch {name}",
            self.group.timeout if timeout is None else timeout,
        )
        if made is None:
            return None
        group = _torch_group(made, dist.PrefixStore(f"{name}/", self._store))
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group

    def get_group_store(self) -> dist.Store:
        """Return torch's store of the group."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing. mpidist counts the operations of a group itself."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES]

    def _has_hooks(self) -> bool:
        return False

    # C++ calls these by the names of its methods.

    def getRank(self) -> int:
        """Return :meth:`rank`."""
        return self.group.rank()

    def getSize(self) -> int:
        """Return :meth:`size`."""
        return self.group.size()

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        """Set torch's description of the group."""
        self._desc = desc

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._desc

    # torch 2.13 and earlier call them by these names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def register_backend() -> None:
    """Register the backend ``"mpidist"`` with torch, and ``"mpi"`` if torch leaves that name free.

    Before torch 2.14 the name belongs to a backend that torch's wheels do not contain.
    """
    if hasattr(dist.Backend, "_ensure_backend_registered") and not dist.is_mpi_available():
        NAMES.append("mpi")
    for name in NAMES:
        dist.Backend.register_backend(
            name, make_process_group, extended_api=True, devices=list(DEVICES)
        )


def make_process_group(options: Any, pg_options: Any) -> MpidistProcessGroup:
    """Collective over the members. Make a group for ``init_process_group`` or ``new_group``.

    Raises:
        ValueError: torch and MPI have different ranks, or there are options.
    """
    _check_options(pg_options)
    world = mpidist.group.WORLD or mpidist.init_process_group()
    ranks = list(options.global_ranks_in_group) or list(world.ranks)
    rank, size = options.group_rank, options.group_size
    if (rank, size) not in ((-1, -1), (ranks.index(world.rank()), len(ranks))):
        raise ValueError(
            f"torch has rank {rank} of {size}, but MPI has rank {world.rank()} of {world.size()}: "
            "start the script with mpidist run, mpiexec or srun, and leave out rank, world_size "
            "and torchrun"
        )
    group = make_group(world, ranks, f"torch {options.group_id}", options.timeout)
    assert group is not None
    return _torch_group(group, options.store)


def _torch_group(group: ProcessGroup, store: dist.Store) -> MpidistProcessGroup:
    from mpidist.torch.other_backends import MixedProcessGroup  # a subclass

    return MixedProcessGroup(group, store)


def _check_options(options: Any) -> None:
    if options is not None:
        raise ValueError(f"the backend {NAME!r} has no options: leave pg_options out")


def _handle(work: Work | None, tensors: Any, opts: Any) -> MpidistWork | None:
    """Return torch's handle of an operation; None if the operation was blocking.

    An asynchronous operation within a coalescing block has no Work of its own yet, but torch's C++
    code needs a handle.
    """
    return None if work is None and not _is_async(opts) else MpidistWork(work, tensors)


def _is_async(opts: Any) -> bool:
    """Return whether an operation is asynchronous, as it is without options."""
    return opts is None or opts.asyncOp


def _reduction(opts: Any) -> Any:
    """Return the reduction of torch's options, SUM by default."""
    if opts is None:
        return mpidist.ReduceOp.SUM
    op = opts.reduceOp
    found = _REDUCTIONS.get(hash(op))
    if found is not None:
        return found
    _, factor = op.__getstate__()  # torch's PREMUL_SUM does not show its factor otherwise
    return mpidist.ReduceOp.PREMUL_SUM(factor)


def _arrays(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return arrays over the memory of tensors, for mpidist.

    Tensors on GPUs, and those of a dtype that NumPy does not have, are returned without gradient.
    torch's backends ignore gradients.
    """
    return [_array(tensor) for tensor in tensors]


def _array(tensor: torch.Tensor) -> Any:
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):
        return tensor.detach()
