"""Encryption and authentication of tcp connections by one shared secret.

Both ends derive the same key pairs from it (CurveZMQ, rfc.zeromq.org/spec/26). The server's public
key never travels, and without it nobody can even begin to speak to the server: knowing it is
knowing the secret.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85


@dataclass(frozen=True)
class Keys:
    """The key pairs that follow from a secret, as Z85 text.

    Attributes:
        server: Public and secret key of whoever listens.
        client: Public and secret key of whoever connects.
    """

    server: tuple[bytes, bytes]
    client: tuple[bytes, bytes]

    @classmethod
    def derive(cls, secret: str) -> Keys:
        """Local. The keys of a secret."""
        return cls(_pair(secret, b"server"), _pair(secret, b"client"))

    def guard_listener(self, socket: zmq.Socket[Any]) -> None:
        """Local. Have a socket speak only to those who know the secret, before it is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.server

    def guard_link(self, socket: zmq.Socket[Any]) -> None:
        """Local. The same for a socket that will connect."""
        socket.curve_serverkey = self.server[0]
        socket.curve_publickey, socket.curve_secretkey = self.client


def _pair(secret: str, role: bytes) -> tuple[bytes, bytes]:
    digest = hashlib.blake2b(secret.encode(), digest_size=32, person=b"mpidist-" + role)
    text = z85.encode(digest.digest())
    return zmq.curve_public(text), text
