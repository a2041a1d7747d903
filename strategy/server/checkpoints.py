"""Checkpoints on a server: its own file, and restores through the chief."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from mpidist.host_memory import check_free
from strategy.checkpoints.parts import PartState, state_of
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.push_message import typed
from strategy.server.pushes import Pushes
from strategy.server.snapshot import Snapshot
from strategy.server.variable_store import VariableStore

Bytes = NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointId:
    """A checkpoint.

    Attributes:
        path: Its folder.
        index: Content of the index file; empty if the worker cannot read the checkpoint.
    """

    path: str
    index: bytes


@dataclass
class _Wait(Generic[T]):
    """A worker that waits for the chief."""

    worker: int
    number: int
    wanted: CheckpointId
    request: T


Answers = list[tuple[T, errors.Error | None]]
"""Requests to answer, each with an error or None."""


@dataclass
class Restores(Generic[T]):
    """The restores under one name of a strategy."""

    _done: list[CheckpointId] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=dict)  # completed restores by worker
    _waiting: dict[int, _Wait[T]] = field(default_factory=dict)  # by worker
    _failures: dict[str, str] = field(default_factory=dict)  # of the last restore of each path

    def count(self, worker: int) -> int:
        """Return the number of restores that a worker has completed."""
        return self._counts.get(worker, 0)

    def wait(self, worker: int, number: int, wanted: CheckpointId, request: T) -> Answers[T]:
        """Add a worker that waits for its restore of a number. Return the requests to answer."""
        # This replaces an earlier request of the worker. The caller of that request was interrupted
        # or has timed out, so the request needs no reply.
        self._waiting[worker] = _Wait(worker, number, wanted, request)
        return self._answers()

    def end(self, worker: int, restored: CheckpointId, problem: str) -> Answers[T]:
        """End a restore of the chief. Return the requests to answer.

        Args:
            worker: Index of the chief.
            restored: The checkpoint.
            problem: Why the restore has failed; empty if it has not.
        """
        if problem:
            self._failures[restored.path] = (
                f"worker {worker} could not restore {restored.path!r} for all workers: {problem}"
            )
        else:
            self._failures.pop(restored.path, None)
            self._done.append(restored)
            self._counts[worker] = len(self._done)
        return self._answers()

    def _answers(self) -> Answers[T]:
        answers: Answers[T] = []
        for one in list(self._waiting.values()):
            failure = self._failures.get(one.wanted.path)
            if one.number <= len(self._done):
                answers.append((one.request, self._check(one)))
            elif failure is not None:  # also if the chief has failed before the worker asked
                answers.append((one.request, errors.AbortedError(failure)))
            else:
                continue
            del self._waiting[one.worker]
        return answers

    def _check(self, wait: _Wait[T]) -> errors.Error | None:
        """Return an error if the chief has restored another checkpoint."""
        done = self._done[wait.number - 1]
        if done.path == wait.wanted.path and wait.wanted.index in (b"", done.index):
            self._counts[wait.worker] = wait.number
            return None
        another = (
            ", which is another checkpoint of this name," if done.path == wait.wanted.path else ""
        )
        return errors.InvalidArgumentError(
            f"worker {wait.worker} restores {wait.wanted.path!r} as its restore number "
            f"{wait.number}, but the chief restored {done.path!r}{another} as that number: restore "
            "the same checkpoints in the same order on all workers; let one worker choose "
            "the path and tell the others"
        )


class ServedCheckpoints:
    """The checkpoints of a server's variables.

    A server that sees the folder of a checkpoint writes its part there. Else the worker fetches the
    part. The chief performs restores: it sends the arrays of each variable.

    Args:
        store: The variables and connections of the server.
        pushes: The pushes, which a save holds.
        metrics: The metrics of the server.
    """

    def __init__(self, store: VariableStore, pushes: Pushes, metrics: TaskMetrics) -> None:
        self._store = store
        self._variables = store.variables
        self._connections = store.connections
        self._pushes = pushes
        self._metrics = metrics
        self._restores: dict[str, Restores[Request]] = {}  # by the name of the strategy
        self._parts: dict[str, _SavedPart] = {}  # parts to fetch, by the path of the file
        self._copy_memory = np.empty(0, np.uint8)  # of the last copy; its pages are in memory

    def save(self, request: Request) -> Reply:
        """Write the part of this server, after some pushes have been applied and no others.

        Later pushes wait until the part is written. If the request sets ``copies``, a thread copies
        and writes the part while later pushes are applied.
        """
        asked = pb.SaveRequest.FromString(request.body)

        def save_cut() -> None:
            try:
                with self._metrics.timed("save", "busy_s"):
                    state = state_of(variable.shard for variable in self._variables)
                    if asked.copies:
                        memory = self._take_memory(state.nbytes)
                        snapshot = self._store.snapshots[asked.path] = Snapshot(state, memory)
            except Exception as error:
                request.fail(error)
                return
            if not asked.copies:
                self._write(request, asked.path, state)
                return

            def copy_and_write() -> None:
                snapshot.finish()
                self._write(request, asked.path, snapshot.copies)
                self._copy_memory = memory

            threading.Thread(target=copy_and_write, name="mpidist-save", daemon=True).start()

        targets = {(one.worker, one.strategy): one.sequence for one in asked.targets}
        self._pushes.cut(asked.path, targets, save_cut)
        return LATER

    def _take_memory(self, nbytes: int) -> Bytes:
        """Return memory for a copy, which another save cannot take meanwhile."""
        memory, self._copy_memory = self._copy_memory, np.empty(0, np.uint8)
        if memory.size < nbytes:
            check_free(
                nbytes, f"a copy of {nbytes >> 20} MiB for a save does not fit; use more ps tasks"
            )
            memory = np.empty(nbytes, np.uint8)
        return memory

    def fetch(self, request: Request) -> Reply:
        """Return some bytes of a saved part whose folder this server does not see."""
        asked = pb.FetchRequest.FromString(request.body)
        return Reply(b"", (self._parts[asked.path].read(asked.start, asked.stop),))

    def release(self, request: Request) -> None:
        """End a save: drop its snapshot and its temporary file, and release held pushes."""
        path = pb.HoldRequest.FromString(request.body).path
        snapshot = self._store.snapshots.pop(path, None)
        if snapshot is not None:
            # If the worker was interrupted, the thread may still copy. Pushes do not copy for this
            # snapshot any more, and the server may close.
            snapshot.finish()
        part = self._parts.pop(path, None)
        if part is not None:
            part.close()
        self._pushes.release(path)

    def variables(self, request: Request) -> Reply:
        """Return the variables of this server."""
        reply = pb.VariablesReply()
        for one in self._variables:
            shard, part = one.shard, one.shard.origin.part
            reply.variables.add(
                name=shard.name,
                number=one.identity,
                dtype=shard.layout.dtype.name,
                variable=shard.origin.variable,
                whole=part.whole,
                part=pb.PartOf(axis=part.axis, start=part.start, stop=part.stop),
            )
        return Reply(reply.SerializeToString())

    def await_restore(self, request: Request) -> Reply:
        """Reply after the chief has performed the restore of a number."""
        asked = pb.RestoreRequest.FromString(request.body)
        connection = self._connections[asked.connection]
        wanted = CheckpointId(asked.path, asked.index)
        restores = self.restores_of(connection.strategy)
        _answer(restores.wait(connection.worker, asked.number, wanted, request))
        return LATER

    def end_restore(self, request: Request) -> None:
        """End a restore of the chief, and answer the workers that wait for it."""
        asked = pb.EndRestoreRequest.FromString(request.body)
        connection = self._connections[asked.connection]
        checkpoint_id = CheckpointId(asked.path, asked.index)
        restores = self.restores_of(connection.strategy)
        _answer(restores.end(connection.worker, checkpoint_id, asked.problem))

    def restores_of(self, strategy: str) -> Restores[Request]:
        """Return the restores under the name of a strategy."""
        return self._restores.setdefault(strategy, Restores())

    def restore_array(self, request: Request) -> None:
        """Replace the values of a variable, or one of its slots."""
        asked = pb.RestoreArrayRequest.FromString(request.body)
        arrays = self._pushes.collected(asked.connection, asked.slices, request.buffers)
        shard = self._variables[asked.variable].shard
        dtype = np.dtype(asked.dtype) if asked.slot else shard.layout.dtype
        nbytes = sum([array.nbytes for array in arrays])
        # Slots may have a size of their own.
        if nbytes % dtype.itemsize or (not asked.slot and nbytes != shard.layout.data_bytes):
            raise errors.InvalidArgumentError(
                f"a restore of {shard.name!r} does not have {shard.layout.size} values of {dtype}"
            )
        values = [typed(array, dtype) for array in arrays]
        with self._metrics.timed("restore", "busy_s"):
            if asked.slot:
                shard.restore_slot(asked.slot, values)
            else:
                slots = {name: np.dtype(kind) for name, kind in asked.state.slots.items()}
                shard.restore(values, slots, dict(asked.state.steps))

    def forget_strategy(self, strategy: str) -> None:
        """Forget the restores under a name whose connections were all closed."""
        if all(one.strategy != strategy for one in self._connections.values()):
            self._restores.pop(strategy, None)

    def close(self) -> None:
        """Discard all saved parts."""
        for part in self._parts.values():
            part.close()

    def _write(self, request: Request, path: str, state: PartState) -> None:
        """Write the part, and reply with the number of bytes to fetch, 0 if the worker has them."""
        nbytes = 0
        try:
            # The worker chose a new name, so an existing folder is the one that it created.
            if os.path.isdir(os.path.dirname(path)):
                state.write(path)
            else:
                part = self._parts[path] = _SavedPart(state.write)
                nbytes = part.nbytes
        except Exception as error:
            request.fail(error)
        else:
            request.reply(pb.SaveReply(nbytes=nbytes).SerializeToString())


class _SavedPart:
    """A temporary file that the server has written for a worker to fetch.

    Args:
        write: Writes the file at a path.

    Attributes:
        nbytes: Size of the file.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="mpidist-save-") as folder:
            path = os.path.join(folder, "part")
            try:
                write(path)
            except errors.FailedPreconditionError as error:
                raise errors.FailedPreconditionError(
                    f"{error.message}. This ps task does not see that folder, and writes to one of "
                    "its own first; TMPDIR names another place for it"
                ) from error
            self._file = open(path, "rb")  # noqa: SIM115 - until close()
        self.nbytes = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a copy of some bytes."""
        piece = np.empty(stop - start, np.uint8)
        self._file.seek(start)
        if self._file.readinto(piece.data) < piece.size:
            raise errors.DataLossError(f"a checkpoint's part has no bytes {start} to {stop}")
        return piece

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


def _answer(answers: Answers[Request]) -> None:
    for request, error in answers:
        if error is None:
            request.reply()
        else:
            request.fail(error)
