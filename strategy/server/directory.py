"""The directory of a cluster's variables, which the first server keeps."""

from __future__ import annotations

from mpidist import Reply, Request, errors
from strategy.proto import parameter_server_pb2 as pb


class Directory:
    """The definition of each variable: its shape and dtype, its parts and their servers.

    The first worker that defines a variable decides about parts and servers. Others receive its
    definition, so workers may create their variables in any order.
    """

    def __init__(self) -> None:
        self._known: dict[str, pb.Definition] = {}
        self._users: dict[str, set[int]] = {}  # connections that have received each definition

    def define(self, request: Request) -> Reply:
        """Return the definition of a variable.

        The first call with a name stores its definition. Later calls return the stored definition.

        Raises:
            InvalidArgumentError: Another worker has defined another shape or dtype.
        """
        asked = pb.Definition.FromString(request.body)
        known = self._known.setdefault(asked.name, asked)
        if (known.dtype, known.shape) != (asked.dtype, asked.shape):
            remedy = "use the same shape and dtype on all workers"
            if known.worker == asked.worker:
                remedy = "strategies share variables by name, so use another name"
            raise errors.InvalidArgumentError(
                f"worker {asked.worker} creates variable {asked.name!r} as "
                f"{asked.dtype}{list(asked.shape)}, but worker {known.worker} created it as "
                f"{known.dtype}{list(known.shape)}: {remedy}"
            )
        self._users.setdefault(asked.name, set()).add(asked.connection)
        return Reply(known.SerializeToString())

    def undefine(self, request: Request) -> None:
        """Forget a user of a definition, which could not create any part. The last one removes it.

        A strategy that has created a part stays a user.
        """
        asked = pb.Definition.FromString(request.body)
        users = self._users.get(asked.name, set())
        users.discard(asked.connection)
        if not users and asked.name in self._known:
            del self._known[asked.name], self._users[asked.name]
