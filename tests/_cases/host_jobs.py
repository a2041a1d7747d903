"""Jobs with ranks on several hosts of the test bed, under an MPI launcher or ``mpidist run``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from _cases.hosts import BRIDGE, HEAD, NETWORK
from mpidist.launcher.vendors import find_launcher

_ROOT = Path(__file__).resolve().parent.parent.parent
_SUBNET = f"{NETWORK}.0/24"
_LOOK_S = 2.0


@dataclass(frozen=True)
class Ended:
    """The result of a job."""

    status: int
    out: str
    err: str


class Jobs:
    """A starter of jobs on the host ``head``.

    Args:
        hosts: The test bed.
        folder: An empty folder that all hosts share.
    """

    def __init__(self, hosts, folder):
        self._hosts = hosts
        self._folder = folder
        self._started = []
        self._launcher = find_launcher()
        self.open_mpi = self._launcher.vendor.name == "openmpi"

    def script(self, source):
        """Write a script without its common indentation. Return the words that run it."""
        path = self._folder / "script.py"
        path.write_text(textwrap.dedent(source))
        return [str(path)]

    def ranks(self, places, words, *, count=None, env=None, timeout_s=60.0):
        """Run a script under the launcher of the MPI library, to its end.

        Args:
            places: Number of ranks of each node, in order.
            words: The script and its arguments.
            count: Number of ranks, if larger than the sum of the places. Ranks are then placed on
                the nodes in turn.
            env: Variables for all ranks.
            timeout_s: Limit in seconds. At the limit, the job is killed and the test fails.
        """
        count = count or sum(places.values())
        given = {**(env or {}), "PYTHONPATH": str(_ROOT / "tests")}
        command = self._launcher.command(count, sorted(given))
        flags = self._flags(self._host_file(places, count), cyclic=count > sum(places.values()))
        command = [command[0], *flags, *command[1:], sys.executable, *words]
        environment = self._launcher.environment(os.environ, 2)
        if not self.open_mpi:
            environment["UCX_TLS"] = "tcp,self"
        return self._finish(self._start(command, {**environment, **given}), timeout_s)

    def mpidist_run(self, places, words, *, env=None, timeout_s=60.0, may_leave=False):
        """Run ``mpidist run`` with the given words, to its end. Arguments as in :meth:`ranks`.

        Args:
            may_leave: Whether daemons of the launcher may outlive the job. They are killed, and
                their files are removed.
        """
        return self._finish(self.start_mpidist_run(places, words, env=env), timeout_s, may_leave)

    def start_mpidist_run(self, places, words, *, env=None):
        """Start ``mpidist run``.

        The MPI launcher takes the hosts from the environment, unless the words name them.
        """
        command = [sys.executable, "-m", "mpidist", "run", *words]
        settings = self._settings(self._host_file(places, sum(places.values())))
        if {"--hosts", "--hostfile"} & set(words):
            settings = {
                name: v for name, v in settings.items() if not name.lower().endswith("file")
            }
        return self._start(command, {**settings, **(env or {})})

    def _start(self, command, env):
        process = subprocess.Popen(
            self._hosts.command(HEAD, command),
            env={**os.environ, **env},
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def close(self):
        """Kill the remaining launchers and their processes."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                self._hosts.end_processes()  # these processes hold the pipes open
            process.communicate(timeout=_LOOK_S)

    def _finish(self, process, timeout_s, may_leave=False):
        deadline = time.monotonic() + timeout_s
        problem = ""
        ended = False
        while True:
            try:
                out, err = process.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                # The launcher may end just now, and its pipes a moment later.
                ended, had_ended = process.poll() is not None, ended
                if not had_ended and time.monotonic() < deadline:
                    continue
                # A remaining process on any host holds the pipes open.
                if process.poll() is None:
                    problem = f"the job did not end within {timeout_s:g} s"
                elif not may_leave:
                    problem = f"the launcher has ended, and not all: {self._hosts.remains()}"
                process.kill()
                self._hosts.end_processes()
        assert not problem, f"{problem}\n{out}\n{err}"
        if may_leave:
            self._hosts.clear()
        return Ended(process.returncode, out, err)

    def _host_file(self, places, count):
        """Write the host file. For Open MPI, its slots are enough for all ranks."""
        path = self._folder / "hosts"
        turns = -(-count // sum(places.values()))
        form = "{} slots={}\n" if self.open_mpi else "{}:{}\n"
        factor = turns if self.open_mpi else 1
        path.write_text("".join(form.format(n, factor * c) for n, c in places.items()))
        return path

    def _flags(self, file, *, cyclic):
        """Return the launcher's options for the network of the test bed."""
        shell = str(self._hosts.shell)
        if not self.open_mpi:
            return ["-launcher", "ssh", "-launcher-exec", shell, "-iface", BRIDGE, "-f", str(file)]
        start = ["--prtemca", "plm_ssh_agent", shell, "--prtemca", "prte_if_include", _SUBNET]
        send = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        send += ["--mca", "btl_tcp_if_include", _SUBNET]
        return [*start, *send, "--hostfile", str(file), *(["--map-by", "node"] if cyclic else [])]

    def _settings(self, file):
        """Return the options of :meth:`_flags` as environment variables."""
        shell = str(self._hosts.shell)
        if not self.open_mpi:
            return {
                "HYDRA_LAUNCHER": "ssh",
                "HYDRA_LAUNCHER_EXEC": shell,
                "HYDRA_IFACE": BRIDGE,
                "HYDRA_HOST_FILE": str(file),
                "UCX_TLS": "tcp,self",
            }
        return {
            "PRTE_MCA_plm_ssh_agent": shell,
            "PRTE_MCA_prte_if_include": _SUBNET,
            "PRTE_MCA_prte_default_hostfile": str(file),
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": _SUBNET,
        }
