"""Parameter servers and workers as threads and endpoints of one process."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mpidist import ClusterSpec, open_endpoint
from mpidist.ps_memory import PsMemory
from strategy import ParameterServerStrategy, get_variable
from strategy.server.parameter_server import ParameterServer


class FarMemory(PsMemory):
    """The memory of ps tasks for a worker on another node."""

    def is_near(self, index):
        return False

    def map(self, index, reference):
        return None


class Host:
    """A stand-in for a Server in a cluster with ps tasks on threads of this process."""

    def __init__(self, cluster, job, index):
        self._cluster = cluster
        self.endpoint = cluster.stack.enter_context(open_endpoint("inproc"))
        self.cluster_spec = cluster.spec
        self.job_name, self.task_index = job, index

    @property
    def memory(self):
        is_near = self._cluster.near or self.job_name == "ps"
        return self._cluster.memory if is_near else FarMemory()

    def own_index(self, job):
        return self.task_index

    def task_group(self, tasks, name):
        """Return None: a manager of checkpoints has no other worker to wait for."""

    def task_address(self, job, index):
        return str(self._cluster.servers[index].endpoint.address)

    def has_left(self, job, index):
        return (job, index) in self._cluster.gone

    def on_drain(self, callback):
        return lambda: None


class Cluster:
    """A cluster of serving ps tasks and any number of workers."""

    def __init__(self, stack, servers=1, workers=2, near=True):
        self.stack, self.near = stack, near
        self.memory = PsMemory()
        self._hosts = {}
        self._made = Counter()
        self.gone = set()  # tasks that have left the cluster
        names = {"ps": servers, "worker": workers}
        self.spec = ClusterSpec({job: [f"h:{i}" for i in range(n)] for job, n in names.items()})
        self.servers = [Host(self, "ps", index) for index in range(servers)]
        self.parameter_servers = [ParameterServer(host) for host in self.servers]
        for host in self.servers:
            host.endpoint.serve_in_thread()

    def host(self, index):
        """Return the stand-in Server of a worker. Each worker has one."""
        if index not in self._hosts:
            self._hosts[index] = Host(self, "worker", index)
        return self._hosts[index]

    def worker(self, index, **options):
        """Create a strategy of a worker.

        The second strategy of each worker is named "strategy 1", and so on.
        """
        name = {"name": f"strategy {self._made[index]}"} if self._made[index] else {}
        self._made[index] += 1
        return ParameterServerStrategy(server=self.host(index), **name | options)


def variable(strategy, name, shape, initializer="zeros", dtype=np.float64):
    """Create a variable of a strategy."""
    with strategy.scope():
        return get_variable(name, shape, dtype, initializer)
