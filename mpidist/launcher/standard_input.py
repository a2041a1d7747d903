"""Standard input of a job: rank 0 gets the descriptor of ``mpidist run`` itself."""

from __future__ import annotations

import os
import secrets
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id


class StandardInput:
    """Gives the standard input of this process to the keeper of rank 0.

    The keeper connects to a socket of this host and receives the descriptor (SCM_RIGHTS, unix(7)).
    Nothing is copied, so rank 0 reads at full speed, and bytes that rank 0 leaves unread stay in
    the file or pipe. Launchers copy standard input instead: MPICH's ends the job when 65,536 bytes
    stay unread, and reads a list that a shell loop needs.

    Attributes:
        name: Name of the socket, which the keeper needs.
        handle: A descriptor that is readable when a keeper has connected; then call
            :meth:`hand_over`.
    """

    def __init__(self) -> None:
        # An abstract name leaves no file behind, and its length does not depend on TMPDIR: paths of
        # sockets end after 107 bytes.
        self.name = f"mpidist-{secrets.token_hex(16)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen()
        self.handle = self._listening.fileno()

    def hand_over(self) -> None:
        """Send the descriptor to the keeper that has connected, and stop holding it."""
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:  # the keeper was killed meanwhile
            return
        with connection:
            size = _CREDENTIALS.size
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            # Every user of the host sees abstract names.
            if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
                return
            try:
                socket.send_fds(connection, [b"0"], [0])
            except BrokenPipeError:  # the keeper was killed meanwhile
                return
        # The writer of a pipe must learn that rank 0 has ended, so only rank 0 may hold the pipe.
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)

    def close(self) -> None:
        """Close the socket."""
        self._listening.close()


def is_of_another_process() -> bool:
    """Return whether standard input is a terminal whose foreground process is another one."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return False
