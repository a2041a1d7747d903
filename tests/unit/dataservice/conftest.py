"""Data services inside this process."""

import gc
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from dataservice import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer

# Checks are frequent, so that tests of silence are short.
DISPATCHER = DispatcherConfig(job_gc_check_interval_ms=10, worker_timeout_ms=60_000)


class Service:
    """A dispatcher and its workers. ``config`` overrides fields of DispatcherConfig."""

    def __init__(self, stack, **config):
        self._stack = stack
        self._config = replace(DISPATCHER, **config)
        self.dispatcher = stack.enter_context(DispatchServer(self._config))
        self.target = self.dispatcher.target
        self.workers = []

    def add_worker(self, heartbeat_interval_ms=20, **config):
        address = self.target.split("://")[1]
        config = WorkerConfig(address, heartbeat_interval_ms=heartbeat_interval_ms, **config)
        self.workers.append(self._stack.enter_context(WorkerServer(config)))
        return self.workers[-1]

    def restart_worker(self, number, same_port=True):
        """Stop a worker, and start an equal one in its place."""
        old = self.workers[number]
        port = old._endpoint.address.port
        old.stop()
        config = replace(old._config, port=port if same_port else port + 1000)
        self.workers[number] = self._stack.enter_context(WorkerServer(config))

    def restart_dispatcher(self):
        """Restart the dispatcher on the same port, from its journal if it has one."""
        self.dispatcher.stop()
        port = int(self.target.rpartition(":")[2])
        config = replace(self._config, port=port, protocol="inproc")
        self.dispatcher = self._stack.enter_context(DispatchServer(config))


@pytest.fixture
def make_service():
    """Provide ``make_service(n, **dispatcher_config)``, which starts a dispatcher and n workers.

    They are stopped after the test.
    """
    with ExitStack() as stack:

        def make(workers, **config):
            service = Service(stack, **config)
            for _ in range(workers):
                service.add_worker()
            return service

        yield make
    soon, late = (time.monotonic() + limit for limit in (1, 10))
    while threads():
        assert time.monotonic() < late, f"threads are left: {threads()}"
        if time.monotonic() > soon:
            gc.collect()  # a caught error may keep an iterator in a reference cycle
        time.sleep(1e-3)


def threads():
    names = ("dataservice-", "mpidist-endpoint-")
    return [t for t in threading.enumerate() if t.name.startswith(names)]


@pytest.fixture
def no_thread_is_left_behind():
    """Check that dropped iterators end their threads without the cyclic garbage collector."""
    gc.collect()
    before = set(threading.enumerate())
    gc.disable()
    yield
    try:
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
            assert not thread.is_alive()
    finally:
        gc.enable()
