"""The process groups of ``torch.distributed`` with the backend ``"mpidist"``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mpidist
from mpidist.errors import DeadlineExceededError
from mpidist.group import Coalescing, ProcessGroup, make_group
from mpidist.torch.work import MpidistWork
from mpidist.work import Work, gather_works

NAME = "mpidist"
_DEVICES = ("cpu", "cuda")
_REDUCTIONS = {
    hash(dist.ReduceOp(getattr(dist.ReduceOp, name))): getattr(mpidist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}  # by hash, because torch's objects take 1 us to compare


class MpidistProcessGroup(dist.ProcessGroup):
    """A process group of torch whose operations run on an :class:`mpidist.ProcessGroup`.

    torch calls the methods. Their names and arguments are torch's; ``opts`` are torch's options.
    Ranks are group ranks. An asynchronous operation returns a Work. A blocking operation has ended
    when the method returns, and returns None, as in torch's NCCL backend.

    Args:
        group: The group of mpidist. It belongs to this object.

    Attributes:
        group: The group of mpidist, for operations that torch does not have, such as ``scan``.
    """

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group
        self._name = self._desc = ""
        self._coalescing: tuple[ExitStack, Coalescing] | None = None
        self._messages: list[Work] = []  # started in the coalescing block

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> MpidistWork | None:
        """Collective. Reduce a tensor over all members, in place."""
        (tensor,) = tensors
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, _reduction(opts))
            return MpidistWork(None, tensors)
        work = self.group.all_reduce(_array(tensor), _reduction(opts), _is_async(opts))
        return _handle(work, tensors, opts)

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

    def reduce(self, tensors: Any, opts: Any) -> MpidistWork | None:
        """Collective. Reduce a tensor to one member."""
        (array,) = _arrays(tensors)
        work = self.group.reduce(
            array, op=_reduction(opts), async_op=_is_async(opts), group_dst=opts.rootRank
        )
        return _handle(work, tensors, opts)

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None
    ) -> MpidistWork | None:
        """Collective. Reduce a list of tensors. Each member receives one of the results."""
        (output,), (inputs,) = _arrays(outputs), input_lists
        work = self.group.reduce_scatter(
            output, _arrays(inputs), _reduction(opts), async_op=_is_async(opts)
        )
        return _handle(work, outputs, opts)

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

    def broadcast(self, tensors: Any, opts: Any) -> MpidistWork | None:
        """Collective. Copy a tensor of one member to all."""
        (array,) = _arrays(tensors)
        work = self.group.broadcast(array, async_op=_is_async(opts), group_src=opts.rootRank)
        return _handle(work, tensors, opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> MpidistWork | None:
        """Collective. Gather a tensor of every member on all."""
        (outputs,), (array,) = output_lists, _arrays(inputs)
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

    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> MpidistWork | None:
        """Collective. Gather a tensor of every member on one."""
        (array,) = _arrays(inputs)
        outputs = output_lists[0] if output_lists else None
        work = self.group.gather(
            array,
            None if outputs is None else _arrays(outputs),
            async_op=_is_async(opts),
            group_dst=opts.rootRank,
        )
        return _handle(work, outputs or [], opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> MpidistWork | None:
        """Collective. Send each member one of the tensors of the root."""
        (output,) = _arrays(outputs)
        work = self.group.scatter(
            output,
            _arrays(input_lists[0]) if input_lists else None,
            async_op=_is_async(opts),
            group_src=opts.rootRank,
        )
        return _handle(work, outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> MpidistWork | None:
        """Collective. Send a tensor to every member, and receive one from every member."""
        work = self.group.all_to_all(_arrays(outputs), _arrays(inputs), _is_async(opts))
        return _handle(work, outputs, opts)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> MpidistWork | None:
        """Collective. Send a part of a tensor to every member, and receive the parts in another.

        Args:
            output: Receives the parts, in the order of the ranks.
            input: The parts for the members.
            output_splits: Rows from each member; empty for equal parts.
            input_splits: Rows for each member; empty for equal parts.
            opts: torch's options.
        """
        whole, source = _arrays((output, input))
        work = self.group.all_to_all_single(
            whole, source, output_splits or None, input_splits or None, _is_async(opts)
        )
        return _handle(work, [output], opts)

    def barrier(self, opts: Any = None) -> MpidistWork | None:
        """Collective. Wait until all members have entered."""
        # torch gives a negative limit if there is none.
        limit = opts.timeout if opts is not None and opts.timeout > timedelta() else None
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
        self.group.set_timeout(timeout)

    def _get_backend(self, device: torch.device) -> MpidistProcessGroup:
        return self  # one backend serves all devices

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in _DEVICES]

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
    names = [NAME]
    if hasattr(dist.Backend, "_ensure_backend_registered") and not dist.is_mpi_available():
        names.append("mpi")
    for name in names:
        dist.Backend.register_backend(
            name, make_process_group, extended_api=True, devices=list(_DEVICES)
        )


def make_process_group(options: Any, pg_options: Any) -> MpidistProcessGroup:
    """Collective over the members. Make a group for ``init_process_group`` or ``new_group``.

    Raises:
        ValueError: torch and MPI have different ranks, or there are options.
    """
    if pg_options is not None:
        raise ValueError(f"the backend {NAME!r} has no options: leave pg_options out")
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
    return MpidistProcessGroup(group)


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
