"""On which hosts the ranks of a job run. Pure, but for reading a file and looking up names."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpidist.host_list import clean_lines, expand_hosts, parse_host_line, split_hosts

Slots = list[tuple[str, int | None]]
_MOST_LOOKED_UP = 64  # each by a thread
_SLURM_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def parse_hosts(text: str) -> Slots:
    """Parse the argument of ``--hosts``: ``a,b:2,n[1-3]:4``.

    Args:
        text: Names, or lists of names as Slurm writes them, each perhaps with a number of ranks.

    Returns:
        Hosts, with the number of ranks that each takes at most, or None where there is none.

    Raises:
        ValueError: It is not such a list.
    """
    found: Slots = []
    for item in split_hosts(text.removeprefix("\ufeff")):  # a byte-order mark, of "$(cat FILE)"
        name, colon, number = item.partition(":")
        if colon and not (number.isascii() and number.isdigit()):
            raise ValueError(f"--hosts {text!r}: {number!r} after {name!r} is not a number")
        found += [(host, int(number) if colon else None) for host in expand_hosts(name)]
    if not found:
        raise ValueError(f"--hosts {text!r} names no hosts")
    return found


def read_host_file(path: str) -> Slots:
    """Read a host file of MPICH's form, ``a:2``, or Open MPI's, ``a slots=2``.

    Args:
        path: One host a line; ``#`` begins a comment.

    Returns:
        As :func:`parse_hosts`.

    Raises:
        ValueError: It cannot be read, names no hosts, or has a line of another form.
    """
    try:
        lines = clean_lines(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--hostfile {path} cannot be read ({error})") from None
    found: Slots = []
    for line in lines:
        try:
            hosts, number = parse_host_line(line)
        except ValueError as error:
            raise ValueError(f"--hostfile {path}: {error}") from None
        found += [(host, number) for host in hosts]
    if not found:
        raise ValueError(f"--hostfile {path} names no hosts")
    return found


def without_address(hosts: Iterable[str], limit_s: float = 3.0) -> dict[str, str]:
    """Local. The hosts that no name service of this host knows, and what it says of them.

    Args:
        hosts: Names.
        limit_s: After which those whose answer is still awaited count as known.
    """
    import socket  # a job that runs well looks nothing up

    answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    names = list(dict.fromkeys(hosts))[:_MOST_LOOKED_UP]

    def look_up(name: str) -> None:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:  # the latter of labels that are too long
            answers.put((name, getattr(error, "strerror", None) or str(error)))
        else:
            answers.put((name, ""))

    for name in names:
        threading.Thread(target=look_up, args=(name,), daemon=True).start()
    deadline = time.monotonic() + limit_s
    found = {}
    with contextlib.suppress(queue.Empty):
        for _ in names:
            name, problem = answers.get(timeout=max(deadline - time.monotonic(), 0.0))
            found[name] = problem
    return {name: found[name] for name in names if found.get(name)}


def place(slots: Iterable[tuple[str, int | None]], ranks: int) -> tuple[tuple[str, int], ...]:
    """Local. Give consecutive ranks to hosts, in the order of the hosts.

    Args:
        slots: Hosts, and how many ranks each takes at most; if none of them says so, all take
            equally many.
        ranks: How many there are.

    Returns:
        The hosts that have ranks, with how many.

    Raises:
        ValueError: There is not room for all ranks.
    """
    room: dict[str, int] = {}
    slots = list(slots)
    hosts = list(dict.fromkeys(host for host, _ in slots))
    if all(number is None for _, number in slots):
        share, rest = divmod(ranks, len(hosts))
        room = {host: share + (place < rest) for place, host in enumerate(hosts)}
    else:
        for host, number in slots:
            room[host] = room.get(host, 0) + (1 if number is None else number)
    total = sum(room.values())
    if total < ranks:
        raise ValueError(
            f"the hosts have slots for {total} ranks, and the job has {ranks}: raise the number "
            "after a colon (a:2,b:2) or lower -n"
        )
    placed, left = [], ranks
    for host in hosts:
        taken = min(room[host], left)
        placed.append((host, taken))
        left -= taken
    return tuple((host, number) for host, number in placed if number)


def ranks_together(
    ranks: int, places: Sequence[tuple[str, int]], environ: Mapping[str, str]
) -> int:
    """Local. How many ranks the fullest host has.

    Args:
        ranks: Of the job.
        places: Hosts, and how many ranks each takes; by default a batch job's around this process,
            which launchers fill one after the other.
        environ: What the batch system says of those.
    """
    if places:
        return max(number for _, number in places)
    slots = _allocated(environ)
    if not slots:
        return ranks
    return max(min(ranks, max(slots)), -(-ranks // len(slots)))


def _allocated(environ: Mapping[str, str]) -> list[int]:
    """Return the number of ranks for each host of the batch job around; [] without one."""
    slurm = _SLURM_COUNT.findall(environ.get("SLURM_TASKS_PER_NODE", ""))
    if slurm:
        return [int(count) for count, times in slurm for _ in range(int(times or 1))]
    lsf = environ.get("LSB_MCPU_HOSTS", "").split()
    if lsf:
        return [int(count) for count in lsf[1::2] if count.isascii() and count.isdigit()]
    with contextlib.suppress(OSError, KeyError, UnicodeDecodeError):
        nodes = clean_lines(Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8"))
        return list(Counter(nodes).values())
    return []
