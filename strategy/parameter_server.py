"""The service of a ps task: owns its variables and is the only one to change them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Reply, Request, errors
from strategy import checkpoint, kernels
from strategy.catalogue import Catalogue, ServedVariable
from strategy.host import Host
from strategy.proto import parameter_server_pb2 as pb
from strategy.restores import Restores
from strategy.shard import BLOCK_BYTES

if TYPE_CHECKING:
    from strategy.kernels import Rule

Array = NDArray[Any]

_PLAIN: Mapping[int, tuple[str, Rule]] = {
    pb.ASSIGN: ("assign", kernels.ASSIGN),
    pb.ADD: ("add", kernels.ADD),
    pb.SUB: ("sub", kernels.SUB),
}


@dataclass
class _Optimizer:
    kind: str
    values: dict[str, float]
    rule: Rule


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
        self._optimizers: list[_Optimizer] = []
        self._restores = Restores()
        self._who = f"ps {index}"
        self._endpoint = host.endpoint
        self._endpoint.register(
            "ps",
            {
                "Attach": self._catalogue.attach,
                "Announce": self._catalogue.announce,
                "CreateVariable": self._catalogue.create,
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
        asked = pb.OptimizerDef.FromString(request.body)
        if asked.kind not in kernels.OPTIMIZERS:
            known = ", ".join(kernels.OPTIMIZERS)
            raise errors.UnimplementedError(
                f"{self._who} has no optimizer {asked.kind!r}; it knows {known}"
            )
        optimizer = _Optimizer(asked.kind, dict(asked.values), kernels.OPTIMIZERS[asked.kind])
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        number = pb.FIRST_OPTIMIZER + self._optimizers.index(optimizer)
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
        problem: Exception | None = None
        for entry in push.entries:
            variable = self._variables[entry.variable]
            layout = variable.shard.layout
            if entry.staged:
                assert connection.ring is not None
                blocks = connection.ring.read(layout.size, layout.dtype)
            else:
                blocks = _blocks(np.array(next(inline)).view(layout.dtype))
            # A bad entry must not leave its blocks in the ring, nor keep the others from applying.
            try:
                reply.staleness.append(
                    variable.shard.version - min(entry.seen, variable.shard.version)
                )
                self._apply(variable, entry.rule, blocks)
            except (ValueError, TypeError) as error:
                problem = problem or error
                for _ in blocks:
                    continue
            reply.versions.append(variable.shard.version)
        if problem is not None:
            raise problem
        return Reply(reply.SerializeToString())

    def _apply(self, variable: ServedVariable, number: int, blocks: Iterator[Array]) -> None:
        shard = variable.shard
        dtype = shard.layout.dtype
        if number in _PLAIN:
            kind, rule = _PLAIN[number]
            values: Mapping[str, float] = {}
            if number == pb.SUB and dtype == np.bool_:
                raise errors.InvalidArgumentError(
                    f"cannot subtract from variable {shard.name!r} of dtype bool: assign its value"
                )
        else:
            optimizer = self._optimizers[number - pb.FIRST_OPTIMIZER]
            kind, rule, values = optimizer.kind, optimizer.rule, optimizer.values
            if dtype.kind != "f":
                raise errors.InvalidArgumentError(
                    f"{kind} cannot change variable {shard.name!r} of dtype {dtype}: optimizers "
                    "need float16, float32 or float64"
                )
        shard.apply(kind, rule, values, blocks)
        for request in variable.waiting:
            reply = self._catalogue.created(variable, request, must_initialize=False)
            request.reply(reply.body)
        variable.waiting.clear()

    def _read(self, request: Request) -> Reply:
        asked = pb.ReadRequest.FromString(request.body)
        shard = self._variables[asked.variable].shard
        body = pb.ReadReply(version=shard.version).SerializeToString()
        return Reply(body, (shard.flat.copy(),))

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

    def _fitting(self, paths: Sequence[str]) -> list[str]:
        saved = checkpoint.read_layouts(paths, self._by_name)
        for name, (shape, dtype) in saved.items():
            checkpoint.check_fits(name, shape, dtype, self._by_name[name].shard.layout)
        return list(saved)

    def _load(self, paths: Sequence[str]) -> None:
        for name, values in checkpoint.read_shards(paths, self._fitting(paths)).items():
            shard = self._by_name[name].shard
            shard.slots = {key: np.array(slot) for key, slot in values.slots.items()}
            shard.apply("assign", kernels.ASSIGN, {}, _blocks(values.data.reshape(-1)))
            shard.steps = dict(values.steps)


def _blocks(flat: Array) -> Iterator[Array]:
    """An array block by block; an empty one is a block too, so that it has versions."""
    step = BLOCK_BYTES // flat.itemsize
    for start in range(0, max(flat.size, 1), step):
        yield flat[start : start + step]
