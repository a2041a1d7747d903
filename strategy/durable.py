"""How a strategy's variables are saved and restored."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mpidist import errors, gather_works
from strategy.checkpoints import checkpoint
from strategy.checkpoints.cut import targets_of
from strategy.checkpoints.lock import CheckpointLock
from strategy.connection.connection import Connection
from strategy.proto import parameter_server_pb2 as pb
from strategy.variable import Variable
from strategy.variables import Variables

logger = logging.getLogger(__name__)


class Durable(ABC):
    """The part of a strategy that deals with checkpoints."""

    global_step: Variable
    _checkpoint_lock: CheckpointLock
    _worker: int
    _connections: list[Connection]
    _variables: Variables

    def save(self, directory: str, keep: int = 3, extra: Mapping[str, Any] | None = None) -> str:
        """Local. Write a checkpoint; one worker does, usually the chief.

        The checkpoint is a consistent cut: a push to several ps tasks is in all of its parts or in
        none. Nobody has to stop training for it; while a ps task writes, pushes to it wait. Saves
        and restores by several threads of a process run one after the other.

        Args:
            directory: Folder of all checkpoints. A ps task that does not see it, on another host
                without a shared file system, sends its part to this worker.
            keep: How many to keep, at least 1: those that were saved last, whatever their steps.
            extra: More files for the folder: name, without ``/``, to what they hold: bytes, such as
                the state of a data iterator, or what is written as JSON.

        Returns:
            The checkpoint's folder. It is complete, or does not exist.

        Raises:
            FailedPreconditionError: A ps task or this worker cannot write into the folder, or has
                no room there; or another worker is saving; or this thread is in the middle of a
                save, as in a signal handler. The checkpoints there are as before.
            ValueError: ``keep`` is less than 1, or a name in ``extra`` is not that of a file of its
                own in the folder. Nothing has been written.
        """
        with self._checkpoint_lock.held("save()"):
            self._drain()
            step, files = int(self.global_step), extra or {}
            names = list(self._variables.by_name)
            count = len(self._connections)
            with checkpoint.Writing(directory, step, count, keep, files, names) as writing:
                for name, content in files.items():
                    writing.add(name, content)
                self._save_parts(writing.paths)
                writing.take_step(self.global_step.name)
            return writing.path

    def restore(self, path: str | None) -> int:
        """Local, on every worker. Take all variables and slots from a checkpoint.

        All workers call it, with the same paths in the same order, before they train; the servers
        carry out each restore once. The number of ps tasks may differ from that of the checkpoint.
        No variable changes unless all of them fit. A restore that failed may be repeated, or
        another checkpoint restored in its place.

        One worker must see the checkpoint, which sends ps tasks that do not what they need of it;
        workers that do not wait until it has been restored.

        Args:
            path: A checkpoint's folder.

        Returns:
            The global step.

        Raises:
            NotFoundError: It is None, or no checkpoint, or has not all variables of the program;
                or is not seen here, and no other worker has restored it in time.
            DataLossError: It is damaged.
            InvalidArgumentError: A variable has another shape or dtype there, or another worker
                restored another checkpoint in its place; the message names both.
        """
        if path is None:
            raise errors.NotFoundError(
                "there is no checkpoint to restore: latest_checkpoint() gives None for a folder "
                "without one"
            )
        with self._checkpoint_lock.held("restore()"):
            return self._restore(os.path.abspath(path))

    def _restore(self, path: str) -> int:
        index = checkpoint.index_of(path)
        wanted = pb.Checkpoint(path=path, index=index or b"")
        if index is not None:
            wanted.names.extend(checkpoint.names_in(path, index))
        self._drain()
        replies = self._check_restore(wanted)
        ordinal = 1 + min(reply.restores for reply in replies)
        if index is None:
            self._await_restore(wanted, ordinal)
        else:
            found = {name for reply in replies for name in reply.found}
            missing = [name for name in self._variables.remotes if name not in found]
            if missing:
                raise errors.NotFoundError(f"the checkpoint {path!r} does not have {missing}")
            self._say_what_is_left(path, index)
        # One after the other: of workers with different paths, the first server lets one go on.
        for connection in self._connections:
            connection.snapshots.restore(wanted, ordinal)
        return int(self.global_step)

    def _say_what_is_left(self, path: str, index: bytes) -> None:
        names = checkpoint.variables_in(index)
        left = [name for name in names if name not in self._variables.by_name]
        if left and self._worker == 0:
            logger.warning(
                "the checkpoint %s has variables that the program has not made before restore(), "
                "and that later checkpoints will not have: %s", path, left,
            )  # fmt: skip

    @staticmethod
    def latest_checkpoint(directory: str) -> str | None:
        """Local. The complete checkpoint of a folder that was saved last, or None."""
        found = checkpoint.checkpoints(directory)
        return found[-1] if found else None

    # Inside

    def _save_parts(self, paths: Sequence[str]) -> None:
        """Have all ps tasks write their parts, all of the same pushes."""
        try:
            said = [
                connection.snapshots.hold(path).result()
                for connection, path in zip(self._connections, paths, strict=True)
            ]
            works = [
                connection.snapshots.save(path, targets)
                for connection, path, targets in zip(
                    self._connections, paths, targets_of(said), strict=True
                )
            ]
            sizes = gather_works("save", works).result()
        except BaseException:  # Ctrl-C too: servers must not hold pushes for ever
            works = []
            for connection, path in zip(self._connections, paths, strict=True):
                works.append(connection.snapshots.release(path))
                works.append(connection.snapshots.forget(path))  # no worker fetches this part
            for work in works:
                with suppress(errors.Error):  # the first error is the cause
                    work.wait()
            raise
        elsewhere = [
            (connection.snapshots, path, nbytes)
            for connection, path, nbytes in zip(self._connections, paths, sizes, strict=True)
            if nbytes
        ]
        try:
            for snapshots, path, nbytes in elsewhere:
                snapshots.fetch(path, nbytes)
        finally:
            for snapshots, path, _ in elsewhere:
                snapshots.forget(path).wait()

    def _check_restore(self, wanted: pb.Checkpoint) -> list[pb.CheckRestoreReply]:
        """What servers say of a checkpoint; those that do not see it are told what it has."""
        ask = [connection.snapshots.check_restore for connection in self._connections]
        replies: list[pb.CheckRestoreReply] = gather_works(
            "restore", [call(wanted) for call in ask]
        ).result()
        for number, reply in enumerate(replies):
            if reply.unseen:
                self._connections[number].snapshots.carry_heads(wanted)
                replies[number] = ask[number](wanted).result()
        return replies

    def _await_restore(self, wanted: pb.Checkpoint, ordinal: int) -> None:
        """Wait until another worker, which sees a checkpoint, has had it restored."""
        try:
            for connection in self._connections:
                connection.snapshots.await_restore(wanted, ordinal).wait()
        except (errors.NotFoundError, errors.DeadlineExceededError) as error:
            try:
                checkpoint.names_in(wanted.path, None)
            except errors.NotFoundError as absent:
                raise errors.NotFoundError(f"{absent.message}; {error.message}") from error

    @abstractmethod
    def _drain(self) -> None:
        """Wait until all pushes have been applied."""
