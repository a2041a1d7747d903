"""The service of a ps task: owns its variables and is the only one to change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Reply, Request, errors
from strategy import checkpoint, kernels, saved
from strategy.catalogue import Catalogue, ServedConnection, ServedVariable
from strategy.configured import Configured
from strategy.host import Host
from strategy.owned_shard import OwnedShard
from strategy.parts import Origin
from strategy.proto import parameter_server_pb2 as pb
from strategy.restores import Restores
from strategy.shard import BLOCK_BYTES

Array = NDArray[Any]

# Their names are no optimizer's, which have no colon.
_PLAIN: Mapping[int, tuple[str, kernels.Rule]] = {
    pb.ASSIGN: (":assign", kernels.ASSIGN),
    pb.ADD: (":add", kernels.ADD),
    pb.SUB: (":sub", kernels.SUB),
    pb.MUL: (":mul", kernels.MUL),
    pb.DIV: (":div", kernels.DIV),
    pb.MIN: (":min", kernels.MIN),
    pb.MAX: (":max", kernels.MAX),
}


class ParameterServer:
    """Local. Serves variables from this process's memory.

    Handlers run one at a time, so that every change and every read by message falls between two
    pushes. A Server makes it for a ps task.

    Args:
        host: The process's place in the cluster: a Server, or a strategy's own in local mode.
    """

    def __init__(self, host: Host) -> None:
        index = host.own_index("ps")
        self._catalogue = Catalogue(host, index)
        self._variables = self._catalogue.variables
        self._by_name = self._catalogue.by_name
        self._connections = self._catalogue.connections
        self._optimizers: list[Configured] = []
        self._numbers: dict[bytes, int] = {}  # of optimizers, by what workers say of them
        self._restores = Restores()
        self._who = f"ps {index}"
        self._endpoint = host.endpoint
        self._endpoint.register(
            "ps",
            {
                "Attach": self._catalogue.attach,
                "Announce": self._catalogue.announce,
                "CreateVariable": self._catalogue.create,
                "Abandon": self._catalogue.abandon,
                "Grow": self._catalogue.grow,
                "Withdraw": self._catalogue.withdraw,
                "Configure": self._configure,
                "Push": self._push,
                "Read": self._read,
                "Save": self._save,
                "CheckRestore": self._check_restore,
                "Restore": self._restore,
            },
        )

    def close(self) -> None:
        """Local. Serve no more."""
        self._endpoint.unregister("ps")
        self._catalogue.close()

    def _configure(self, request: Request) -> Reply:
        number = self._numbers.get(request.body)
        if number is None:
            asked = pb.OptimizerDef.FromString(request.body)
            self._optimizers.append(Configured(asked, self._who))
            number = pb.FIRST_OPTIMIZER + len(self._optimizers) - 1
            self._numbers[request.body] = number
        return Reply(pb.ConfigureReply(rule=number).SerializeToString())

    def _push(self, request: Request) -> Reply:
        push = pb.PushRequest.FromString(request.body)
        connection = self._connections[push.connection]
        expected = connection.sequence + 1
        if push.sequence != expected:
            raise errors.InternalError(
                f"{self._who} got push {push.sequence} of connection {push.connection}, of worker "
                f"{connection.worker}, and expected {expected}"
            )
        connection.sequence = expected
        inline = iter(request.buffers)
        reply = pb.PushReply()
        problem: BaseException | None = None
        for entry in push.entries:
            variable = self._variables[entry.variable]
            shard = variable.shard
            change, rest = _incoming(entry, connection, shard, inline)
            # A bad entry must not leave its blocks in the ring, nor keep the others from applying.
            try:
                reply.staleness.append(shard.version - min(entry.seen, shard.version))
                self._apply(variable, entry.rule, change)
            except errors.DeadlineExceededError:
                raise  # the worker's own end of the ring is stuck or gone: nothing more will come
            except (Exception, SystemExit) as error:
                problem = problem or error
                for _ in rest:
                    continue
            reply.versions.append(shard.version)
        if problem is not None:
            raise problem
        return Reply(reply.SerializeToString())

    def _apply(self, variable: ServedVariable, number: int, change: Callable[..., None]) -> None:
        shard = variable.shard
        dtype = shard.layout.dtype
        values: Mapping[str, float] = {}
        if number in _PLAIN:
            name, rule = _PLAIN[number]
            if number == pb.SUB and dtype == np.bool_:
                raise errors.InvalidArgumentError(
                    f"cannot subtract from variable {shard.name!r} of dtype bool: assign its value"
                )
        else:
            optimizer = self._optimizers[number - pb.FIRST_OPTIMIZER]
            name, rule = optimizer.name, optimizer.rule
            if not shard.layout.is_floating:
                raise errors.InvalidArgumentError(
                    f"{optimizer.kind} cannot change variable {shard.name!r} of dtype {dtype}: "
                    "optimizers need bfloat16, float16, float32 or float64"
                )
            values = optimizer.values_at(shard.steps.get(name, 0) + 1)
        change(name, rule, values)
        for request in variable.waiting:
            reply = self._catalogue.created(variable, request, must_initialize=False)
            request.reply(reply.body)
        variable.waiting.clear()

    def _read(self, request: Request) -> Reply:
        asked = pb.ReadRequest.FromString(request.body)
        shard = self._variables[asked.variable].shard
        body = pb.ReadReply(version=shard.version).SerializeToString()
        if not request.buffers:
            return Reply(body, (shard.flat.copy(),))
        ids = np.array(request.buffers[0]).view(np.int64)
        shard.check_rows(ids)
        return Reply(body, (np.take(shard.data, ids, axis=0),))

    def _save(self, request: Request) -> Reply:
        asked = pb.SaveRequest.FromString(request.body)
        checkpoint.write_shards(asked.path, [variable.shard for variable in self._variables])
        return Reply()

    def _check_restore(self, request: Request) -> Reply:
        asked = pb.CheckRestoreRequest.FromString(request.body)
        reply = pb.CheckRestoreReply(
            found=self._fitting(asked.paths), restores=self._restores.count(asked.worker)
        )
        return Reply(reply.SerializeToString())

    def _restore(self, request: Request) -> None:
        asked = pb.RestoreRequest.FromString(request.body)
        this = (asked.worker, asked.ordinal, asked.checkpoint)
        if self._restores.is_due(*this):
            self._load(asked.paths)
        self._restores.complete(*this)

    def _fitting(self, paths: Sequence[str]) -> dict[str, Origin]:
        """Those of the variables here that a checkpoint has; an error unless all fit."""
        origins = {name: variable.shard.origin for name, variable in self._by_name.items()}
        found = saved.read_layouts(paths, origins)
        for name, (shape, dtype) in found.items():
            saved.check_fits(name, shape, dtype, self._by_name[name].shard)
        return {name: origins[name] for name in found}

    def _load(self, paths: Sequence[str]) -> None:
        for name, values in saved.read_shards(paths, self._fitting(paths)).items():
            shard = self._by_name[name].shard
            shard.apply(":assign", kernels.ASSIGN, {}, _blocks(values.data))
            shard.slots = dict(values.slots)
            shard.steps = dict(values.steps)


def _incoming(
    entry: pb.PushEntry, connection: ServedConnection, shard: OwnedShard, inline: Iterator[Array]
) -> tuple[Callable[..., None], Iterator[Array]]:
    """What changes a shard, given a rule, and the blocks that it takes one by one, if it does."""
    layout = shard.layout
    if entry.rows:
        ids = np.array(next(inline)).view(np.int64)
        rows = np.array(next(inline)).view(layout.dtype)
        return partial(shard.apply_rows, ids=ids, rows=rows), iter(())
    if entry.staged:
        assert connection.ring is not None
        blocks = connection.ring.read(layout.size, layout.dtype)
    else:
        blocks = _blocks(np.array(next(inline)).view(layout.dtype))
    return partial(shard.apply, blocks=blocks), blocks


def _blocks(flat: Array) -> Iterator[Array]:
    """An array block by block; an empty one is a block too, so that it has versions."""
    step = BLOCK_BYTES // flat.itemsize
    for start in range(0, max(flat.size, 1), step):
        yield flat[start : start + step]
