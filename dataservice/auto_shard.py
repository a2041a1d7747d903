"""Static sharding: which part of a dataset each data worker evaluates is fixed beforehand. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from dataservice.dataset.base import Node
from dataservice.dataset.execution import Prefetch
from dataservice.dataset.indexed import Map, Shard
from dataservice.dataset.readers import Files
from dataservice.options import ShardingPolicy
from mpidist.errors import InvalidArgumentError, NotFoundError

# Sources with an attribute ``paths``: names of files that can be read independently.
_FILE_SOURCES = (Files,)

_ADDRESS = re.compile(r"(?:(?P<protocol>[^/]*)://)?(?P<host>[^/]+?)(?::(?P<port>\d+|%port%))?")


class EvaluatedElsewhere:
    """Base class of nodes that have their parents evaluated elsewhere: those are not rewritten."""


def auto_shard(node: Node, policy: ShardingPolicy, num_workers: int, index: int) -> Node:
    """Return the part of a dataset that one of several workers evaluates under a static policy.

    FILE and HINT look at the description only, not into the datasets that functions make, as those
    given to ``interleave``. Under DATA and HINT every worker must evaluate the same sequence: give
    passes on all workers the same :class:`Context`, or a shuffle without a seed loses elements and
    doubles others.

    Args:
        node: The whole.
        policy: How to divide it; OFF and DYNAMIC leave it as it is.
        num_workers: How many parts there are.
        index: The index of the part, from 0.

    Returns:
        The part. Make it once for a dataset, because the elements of ``cache`` belong to it.

    Raises:
        InvalidArgumentError: FILE: there are fewer files than workers.
        NotFoundError: FILE: a source has no files. HINT: there is no ``shard(SHARD_HINT,
            SHARD_HINT)``.
        ValueError: The index is not in [0, num_workers).
    """
    if not 0 <= index < num_workers:
        raise ValueError(f"a worker's index must be in [0, {num_workers}), not {index}")
    if policy is ShardingPolicy.FILE:
        return _by_files(node, num_workers, index)
    if policy is ShardingPolicy.DATA:
        return _by_elements(node, num_workers, index)
    if policy is ShardingPolicy.FILE_OR_DATA:
        sources = _sources(node)
        enough = all(_is_of_files(one) and len(one.paths) >= num_workers for one in sources)
        return (_by_files if enough else _by_elements)(node, num_workers, index)
    if policy is ShardingPolicy.HINT:
        return _by_hints(node, num_workers, index)
    return node


def worker_index(address: str, worker_addresses: Sequence[str]) -> int:
    """Return the place of a worker in the list of configured addresses.

    An entry without a port, or with ``%port%`` for one, stands for any worker of its host, but for
    one only. So the caller puts the address there::

        addresses[worker_index(address, addresses)] = address

    Args:
        address: Of the worker, as ``host:port``, with or without ``protocol://``.
        worker_addresses: Entries ``host:port``, ``host:%port%`` or ``host``, with or without
            ``protocol://``, some of them replaced by the addresses of workers.

    Returns:
        The index of the entry that names the address; without one, of the first that can stand
        for it.

    Raises:
        InvalidArgumentError: There is none: the worker is not configured, or others have taken
            the entries of its host.
    """
    entries = [_parts(entry) for entry in worker_addresses]
    protocol, host, port = _parts(address)
    there = [
        number
        for number, (its_protocol, its_host, _) in enumerate(entries)
        if its_host == host and (its_protocol == protocol or not (its_protocol and protocol))
    ]
    named = [number for number in there if entries[number][2] == port]
    open_ones = [number for number in there if entries[number][2] in ("", "%port%")]
    for number in named + open_ones:
        return number
    raise InvalidArgumentError(
        f"data worker {address} is not in DispatcherConfig.worker_addresses "
        f"{list(worker_addresses)}, or other workers of its host have taken all entries: add it "
        "to the list, or start it at an address of the list"
    )


def _parts(address: str) -> tuple[str, str, str]:
    """Protocol, host and port; empty where the address has none."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise InvalidArgumentError(
            f"{address!r} is not the address of a worker: expected [protocol://]host[:port]"
        )
    return found["protocol"] or "", found["host"].lower(), found["port"] or ""


def _by_elements(node: Node, num_workers: int, index: int) -> Node:
    # Below map, so that a worker calls functions for its own elements only.
    if isinstance(node, Map | Prefetch):
        return dataclasses.replace(node, parent=_by_elements(node.parent, num_workers, index))
    return Shard(node, num_workers, index)


def _by_files(node: Node, num_workers: int, index: int) -> Node:
    for source in _sources(node):
        if not _is_of_files(source):
            raise NotFoundError(
                "unshardable: ShardingPolicy.FILE divides files, but the source "
                f"{source.summary()} of {node.summary()} is not from_files: use "
                "ShardingPolicy.DATA or FILE_OR_DATA"
            )
        if len(source.paths) < num_workers:
            raise InvalidArgumentError(
                f"{source.summary()} has {len(source.paths)} files, not enough for {num_workers} "
                "workers under ShardingPolicy.FILE; use ShardingPolicy.DATA or FILE_OR_DATA"
            )

    def part(one: Node) -> Node:
        return (
            dataclasses.replace(one, paths=one.paths[index::num_workers])
            if _is_of_files(one)
            else one
        )

    return _rewritten(node, part)


def _by_hints(node: Node, num_workers: int, index: int) -> Node:
    def part(one: Node) -> Node:
        if not isinstance(one, Shard) or not one.hint:
            return one
        return Shard(one.parent, num_workers, index)

    result = _rewritten(node, part)
    if result is node:
        raise NotFoundError(
            "ShardingPolicy.HINT needs shard(SHARD_HINT, SHARD_HINT) outside of functions, and "
            f"{node.summary()} has none: add it where the workers divide the elements"
        )
    return result


def _is_of_files(node: Node) -> TypeGuard[Files]:
    return isinstance(node, _FILE_SOURCES)


def _below(node: Node) -> dict[str, tuple[Node, ...]]:
    """Return the nodes below, by the field that has them."""
    if isinstance(node, EvaluatedElsewhere):
        return {}
    assert dataclasses.is_dataclass(node)
    fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    several = {
        name: value if isinstance(value, tuple) else (value,) for name, value in fields.items()
    }
    return {
        name: values
        for name, values in several.items()
        if values and all(isinstance(value, Node) for value in values)
    }


def nodes_below(node: Node) -> list[Node]:
    """List the nodes below a node, whose elements it uses."""
    return [one for nodes in _below(node).values() for one in nodes]


def _sources(node: Node) -> list[Node]:
    below = nodes_below(node)
    return [source for one in below for source in _sources(one)] if below else [node]


def _rewritten(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the dataset with ``change(n)`` for every node n, from the sources up.

    Equal nodes stay the same objects.
    """
    changes: dict[str, Any] = {}
    for name, nodes in _below(node).items():
        new = tuple(_rewritten(one, change) for one in nodes)
        if any(one is not other for one, other in zip(new, nodes, strict=True)):
            changes[name] = new if isinstance(getattr(node, name), tuple) else new[0]
    assert dataclasses.is_dataclass(node)
    return change(dataclasses.replace(node, **changes) if changes else node)
