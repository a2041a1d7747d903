"""What a worker says to a server of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from mpidist import Reply, Work
from strategy.checkpoints import checkpoint
from strategy.checkpoints.carried import PIECE_BYTES, head_of, pieces_of
from strategy.checkpoints.cut import Key
from strategy.connection.line import Line
from strategy.proto import parameter_server_pb2 as pb


class Snapshots:
    """Local, all of it. The checkpoints of a server's variables, on a worker's line to it.

    Args:
        line: The line.
        worker: Index of the worker.
    """

    def __init__(self, line: Line, worker: int) -> None:
        self._line = line
        self._worker = worker

    def hold(self, path: str) -> Work:
        """Have the server take up no more pushes.

        Args:
            path: File of the save, of a name that no other save has.

        Returns:
            A Work whose result is, for each connection, its key and what its last push has said.
        """
        return self._line.start("Hold", self._hold_request(path)).then(_held)

    def release(self, path: str) -> Work:
        """Have the server go on if it holds pushes for the save of this path."""
        return self._line.start("Release", self._hold_request(path))

    def save(self, path: str, targets: Mapping[Key, int]) -> Work:
        """Local. Have the server write its part of a checkpoint, and go on.

        Args:
            path: File of the save, with which :meth:`hold` was called.
            targets: The last push of each connection that is to be in it.

        Returns:
            A Work whose result is the number of bytes to :meth:`fetch`.
        """
        asked = pb.SaveRequest(path=path)
        for (worker, strategy), sequence in targets.items():
            asked.targets.add(worker=worker, strategy=strategy, sequence=sequence)
        work = self._line.start("Save", asked)
        return work.then(lambda reply: int(pb.SaveReply.FromString(reply.body).nbytes))

    def fetch(self, path: str, nbytes: int) -> None:
        """Local. Write what the server could not write into the folder.

        Args:
            path: Of the file.
            nbytes: Its length.

        Raises:
            FailedPreconditionError: The file cannot be written.
        """
        piece = np.empty(min(nbytes, PIECE_BYTES), np.uint8)
        with checkpoint.reported(path), open(path, "wb") as file:
            for start in range(0, nbytes, PIECE_BYTES):
                into = piece[: nbytes - start]
                asked = pb.FetchRequest(path=path, start=start, stop=start + into.size)
                self._line.start("Fetch", asked, into=(into,)).wait()
                file.write(into.data)
            file.flush()
            os.fsync(file.fileno())

    def forget(self, path: str) -> Work:
        """Local. Have the server keep nothing to be fetched for a file."""
        return self._line.start("Forget", pb.FetchRequest(path=path))

    def check_restore(self, wanted: pb.Checkpoint) -> Work:
        """Local. Ask whether the server's variables fit a checkpoint; changes nothing.

        Args:
            wanted: The checkpoint; without names of files, this only asks for what was restored.

        Returns:
            A Work whose result is a CheckRestoreReply.
        """
        asked = pb.CheckRestoreRequest(
            checkpoint=wanted, worker=self._worker, connection=self._line.number
        )
        work = self._line.start("CheckRestore", asked)
        return work.then(lambda reply: pb.CheckRestoreReply.FromString(reply.body))

    def carry_heads(self, wanted: pb.Checkpoint) -> None:
        """Local. Send the server what files that it does not see say of themselves."""
        for number, name in enumerate(wanted.names):
            length, _ = head_of(os.path.join(wanted.path, name))
            self._carry(wanted, pb.Stretch(file=number, start=0, stop=length))

    def restore(self, wanted: pb.Checkpoint, ordinal: int) -> None:
        """Local. Have the server read its variables from a checkpoint, unless another worker has.

        Args:
            wanted: The checkpoint, checked before.
            ordinal: How many checkpoints this worker has restored, this one included.

        Raises:
            InvalidArgumentError: Another worker's restore of this number was of another checkpoint.
        """
        asked = self._request(wanted, ordinal)
        while needed := pb.RestoreReply.FromString(self._line.call("Restore", asked).body).needed:
            for stretch in needed:
                self._carry(wanted, stretch)

    def await_restore(self, wanted: pb.Checkpoint, ordinal: int) -> Work:
        """Local. Ask for an answer when another worker has had a checkpoint restored.

        Args:
            wanted: The checkpoint, which this worker does not see.
            ordinal: See :meth:`restore`.
        """
        return self._line.start("AwaitRestore", self._request(wanted, ordinal))

    def _hold_request(self, path: str) -> pb.HoldRequest:
        return pb.HoldRequest(connection=self._line.number, path=path)

    def _request(self, wanted: pb.Checkpoint, ordinal: int) -> pb.RestoreRequest:
        return pb.RestoreRequest(
            checkpoint=wanted,
            ordinal=ordinal,
            worker=self._worker,
            connection=self._line.number,
        )

    def _carry(self, wanted: pb.Checkpoint, stretch: pb.Stretch) -> None:
        path = os.path.join(wanted.path, wanted.names[stretch.file])
        _, size = head_of(path)
        for start, piece in pieces_of(path, stretch.start, stretch.stop):
            asked = pb.CarryRequest(
                checkpoint=wanted,
                connection=self._line.number,
                file=stretch.file,
                start=start,
                size=size,
            )
            self._line.start("Carry", asked, (piece,)).wait()


def _held(reply: Reply) -> list[tuple[Key, tuple[int, ...]]]:
    last = pb.HoldReply.FromString(reply.body).last
    return [((one.worker, one.strategy), tuple(one.sent)) for one in last]
