"""Clusters on the ranks of a test's world."""

from __future__ import annotations

import mpidist
from mpidist import ClusterSpec
from strategy import ParameterServerStrategy


def counted(counts, hosts, first_rank=0):
    """A cluster of consecutive ranks, in the order of the jobs, one on each of the hosts."""
    addresses = iter([f"{host}:{rank}" for rank, host in enumerate(hosts, first_rank)])
    return ClusterSpec({job: [next(addresses) for _ in range(n)] for job, n in counts.items()})


def spec_of(world, ps):
    """The first ranks are ps tasks, the others workers."""
    hosts = world.allgather(mpidist.Address("mpi", _host(), world.rank).host)
    return counted({"ps": ps, "worker": world.size - ps}, hosts)


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
