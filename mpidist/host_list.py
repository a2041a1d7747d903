"""Host lists as Slurm writes them: ``n[1-3,07-09],login``. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from mpidist.errors import InvalidArgumentError

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_MOST_HOSTS = 1 << 16


def expand_hosts(text: str) -> list[str]:
    """Local. The names of a host list, in its order, with repetitions.

    Args:
        text: Names, with commas between. A name may have several brackets, of which the last one
            counts fastest; numbers in brackets are padded to the width of their range's first.

    Raises:
        InvalidArgumentError: It is no such list, or has more than 65,536 names; also a ValueError.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text.strip()):
        if not _ITEM.fullmatch(item):
            raise InvalidArgumentError(f"{item!r} is no name of a host list: {text!r}")
        pieces = [_strings(piece, text) for piece in re.split(r"(\[[^\]]*\])", item)]
        if len(hosts) + math.prod(map(len, pieces)) > _MOST_HOSTS:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_HOSTS} hosts")
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def compress_hosts(hosts: Sequence[str]) -> str:
    """Local. A host list, short, that :func:`expand_hosts` makes these names of, in their order."""
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
    """What a name may have in a place: its literal, or the numbers in brackets."""
    if not piece.startswith("["):
        return [piece]
    strings: list[str] = []
    for part in piece[1:-1].split(","):
        matched = _RANGE.fullmatch(part)
        first, last = (matched[1], matched[2] or matched[1]) if matched else ("1", "0")
        if int(last) < int(first):
            raise InvalidArgumentError(f"{part!r} is no range of numbers: {text!r}")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_HOSTS} hosts")
        strings += (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return strings


def _in_brackets(ranges: list[tuple[str, str]]) -> str:
    texts = [first if first == last else f"{first}-{last}" for first, last in ranges]
    if ranges and (len(texts) > 1 or ranges[0][0] != ranges[0][1]):
        return f"[{','.join(texts)}]"
    return "".join(texts)
