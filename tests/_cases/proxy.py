"""A bad network: passes bytes on between a client and a server until it is told to cut them off."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Listens at a port of its own and passes everything on to another.

    Args:
        port: Of the server.

    Attributes:
        port: That clients connect to.
        connections: How many there have been.
    """

    def __init__(self, port):
        self._server = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.connections = 0
        self._open = []
        self._lock = threading.Lock()
        self._budget = None
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Break all connections; new ones are accepted."""
        with self._lock:
            broken, self._open = self._open, []
        for one in broken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def cut_after(self, nbytes):
        """Break the connections once so many more bytes have gone from clients to the server."""
        self._budget = nbytes

    def close(self):
        """Break all connections, and accept no more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                return
            self.connections += 1
            with self._lock:
                self._open += [client, server]
            for pair in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source, target, counted):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted and self._budget is not None:
                    data, self._budget = data[: self._budget], self._budget - len(data)
                    if self._budget <= 0:
                        self._budget = None
                        target.sendall(data)
                        self.cut()
                        return
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
