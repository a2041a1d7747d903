"""What a rank prints last, just before it ends the job."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import stat
import termios
import time

_LIMIT_S = 0.5
_POLL_S = 1e-3


def wait_until_read(handle: int) -> None:
    """Local. Wait until a pipe's reader has taken all that is in it, though not for long.

    MPICH's launcher drops what it has not read when a rank aborts.

    Args:
        handle: A descriptor; nothing is done unless it is a pipe's.
    """
    deadline = time.monotonic() + _LIMIT_S
    unread = array.array("i", [1])
    with contextlib.suppress(OSError):  # closed: nothing will be read
        if not stat.S_ISFIFO(os.fstat(handle).st_mode):
            return
        while unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(handle, termios.FIONREAD, unread)
            time.sleep(_POLL_S)
