"""A variable as a worker knows it, and how it is pulled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Work
from strategy.connection.pulls import SMALL_BYTES, is_large
from strategy.shared.one_sided import OneSidedShard
from strategy.shared.shard import Layout, SharedShard

if TYPE_CHECKING:
    from strategy.connection.connection import Connection

Array = NDArray[Any]

_PULL_TRIES = 3


@dataclass(slots=True)
class Remote:
    """A variable as a worker knows it.

    Attributes:
        name: Of the variable.
        whole: Of the variable that it is a part of; its own, if it is whole.
        layout: Shape and dtype.
        connection: To its server.
        number: The server's for it.
        shared: Its memory, or None if this worker has to ask the server.
        gpu: The number of the server's GPU on which it lives, and of which ``shared`` is a copy;
            None if it lives on the host.
        seen: Version of the last pull, plus this worker's own pushes since: what the version will
            be if nobody else pushes.
        known: Version after the last pull or push that is complete.
    """

    name: str
    whole: str
    layout: Layout
    connection: Connection
    number: int
    shared: SharedShard | OneSidedShard | None
    gpu: int | None = None
    seen: int = 0
    known: int = 0


def pull(remote: Remote, out: Array, ids: Array | None = None, *, consistent: bool = True) -> None:
    """Local. Copy a variable, with all earlier pushes through its connection applied.

    Args:
        remote: The variable; its versions become those of the copy.
        out: C-contiguous, shape and dtype of the variable, or of the rows.
        ids: Which rows; None for all.
        consistent: Whether the copy must belong to one version; otherwise each block of 1 MiB may
            belong to its own. Rows always do.
    """
    metrics = remote.connection.metrics
    metrics.values["in_bytes"] += out.nbytes
    if not _copied(remote, out, ids, consistent):
        with metrics.timed("pull by message", "waited_s"):
            if is_large(out, ids):
                version = remote.connection.pulls.in_pieces(remote, out)
            else:
                version = remote.connection.pulls.start(remote, out, ids).result()
            remote.seen = remote.known = version


def pull_all(pulls: Sequence[tuple[Remote, Array, Array | None]], consistent: bool = True) -> None:
    """Local. Pull several at once; see :func:`pull`.

    Those by message are all under way together, the small ones of a server in one, but for large
    ones, which follow one by one.

    Args:
        pulls: Variable, memory and rows of each.
        consistent: See :func:`pull`; of each on its own.
    """
    left = [one for one in pulls if not _copied(*one, consistent)]
    for remote, out, _ in pulls:
        remote.connection.metrics.values["in_bytes"] += out.nbytes
    if left:
        with left[0][0].connection.metrics.timed("pulls by message", "waited_s"):
            _ask_for(left)


def pull_into(places: Sequence[tuple[Remote, Array]], consistent: bool = True) -> None:
    """Local. Pull several at once; see :func:`pull_all`.

    Args:
        places: Of each variable where it shall lie: of its shape and dtype, any strides.
        consistent: See :func:`pull`; of each on its own.
    """
    targets = [  # by way of memory that is contiguous where it is not
        view if view.flags.c_contiguous else np.empty(view.shape, view.dtype) for _, view in places
    ]
    pulls = [(remote, target, None) for (remote, _), target in zip(places, targets, strict=True)]
    pull_all(pulls, consistent)
    for (_, view), target in zip(places, targets, strict=True):
        if target is not view:
            view[...] = target


def _ask_for(pulls: Sequence[tuple[Remote, Array, Array | None]]) -> None:
    small: dict[Connection, list[tuple[Remote, Array]]] = {}
    large: list[tuple[Remote, Array]] = []
    asked: list[tuple[Remote, Work]] = []
    for remote, out, ids in pulls:
        connection = remote.connection
        if is_large(out, ids):
            large.append((remote, out))
        elif ids is None and out.nbytes < SMALL_BYTES:
            small.setdefault(connection, []).append((remote, out))
        else:
            asked.append((remote, connection.pulls.start(remote, out, ids)))
    together = [(wanted, one.pulls.start_many(wanted)) for one, wanted in small.items()]
    for remote, out in large:
        remote.seen = remote.known = remote.connection.pulls.in_pieces(remote, out)
    for remote, work in asked:
        remote.seen = remote.known = work.result()
    for wanted, work in together:
        for (remote, _), version in zip(wanted, work.result(), strict=True):
            remote.seen = remote.known = version


def _copied(remote: Remote, out: Array, ids: Array | None, consistent: bool) -> bool:
    """Whether a variable could be copied from shared memory; then it is."""
    remote.connection.settle()
    shared = remote.shared
    if shared is None:
        return False
    if not consistent:
        shared.read_blocks(out)
        return True
    for _ in range(_PULL_TRIES):
        version = shared.try_read(out, ids)
        if version is not None:
            remote.seen = remote.known = version
            return True
    return False
