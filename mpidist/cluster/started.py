"""The started Server of this process, which strategies find."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mpidist.errors import AlreadyExistsError

if TYPE_CHECKING:
    from mpidist.cluster.server import Server

_started: Server | None = None
_changing = threading.Lock()


def started_server() -> Server | None:
    """Return the Server that this process has started and not stopped; None if there is none."""
    return _started


def set_started(server: Server) -> None:
    """Register a Server that is about to start.

    The registry holds it, so that it stays started until it is stopped, whether or not the script
    keeps a reference to it.

    Raises:
        AlreadyExistsError: This process has a Server that was started and not stopped.
    """
    global _started
    with _changing:
        if _started is not None:
            raise AlreadyExistsError(
                f"this process has a Server already: {_started.target}; stop() it first "
                "(mpidist.started_server() returns it)"
            )
        _started = server


def forget(server: Server) -> None:
    """Remove a Server that was stopped, or could not start, from the registry."""
    global _started
    with _changing:
        if _started is server:
            _started = None
