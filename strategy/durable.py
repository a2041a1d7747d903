"""Saving and restoring the variables of a strategy."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from mpidist import Work, errors, gather_works
from mpidist.config import config as settings
from strategy.checkpoints import checkpoint, saved
from strategy.checkpoints.cut import targets_of
from strategy.checkpoints.lock import CheckpointLock
from strategy.connection.connection import LOOK_S, Connection
from strategy.shared.host import Host, workers_of
from strategy.shared.parts import Origin, origin_of
from strategy.variable import Variable
from strategy.variables import Variables

logger = logging.getLogger(__name__)


class Durable(ABC):
    """The checkpoints of a strategy."""

    global_step: Variable
    _checkpoint_lock: CheckpointLock
    _worker: int
    _host: Host
    _restores: int  # completed restores of this worker
    _connections: list[Connection]
    _variables: Variables

    def save(self, directory: str, keep: int = 3, extra: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint. One worker calls it, usually the chief.

        The checkpoint is a consistent cut: a push to several ps tasks is in all of its parts or in
        none. Training goes on, but each ps task holds pushes from the start of the save until the
        task has written its part. While a ps task writes, pulls by message from the task wait, too.
        Saves and restores by several threads of a process run one after the other.

        Args:
            directory: Folder of all checkpoints. A ps task that does not see the folder, on another
                host without a shared file system, sends its part to this worker.
            keep: Number of checkpoints to keep, at least 1. Older ones are removed, by the time of
                their save.
            extra: More files for the folder, by name without ``/``: bytes, such as the state of a
                data iterator, or an object that is written as JSON.

        Returns:
            The folder of the checkpoint. It is complete, or does not exist.

        Raises:
            FailedPreconditionError: A ps task or this worker cannot write into the folder, another
                worker is saving, or this thread is saving already, as in a signal handler. The
                earlier checkpoints are unchanged.
            ValueError: ``keep`` is less than 1, or a name in ``extra`` is not valid. Nothing has
                been written.
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
        """Restore all variables and optimizer slots from a checkpoint. Every worker calls it.

        All workers restore the same checkpoints in the same order, before they train. The chief
        reads the checkpoint and sends the values to the ps tasks. The other workers wait, and need
        not see the checkpoint. The number of ps tasks, the partitioners and the placement may
        differ from those of the save.

        The chief restores every variable of the checkpoint that exists on the ps tasks when it
        calls ``restore``, whichever worker created the variable. A variable created later keeps its
        initial value.

        Shapes and dtypes of all variables are compared before anything changes. A damaged file may
        be noticed later, when some variables have changed. A restore that failed may be repeated,
        or another checkpoint restored in its place.

        Args:
            path: Folder of the checkpoint.

        Returns:
            The global step.

        Raises:
            NotFoundError: The path is None or no checkpoint, or a variable of this worker is
                missing in it. Or this worker does not see it, and the chief has not restored it.
            AbortedError: The chief failed while this worker waited for the same path.
            DataLossError: The checkpoint is damaged.
            InvalidArgumentError: A variable has another shape or dtype in the checkpoint, or the
                chief restored another checkpoint in its place.
            ResourceExhaustedError: A ps task has no memory for a slot.
        """
        if path is None:
            raise errors.NotFoundError(
                "there is no checkpoint to restore: latest_checkpoint() gives None for a folder "
                "without one"
            )
        with self._checkpoint_lock.held("restore()"):
            return self._restore(os.path.abspath(path))

    def _restore(self, path: str) -> int:
        self._drain()
        index = checkpoint.index_of(path)
        first = self._connections[0].snapshots
        number = self._restores + 1
        if self._worker:
            if index is not None:
                remotes = self._variables.remotes.copy()
                known = {name: (one.origin, one.layout.dtype) for name, one in remotes.items()}
                self._check_fits(path, _files_of(path, index), known)
            work = first.await_restore(path, index or b"", number)
            self._watch_chief(work, path)
            try:
                work.wait()
            except errors.DeadlineExceededError as error:
                raise errors.NotFoundError(
                    f"{path!r} cannot be read by worker {self._worker}, and the chief has not "
                    f"restored it in time: {error.message}"
                ) from error
        else:
            problem = "it was interrupted"
            try:
                self._perform_restore(path, index)
                problem = ""
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise
            finally:
                with suppress(errors.Error) if problem else nullcontext():
                    first.end_restore(path, index or b"", problem)
        self._restores = number
        return int(self.global_step)

    def _watch_chief(self, work: Work, path: str) -> None:
        """Wait for the chief. Log a warning once, and raise AbortedError if it has left."""
        chief = workers_of(self._host.cluster_spec)[0]
        warn_at = time.monotonic() + settings.stall_s
        while not work.is_completed():
            work.block(min(time.monotonic() + LOOK_S, max(warn_at, time.monotonic() + 1e-3)))
            if not work.is_completed() and self._host.has_left(*chief):
                raise errors.AbortedError(
                    f"worker {self._worker} cannot restore {path!r}: the chief, {chief[0]} "
                    f"{chief[1]}, has left the cluster and has not restored it"
                )
            if not work.is_completed() and time.monotonic() >= warn_at:
                warn_at = float("inf")
                logger.warning(
                    "worker %d has waited %g s for the chief (worker 0) to restore %s: all workers "
                    "must call restore, on strategies of one name", self._worker, settings.stall_s,
                    path,
                )  # fmt: skip

    def _perform_restore(self, path: str, index: bytes | None) -> None:
        """Send the arrays of a checkpoint to the servers, for the variables of all workers."""
        files = _files_of(path, index)
        servers = [(one.snapshots, one.snapshots.variables()) for one in self._connections]
        known = {
            one.name: (origin_of(one), np.dtype(one.dtype)) for _, own in servers for one in own
        }
        self._check_fits(path, files, known)
        for snapshots, variables in servers:
            numbers = {one.name: one.number for one in variables}
            wanted = {name: known[name][0] for name in numbers}
            for name, found in saved.read_shards(files, wanted):
                snapshots.restore(numbers[name], found)
        if checkpoint.index_of(path) != index:
            raise errors.DataLossError(
                f"the checkpoint {path!r} is gone, or another one is in its place; restore the "
                "newest one"
            )
        made = {origin.variable for origin, _ in known.values()}
        left = [name for name in checkpoint.variables_in(index or b"") if name not in made]
        if left:
            logger.warning(
                "the checkpoint %s has variables that the program has not made before restore(), "
                "and that later checkpoints will not have: %s", path, left,
            )  # fmt: skip

    def _check_fits(
        self, path: str, files: Sequence[str], known: Mapping[str, tuple[Origin, np.dtype[Any]]]
    ) -> None:
        """Raise an error unless the checkpoint has this worker's variables, and all known ones fit.

        Args:
            path: Folder of the checkpoint.
            files: Its files.
            known: The variables of the program by name, each with its dtype.
        """
        found = saved.read_layouts(files, {name: origin for name, (origin, _) in known.items()})
        missing = [name for name in self._variables.remotes.copy() if name not in found]
        if missing:
            raise errors.NotFoundError(f"the checkpoint {path!r} does not have {missing}")
        for name, (shape, dtype) in found.items():
            saved.check_fits(name, shape, dtype, *known[name])

    @staticmethod
    def latest_checkpoint(directory: str) -> str | None:
        """Return the complete checkpoint of a folder that was saved last, or None."""
        found = checkpoint.checkpoints(directory)
        return found[-1] if found else None

    # Inside

    def _save_parts(self, paths: Sequence[str]) -> None:
        """Let all ps tasks write their parts, which contain the same pushes."""
        try:
            said = {
                connection.index: connection.snapshots.hold(path).result()
                for connection, path in zip(self._connections, paths, strict=True)
            }
            targets = targets_of(said)
            works = [
                connection.snapshots.save(path, targets[connection.index])
                for connection, path in zip(self._connections, paths, strict=True)
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

    @abstractmethod
    def _drain(self) -> None:
        """Wait until all pushes have been applied."""


def _files_of(path: str, index: bytes | None) -> list[str]:
    return [os.path.join(path, name) for name in checkpoint.names_in(path, index)]
