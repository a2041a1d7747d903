"""Which ps task a variable lives on. Pure."""

from __future__ import annotations


class ByBytes:
    """Gives each new variable to the server with the fewest bytes so far, the first of several.

    All workers create the same variables in the same order, so that all come to the same result
    without asking each other.

    Args:
        servers: Number of ps tasks.
    """

    def __init__(self, servers: int) -> None:
        self._loads = [0] * servers

    def place(self, nbytes: int) -> int:
        """Local. The server for a variable of so many bytes."""
        server = min(range(len(self._loads)), key=self._loads.__getitem__)
        # A server of many tiny variables is not idle: count an entry's overhead too.
        self._loads[server] += nbytes + 64
        return server
