"""Static sharding: which part of a dataset each data worker evaluates is fixed beforehand. Pure."""

from __future__ import annotations

import dataclasses

from dataservice.dataset.base import Node, rewritten
from dataservice.dataset.execution import Prefetch
from dataservice.dataset.indexed import Map, Shard
from dataservice.dataset.readers import Files
from dataservice.options import ShardingPolicy
from mpidist.errors import InvalidArgumentError, NotFoundError


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
        enough = all(isinstance(one, Files) and len(one.paths) >= num_workers for one in sources)
        return (_by_files if enough else _by_elements)(node, num_workers, index)
    if policy is ShardingPolicy.HINT:
        return _by_hints(node, num_workers, index)
    return node


def _by_elements(node: Node, num_workers: int, index: int) -> Node:
    # Below map, so that a worker calls functions for its own elements only.
    if isinstance(node, Map | Prefetch):
        return dataclasses.replace(node, parent=_by_elements(node.parent, num_workers, index))
    return Shard(node, num_workers, index)


def _by_files(node: Node, num_workers: int, index: int) -> Node:
    for source in _sources(node):
        if not isinstance(source, Files):
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
            if isinstance(one, Files)
            else one
        )

    return rewritten(node, part)


def _by_hints(node: Node, num_workers: int, index: int) -> Node:
    def part(one: Node) -> Node:
        if not isinstance(one, Shard) or not one.hint:
            return one
        return Shard(one.parent, num_workers, index)

    result = rewritten(node, part)
    if result is node:
        raise NotFoundError(
            "ShardingPolicy.HINT needs shard(SHARD_HINT, SHARD_HINT) outside of functions, and "
            f"{node.summary()} has none: add it where the workers divide the elements"
        )
    return result


def _sources(node: Node) -> list[Node]:
    below = node.inputs()
    return [source for one in below for source in _sources(one)] if below else [node]
