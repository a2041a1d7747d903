"""Handlers of pulls by message."""

from __future__ import annotations

import numpy as np

from mpidist import Reply, Request, TaskMetrics
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.catalogue import Catalogue


class Reads:
    """Handlers of pulls. They run between two pushes, so every reply has a single version.

    Args:
        catalogue: The variables of the server.
        metrics: The metrics of the server.
    """

    def __init__(self, catalogue: Catalogue, metrics: TaskMetrics) -> None:
        self._variables = catalogue.variables
        self._metrics = metrics

    def read(self, request: Request) -> Reply:
        """Return a copy of a variable, of some rows, or of a range of the flattened elements."""
        asked = pb.ReadRequest.FromString(request.body)
        shard = self._variables[asked.variable].shard
        with self._metrics.timed("read", "busy_s"):
            if request.buffers:
                ids = np.array(request.buffers[0]).view(np.int64)
                shard.check_rows(ids)
                copy = np.take(shard.data, ids, axis=0)
            else:
                copy = shard.flat[asked.start : asked.stop or None].copy()
        self._metrics.values["out_bytes"] += copy.nbytes
        return Reply(pb.ReadReply(version=shard.version).SerializeToString(), (copy,))

    def read_many(self, request: Request) -> Reply:
        """Return copies of several variables, joined in one array."""
        asked = pb.ReadManyRequest.FromString(request.body)
        shards = [self._variables[number].shard for number in asked.variables]
        copy = np.empty(sum([shard.layout.data_bytes for shard in shards]), np.uint8)
        begin = 0
        for shard in shards:
            end = begin + shard.layout.data_bytes
            copy[begin:end] = shard.flat.view(np.uint8)
            begin = end
        self._metrics.values["out_bytes"] += copy.nbytes
        reply = pb.ReadManyReply(versions=[shard.version for shard in shards])
        return Reply(reply.SerializeToString(), (copy,))
