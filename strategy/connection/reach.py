"""How a worker reaches the memory of a ps task: mapped, by one-sided operations, or not at all."""

from __future__ import annotations

import contextlib

from mpidist import errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.host import Host, Task, workers_of
from strategy.shared.one_sided import OneSidedShard
from strategy.shared.shard import Layout, SharedShard

TRANSPORTS = ("auto", "shared", "rma", "p2p")


class Reach:
    """Local but for :meth:`grow`. What a transport makes of the places that a server names.

    Args:
        host: The worker's process.
        index: Of the ps task.
        transport: One of :data:`TRANSPORTS`.

    Attributes:
        only_shared: Whether what cannot be mapped is an error.
        one_sided: Whether memory is reached by MPI's Get and Put.
        is_direct: True if this worker can access the memory of the server.

    Raises:
        FailedPreconditionError: ``"shared"`` was asked for, and the memory of the ps cannot be
            mapped.
    """

    def __init__(self, host: Host, index: int, transport: str) -> None:
        self._host = host
        self._index = index
        self.only_shared = transport == "shared"
        self.one_sided = transport == "rma"
        is_mapped = transport in ("auto", "shared") and host.memory.part(index) is not None
        self.is_direct = is_mapped or self.one_sided
        if self.only_shared and not is_mapped:
            raise errors.FailedPreconditionError(
                f"ps {index} is on another node than {host.job_name} {host.task_index}, or that "
                "node has no shared memory (the ps says so): transport 'shared' cannot reach it; "
                "use 'auto'"
            )

    def shard(self, layout: Layout, reply: pb.CreateReply) -> SharedShard | OneSidedShard | None:
        """Local. A variable, or None if the server has to be asked for it."""
        if not self.is_direct or reply.private:
            return None
        offsets = (reply.versions_offset, reply.data_offset)
        if self.one_sided:
            window, rank = self._host.memory.window(self._index, reply.segment)
            return OneSidedShard(window, rank, layout, *offsets)
        memory = self._host.memory.part(self._index, reply.segment)
        assert memory is not None
        return SharedShard(memory, layout, *offsets, self._host.memory.sync)

    def mate_has_left(self) -> bool:
        """Local. Whether one of those who share the memory has ended, or closed its Server."""
        return any(self._host.has_left(*task) for task in self._mates())

    def grow(self, reply: pb.GrowReply) -> None:
        """Collective over the ps task and those who share its memory. Make a further segment."""
        # Without room it is the server that tells, and finds another place.
        with contextlib.suppress(errors.ResourceExhaustedError):
            place = self._index, reply.segment
            self._host.memory.grow(*place, reply.nbytes, self._mates(), self.one_sided)

    def _mates(self) -> list[Task]:
        """The workers in other processes than the server's that share its memory."""
        mates = set(self._host.memory.mates(self._index, self.one_sided))
        return [task for task in workers_of(self._host.cluster_spec) if task in mates]
