"""Reads of the memory of a ps task: mapped, by MPI's Get, or by messages."""

from __future__ import annotations

from mpidist import errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.host import Host
from strategy.shared.one_sided import OneSidedShard
from strategy.shared.shard import Layout, SharedShard

TRANSPORTS = ("auto", "shared", "rma", "p2p")


class Reach:
    """Access of a worker to the memory of a ps task.

    Args:
        host: The process of the worker.
        index: Index of the ps task.
        transport: One of :data:`TRANSPORTS`.

    Attributes:
        one_sided: Whether the worker reads the memory by MPI's Get. True only for ps tasks on other
            nodes with transport ``"rma"``.

    Raises:
        FailedPreconditionError: The transport is ``"shared"``, but the ps task is on another node.
    """

    def __init__(self, host: Host, index: int, transport: str) -> None:
        self._memory = host.memory
        self._index = index
        self._transport = transport
        self._task = f"{host.job_name} {host.task_index}"
        self.one_sided = transport == "rma" and not host.memory.is_near(index)
        if transport == "shared" and not host.memory.is_near(index):
            raise errors.FailedPreconditionError(
                f"ps {index} is on another node than {self._task}, so transport 'shared' cannot "
                "read its memory; use 'auto'"
            )

    def shard(self, layout: Layout, reply: pb.CreateReply) -> SharedShard | OneSidedShard | None:
        """Return a new variable's shard; None if the worker must read the variable by messages.

        Raises:
            FailedPreconditionError: The transport is ``"shared"``, but the memory is not shared.
        """
        offsets = (reply.versions_offset, reply.data_offset)
        if self._transport == "p2p":
            return None
        memory = self._memory.map(self._index, reply.segment)
        if memory is not None:
            return SharedShard(memory, layout, *offsets, self._memory.sync)
        if self.one_sided:
            addresses = [reply.address + offset for offset in offsets]
            return OneSidedShard(self._memory, self._index, layout, *addresses)
        if self._transport == "shared":
            raise errors.FailedPreconditionError(
                f"{self._task} cannot map the memory of ps {self._index} (a warning gives the "
                "reason), as transport 'shared' requires; use 'auto'"
            )
        return None
