"""The hosts on which the attempts of a job run: spare hosts, and hosts that were lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from mpidist.launcher.hosts import Slots, allocated_slots, assign_slots
from mpidist.launcher.job import start_launcher
from mpidist.launcher.leftovers import descendants, kill
from mpidist.launcher.vendors import Launcher

_ANSWER = "this host starts programs"
# The text is not in the command line, which some launchers print.
_PROGRAM = ("-I", "-S", "-c", f"print(*{_ANSWER.split()})")
# Time limit of a probe. A busy host starts a program in 1 to 2 s, also through ssh or srun.
_PROBE_S = 10.0
_PROBES_AT_ONCE = 32  # each is a process of the launcher on this host
_PROBES = 2
_POLL_S = 0.02

Placement = tuple[tuple[str, int], ...]
"""The hosts of an attempt in the order of their ranks, each with its number of ranks.

() if the launcher places the ranks.
"""


class HostPool:
    """The hosts that the attempts of a job may use.

    Args:
        launcher: The MPI library's launcher.
        given: The hosts of the user, each with the most ranks that it takes; [] for the hosts of
            the batch job around this process.
        ranks: Number of ranks of the job.
        spare: Number of spare hosts. A spare host gets ranks only after another host was lost.

    Attributes:
        has_user_hosts: Whether the user has given the hosts.
        lost: The hosts that were lost, each with the message of the launcher.

    Raises:
        ValueError: There are not enough hosts.
    """

    def __init__(self, launcher: Launcher, given: Slots, ranks: int, spare: int) -> None:
        self._launcher = launcher
        self._ranks = ranks
        self._spare = spare
        self.has_user_hosts = bool(given)
        self._slots = given or (allocated_slots(os.environ) if launcher.vendor.hosts else [])
        self._placement: Placement = ()
        self.lost: dict[str, str] = {}
        count = len(self._hosts())
        if spare and not count:
            raise ValueError(
                "--spare needs the names of the hosts: give --hosts or --hostfile, or start the "
                "job in a batch job of Slurm, PBS or LSF"
            )
        if spare and spare >= count:
            raise ValueError(f"--spare {spare} leaves no host for the ranks: there are {count}")
        self._most_used = count - spare

    def assign(self) -> Placement:
        """Place the ranks of the next attempt.

        Raises:
            ValueError: The hosts do not have slots for all ranks.
        """
        if not (self.has_user_hosts or self._spare):
            return ()
        used = self._hosts()[: self._most_used]
        slots = [slot for slot in self._slots if slot[0] in used]
        try:
            self._placement = assign_slots(slots, self._ranks)
        except ValueError:
            if not (self._spare or self.lost):
                raise
            which = (
                "remaining hosts" if self.lost else f"hosts without the {self._spare} spare ones"
            )
            raise ValueError(
                f"the {which} have too few slots for {self._ranks} ranks; give more hosts"
            ) from None
        return self._placement

    def find_lost(
        self,
        environment: Mapping[str, str],
        signals: set[int],
        is_cancelled: Callable[[], bool],
        among: Collection[str] | None = None,
    ) -> list[str]:
        """Return the hosts that were lost since the last call, and add them to ``lost``.

        A host is lost if the launcher cannot start a program there within 10 s, twice. If no host
        can be reached, the launcher does not work, and no host is lost.

        Args:
            environment: Environment of the launcher.
            signals: The value of :func:`blocked_signals`.
            is_cancelled: Returns True to cancel the search, and from then on. The result is then
                [], and no host is added to ``lost``.
            among: The hosts that may be lost; by default all. One more host is probed, too.

        Returns:
            [] if the launcher places the ranks: it may not use all hosts.
        """
        hosts = self._hosts()
        if among is not None:
            others = [host for host in hosts if host not in among]
            hosts = [*among, *others[:1]]
        if len(hosts) < 2 or not self._placement:
            return []
        # A batch system may still end the processes of the last attempt.
        environment = {**environment, "SLURM_OVERLAP": "1"}
        failed = dict.fromkeys(hosts, "")
        try:
            for _ in range(_PROBES):
                probed, failed = list(failed), {}
                for start in range(0, len(probed), _PROBES_AT_ONCE):
                    batch = probed[start : start + _PROBES_AT_ONCE]
                    failed |= self._probe(batch, environment, signals, is_cancelled)
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"mpidist run: cannot look for lost hosts: {error}\n")
            return []
        if is_cancelled():
            return []
        if len(failed) == len(hosts):
            sys.stderr.write(
                f"mpidist run: cannot look for lost hosts: no host answers ({failed[hosts[0]]})\n"
            )
            return []
        lost = {host: text for host, text in failed.items() if among is None or host in among}
        self.lost |= lost
        return list(lost)

    def find_lost_of(
        self,
        environment: Mapping[str, str],
        signals: set[int],
        silent: Collection[int],
        alive: Collection[int],
        is_cancelled: Callable[[], bool],
    ) -> list[str]:
        """Return the hosts that were lost while the job runs; [] in a batch job.

        Batch systems find lost hosts themselves. A probe could fail there although the host is up,
        because the running job has all slots.

        Args:
            environment: Environment of the launcher.
            signals: The value of :func:`blocked_signals`.
            silent: The ranks that do not answer. Only their hosts may be lost.
            alive: The ranks that answer. Their hosts are not lost.
            is_cancelled: As in :meth:`find_lost`.
        """
        among, first = [], 0
        for host, count in self._placement:
            ranks = set(range(first, first + count))
            if ranks & set(silent) and not ranks & set(alive):
                among.append(host)
            first += count
        if not among or allocated_slots(os.environ):
            return []
        return self.find_lost(environment, signals, is_cancelled, among)

    def _hosts(self) -> list[str]:
        return [host for host in dict.fromkeys(h for h, _ in self._slots) if host not in self.lost]

    def _probe(
        self,
        hosts: Sequence[str],
        environment: Mapping[str, str],
        signals: set[int],
        is_cancelled: Callable[[], bool],
    ) -> dict[str, str]:
        """Return the hosts on which no program starts in time, with the launcher's messages.

        Raises:
            OSError: A process cannot be made.
        """
        failed: dict[str, str] = {}
        probes: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        with ExitStack() as stack:
            for host in hosts:
                if is_cancelled():
                    break
                output = os.memfd_create("probe")  # a temporary folder may be full
                stack.callback(os.close, output)
                command = [*self._launcher.command(1, (), [(host, 1)]), sys.executable, *_PROGRAM]
                process = start_launcher(command, environment, signals, output=output)
                stack.callback(_end, process)
                probes[host] = process, output
            deadline = time.monotonic() + _PROBE_S
            while None in [process.poll() for process, _ in probes.values()]:
                if time.monotonic() > deadline or is_cancelled():
                    break
                time.sleep(_POLL_S)
            for host, (_, output) in probes.items():
                # The exit status is not reliable: run_job may reap the process in another thread.
                text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
                if _ANSWER not in text:
                    said = [line.strip() for line in text.split("\n") if re.search(r"\w", line)]
                    failed[host] = said[0] if said else f"no answer within {_PROBE_S:g} s"
        return failed


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a probe and the processes that it has started."""
    if process.poll() is None:
        kill([process.pid, *descendants(process.pid)])
        process.wait()
