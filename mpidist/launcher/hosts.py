"""The hosts of a job, from the command line or from the surrounding batch job."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpidist.errors import OpError
from mpidist.host_list import (
    expand_hosts,
    parse_counts,
    parse_host_counts,
    parse_host_lines,
    read_host_lines,
    split_hosts,
)

Slots = list[tuple[str, int | None]]
_MOST_LOOKED_UP = 64  # each in a thread
_SCONTROL_S = 20.0
# The variables by which launchers and mpidist find the hosts of a batch job. Without them, both
# ignore the other variables of the batch system.
_SLURM = (
    *("SLURM_JOBID", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
    *("SLURM_TASKS_PER_NODE",),
)
_PBS = ("PBS_NODEFILE", "PBS_JOBID", "PBS_ENVIRONMENT")
_GRID_ENGINE = ("PE_HOSTFILE",)
# MPICH reads the file. Open MPI needs the file if it finds the number of the job.
_COBALT = ("COBALT_NODEFILE", "COBALT_JOBID")
_LSF = ("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE")


def parse_hosts(text: str) -> Slots:
    """Parse the argument of ``--hosts``, for example ``a,b:2,n[1-3]:4``.

    Args:
        text: Host names or lists as Slurm writes them, each perhaps with a number of ranks.

    Returns:
        The hosts, each with the most ranks that it takes, or None where no number is given.

    Raises:
        ValueError: The text has another form.
    """
    # "$(cat FILE)" can begin with a byte-order mark.
    return _parse(lambda: split_hosts(text.removeprefix("\ufeff")), f"--hosts {text!r}")


def read_host_file(path: str) -> Slots:
    """Read a host file of MPICH's form, ``a:2``, or Open MPI's, ``a slots=2``.

    Args:
        path: A file with one host a line; ``#`` begins a comment.

    Returns:
        The same as :func:`parse_hosts`.

    Raises:
        ValueError: The file cannot be read, names no hosts, or has a line of another form.
    """
    return _parse(lambda: read_host_lines(path), f"--hostfile {path}")


def _parse(lines: Callable[[], list[str]], source: str) -> Slots:
    try:
        found = parse_host_lines(lines())
    except OpError as error:
        raise ValueError(f"{source}: {error}") from None
    if not found:
        raise ValueError(f"{source} names no hosts")
    return found


def assign_slots(slots: Slots, ranks: int) -> tuple[tuple[str, int], ...]:
    """Assign consecutive ranks to hosts, in the order of the hosts.

    Args:
        slots: The hosts, each with the most ranks that it takes. If no host has a number, all
            hosts take equally many.
        ranks: Number of ranks.

    Returns:
        The hosts that have ranks, each with their number.

    Raises:
        ValueError: The hosts do not take that many ranks.
    """
    hosts = list(dict.fromkeys(host for host, _ in slots))
    if all(number is None for _, number in slots):
        share, rest = divmod(ranks, len(hosts))
        room = Counter({host: share + (n < rest) for n, host in enumerate(hosts)})
    else:
        room = Counter()
        for host, number in slots:
            room[host] += 1 if number is None else number
    if room.total() < ranks:
        raise ValueError(
            f"the hosts have slots for {room.total()} ranks, and the job has {ranks}: raise the "
            "number after a colon (a:2,b:2) or lower -n"
        )
    assigned, left = [], ranks
    for host in hosts:
        assigned.append((host, min(room[host], left)))
        left -= assigned[-1][1]
    return tuple((host, number) for host, number in assigned if number)


def most_ranks_on_a_host(
    ranks: int, slots: Sequence[tuple[str, int]], environ: Mapping[str, str]
) -> int:
    """Return the number of ranks on the fullest host.

    Args:
        ranks: Number of ranks of the job.
        slots: The hosts that the user gave, each with its number of ranks. If there are none,
            launchers fill the hosts of the batch job around this process, one after the other.
        environ: The environment of this process.
    """
    if slots:
        return max(number for _, number in slots)
    allocated = [number or 1 for _, number in allocated_slots(environ)]
    if not allocated:
        return ranks
    return max(min(ranks, max(allocated)), -(-ranks // len(allocated)))


def allocated_slots(environ: Mapping[str, str]) -> Slots:
    """Return the hosts of the batch job around this process, each with its number of ranks.

    Args:
        environ: The environment of this process.

    Returns:
        [] without a batch job of Slurm, LSF or PBS, or if its variables cannot be used.
    """
    with contextlib.suppress(OpError):  # the launcher reports what it cannot use
        if "SLURM_TASKS_PER_NODE" in environ:
            counts = parse_counts(environ["SLURM_TASKS_PER_NODE"])
            listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
            hosts = expand_hosts(listed)
            return list(zip(hosts, counts, strict=True)) if len(hosts) == len(counts) else []
        if "LSB_MCPU_HOSTS" in environ:
            return list(parse_host_counts(environ["LSB_MCPU_HOSTS"]))
        if "PBS_NODEFILE" in environ:
            return list(Counter(read_host_lines(environ["PBS_NODEFILE"])).items())
    return []


def without_address(hosts: Iterable[str], limit_s: float = 3.0) -> dict[str, str]:
    """Return the hosts that this host's name service does not know, with its error messages.

    Args:
        hosts: Host names.
        limit_s: Time limit in seconds. A host without an answer by then counts as known.
    """
    names = list(dict.fromkeys(hosts))[:_MOST_LOOKED_UP]
    problems: dict[str, str] = {}

    def look_up(name: str) -> None:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is too long
            problems[name] = getattr(error, "strerror", None) or str(error)

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return {name: problems[name] for name in names if name in problems}


def stale_batch_job(environ: Mapping[str, str], *, needs_srun: bool) -> str:
    """Return an error message if variables are left over from a batch job; "" if none are.

    Launchers trust such variables: they hang in srun, connect to hosts of other users, or end with
    a message of their own.

    Args:
        environ: The environment of the launcher.
        needs_srun: Whether the launcher starts all ranks of a Slurm job by srun, also those of its
            own host. Containers often lack Slurm's programs.
    """
    for names, problem in (
        (_SLURM, _slurm_problem(environ, needs_srun=needs_srun)),
        (_PBS, _pbs_problem(environ)),
        (_GRID_ENGINE, _file_problem(environ, "PE_HOSTFILE")),
        (_LSF, _lsf_problem(environ)),
        (_COBALT, _file_problem(environ, "COBALT_NODEFILE")),
    ):
        if problem:
            found = " ".join(name for name in names if name in environ)
            return f"{problem}; if this shell is not in a batch job: unset {found}"
    return ""


def _slurm_problem(environ: Mapping[str, str], *, needs_srun: bool) -> str:
    # With SLURM_JOB_ID alone, no launcher looks for the job.
    if not any(environ.get(name) for name in _SLURM if name != "SLURM_JOB_ID"):
        return ""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        return "variables of Slurm are set without SLURM_JOB_ID"
    if shutil.which("scontrol") and shutil.which("srun"):
        return _scontrol_problem(job)
    hosts = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if needs_srun or not _is_this_host(hosts):
        return f"SLURM_JOB_ID is {job}, but srun and scontrol are not in PATH"
    return ""


def _scontrol_problem(job: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "--", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"SLURM_JOB_ID is {job}, and scontrol show job does not answer ({error})"
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"SLURM_JOB_ID is {job}, and scontrol show job fails ({message})"
    if "JobState=RUNNING" not in done.stdout:
        return f"SLURM_JOB_ID is {job}, and that job does not run any more"
    return ""


def _is_this_host(text: str) -> bool:
    try:
        hosts = expand_hosts(text)
    except OpError:
        return False
    own = socket.gethostname().partition(".")[0]
    return {host.partition(".")[0] for host in hosts} == {own}


def _pbs_problem(environ: Mapping[str, str]) -> str:
    # Open MPI reads the file if these two are set, MPICH if the name of the file is.
    if "PBS_NODEFILE" not in environ and {"PBS_JOBID", "PBS_ENVIRONMENT"} <= environ.keys():
        return "PBS_JOBID is set, and PBS_NODEFILE is not"
    return _file_problem(environ, "PBS_NODEFILE")


def _lsf_problem(environ: Mapping[str, str]) -> str:
    if not any(environ.get(name, "").strip() for name in ("LSB_MCPU_HOSTS", "LSB_HOSTS")):
        return ""
    programs = os.pathsep.join([environ.get("LSF_BINDIR", ""), environ.get("PATH", os.defpath)])
    if shutil.which("blaunch", path=programs) is None:
        return "variables of LSF name hosts, but blaunch is neither in LSF_BINDIR nor in PATH"
    return _file_problem(environ, "LSB_DJOB_HOSTFILE")


def _file_problem(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        return ""
    try:
        with open(environ[name], "rb"):
            return ""
    except OSError as error:
        return f"the host file {name}={environ[name]} cannot be read ({error.strerror})"
