"""A data service over tcp, each part of it a process of its own that a test can lose."""

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
    """A dispatcher and workers; nothing of it is left after :meth:`close`, or without this process.

    What a test does to one that is not there is an error of the test.

    Args:
        num_workers: To begin with.
        work_dir: Of the dispatcher.
        fault_tolerant: Whether the dispatcher can go on where it was killed; needs a work_dir.
        secret: That all know; this process does not. None speaks in clear.
        dispatcher: More settings, by the names of DispatcherConfig.
        worker: The same for all workers, by the names of WorkerConfig.
        env: Added to the environment of all.

    Attributes:
        dispatcher: Its process.
        workers: Theirs, by index; a worker that is started again keeps its own.
        target: What ``distribute`` takes.
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
        """One more worker, with settings of its own; its index.

        Args:
            wait: Whether until the dispatcher knows it.
            **config: By the names of WorkerConfig.
        """
        index = len(self.workers)
        self.workers.append(self._start_worker(index, wait, config))
        return index

    def stop_worker(self, index):
        """Stop it as one should."""
        assert self.workers[index].stop() == 0

    def kill_worker(self, index):
        """Kill it, even if it is stopped."""
        self.workers[index].end()

    def pause_worker(self, index):
        """Have it stand still."""
        self.workers[index].signal(signal.SIGSTOP)

    def resume_worker(self, index):
        """Have it go on."""
        self.workers[index].signal(signal.SIGCONT)

    def restart_worker(self, index, *, same_port=True, wait=True):
        """Start one anew that was stopped or killed.

        Args:
            index: Its index.
            same_port: Whether where it was; else at any port.
            wait: Whether until the dispatcher knows it.
        """
        port = self.workers[index].last_port if same_port else 0
        self.workers[index] = self._start_worker(index, wait, {"port": port})

    def stop_dispatcher(self):
        """Stop it as one should."""
        assert self.dispatcher.stop() == 0

    def kill_dispatcher(self):
        """Kill it, even if it is stopped."""
        self.dispatcher.end()

    def pause_dispatcher(self):
        """Have it stand still."""
        self.dispatcher.signal(signal.SIGSTOP)

    def resume_dispatcher(self):
        """Have it go on."""
        self.dispatcher.signal(signal.SIGCONT)

    def restart_dispatcher(self, *, wait=True):
        """Start it anew at its port.

        Args:
            wait: Whether until it listens.
        """
        self.dispatcher = self._start_dispatcher(self.dispatcher.last_port)
        assert not wait or self.dispatcher.port

    def num_tasks_on_workers(self):
        """Tasks that run, on all workers that are there."""
        return sum(worker.run(num_tasks) for worker in self.workers if worker.ended is None)

    def add_process(self, name, env=None):
        """A process that only runs functions, for instance a consumer; see :class:`Process`.

        Args:
            name: In logs.
            env: Added to the environment.
        """
        return self._keep(Process(name, self._path, "plain", env={**self._env, **(env or {})}))

    def dump(self):
        """Have all that are there write where their threads are to their logs."""
        for process in self._all:
            if process.ended is None:
                process.dump()

    def close(self):
        """Kill all of it, and print what it has written, which pytest shows if the test fails."""
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
    """A consumer in a process of its own.

    Args:
        process: A plain one; see :meth:`DataCluster.add_process`.
        dataset: What to read.
    """

    def __init__(self, process, dataset):
        self.process = process
        process.run(_open, dataset)

    def take(self, count):
        """The next elements, fewer at the end."""
        return self.process.run(_take, count)

    def rest(self):
        """All that come."""
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
