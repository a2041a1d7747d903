"""What a worker says to a server of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpidist import Reply, Work
from strategy.line import Line
from strategy.proto import parameter_server_pb2 as pb
from strategy.served import Key


class Snapshots:
    """Local, all of it. The checkpoints of a server's variables, on a worker's line to it.

    Args:
        line: The line.
        worker: Index of the worker.
    """

    def __init__(self, line: Line, worker: int) -> None:
        self._line = line
        self._worker = worker

    def hold(self) -> Work:
        """Local. Have the server take up no more pushes.

        Returns:
            A Work whose result is, for each connection, its key and what its last push has said.
        """
        return self._line.start("Hold", pb.AttachReply(connection=self._line.number)).then(_held)

    def release(self) -> Work:
        """Local. Have the server go on, if it holds pushes for this connection."""
        return self._line.start("Release", pb.AttachReply(connection=self._line.number))

    def save(self, path: str, targets: Mapping[Key, int]) -> Work:
        """Local. Have the server write its part of a checkpoint, and go on.

        Args:
            path: Of the file.
            targets: The last push of each connection that is to be in it.
        """
        asked = pb.SaveRequest(path=path)
        for (worker, strategy), sequence in targets.items():
            asked.targets.add(worker=worker, strategy=strategy, sequence=sequence)
        return self._line.start("Save", asked)

    def check_restore(self, paths: Sequence[str]) -> Work:
        """Local. Ask whether the server's variables fit a checkpoint; changes nothing.

        Args:
            paths: All files of the checkpoint.

        Returns:
            A Work whose result is a CheckRestoreReply.
        """
        asked = pb.CheckRestoreRequest(paths=paths, worker=self._worker)
        work = self._line.start("CheckRestore", asked)
        return work.then(lambda reply: pb.CheckRestoreReply.FromString(reply.body))

    def restore(self, checkpoint: str, paths: Sequence[str], ordinal: int) -> None:
        """Local. Have the server read its variables from a checkpoint, unless another worker has.

        Args:
            checkpoint: Its folder.
            paths: All its files.
            ordinal: How many checkpoints this worker has restored, this one included.

        Raises:
            InvalidArgumentError: Another worker's restore of this number was of another checkpoint.
        """
        asked = pb.RestoreRequest(
            checkpoint=checkpoint, paths=paths, ordinal=ordinal, worker=self._worker
        )
        self._line.call("Restore", asked)


def _held(reply: Reply) -> list[tuple[Key, tuple[int, ...]]]:
    last = pb.HoldReply.FromString(reply.body).last
    return [((one.worker, one.strategy), tuple(one.sent)) for one in last]
