"""Parameter servers and workers, as threads and endpoints of one process."""

from __future__ import annotations

import numpy as np

from mpidist import ClusterSpec, Window, open_endpoint
from strategy import ParameterServerStrategy, get_variable
from strategy.server.parameter_server import ParameterServer


class Host:
    """A task of a cluster whose ps is a thread of this process."""

    def __init__(self, cluster, job, index):
        self._cluster = cluster
        self.endpoint = cluster.stack.enter_context(open_endpoint("inproc"))
        self.cluster_spec = cluster.spec
        self.job_name, self.task_index = job, index

    def own_index(self, job):
        return self.task_index

    def task_address(self, job, index):
        return str(self._cluster.servers[index].endpoint.address)

    @property
    def memory(self):
        return self

    def part(self, index, segment=0):
        return self._cluster.windows[index][segment].local if self._cluster.near else None

    def own(self, segment=0):
        return self._cluster.windows[self.task_index][segment].local

    def window(self, index, segment):
        return self._cluster.windows[index][segment], 0

    def mates(self, index, one_sided=False):
        return []

    def growth_bytes(self, index, needed, wanted):
        return wanted if needed <= self._cluster.growth_bytes else 0

    def grow(self, index, segment, nbytes, tasks, one_sided=False):
        assert segment == len(self._cluster.windows[index])
        self._cluster.windows[index].append(Window.private(nbytes))

    def warn_unshared(self, reason):
        self._cluster.warnings.append(reason)

    def sync(self):
        pass

    def has_left(self, job, index):
        return (job, index) in self._cluster.gone

    def on_drain(self, callback):
        pass


class Cluster:
    """Some ps tasks that serve, and any number of workers."""

    def __init__(self, stack, servers=1, workers=2, near=True, arena_bytes=1 << 30, growth_bytes=0):
        self.stack, self.near, self.growth_bytes = stack, near, growth_bytes
        self.warnings = []
        self._hosts = {}
        self.gone = set()  # tasks that have left the cluster
        names = {"ps": servers, "worker": workers}
        self.spec = ClusterSpec({job: [f"h:{i}" for i in range(n)] for job, n in names.items()})
        self.windows = [[Window.private(arena_bytes)] for _ in range(servers)]
        self.servers = [Host(self, "ps", index) for index in range(servers)]
        self.parameter_servers = [ParameterServer(host) for host in self.servers]
        for host in self.servers:
            host.endpoint.serve_in_thread()

    def host(self, index):
        """The Server of a worker, the same each time."""
        if index not in self._hosts:
            self._hosts[index] = Host(self, "worker", index)
        return self._hosts[index]

    def worker(self, index, **options):
        """A strategy of a worker."""
        return ParameterServerStrategy(server=self.host(index), **options)


def variable(strategy, name, shape, initializer="zeros", dtype=np.float64):
    """A variable of a strategy."""
    with strategy.scope():
        return get_variable(name, shape, dtype, initializer)
