"""Pulls by message: small variables together, large variables in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Reply, Work
from strategy.proto import parameter_server_pb2 as pb

if TYPE_CHECKING:
    from strategy.connection.connection import Connection
    from strategy.connection.remote import Remote

Array = NDArray[Any]

SMALL_BYTES = 64 << 10
"""Smaller variables are pulled together in one message, at the price of one more copy."""

LARGE_BYTES = 16 << 20
"""Larger variables are pulled in pieces: whole copies would fill the memory of the server."""

_PIECE_BYTES = 4 << 20
_AHEAD = 4
_TRIES = 3


def is_large(out: Array, ids: Array | None) -> bool:
    """Return whether a pull is divided into pieces. Pulls of rows are not."""
    return ids is None and out.nbytes > LARGE_BYTES


class Pulls:
    """Pulls over a connection.

    Args:
        connection: The connection to the server.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, remote: Remote, out: Array, ids: Array | None = None) -> Work:
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
        work = self._connection.start("Read", asked, buffers, into=(out,))
        return work.then(lambda reply: pb.ReadReply.FromString(reply.body).version)

    def start_many(self, wanted: Sequence[tuple[Remote, Array]]) -> Work:
        """Request consistent copies of several small variables in one message.

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

        return self._connection.start("ReadMany", asked, into=(memory,)).then(put)

    def in_pieces(self, remote: Remote, out: Array) -> int:
        """Pull a consistent copy of a large variable.

        The variable is pulled in pieces, so that the server needs no whole copy for each reader. If
        pushes change the variable between the pieces in three attempts, the server copies the whole
        variable.

        Args:
            remote: The variable.
            out: C-contiguous array with the shape and dtype of the variable.

        Returns:
            The version of the copy.
        """
        for _ in range(_TRIES):
            version = self._read_pieces(remote, out.reshape(-1))
            if version is not None:
                return version
        whole: int = self.start(remote, out).result()
        return whole

    def _read_pieces(self, remote: Remote, flat: Array) -> int | None:
        """Pull all pieces. Return their version, or None if a push came between two pieces."""
        step = max(_PIECE_BYTES // flat.itemsize, 1)
        versions: set[int] = set()
        asked: deque[Work] = deque()
        try:
            for start in range(0, flat.size, step):
                piece = flat[start : start + step]
                request = pb.ReadRequest(
                    variable=remote.number, start=start, stop=start + piece.size
                )
                asked.append(self._connection.start("Read", request, into=(piece,)))
                if len(asked) > _AHEAD:
                    versions.add(_version(asked.popleft()))
                if len(versions) > 1:
                    break
            while asked:
                versions.add(_version(asked.popleft()))
        finally:
            for work in asked:  # late replies would still be written into the array
                work.block(float("inf"))
        return versions.pop() if len(versions) == 1 else None


def _version(work: Work) -> int:
    return pb.ReadReply.FromString(work.result().body).version
