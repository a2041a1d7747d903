"""The hosts on which the attempts of a job run: spare hosts, and hosts that were lost."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from mpidist.launcher.hosts import Slots, allocated_slots, assign_slots
from mpidist.launcher.job import start_launcher
from mpidist.launcher.leftovers import descendants, kill
from mpidist.launcher.vendors import Launcher

_ANSWER = "this host can start programs"
# Time limit of a probe. A busy host starts a program in 1 to 2 s, also through ssh or srun.
_PROBE_S = 10.0
_PROBES_AT_ONCE = 64  # each is a process of the launcher on this host
_POLL_S = 0.02


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
        lost: The hosts that were lost.

    Raises:
        ValueError: There are not enough hosts.
    """

    def __init__(self, launcher: Launcher, given: Slots, ranks: int, spare: int) -> None:
        self._launcher = launcher
        self._ranks = ranks
        self.has_user_hosts = bool(given)
        self._slots = given or (allocated_slots(os.environ) if launcher.vendor.hosts else [])
        self._assigns_ranks = bool(given or spare)  # False: the launcher places the ranks
        self.lost: list[str] = []
        count = len(self._hosts())
        if spare < 0:
            raise ValueError(f"--spare {spare} is negative; give 0 or more")
        if spare and not count:
            raise ValueError(
                "--spare needs the names of the hosts: give --hosts or --hostfile, or start the "
                "job in a batch job of Slurm, PBS or LSF"
            )
        if spare and spare >= count:
            raise ValueError(f"--spare {spare} leaves no host for the ranks: there are {count}")
        self._most_used = count - spare

    def assign(self) -> tuple[tuple[str, int], ...]:
        """Return the hosts of the next attempt in the order of their ranks.

        Returns:
            Each host with its number of ranks; () if the launcher places the ranks.

        Raises:
            ValueError: The hosts do not take all ranks.
        """
        if not self._assigns_ranks:
            return ()
        used = self._hosts()[: self._most_used]
        if not used:
            raise ValueError("no host is left")
        slots = [slot for slot in self._slots if slot[0] in used]
        try:
            return assign_slots(slots, self._ranks)
        except ValueError:
            if not self.lost:
                raise
            raise ValueError(
                f"the remaining hosts do not have slots for all {self._ranks} ranks; add a host, "
                "and keep it free with --spare 1"
            ) from None

    def find_lost(
        self, environment: Mapping[str, str], signals: set[int], is_cancelled: Callable[[], bool]
    ) -> list[str]:
        """Return the hosts that were lost since the last call, and add them to ``lost``.

        A host is lost if the launcher cannot start a program there within 10 s. At most 64 hosts
        are probed at once.

        Args:
            environment: Environment of the launcher.
            signals: The value of :func:`blocked_signals`.
            is_cancelled: Returns True to cancel the search. The result is then [], and no host is
                added to ``lost``.
        """
        hosts = self._hosts()
        if len(hosts) < 2:
            return []
        lost: list[str] = []
        for start in range(0, len(hosts), _PROBES_AT_ONCE):
            probed = hosts[start : start + _PROBES_AT_ONCE]
            reachable = self._reachable(probed, environment, signals, is_cancelled)
            lost += [host for host in probed if host not in reachable]
        if not lost or is_cancelled():
            return []
        self.lost += lost
        self._assigns_ranks = True
        return lost

    def find_lost_while_running(
        self, environment: Mapping[str, str], signals: set[int], is_cancelled: Callable[[], bool]
    ) -> list[str]:
        """Return the hosts that were lost since the last call; [] in a batch job.

        Batch systems find lost hosts themselves. A probe could fail there although the host is up,
        because the running job has all slots.
        """
        if allocated_slots(os.environ):
            return []
        return self.find_lost(environment, signals, is_cancelled)

    def _hosts(self) -> list[str]:
        return [host for host in dict.fromkeys(h for h, _ in self._slots) if host not in self.lost]

    def _reachable(
        self,
        hosts: Iterable[str],
        environment: Mapping[str, str],
        signals: set[int],
        is_cancelled: Callable[[], bool],
    ) -> list[str]:
        """Return the hosts on which a program starts in time."""
        with ExitStack() as stack:
            probes = []
            for host in hosts:
                command = [*self._launcher.command(1, (), [(host, 1)]), "echo", _ANSWER]
                output = stack.enter_context(tempfile.TemporaryFile())
                process = start_launcher(command, environment, signals, output=output.fileno())
                probes.append((host, process, output))
            deadline = time.monotonic() + _PROBE_S
            while None in [process.poll() for _, process, _ in probes]:
                if time.monotonic() > deadline or is_cancelled():
                    break
                time.sleep(_POLL_S)
            found = []
            for host, process, output in probes:
                # The exit status is not reliable: run_job may reap the process in another thread.
                output.seek(0)
                if _ANSWER.encode() in output.read():
                    found.append(host)
                if process.poll() is None:
                    kill([process.pid, *descendants(process.pid)])
                    process.wait()
        return found
