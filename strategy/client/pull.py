"""A variable on a ps task, and its pulls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Reply, Work
from strategy.client.waits import block
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.layout import Layout, RmaShardView, ShardView
from strategy.protocol.partition import Origin

if TYPE_CHECKING:
    from strategy.client.connection import Connection


Array = NDArray[Any]

SMALL_BYTES = 64 << 10
"""Smaller variables are pulled together in one message, which costs one more copy."""

LARGE_BYTES = 16 << 20
"""Larger variables are pulled in pieces: whole copies would fill the memory of the server."""

_PIECE_BYTES = 4 << 20
_AHEAD = 4
_TRIES = 3


@dataclass(slots=True)
class RemoteVariable:
    """A worker's handle of a variable, or of a part of a partitioned variable.

    Attributes:
        name: Name of the variable or of the part.
        origin: The whole variable, and the part of it.
        layout: Shape and dtype.
        connection: The connection to the server.
        number: Number of the variable on the server.
        shared: The memory of the variable; None if the worker must read it by messages.
        gpu: Index of the server's GPU that holds the variable, with a copy of it in ``shared``;
            None for the host.
        seen: Version of the last pull plus the number of this worker's pushes since. The version
            will have this value if no other worker pushes.
        known: Version after the last completed pull or push.
    """

    name: str
    origin: Origin
    layout: Layout
    connection: Connection
    number: int
    shared: ShardView | RmaShardView | None
    gpu: int | None = None
    seen: int = 0
    known: int = 0


def pull(
    remote: RemoteVariable, out: Array, ids: Array | None = None, *, consistent: bool = True
) -> None:
    """Copy a variable after all earlier pushes over its connection have been applied.

    Args:
        remote: The variable. ``seen`` and ``known`` become the version of a consistent copy.
        out: C-contiguous array with the shape and dtype of the variable or of the rows.
        ids: Row numbers; None for all rows.
        consistent: Whether the copy must have one version. Otherwise each block of 1 MiB may have
            its own version. Must be True for rows.
    """
    remote.connection.metrics.values["in_bytes"] += out.nbytes
    if not _copied(remote, out, ids, consistent):
        _pull_by_message([(remote, out, ids)])


def pull_all(
    pulls: Sequence[tuple[RemoteVariable, Array, Array | None]], consistent: bool = True
) -> None:
    """Pull several variables at once; see :func:`pull`.

    Pulls by message are in flight together, and the small variables of a server share one message.
    Large variables are pulled one after the other.

    Args:
        pulls: The variable, output array and row numbers of each pull.
        consistent: See :func:`pull`. Different variables may have copies of different times.
    """
    left = [one for one in pulls if not _copied(*one, consistent)]
    for remote, out, _ in pulls:
        remote.connection.metrics.values["in_bytes"] += out.nbytes
    if left:
        _pull_by_message(left)


def pull_into(places: Sequence[tuple[RemoteVariable, Array]], consistent: bool = True) -> None:
    """Pull several variables at once into arrays of any strides; see :func:`pull_all`.

    Args:
        places: Pairs of a variable and an output array with its shape and dtype.
        consistent: See :func:`pull_all`.
    """
    targets = [  # pull needs contiguous arrays
        view if view.flags.c_contiguous else np.empty(view.shape, view.dtype) for _, view in places
    ]
    pulls = [(remote, target, None) for (remote, _), target in zip(places, targets, strict=True)]
    pull_all(pulls, consistent)
    for (_, view), target in zip(places, targets, strict=True):
        if target is not view:
            view[...] = target


def _copied(remote: RemoteVariable, out: Array, ids: Array | None, consistent: bool) -> bool:
    """Copy a variable without messages, if possible. Return whether it was copied."""
    remote.connection.settle()
    shared = remote.shared
    if shared is None:
        return False
    if not consistent:
        shared.read_blocks(out)
        return True
    for _ in range(_TRIES):
        version = shared.try_read(out, ids)
        if version is not None:
            remote.seen = remote.known = version
            return True
    return False


def _pull_by_message(pulls: Sequence[tuple[RemoteVariable, Array, Array | None]]) -> None:
    small: dict[Connection, list[tuple[RemoteVariable, Array]]] = {}
    large: list[tuple[RemoteVariable, Array]] = []
    asked: list[tuple[RemoteVariable, Work]] = []
    with pulls[0][0].connection.metrics.timed("pulls by message", "waited_s"):
        for remote, out, ids in pulls:
            if ids is None and out.nbytes > LARGE_BYTES:
                large.append((remote, out))
            elif ids is None and out.nbytes < SMALL_BYTES and len(pulls) > 1:
                small.setdefault(remote.connection, []).append((remote, out))
            else:
                asked.append((remote, request(remote, out, ids)))
        together = [(wanted, request_many(wanted)) for wanted in small.values()]
        for remote, out in large:
            remote.seen = remote.known = read_in_pieces(remote, out)
        for remote, work in asked:
            remote.seen = remote.known = _result(work, remote)
        for wanted, work in together:
            versions = _result(work, wanted[0][0])
            for (remote, _), version in zip(wanted, versions, strict=True):
                remote.seen = remote.known = version


def request(remote: RemoteVariable, out: Array, ids: Array | None = None) -> Work:
    """Request a consistent copy of a variable or of some rows.

    Args:
        remote: The variable.
        out: C-contiguous array with the shape and dtype of the variable or of the rows.
        ids: Row numbers; None for all rows.

    Returns:
        A Work whose result is the version of the copy.
    """
    asked = pb.ReadRequest(variable=remote.number)
    buffers = () if ids is None else (ids,)
    return remote.connection.start("Read", asked, buffers, into=(out,)).then(_version)


def request_many(wanted: Sequence[tuple[RemoteVariable, Array]]) -> Work:
    """Request consistent copies of several small variables of a server in one message.

    Args:
        wanted: Pairs of a variable and a C-contiguous array of the same shape and dtype.

    Returns:
        A Work whose result is the list of the versions of the copies.
    """
    asked = pb.ReadManyRequest(variables=[remote.number for remote, _ in wanted])
    memory = np.empty(sum([out.nbytes for _, out in wanted]), np.uint8)

    def put(reply: Reply) -> list[int]:
        begin = 0
        for _, out in wanted:
            end = begin + out.nbytes
            out.reshape(-1).view(np.uint8)[:] = memory[begin:end]
            begin = end
        return list(pb.ReadManyReply.FromString(reply.body).versions)

    return wanted[0][0].connection.start("ReadMany", asked, into=(memory,)).then(put)


def read_in_pieces(remote: RemoteVariable, out: Array) -> int:
    """Pull a consistent copy of a large variable.

    The variable is pulled in pieces, so that the server needs no whole copy for each reader. If a
    push changes the variable in each of three attempts, the server sends a copy of the whole
    variable.

    Args:
        remote: The variable.
        out: C-contiguous array with the shape and dtype of the variable.

    Returns:
        The version of the copy.
    """
    for _ in range(_TRIES):
        version = _read_pieces(remote, out.reshape(-1))
        if version is not None:
            return version
    whole: int = _result(request(remote, out), remote)
    return whole


def _read_pieces(remote: RemoteVariable, flat: Array) -> int | None:
    """Pull all pieces. Return their version, or None if a push came between two pieces."""
    step = max(_PIECE_BYTES // flat.itemsize, 1)
    versions: set[int] = set()
    asked: deque[Work] = deque()
    try:
        for start in range(0, flat.size, step):
            piece = flat[start : start + step]
            part = pb.ReadRequest(variable=remote.number, start=start, stop=start + piece.size)
            asked.append(remote.connection.start("Read", part, into=(piece,)).then(_version))
            if len(asked) > _AHEAD:
                versions.add(_result(asked.popleft(), remote))
            if len(versions) > 1:
                break
        while asked:
            versions.add(_result(asked.popleft(), remote))
    finally:
        for work in asked:  # late replies would still be written into the array
            work.block(float("inf"))
    return versions.pop() if len(versions) == 1 else None


def _result(work: Work, remote: RemoteVariable) -> Any:
    """Return the result of a request for a variable. Register the wait if it lasts."""
    task = remote.connection.task
    block([work], lambda: (f"variable {remote.name!r} from {task}", [task]))
    return work.result()


def _version(reply: Reply) -> int:
    version: int = pb.ReadReply.FromString(reply.body).version
    return version
