"""Runs a command on a host of the test bed, in place of ssh.

    python -I -S host_shell.py FOLDER [-t] [other options of ssh] HOST WORD...

As with ssh, a shell there gets the words, and nothing of the environment; its status is returned.
With ``-t`` the command is bound to this process: it has its environment and folder, gets SIGINT and
SIGTERM that are sent to it, and is killed with its process group when this process ends. Without,
it goes on then.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

_FAILED = 255  # as ssh's own failures


def main(folder: str, *words: str) -> int:
    """Run the command; returns its status."""
    options, rest = [], list(words)
    while rest and rest[0].startswith("-"):
        options.append(rest.pop(0))
    host, *command = rest
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{folder}/{host}.socket")
    except OSError as error:
        print(f"ssh: cannot reach {host}: {error.strerror}", file=sys.stderr)
        return _FAILED
    bound = "-t" in options
    request = {
        "command": " ".join(command),
        "bound": bound,
        "environment": dict(os.environ) if bound else None,
        "folder": os.getcwd() if bound else None,
    }
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])

    def forward(number: int, _frame: object) -> None:
        connection.send(json.dumps({"signal": number}).encode())

    if bound:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
    data = connection.recv(100)
    return int(data) if data else _FAILED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
