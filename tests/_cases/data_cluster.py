"""A data service over tcp with a process for each server, so that a test can kill servers."""

from __future__ import annotations

import signal
import sys
import tempfile
from itertools import islice
from pathlib import Path

from _cases.data_process import Process, num_tasks
from dataservice import DispatcherConfig, WorkerConfig

HEARTBEAT_MS = 100
WORKER_TIMEOUT_MS = 1000


class DataCluster:
    """A dispatcher and workers in separate processes.

    All processes end with :meth:`close`, and with this process. A test must not act on a process
    that has ended.

    Args:
        num_workers: Initial number of workers.
        work_dir: Work directory of the dispatcher.
        fault_tolerant: Whether the dispatcher can resume after a kill. Requires work_dir.
        secret: Secret that all processes except this one know. None turns encryption off.
        dispatcher: More settings of DispatcherConfig, by name.
        worker: More settings of WorkerConfig for all workers, by name.
        env: Variables added to the environment of all processes.

    Attributes:
        dispatcher: Process of the dispatcher.
        workers: Processes of the workers, by index. A restarted worker keeps its index.
        target: Argument for ``distribute``.
    """

    def __init__(
        self,
        num_workers,
        *,
        work_dir=None,
        fault_tolerant=False,
        secret=None,
        dispatcher=None,
        worker=None,
        env=None,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="mpidist-data-")
        self._env = {**(env or {}), **({"MPIDIST_SECRET": secret} if secret else {})}
        self._dispatcher_config = {
            "protocol": "tcp",
            "worker_timeout_ms": WORKER_TIMEOUT_MS,
            "client_timeout_ms": 10_000,
            "job_gc_check_interval_ms": HEARTBEAT_MS,
            "work_dir": None if work_dir is None else str(work_dir),
            "fault_tolerant_mode": fault_tolerant,
            **(dispatcher or {}),
        }
        self._worker_config = {"heartbeat_interval_ms": HEARTBEAT_MS, **(worker or {})}
        self._all = []
        self.workers = []
        try:
            self.dispatcher = self._start_dispatcher(0)
            self.target = f"tcp://localhost:{self.dispatcher.port}"
            for _ in range(num_workers):
                self.add_worker(wait=False)
            for worker in self.workers:
                assert worker.port
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def add_worker(self, *, wait=True, **config):
        """Add a worker and return its index.

        Args:
            wait: Whether to wait until the dispatcher knows the worker.
            **config: Settings of WorkerConfig for this worker.
        """
        index = len(self.workers)
        self.workers.append(self._start_worker(index, wait, config))
        return index

    def stop_worker(self, index):
        """Stop a worker and check its exit status."""
        assert self.workers[index].stop() == 0

    def kill_worker(self, index):
        """Kill a worker, even if it is paused."""
        self.workers[index].end()

    def pause_worker(self, index):
        """Pause a worker with SIGSTOP."""
        self.workers[index].signal(signal.SIGSTOP)

    def resume_worker(self, index):
        """Resume a paused worker."""
        self.workers[index].signal(signal.SIGCONT)

    def restart_worker(self, index, *, same_port=True, wait=True):
        """Start a stopped or killed worker again.

        Args:
            index: Index of the worker.
            same_port: Whether to use the previous port. Otherwise, any free port.
            wait: Whether to wait until the dispatcher knows the worker.
        """
        port = self.workers[index].last_port if same_port else 0
        self.workers[index] = self._start_worker(index, wait, {"port": port})

    def stop_dispatcher(self):
        """Stop the dispatcher and check its exit status."""
        assert self.dispatcher.stop() == 0

    def kill_dispatcher(self):
        """Kill the dispatcher, even if it is paused."""
        self.dispatcher.end()

    def pause_dispatcher(self):
        """Pause the dispatcher with SIGSTOP."""
        self.dispatcher.signal(signal.SIGSTOP)

    def resume_dispatcher(self):
        """Resume the paused dispatcher."""
        self.dispatcher.signal(signal.SIGCONT)

    def restart_dispatcher(self, *, wait=True):
        """Start the dispatcher again at its previous port.

        Args:
            wait: Whether to wait until the dispatcher listens.
        """
        self.dispatcher = self._start_dispatcher(self.dispatcher.last_port)
        assert not wait or self.dispatcher.port

    def num_tasks_on_workers(self):
        """Return the number of running tasks on all running workers."""
        return sum(worker.run(num_tasks) for worker in self.workers if worker.ended is None)

    def add_process(self, name, env=None):
        """Start a process that only runs functions, such as a consumer. See :class:`Process`.

        Args:
            name: Name in logs.
            env: Variables added to the environment.
        """
        return self._keep(Process(name, self._path, "plain", env={**self._env, **(env or {})}))

    def dump(self):
        """Let all running processes write the stacks of their threads to their logs."""
        for process in self._all:
            if process.ended is None:
                process.dump()

    def close(self):
        """Kill all processes and print their logs, which pytest shows for a failed test."""
        for process in self._all:
            process.end()
        for name, process in {process.name: process for process in self._all}.items():
            if text := process.log():
                print(f"--- log of {name}\n{text}", file=sys.stderr)
        self._folder.cleanup()

    @property
    def _path(self):
        return Path(self._folder.name)

    def _start_dispatcher(self, port):
        config = DispatcherConfig(port=port, **self._dispatcher_config)
        return self._keep(Process("dispatcher", self._path, "dispatcher", config, self._env))

    def _start_worker(self, index, wait, more):
        chosen = {"protocol": "tcp", **self._worker_config, **more}
        config = WorkerConfig(self.target, **chosen)
        process = self._keep(Process(f"worker{index}", self._path, "worker", config, self._env))
        assert not wait or process.port
        return process

    def _keep(self, process):
        self._all.append(process)
        return process


class Reader:
    """A consumer in its own process.

    Args:
        process: A plain process; see :meth:`DataCluster.add_process`.
        dataset: The dataset to read.
    """

    def __init__(self, process, dataset):
        self.process = process
        process.run(_open, dataset)

    def take(self, count):
        """Return the next elements, or fewer at the end."""
        return self.process.run(_take, count)

    def rest(self):
        """Return all remaining elements."""
        return self.process.run(_take, None)

    def close(self):
        """Close the iterator."""
        self.process.run(_close)


def _open(state, dataset):
    state["elements"] = iter(dataset)


def _take(state, count):
    return list(islice(state["elements"], count))


def _close(state):
    state["elements"].close()
