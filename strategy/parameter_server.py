"""The service of a ps task: owns its variables and is the only one to change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import LATER, Reply, Request, task_metrics
from strategy import checkpoint, kernels, saved
from strategy.blocks import in_blocks
from strategy.catalogue import Catalogue
from strategy.host import Host
from strategy.known_rules import Rules
from strategy.parts import Origin
from strategy.proto import parameter_server_pb2 as pb
from strategy.pushes import Pushes
from strategy.restores import Restores
from strategy.timekeeper import Timekeeper

Array = NDArray[Any]


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
        who = f"ps {index}"
        self._rules = Rules(who)
        self._metrics = task_metrics("ps", index)
        self._pushes = Pushes(who, self._catalogue, self._rules, self._metrics)
        self._timekeeper = Timekeeper(self._catalogue, host)
        self._restores = Restores()
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
                "Configure": self._rules.configure,
                "Push": self._pushes.push,
                "Hold": self._pushes.hold,
                "Release": self._pushes.release,
                "Await": self._pushes.wait,
                "Fail": self._pushes.fail,
                "Enter": self._timekeeper.enter,
                "Clock": self._timekeeper.clock,
                "Missing": self._timekeeper.missing,
                "Leave": self._timekeeper.leave,
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

    def _read(self, request: Request) -> Reply:
        asked = pb.ReadRequest.FromString(request.body)
        shard = self._variables[asked.variable].shard
        body = pb.ReadReply(version=shard.version).SerializeToString()
        with self._metrics.timed("read", "busy_s"):
            if request.buffers:
                ids = np.array(request.buffers[0]).view(np.int64)
                shard.check_rows(ids)
                copy = np.take(shard.data, ids, axis=0)
            else:
                copy = shard.flat.copy()
        self._metrics.values["out_bytes"] += copy.nbytes
        return Reply(body, (copy,))

    def _save(self, request: Request) -> Reply:
        asked = pb.SaveRequest.FromString(request.body)

        def write() -> None:
            shards = [variable.shard for variable in self._variables]
            try:
                with self._metrics.timed("save", "busy_s"):
                    checkpoint.write_shards(asked.path, shards)
            except Exception as error:
                request.fail(error)
            else:
                request.reply()

        targets = {(one.worker, one.strategy): one.sequence for one in asked.targets}
        self._pushes.cut(targets, write)
        return LATER

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
            shard.apply(":assign", kernels.ASSIGN, {}, in_blocks(values.data))
            shard.slots = dict(values.slots)
            shard.initials = dict(values.initials)
            shard.steps = dict(values.steps)
