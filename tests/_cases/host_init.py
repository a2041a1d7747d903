"""Process 1 of a host of the test bed. It sets up the host, then runs commands for its shell.

Runs as ``python -I -S host_init.py FOLDER NAME [SHARED...]`` in namespaces of its own, and listens
at ``FOLDER/NAME.socket``. The host has its own name, the /etc/hosts of FOLDER, and a /dev/shm and a
/tmp that are empty except for the folders shared by all hosts. When this process ends, the kernel
ends all other processes of the host and removes its network interfaces.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_MESSAGE_BYTES = 1 << 20
# Number of SYN retries that newer kernels send at a fixed interval, before exponential backoff.
# Older kernels back off from the first retry.
_LINEAR_TIMEOUTS = Path("/proc/sys/net/ipv4/tcp_syn_linear_timeouts")


def set_up(folder: Path, name: str, shared: list[Path]) -> None:
    """Set the name, the loopback interface and the private mounts of this host."""
    socket.sethostname(name)
    new = folder / f"{name}.tmp"
    new.mkdir()
    commands = [
        ["ip", "link", "set", "lo", "up"],
        ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"],
        ["mount", "--bind", folder / "hosts", "/etc/hosts"],
        ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", new],
    ]
    for path in shared:
        place = new / path.relative_to("/tmp")
        commands += [["mkdir", "-p", place], ["mount", "--bind", path, place]]
    for command in [*commands, ["mount", "--move", new, "/tmp"]]:
        subprocess.run(command, check=True)
    if _LINEAR_TIMEOUTS.exists():
        _LINEAR_TIMEOUTS.write_text("0")


class Shell:
    """A server that starts commands and reports their exit status to the requester.

    Args:
        listening: Listening socket for requests.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._woken, waking = socket.socketpair()
        self._running: dict[int, tuple[socket.socket, bool]] = {}
        self._selector = selectors.DefaultSelector()
        for one in (listening, self._woken):
            self._selector.register(one, selectors.EVENT_READ)
        waking.setblocking(False)
        self._waking = waking
        signal.set_wakeup_fd(waking.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve requests forever."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    connection, _ = self._listening.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                else:
                    self._take(key.fileobj)
            self._reap()

    def _take(self, connection: socket.socket) -> None:
        """Handle a request. If the requester has gone, kill its bound commands."""
        try:
            data, handles, _, _ = socket.recv_fds(
                connection, _MESSAGE_BYTES, 3, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the requester was killed before it read its data
            data, handles = b"", []
        message = json.loads(data or "{}")
        if "command" in message:
            pid = self._start(message, handles)
            self._running[pid] = (connection, message["bound"])
            return
        for pid, (asked, bound) in self._running.items():
            with suppress(ProcessLookupError):  # the process has just ended
                if asked is connection and message:
                    os.kill(pid, message["signal"])
                elif asked is connection and bound:
                    os.killpg(pid, signal.SIGKILL)
        if not message:
            self._selector.unregister(connection)
            connection.close()

    def _start(self, message: dict[str, Any], handles: list[int]) -> int:
        """Start a command in its own session, as sshd does."""
        os.chdir(message["folder"] or os.path.expanduser("~"))
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", message["command"]],
            message["environment"] or {"PATH": os.defpath, "HOME": os.path.expanduser("~")},
            file_actions=[(os.POSIX_SPAWN_DUP2, handle, n) for n, handle in enumerate(handles)],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
        for handle in handles:
            os.close(handle)
        return pid

    def _reap(self) -> None:
        """Reap ended children. Orphans are children of process 1, too."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection, _ = self._running.pop(ended[0], (None, False))
                if connection is not None:
                    code = os.waitstatus_to_exitcode(ended[1])
                    with suppress(OSError):
                        connection.send(json.dumps(code if code >= 0 else 128 - code).encode())


def main(folder: str, name: str, *shared: str) -> None:
    """Run the host until this process is killed."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{folder}/{name}.socket")
    listening.listen(100)
    set_up(Path(folder), name, [Path(path) for path in shared])
    print("ready", flush=True)
    Shell(listening).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
