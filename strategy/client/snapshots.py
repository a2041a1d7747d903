"""Messages of a worker for saves and restores."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpidist import Reply, Work
from mpidist.config import config as settings
from strategy.checkpoints import checkpoint
from strategy.checkpoints.cut import Key
from strategy.checkpoints.saved import Saved, Stored
from strategy.proto import parameter_server_pb2 as pb

if TYPE_CHECKING:
    from strategy.client.connection import Connection


_PIECE_BYTES = 8 << 20


class Snapshots:
    """Messages for saves and restores over a worker's connection to a server.

    Args:
        connection: The connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def hold(self, path: str) -> Work:
        """Let the server hold all pushes.

        Args:
            path: Path of the server's file, unique to this save.

        Returns:
            A Work with a list of the key of each connection and the vector clock of its last
            applied push.
        """
        return self._connection.start("Hold", self._hold_request(path)).then(_held)

    def release(self, path: str) -> Work:
        """Let the server release its pushes if it holds them for the save of this file."""
        return self._connection.start("Release", self._hold_request(path))

    def save(self, path: str, targets: Mapping[Key, int]) -> Work:
        """Let the server write its part of a checkpoint, then release its pushes.

        Args:
            path: The path given to :meth:`hold`.
            targets: Sequence number of the last push of each connection in the checkpoint.

        Returns:
            A Work with the number of bytes to :meth:`fetch`, or 0 if the server sees the folder.
        """
        asked = pb.SaveRequest(path=path)
        for (worker, strategy), sequence in targets.items():
            asked.targets.add(worker=worker, strategy=strategy, sequence=sequence)
        work = self._connection.start("Save", asked)
        return work.then(lambda reply: int(pb.SaveReply.FromString(reply.body).nbytes))

    def fetch(self, path: str, nbytes: int) -> None:
        """Fetch the part of a server that does not see the folder, and write it to the file.

        Args:
            path: The path given to :meth:`save`.
            nbytes: Size of the part in bytes.

        Raises:
            FailedPreconditionError: The file cannot be written.
        """
        piece = np.empty(min(nbytes, _PIECE_BYTES), np.uint8)
        with checkpoint.reported(path), open(path, "wb") as file:
            for start in range(0, nbytes, _PIECE_BYTES):
                into = piece[: nbytes - start]
                asked = pb.FetchRequest(path=path, start=start, stop=start + into.size)
                self._connection.start("Fetch", asked, into=(into,)).wait()
                file.write(into.data)
            file.flush()
            os.fsync(file.fileno())

    def forget(self, path: str) -> Work:
        """Let the server discard the part that it keeps for :meth:`fetch`."""
        return self._connection.start("Forget", pb.FetchRequest(path=path))

    def variables(self) -> list[pb.ServedVariable]:
        """Return all variables of the server, also those of other workers."""
        return list(
            pb.VariablesReply.FromString(self._connection.call("Variables", b"").body).variables
        )

    def await_restore(self, path: str, index: bytes, number: int) -> Work:
        """Ask the first server to reply when the chief has restored a checkpoint.

        Args:
            path: Folder of the checkpoint.
            index: Content of the index file; empty if this worker cannot read the checkpoint.
            number: Number of this restore among those of this worker, from 1.

        Returns:
            A Work, which fails with AbortedError if the chief could not restore the checkpoint,
            with InvalidArgumentError if the chief has restored another one under this number, and
            with DeadlineExceededError if this worker cannot read the checkpoint and the chief has
            not restored it within the deadline of calls.
        """
        asked = pb.RestoreRequest(path=path, index=index, number=number)
        asked.connection = self._connection.number
        # The chief may need any time for its restore. If the chief dies, the job ends.
        timeout = math.inf if index else settings.call_timeout_s
        return self._connection.start("AwaitRestore", asked, timeout=timeout)

    def end_restore(self, path: str, index: bytes, problem: str) -> None:
        """Tell the first server that the chief has restored a checkpoint, or why it has failed."""
        asked = pb.EndRestoreRequest(path=path, index=index, problem=problem)
        asked.connection = self._connection.number
        self._connection.call("EndRestore", asked)

    def restore(self, variable: int, found: Saved) -> None:
        """Replace the values and slots of a variable by those of a checkpoint.

        Args:
            variable: Number of the variable on the server.
            found: The variable in the checkpoint.

        Raises:
            DataLossError: The checkpoint is damaged.
            ResourceExhaustedError: The server has no memory for a slot.
        """
        slots = {name: slot.dtype.name for name, slot in found.slots.items()}
        state = pb.VariableState(slots=slots, steps=found.steps, initials=found.initials)
        # One array after the other, because the server collects all slices of an array.
        self._restore_array(found.data, pb.RestoreArrayRequest(variable=variable, state=state))
        for name, slot in found.slots.items():
            asked = pb.RestoreArrayRequest(variable=variable, slot=name, dtype=slots[name])
            self._restore_array(slot, asked)

    def _restore_array(self, stored: Stored, asked: pb.RestoreArrayRequest) -> None:
        places = stored.slices()
        asked.connection, asked.slices = self._connection.number, len(places) - 1
        # Read slice by slice, because this process may have no memory for the whole array.
        self._connection.send_array("RestoreArray", asked, (stored.part(*one) for one in places))

    def _hold_request(self, path: str) -> pb.HoldRequest:
        return pb.HoldRequest(connection=self._connection.number, path=path)


def _held(reply: Reply) -> list[tuple[Key, tuple[int, ...]]]:
    last = pb.HoldReply.FromString(reply.body).last
    return [((one.worker, one.strategy), tuple(one.sent)) for one in last]
