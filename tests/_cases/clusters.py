"""Clusters of parameter servers and workers on the ranks of a test's world."""

from __future__ import annotations

import mpidist
from mpidist import ClusterSpec
from strategy import ParameterServerStrategy


def counted(counts, hosts, first_rank=0):
    """Return a cluster of consecutive ranks, one for each host, in the order of the jobs."""
    addresses = iter([f"{host}:{rank}" for rank, host in enumerate(hosts, first_rank)])
    return ClusterSpec({job: [next(addresses) for _ in range(n)] for job, n in counts.items()})


def spec_of(world, ps):
    """Return a cluster with the first ranks as ps tasks and the other ranks as workers."""
    hosts = world.allgather(mpidist.Address("mpi", _host(), world.rank).host)
    return counted({"ps": ps, "worker": world.size - ps}, hosts)


def on_cluster(world, ps, train, transport="auto", **options):
    """Start a Server on every rank. Workers train, and ps tasks serve.

    Args:
        world: A communicator of all ranks.
        ps: Number of ps tasks.
        train: Called as ``train(strategy, workers)`` on workers, with their process group.
        transport: Transport of the strategy.
        options: Other arguments of the strategy.

    Returns:
        The result of ``train``, or None on a ps task.
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
