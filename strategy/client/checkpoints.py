"""Checkpoints of a strategy: its worker lets the ps tasks save and restore their variables."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from mpidist import Work, errors, gather_works
from mpidist.checkpoints import folder
from mpidist.config import config as settings
from mpidist.mpi import waiting_for
from strategy.checkpoints import saved
from strategy.checkpoints.cut import Key, targets_of
from strategy.client.changes import slices_of
from strategy.client.connection import Connection
from strategy.client.pull import RemoteVariable
from strategy.client.waits import LOOK_S
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.cluster import Host, workers_of
from strategy.protocol.partition import Origin, origin_of

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20


class CheckpointClient:
    """Saves and restores by the worker of a strategy.

    Args:
        connections: The connections of the strategy to its ps tasks. The first ps task orders the
            restores of the workers.
        host: The place of this process in the cluster.
        worker: Index of this worker. Worker 0 is the chief.
        own_remotes: The variables of this worker on their ps tasks, by name.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        host: Host,
        worker: int,
        own_remotes: Mapping[str, RemoteVariable],
    ) -> None:
        self._connections = connections
        self._host = host
        self._worker = worker
        self._own_remotes = own_remotes
        self._completed = connections[0].restores

    @property
    def servers(self) -> int:
        """The number of ps tasks."""
        return len(self._connections)

    def begin_save(self, paths: Sequence[str], *, copies: bool = False) -> Save:
        """Let all ps tasks write their parts, which contain the same pushes.

        Args:
            paths: Path of each ps task's file, unique to this save.
            copies: Let the ps tasks apply pushes while they copy their parts and write the copies.

        Raises:
            FailedPreconditionError: Another worker is saving.
        """
        save = Save(self._connections, paths)
        try:
            save.begin(copies=copies)
        except BaseException:
            save.release()
            raise
        return save

    def restore(self, path: str) -> None:
        """Restore a checkpoint as the chief, or wait until the chief has restored it.

        Args:
            path: Folder of the checkpoint.

        Raises:
            Error: See :meth:`strategy.ParameterServerStrategy.restore`.
        """
        index = folder.index_of(path)
        if self._worker:
            self._await_chief(path, index)
        else:
            self._restore_for_all(path, index)
        self._completed += 1

    def _await_chief(self, path: str, index: bytes | None) -> None:
        """Check the own variables if this worker sees the checkpoint, and wait for the chief."""
        if index is not None:
            remotes = dict(self._own_remotes)
            known = {name: (one.origin, one.layout.dtype) for name, one in remotes.items()}
            self._check_fits(path, folder.files_in(path, index, "ps"), known)
        first = self._connections[0]
        asked = pb.RestoreRequest(connection=first.number, path=path, index=index or b"")
        asked.number = self._completed + 1
        # The chief may need any time for its restore. If the chief dies, the job ends.
        timeout = settings.call_timeout_s if index is None else math.inf
        work = first.start("AwaitRestore", asked, timeout=timeout)
        job, task = workers_of(self._host.cluster_spec)[0]
        with waiting_for(f"the chief to restore {path!r}", [f"{job} {task}"]):
            self._watch_chief(work, path)
        try:
            work.wait()
        except errors.DeadlineExceededError as error:
            raise errors.NotFoundError(
                f"{path!r} cannot be read by worker {self._worker}, and the chief has not "
                f"restored it in time: {error.message}"
            ) from error

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
                warn_at = math.inf
                logger.warning(
                    "worker %d has waited %g s for the chief (worker 0) to restore %s: all workers "
                    "must call restore, on strategies of one name", self._worker, settings.stall_s,
                    path,
                )  # fmt: skip

    def _restore_for_all(self, path: str, index: bytes | None) -> None:
        """Restore the variables of all workers, and tell the first ps task how that ended."""
        first = self._connections[0]
        ended = pb.EndRestoreRequest(connection=first.number, path=path, index=index or b"")
        ended.problem = "it was interrupted"
        try:
            self._send_arrays(path, index)
            ended.problem = ""
        except Exception as error:
            ended.problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            with suppress(errors.Error) if ended.problem else nullcontext():
                first.call("EndRestore", ended)

    def _send_arrays(self, path: str, index: bytes | None) -> None:
        """Send the arrays of a checkpoint to the ps tasks, for the variables of all workers."""
        files = folder.files_in(path, index, "ps")
        servers = [(one, _variables_of(one)) for one in self._connections]
        known = {
            one.name: (origin_of(one), np.dtype(one.dtype)) for _, own in servers for one in own
        }
        self._check_fits(path, files, known)
        for connection, variables in servers:
            numbers = {one.name: one.number for one in variables}
            wanted = {name: known[name][0] for name in numbers}
            for name, found in saved.read_shards(files, wanted):
                _send_variable(connection, numbers[name], found)
        if folder.index_of(path) != index:
            raise errors.DataLossError(
                f"the checkpoint {path!r} is gone, or another one is in its place; restore the "
                "newest one"
            )
        folder.warn_of_others(path, index, {origin.variable for origin, _ in known.values()})

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
        missing = [name for name in dict(self._own_remotes) if name not in found]
        if missing:
            raise errors.NotFoundError(f"the checkpoint {path!r} does not have {missing}")
        for name, (shape, dtype) in found.items():
            saved.check_fits(name, shape, dtype, *known[name])


