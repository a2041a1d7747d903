"""The started Server of this process, which strategies find."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING
from weakref import ref

from mpidist.errors import AlreadyExistsError

if TYPE_CHECKING:
    from mpidist.cluster.server import Server

_started: Server | None = None


def started_server() -> Server | None:
    """Local. The Server that this process has started, if it is running."""
    return _started


def make_room() -> None:
    """Local. See that a Server can start: one without services that nobody else holds is stopped.

    It is stopped here, and not as soon as nobody holds it: to stop sends messages and waits for
    threads, which must not happen amid a garbage collection, at any moment and on any thread. And
    a strategy finds a Server that its script has never given a name.

    Raises:
        AlreadyExistsError: Somebody holds the started one.
    """
    global _started
    if _started is None:
        return
    if not _started.serves:  # others may need the services
        held = ref(_started)
        _started = None
        if held() is not None:
            gc.collect()  # a strategy that is gone, and its Server, hold each other
        _started = held()
    if _started is not None:
        raise AlreadyExistsError(
            f"this process has a Server already: {_started.target}; stop() it first"
        )


def set_started(server: Server) -> None:
    """Local. Take note that a Server has started."""
    global _started
    _started = server


def forget(server: Server) -> None:
    """Local. Take note that a Server has been stopped."""
    global _started
    if _started is server:
        _started = None
