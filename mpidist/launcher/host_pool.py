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
_ANSWER_S = 10.0
_POLL_S = 0.02
_AT_ONCE = 64  # hosts


class HostPool:
    """Chooses the hosts of each attempt.

    Args:
        launcher: The MPI library's launcher.
        given: The hosts of the user, each with the most ranks that it takes; [] for the hosts of
            the batch job around this process.
        ranks: Number of ranks of the job.
        spare: Number of hosts that get ranks only in the place of lost ones.

    Attributes:
        given: Whether the user has given the hosts.
        lost: The hosts that were lost.

    Raises:
        ValueError: There are not enough hosts.
    """

    def __init__(self, launcher: Launcher, given: Slots, ranks: int, spare: int) -> None:
        self._launcher = launcher
        self._ranks = ranks
        self.given = bool(given)
        self._slots = given or (allocated_slots(os.environ) if launcher.vendor.hosts else [])
        self._is_chosen = bool(given or spare)  # otherwise the launcher chooses
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
        """Return the hosts of the next attempt in the order of their ranks, with their numbers.

        Returns:
            () if the launcher chooses.

        Raises:
            ValueError: The hosts do not take all ranks.
        """
        if not self._is_chosen:
            return ()
        used = self._hosts()[: self._most_used]
        if not used:
            raise ValueError("no host is left")
        return assign_slots([slot for slot in self._slots if slot[0] in used], self._ranks)

    def find_lost(
        self, environment: Mapping[str, str], signals: set[int], is_over: Callable[[], bool]
    ) -> list[str]:
        """Return the hosts that have been lost since the last call, and add them to ``lost``.

        A host is lost if the launcher cannot start a program there within 10 s.

        Args:
            environment: Environment of the launcher.
            signals: The value of :func:`blocked_signals`.
            is_over: Returns whether the search has become useless. Nothing is then found.
        """
        hosts = self._hosts()
        if len(hosts) < 2:
            return []
        lost: list[str] = []
        for start in range(0, len(hosts), _AT_ONCE):
            asked = hosts[start : start + _AT_ONCE]
            reachable = self._reachable(asked, environment, signals, is_over)
            lost += [host for host in asked if host not in reachable]
        if not lost or is_over():
            return []
        self.lost += lost
        self._is_chosen = True
        return lost

    def find_lost_while_running(
        self, environment: Mapping[str, str], signals: set[int], is_over: Callable[[], bool]
    ) -> list[str]:
        """Do as :meth:`find_lost`, or nothing in a batch job.

        Batch systems notice the end of a host. They may start nothing beside the running job.
        """
        if allocated_slots(os.environ):
            return []
        return self.find_lost(environment, signals, is_over)

    def _hosts(self) -> list[str]:
        return [host for host in dict.fromkeys(h for h, _ in self._slots) if host not in self.lost]

    def _reachable(
        self,
        hosts: Iterable[str],
        environment: Mapping[str, str],
        signals: set[int],
        is_over: Callable[[], bool],
    ) -> list[str]:
        """Return the hosts on which a program starts in time."""
        with ExitStack() as stack:
            asking = []
            for host in hosts:
                command = [*self._launcher.command(1, (), [(host, 1)]), "echo", _ANSWER]
                output = stack.enter_context(tempfile.TemporaryFile())
                process = start_launcher(command, environment, signals, output=output.fileno())
                asking.append((host, process, output))
            deadline = time.monotonic() + _ANSWER_S
            while None in [process.poll() for _, process, _ in asking]:
                if time.monotonic() > deadline or is_over():
                    break
                time.sleep(_POLL_S)
            found = []
            for host, process, output in asking:
                # The status does not tell: run_job collects the children of this process, too.
                output.seek(0)
                if _ANSWER.encode() in output.read():
                    found.append(host)
                if process.poll() is None:
                    kill([process.pid, *descendants(process.pid)])
                    process.wait()
        return found
