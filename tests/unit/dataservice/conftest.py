"""Data services inside this process."""

import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import settings

from dataservice import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer

# An example may be slow because the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Fast enough that tests of silence are short.
DISPATCHER = DispatcherConfig(job_gc_check_interval_ms=10, worker_timeout_ms=60_000)


class Service:
    """A dispatcher and some workers."""

    def __init__(self, stack):
        self._stack = stack
        self.dispatcher = stack.enter_context(DispatchServer(DISPATCHER))
        self.target = self.dispatcher.target
        self.workers = []

    def add_worker(self, heartbeat_interval_ms=20):
        address = self.target.split("://")[1]
        config = WorkerConfig(address, heartbeat_interval_ms=heartbeat_interval_ms)
        self.workers.append(self._stack.enter_context(WorkerServer(config)))
        return self.workers[-1]


@pytest.fixture
def make_service():
    """``make_service(n)``: a service with n workers, stopped after the test."""
    with ExitStack() as stack:

        def make(workers):
            service = Service(stack)
            for _ in range(workers):
                service.add_worker()
            return service

        yield make
    left = time.monotonic() + 10
    while threads():
        assert time.monotonic() < left, f"threads are left: {threads()}"
        time.sleep(1e-3)


def threads():
    names = ("dataservice-", "mpidist-endpoint-")
    return [t for t in threading.enumerate() if t.name.startswith(names)]
