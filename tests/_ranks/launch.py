"""Worlds of ranks for tests. Each rank runs a pytest that takes orders from this process."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from _ranks import rank_main
from _ranks.inner import STACKS_SIGNAL, stacks_path
from _ranks.merge import Outcome, merge, own_frames
from mpidist.launcher.job import die_with_parent

START_S = 60.0
END_S = 20.0
KILL_S = 10.0
STACKS_S = 1.0
FAILED_GRACE_S = 5.0
OUTPUT_LINES = 80


class Key(NamedTuple):
    """The key of a world: its number of ranks, and the id of the only test of its own world."""

    count: int
    own: str | None


class Launches:
    """The worlds of a test session. At most one world exists at a time."""

    def __init__(self, config):
        self._config = config
        self._key = None
        self._launch = None
        self._files = {}  # test files of each world, by key

    def plan(self, items, key_of):
        """Record the test files of each world."""
        for item in items:
            key = key_of(item)
            if key is not None:
                self._files.setdefault(key, {})[str(item.path)] = None

    def run(self, key, item, follower, timeout_s):
        """Run a test in its world and return the reports to show."""
        count = key.count
        if self._launch is None or self._key != key:
            self.close()
            self._key, self._launch = key, Launch(self._config, self._files[key], count)
        outcome = self._launch.run(item, follower, timeout_s)
        if outcome.failed:
            self.close()  # a failed test may leave messages in MPI that disturb the next test
        elif follower is None:
            outcome.late = self._launch.finish()
            outcome.output = self._launch.output() if outcome.late else ""
            self.close()
        return merge(item, count, outcome)

    def stacks(self):
        """Return the stacks of the ranks of the current world, by rank."""
        return {} if self._launch is None else self._launch.stacks()

    def close(self):
        """End the world, if there is one."""
        if self._launch is not None:
            self._launch.close()
            self._launch = None


class Launch:
    """A world: ``mpidist run``, and a connection to the pytest of each rank."""

    def __init__(self, config, paths, count):
        self._config = config
        self._count = count
        self._folder = Path(tempfile.mkdtemp(prefix="mpidist-test-"))
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen(count)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers = {}  # connection -> received bytes of an incomplete line
        self._of_rank = {}  # rank -> connection
        self._pids = {}
        self._lost = False
        self._log = (self._folder / "output.txt").open("w")
        self._process = self._start(paths)
        self._ready = False

    def _start(self, paths):
        config = self._config
        root = str(config.rootpath)
        program = [rank_main.__file__, str(self._folder), *paths]
        program += ["-p", "no:cacheprovider", "-m", "", f"--rootdir={root}"]
        program += [f"--tb={config.option.tbstyle}", f"--capture={config.option.capture}"]
        program += ["-c", str(config.inipath)] if config.inipath else []
        program += ["--showlocals"] if config.option.showlocals else []
        program += [word for text in config.option.override_ini or () for word in ("-o", text)]
        program += [word for text in config.option.pythonwarnings or () for word in ("-W", text)]
        words = ["-m", "mpidist", "run", "-n", str(self._count)]
        words += ["--run-dir", str(self._folder / "run")]
        shown = None if config.option.capture == "no" else self._log
        search = [root, os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, *words, *program],
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=shown,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in search if p)},
            preexec_fn=die_with_parent,
        )

    def run(self, item, follower, timeout_s):
        """Run one test on all ranks. End the world after a timeout or the loss of a rank."""
        outcome = Outcome()
        if not self._ready:
            self._wait(time.monotonic() + START_S, lambda: len(self._pids) == self._count)
            if len(self._pids) < self._count:
                missing = [rank for rank in range(self._count) if rank not in self._pids]
                reason = f"ranks {missing} of {self._count} did not start within {START_S:g} s"
                return self._end(outcome, self._loss() or reason)
            self._ready = True
        started = time.monotonic()
        order = {"run": item.nodeid, "next": follower.nodeid if follower else None}
        for connection in self._peers:
            with suppress(ConnectionError):  # a lost rank is noticed below
                connection.sendall(json.dumps(order).encode() + b"\n")
        self._wait(started + timeout_s, lambda: self._all_done(outcome) or outcome.failed)
        reason = f"timeout: not all ranks have ended the test in {timeout_s:g} s"
        if outcome.failed and not self._all_done(outcome):
            reason = f"a rank failed, and others did not end the test in {FAILED_GRACE_S:g} s more"
            self._wait(time.monotonic() + FAILED_GRACE_S, lambda: self._all_done(outcome))
        outcome.duration = time.monotonic() - started
        if len(outcome.reports) < self._count:
            return self._end(outcome, self._loss() or reason)
        return outcome

    def _all_done(self, outcome):
        """Store the reports that have arrived. Return True if all ranks have reported."""
        hook = self._config.hook
        for rank, data in self._arrived.items():
            if rank not in outcome.reports:
                outcome.reports[rank] = [
                    hook.pytest_report_from_serializable(config=self._config, data=one)
                    for one in data
                ]
        return len(outcome.reports) == self._count

    def _loss(self):
        """Return the reason for the loss of a rank, or an empty string."""
        if not self._lost:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        lines = [line for line in self.output().splitlines() if "mpidist run: " in line]
        return lines[-1].strip() if lines else "a rank closed its connection"

    def _end(self, outcome, trouble):
        """End the world. Record the reason and the stacks of the remaining ranks."""
        outcome.trouble = trouble
        outcome.stacks = self.stacks()
        outcome.output = self.output()  # before the launcher reports its own end
        self._stop()
        return outcome

    def stacks(self):
        """Return the stacks of all ranks, by rank, or an empty dict if a rank is lost."""
        if self._lost:
            return {}
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        time.sleep(STACKS_S)
        return {
            rank: stacks_path(self._folder, rank).read_text(errors="replace") for rank in self._pids
        }

    def _wait(self, deadline, enough):
        """Receive messages until ``enough()`` is true, the time is over, or a rank is lost."""
        self._arrived = {}
        while not enough() and not self._lost and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._peers[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    self._receive(key.fileobj)
            self._lost = self._lost or self._process.poll() is not None

    def _receive(self, connection):
        """Receive messages from one rank."""
        with suppress(ConnectionResetError):
            data = connection.recv(1 << 20)
            *lines, self._peers[connection] = (self._peers[connection] + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message["kind"] == "ready":
                    self._pids[message["rank"]] = message["pid"]
                else:
                    self._arrived[message["rank"]] = message["reports"]
            if data:
                return
        self._selector.unregister(connection)
        self._lost = True

    def finish(self):
        """Let the ranks end by themselves.

        Return a description of a failure, or an empty string.
        """
        for connection in self._peers:
            connection.shutdown(socket.SHUT_WR)
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            outcome = self._end(Outcome(), "")
            stacks = [f"rank {rank}:\n{text}" for rank, text in outcome.stacks.items()]
            return "\n".join([f"the ranks did not end in {END_S:g} s", *stacks])
        return f"the launch ended with status {status}" if status else ""

    def output(self):
        """Return the end of the output of the ranks and the launcher outside of tests."""
        self._log.flush()
        text = (self._folder / "output.txt").read_text(errors="replace")
        return "\n".join(own_frames(text).splitlines()[-OUTPUT_LINES:])

    def _stop(self):
        """End ``mpidist run``, which ends all its processes."""
        self._process.terminate()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_S)

    def close(self):
        """End the world if it still runs, and remove its folder."""
        self._stop()
        self._selector.close()
        for connection in (self._listener, *self._peers):
            connection.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
