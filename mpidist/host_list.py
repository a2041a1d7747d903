"""Host lists as Slurm writes them, ``n[1-3,07-09],login``, and lines of host files. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from mpidist.errors import InvalidArgumentError

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
_ITEM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
_SEPARATOR = re.compile(r"[,\s]+(?![^\[]*\])")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LINE = re.compile(
    r"([^\s:]+)(?:\s*:\s*([0-9]{1,9})|\s+slots\s*=\s*([0-9]{1,9}))?"
    r"(?:\s+max[-_]slots\s*=\s*[0-9]+)?[\s,]*"
)
_MOST_HOSTS = 1 << 16


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
    """Return the names of a host list, in its order, with repetitions.

    Args:
        text: Names, with commas or blanks between. A name may have several brackets, of which the
            last one counts fastest; numbers in brackets are padded to the width of their range's
            first. Blanks in brackets are an error: ``scontrol`` takes ``n[1-3, 5]`` for n05.

    Raises:
        InvalidArgumentError: It is not such a list, or has more than 65,536 names; also a
            ValueError.
    """
    hosts: list[str] = []
    for item in split_hosts(text):
        if not _ITEM.fullmatch(item):
            raise InvalidArgumentError(f"{item!r} is not a name of a host list: {text!r}")
        pieces = [_strings(piece, text) for piece in re.split(r"(\[[^\]]*\])", item)]
        if len(hosts) + math.prod(map(len, pieces)) > _MOST_HOSTS:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_HOSTS} hosts")
        hosts += [check_host(host, text) for host in map("".join, itertools.product(*pieces))]
    if not hosts:
        raise InvalidArgumentError(f"the host list {text!r} names no hosts")
    return hosts


def check_host(name: str, source: str) -> str:
    """Return the name of a host; InvalidArgumentError if it cannot be one.

    Args:
        name: The name.
        source: Where it was found, for the message.
    """
    if not _HOST.fullmatch(name):
        raise InvalidArgumentError(f"{name!r} is not a host name: {source!r}")
    return name


def clean_lines(text: str) -> list[str]:
    """Return the lines of a host file without comments, empty lines and a byte-order mark."""
    lines = text.removeprefix("\ufeff").splitlines()
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def parse_host_line(line: str) -> tuple[list[str], int | None]:
    """Return the hosts of a line of a host file, and the number of ranks for each.

    Args:
        line: ``a:2`` as in MPICH's files, ``a slots=2`` as in Open MPI's, or ``a``. The host may
            be a list. Commas at the end are ignored.

    Returns:
        The hosts, and the number of ranks, None where the line has no number.

    Raises:
        InvalidArgumentError: The line has another form; also a ValueError.
    """
    matched = _LINE.fullmatch(line)
    if matched is None:
        raise InvalidArgumentError(f"{line!r} is neither HOST:N nor HOST slots=N")
    number = matched[2] or matched[3]
    return expand_hosts(matched[1]), int(number) if number else None


def compress_hosts(hosts: Sequence[str]) -> str:
    """Return a short host list of which :func:`expand_hosts` makes these names, in their order."""
    items: list[tuple[str, list[tuple[str, str]]]] = []  # names before their ranges
    for host in hosts:
        numbered = _NUMBERED.fullmatch(host)
        if numbered is None:
            items.append((host, []))
            continue
        prefix, number = numbered.groups()
        if not items or items[-1][0] != prefix or not items[-1][1]:
            items.append((prefix, []))
        ranges = items[-1][1]
        if ranges and number == str(int(ranges[-1][1]) + 1).zfill(len(ranges[-1][0])):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(prefix + _in_brackets(ranges) for prefix, ranges in items)


def _strings(piece: str, text: str) -> Sequence[str]:
    """Return the strings that a part of a name stands for: a literal, or numbers in brackets."""
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


def _in_brackets(ranges: list[tuple[str, str]]) -> str:
    texts = [first if first == last else f"{first}-{last}" for first, last in ranges]
    if ranges and (len(texts) > 1 or ranges[0][0] != ranges[0][1]):
        return f"[{','.join(texts)}]"
    return "".join(texts)
