"""Clusters on the ranks of a test's world."""

from __future__ import annotations

import mpidist
from mpidist import ClusterSpec
from strategy import ParameterServerStrategy


def spec_of(world, ps):
    """The first ranks are ps tasks, the others workers."""
    hosts = world.allgather(mpidist.Address("mpi", _host(), world.rank).host)
    return ClusterSpec.from_counts({"ps": ps, "worker": -1}, hosts)


def on_cluster(world, ps, train, transport="auto", **options):
    """Start a Server on every rank; workers train, ps tasks serve them.

    Args:
        world: A communicator of all ranks.
        ps: Number of ps tasks.
        train: Called as ``train(strategy, workers)`` on workers, with their process group.
        transport: Of the strategy.
        options: More of its arguments.

    Returns:
        What ``train`` returned; None on a ps.
    """
    spec = spec_of(world, ps)
    job, task = spec.task_of(world.rank)
    with mpidist.Server(spec, job, task) as server:
        if job == "ps":
            server.join()
            return None
        workers = server.job_group("worker")
        return train(ParameterServerStrategy(spec, transport=transport, **options), workers)


def _host():
    from mpidist.mpi import world

    return world().host
