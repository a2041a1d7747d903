"""How a server saves its variables, and restores them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from strategy.checkpoints import checkpoint, saved
from strategy.checkpoints.carried import Mirror, SavedPart, Stretch, tensors_in
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.catalogue import Catalogue
from strategy.server.pushes import Pushes
from strategy.server.restores import Restores, Wish
from strategy.shared.parts import Origin


class ServedCheckpoints:
    """Local. The checkpoints of a server's variables.

    Folders that a worker names need not be seen by the server: then its part of a checkpoint goes
    to the worker, and what it restores comes from there, piece by piece.

    Args:
        catalogue: The server's variables.
        pushes: Its pushes.
        metrics: What the server has done so far.
        workers: How many workers there are.
    """

    def __init__(
        self, catalogue: Catalogue, pushes: Pushes, metrics: TaskMetrics, workers: int
    ) -> None:
        self._variables = catalogue.variables
        self._by_name = catalogue.by_name
        self._pushes = pushes
        self._metrics = metrics
        self._workers = workers
        self._restores = Restores()
        self._parts: dict[str, SavedPart] = {}  # to be fetched; by the path they are for
        # By connection: what it has carried here of which checkpoint.
        self._mirrors: dict[int, tuple[bytes, str, Mirror]] = {}
        self._waiting: dict[int, tuple[Wish, Request]] = {}  # for a restore; by worker

    def save(self, request: Request) -> Reply:
        """Local. Write this server's part, once some pushes have been applied, and no others."""
        asked = pb.SaveRequest.FromString(request.body)

        def write() -> None:
            try:
                with self._metrics.timed("save", "busy_s"):
                    nbytes = self._write(asked)
            except Exception as error:
                request.fail(error)
            else:
                request.reply(pb.SaveReply(nbytes=nbytes).SerializeToString())

        targets = {(one.worker, one.strategy): one.sequence for one in asked.targets}
        self._pushes.cut(asked.path, targets, write)
        return LATER

    def fetch(self, request: Request) -> Reply:
        """Local. Give away some of what was saved for a file whose folder is not seen here."""
        asked = pb.FetchRequest.FromString(request.body)
        return Reply(b"", (self._parts[asked.path].read(asked.start, asked.stop),))

    def forget(self, request: Request) -> None:
        """Local. Keep nothing to be fetched for a file."""
        part = self._parts.pop(pb.FetchRequest.FromString(request.body).path, None)
        if part is not None:
            part.close()

    def check_restore(self, request: Request) -> Reply:
        """Local. Whether the variables here fit a checkpoint."""
        asked = pb.CheckRestoreRequest.FromString(request.body)
        reply = pb.CheckRestoreReply(restores=self._restores.count(asked.worker))
        if asked.checkpoint.names:
            paths, mirror = self._paths(asked.checkpoint, asked.connection)
            reply.unseen = not paths
            try:
                with _in_words(mirror):
                    reply.found.extend(self._fitting(paths))
            except Exception:
                self.drop_mirror(asked.connection)  # a repeated request starts again
                raise
        return Reply(reply.SerializeToString())

    def carry(self, request: Request) -> None:
        """Local. Take some bytes of a file of a checkpoint that is not seen here."""
        asked = pb.CarryRequest.FromString(request.body)
        mirror = self._mirror(asked.checkpoint, asked.connection)
        if mirror is None:
            self.drop_mirror(asked.connection)
            mirror = Mirror(asked.checkpoint.names, asked.checkpoint.path)
            this = (asked.checkpoint.index, asked.checkpoint.path)
            self._mirrors[asked.connection] = (*this, mirror)
        mirror.put(asked.file, asked.size, asked.start, np.asarray(request.buffers[0]))

    def restore(self, request: Request) -> Reply:
        """Restore the variables from a checkpoint."""
        asked = pb.RestoreRequest.FromString(request.body)
        return Reply(self._restored(asked).SerializeToString())

    def await_restore(self, request: Request) -> Reply:
        """Local. A worker that does not see a checkpoint waits until another has it restored."""
        wish = _wish(pb.RestoreRequest.FromString(request.body))
        self._waiting[wish.worker] = (wish, request)
        self._answer_waiting(wish.worker, wish, request)
        if len(self._waiting) == self._workers:  # nobody is left who could
            waiting, self._waiting = self._waiting, {}
            for other, each in waiting.values():
                each.fail(errors.NotFoundError(f"no worker finds the checkpoint {other.path!r}"))
        return LATER

    def close(self) -> None:
        """Local. Forget what has not been fetched, or restored."""
        for part in self._parts.values():
            part.close()
        for connection in list(self._mirrors):
            self.drop_mirror(connection)

    # Inside

    def _restored(self, asked: pb.RestoreRequest) -> pb.RestoreReply:
        """Restore a checkpoint, unless another worker has had it done, or say what is needed."""
        wish = _wish(asked)
        if self._restores.is_due(wish):
            paths, mirror = self._there(asked)
            with _in_words(mirror):
                needed = [] if mirror is None else mirror.missing(self._needed(paths))
                if needed:
                    return _needing(needed)
                self._load(paths)
            self._there(asked)  # another one of its name might have been read in part
        self.drop_mirror(asked.connection)
        self._restores.complete(wish)
        for worker, (other, waiting) in list(self._waiting.items()):
            self._answer_waiting(worker, other, waiting)
        return pb.RestoreReply()

    def _write(self, asked: pb.SaveRequest) -> int:
        """Write the part: the bytes that the worker has to fetch; 0 if it is in its folder."""
        shards = [variable.shard for variable in self._variables]
        # Its name has never been used before: who sees it sees what the worker sees.
        if os.path.isdir(os.path.dirname(asked.path)):
            checkpoint.write_shards(asked.path, shards)
            return 0
        part = SavedPart(lambda path: checkpoint.write_shards(path, shards))
        self._parts[asked.path] = part
        return part.nbytes

    def _paths(self, wanted: pb.Checkpoint, connection: int) -> tuple[list[str], Mirror | None]:
        """Where a checkpoint's files are: in its folder, or else carried here, or else nowhere."""
        if wanted.index == checkpoint.index_of(wanted.path):
            return [os.path.join(wanted.path, name) for name in wanted.names], None
        mirror = self._mirror(wanted, connection)
        return ([], None) if mirror is None else (mirror.paths, mirror)

    def _there(self, asked: pb.RestoreRequest) -> tuple[list[str], Mirror | None]:
        """See :meth:`_paths`; DataLossError if the checkpoint is where it was no longer."""
        paths, mirror = self._paths(asked.checkpoint, asked.connection)
        if not paths:
            raise errors.DataLossError(
                f"the checkpoint {asked.checkpoint.path!r} is gone, or another one is in its "
                "place; restore the newest one"
            )
        return paths, mirror

    def _mirror(self, wanted: pb.Checkpoint, connection: int) -> Mirror | None:
        *this, mirror = self._mirrors.get(connection, (b"", "", None))
        return mirror if this == [wanted.index, wanted.path] else None

    def drop_mirror(self, connection: int) -> None:
        """Forget the files that a worker has carried over a connection."""
        if connection in self._mirrors:
            self._mirrors.pop(connection)[2].close()

    def _answer_waiting(self, worker: int, wish: Wish, request: Request) -> None:
        try:
            if self._restores.is_due(wish):
                return
        except errors.InvalidArgumentError as error:
            request.fail(error)
        else:
            request.reply()
        del self._waiting[worker]

    def _fitting(self, paths: Sequence[str]) -> dict[str, Origin]:
        """Those of the variables here that a checkpoint has; an error unless all fit."""
        origins = {name: variable.shard.origin for name, variable in self._by_name.items()}
        found = saved.read_layouts(paths, origins)
        for name, (shape, dtype) in found.items():
            saved.check_fits(name, shape, dtype, self._by_name[name].shard)
        return {name: origins[name] for name in found}

    def _needed(self, paths: Sequence[str]) -> list[Stretch]:
        """What a restore would read of files of which the heads are here."""
        needed = dict.fromkeys(saved.needed_tensors(paths, self._fitting(paths)))
        places = {path: tensors_in(path) for path in paths}
        return [(paths.index(path), *places[path][tensor]) for path, tensor in needed]

    def _load(self, paths: Sequence[str]) -> None:
        found = [
            (self._by_name[name].shard, values)
            for name, values in saved.read_shards(paths, self._fitting(paths))
        ]
        for shard, values in found:  # of all of them, before there are any new ones
            shard.slots = {
                key: slot
                for key, slot in shard.slots.items()
                if key in values.slots and values.slots[key].dtype == slot.dtype
            }
        for shard, values in found:
            shard.restore(values.data, values.slots, values.steps, values.initials)


@contextmanager
def _in_words(mirror: Mirror | None) -> Iterator[None]:
    """Errors name files as they are called where they come from."""
    try:
        yield
    except errors.DataLossError as error:
        if mirror is None:
            raise
        raise errors.DataLossError(mirror.in_words(error.message)) from error


def _wish(asked: pb.RestoreRequest) -> Wish:
    return Wish(asked.worker, asked.ordinal, asked.checkpoint.path, asked.checkpoint.index)


def _needing(stretches: Sequence[Stretch]) -> pb.RestoreReply:
    reply = pb.RestoreReply()
    for file, start, stop in stretches:
        reply.needed.add(file=file, start=start, stop=stop)
    return reply