class Save:
    """A save under way.

    Args:
        connections: The connections to the ps tasks.
        paths: Path of each ps task's file.
    """

    def __init__(self, connections: Sequence[Connection], paths: Sequence[str]) -> None:
        self._parts = [
            (connection, pb.HoldRequest(connection=connection.number, path=path))
            for connection, path in zip(connections, paths, strict=True)
        ]
        self._works: list[Work] = []

    def begin(self, *, copies: bool) -> None:
        """Hold the pushes of all ps tasks, and tell each which pushes belong to the save."""
        clocks = {one.index: _clocks(one.call("Hold", hold).body) for one, hold in self._parts}
        targets = targets_of(clocks)
        for one, hold in self._parts:
            request = _save_request(hold.path, targets[one.index])
            request.copies = copies
            self._works.append(one.start("Save", request))

    def end(self) -> None:
        """Wait until all files are written.

        Raises:
            FailedPreconditionError: A file cannot be written.
        """
        try:
            replies = gather_works("save", self._works).result()
            for (connection, hold), reply in zip(self._parts, replies, strict=True):
                nbytes = pb.SaveReply.FromString(reply.body).nbytes
                if nbytes:  # the ps task does not see the folder
                    _fetch(connection, hold.path, nbytes)
        finally:
            self.release()

    def release(self) -> None:
        """Have the ps tasks end the save: they must not hold pushes or keep parts for ever."""
        for work in [one.start("Release", hold) for one, hold in self._parts]:
            with suppress(errors.Error):  # the first error is the cause
                work.wait()


def _clocks(body: bytes) -> list[tuple[Key, Sequence[int]]]:
    """Return the vector clock of the last applied push of each connection of a ps task."""
    return [
        ((one.worker, one.strategy), tuple(one.sent)) for one in pb.HoldReply.FromString(body).last
    ]


def _save_request(path: str, targets: Mapping[Key, int]) -> pb.SaveRequest:
    request = pb.SaveRequest(path=path)
    for (worker, strategy), sequence in targets.items():
        request.targets.add(worker=worker, strategy=strategy, sequence=sequence)
    return request


def _fetch(connection: Connection, path: str, nbytes: int) -> None:
    """Fetch the part of a ps task that does not see the folder, and write it to the file."""
    piece = np.empty(min(nbytes, _PIECE_BYTES), np.uint8)
    with folder.reported(path), open(path, "wb") as file:
        for start in range(0, nbytes, _PIECE_BYTES):
            into = piece[: nbytes - start]
            asked = pb.FetchRequest(path=path, start=start, stop=start + into.size)
            connection.start("Fetch", asked, into=(into,)).wait()
            file.write(into.data)
        file.flush()
        os.fsync(file.fileno())


def _variables_of(connection: Connection) -> Sequence[pb.ServedVariable]:
    """Return all variables of a ps task, also the variables of other workers."""
    return pb.VariablesReply.FromString(connection.call("Variables", b"").body).variables


def _send_variable(connection: Connection, number: int, found: saved.Saved) -> None:
    """Replace the values and slots of a variable on a ps task by the arrays of a checkpoint."""
    slots = {name: slot.dtype.name for name, slot in found.slots.items()}
    state = pb.VariableState(slots=slots, steps=found.steps)
    # One array after the other, because this process and the ps task collect a whole array.
    _send_array(connection, found.data, pb.RestoreArrayRequest(variable=number, state=state))
    for name, slot in found.slots.items():
        asked = pb.RestoreArrayRequest(variable=number, slot=name, dtype=slots[name])
        _send_array(connection, slot, asked)


def _send_array(
    connection: Connection, stored: saved.Stored, asked: pb.RestoreArrayRequest
) -> None:
    array = stored.read()
    slices = slices_of(array) or [array]  # the last message carries an array, also an empty one
    asked.connection, asked.slices = connection.number, len(slices) - 1
    connection.send_array("RestoreArray", asked, slices)
