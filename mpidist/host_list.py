"""Host lists, host files and task counts, as batch systems and MPI launchers write them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpidist.errors import FailedPreconditionError, InvalidArgumentError

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_ITEM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
_SEPARATOR = re.compile(r"[,\s]+(?![^\[]*\])")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LINE = re.compile(
    r"([^\s:]+)(?:\s*:\s*([0-9]{1,9})|\s+slots\s*=\s*([0-9]{1,9}))?"
    r"(?:\s+max[-_]slots\s*=\s*[0-9]+)?[\s,]*"
)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NUMBER = re.compile(r"[0-9]{1,9}")
_MOST_HOSTS = 1 << 16
_MOST_TASKS = 1_000_000


# Host lists


def split_hosts(text: str) -> list[str]:
    """Split a host list at commas and blanks outside of brackets, as ``scontrol`` does.

    Args:
        text: A host list. Blanks around it, and commas without a name between, are ignored.
    """
    if re.search(r"[^\s,]\s+\[", text):
        # scontrol takes "n [1-2]" for three hosts: n, 1 and 2.
        raise InvalidArgumentError(f"host list {text!r}: remove the blank before the bracket")
    return [item for item in _SEPARATOR.split(text) if item]


def expand_hosts(text: str) -> list[str]:
    """Return the host names of a Slurm host list, in its order, with repetitions.

    ``n[1-3,07-09],login`` is n1, n2, n3, n07, n08, n09 and login.

    Args:
        text: Names, separated by commas or blanks. In a name with several brackets the last
            bracket counts fastest. Numbers in brackets are padded to the width of the first number
            of their range. Blanks in brackets are an error: ``scontrol`` takes ``n[1-3, 5]`` for
            n05.

    Raises:
        InvalidArgumentError: The text is not a host list, or has more than 65,536 names; also a
            ValueError.
    """
    hosts: list[str] = []
    for item in split_hosts(text):
        if not _ITEM.fullmatch(item):
            raise InvalidArgumentError(f"{item!r} is not a name of a host list: {text!r}")
        pieces = [_expand_piece(piece, text) for piece in re.split(r"(\[[^\]]*\])", item)]
        if len(hosts) + math.prod(map(len, pieces)) > _MOST_HOSTS:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_HOSTS} hosts")
        hosts += [check_host(host, text) for host in map("".join, itertools.product(*pieces))]
    if not hosts:
        raise InvalidArgumentError(f"the host list {text!r} names no hosts")
    return hosts


def check_host(name: str, source: str) -> str:
    """Return a host name; raise InvalidArgumentError if it is not valid.

    Args:
        name: The name.
        source: The text or variable that has the name, for the message.
    """
    if not _HOST.fullmatch(name):
        raise InvalidArgumentError(f"{name!r} is not a host name: {source!r}")
    return name


def _expand_piece(piece: str, text: str) -> Sequence[str]:
    """Return the strings of one piece of a name: a literal, or numbers in brackets."""
    if not piece.startswith("["):
        return [piece]
    strings: list[str] = []
    for part in piece[1:-1].split(","):
        matched = _RANGE.fullmatch(part)
        first, last = (matched[1], matched[2] or matched[1]) if matched else ("1", "0")
        if int(last) < int(first):
            raise InvalidArgumentError(
                f"{part!r} is not a range of numbers in the host list {text!r}"
            )
        if int(last) - int(first) >= _MOST_HOSTS:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_HOSTS} hosts")
        strings += (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return strings


# Host files


def read_host_lines(path: str) -> list[str]:
    """Return the lines of a host file, without comments and empty lines.

    Raises:
        FailedPreconditionError: The file cannot be read, or has no hosts.
    """
    try:
        lines = clean_lines(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPreconditionError(f"the host file {path} cannot be read: {error}") from None
    if not lines:
        raise FailedPreconditionError(f"the host file {path} names no hosts")
    return lines


def clean_lines(text: str) -> list[str]:
    """Return the lines of a host file without comments, empty lines and a byte-order mark."""
    lines = text.removeprefix("\ufeff").splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def parse_host_lines(lines: Iterable[str]) -> list[tuple[str, int | None]]:
    """Return the hosts of a host file, each with its number of ranks.

    Args:
        lines: Each ``a:2`` as in MPICH's files, ``a slots=2`` as in Open MPI's, or ``a``. The host
            may be a host list. Commas at the end are ignored.

    Returns:
        The hosts, each with the number of ranks, None where the line has no number.

    Raises:
        InvalidArgumentError: A line has another form; also a ValueError.
    """
    found: list[tuple[str, int | None]] = []
    for line in lines:
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise InvalidArgumentError(f"{line!r} is neither HOST:N nor HOST slots=N")
        number = matched[2] or matched[3]
        found += [(host, int(number) if number else None) for host in expand_hosts(matched[1])]
    return found


# Task counts of batch systems


def is_number(text: str) -> bool:
    """Return whether a text is a whole number of at most nine plain digits."""
    return _NUMBER.fullmatch(text) is not None


def parse_counts(text: str) -> list[int]:
    """Return the number of tasks of each node, as Slurm writes it: ``"3(x2),1"`` is 3, 3, 1.

    Raises:
        InvalidArgumentError: The text has another form, or more than a million nodes or tasks; also
            a ValueError.
    """
    counts: list[int] = []
    for item in text.split(","):
        matched = _COUNT.fullmatch(item.strip())
        if matched is None:
            raise InvalidArgumentError(
                f"{text!r} is not a list of tasks by node, for example 2(x3),1"
            )
        counts += [int(matched[1])] * min(int(matched[2] or 1), _MOST_TASKS)
        if len(counts) > _MOST_TASKS or sum(counts) > _MOST_TASKS:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_TASKS} nodes or tasks")
    return counts


def parse_host_counts(text: str) -> list[tuple[str, int]]:
    """Return the hosts of ``LSB_MCPU_HOSTS``, each with its number: ``"a 2 b 1"``.

    Raises:
        InvalidArgumentError: The text has another form; also a ValueError.
    """
    words = text.split()
    if len(words) % 2 or not all(is_number(count) for count in words[1::2]):
        raise InvalidArgumentError(f"{text!r} is not a list of hosts and numbers in turns")
    return [(host, int(count)) for host, count in zip(words[::2], words[1::2], strict=True)]


def expand_slots(slots: Sequence[tuple[str, int]], source: str) -> tuple[str, ...]:
    """Return one host for each task, in the order of the slots.

    Args:
        slots: Hosts, each with its number of tasks.
        source: The text or variable that has the hosts, for messages.

    Raises:
        InvalidArgumentError: A name is not a host name, or there are more than a million tasks;
            also a ValueError.
    """
    if sum(count for _, count in slots) > _MOST_TASKS:
        raise InvalidArgumentError(f"more than {_MOST_TASKS} tasks on {slots[0][0]} and others")
    for host, _ in slots:
        check_host(host, source)
    return tuple(host for host, count in slots for _ in range(count))
