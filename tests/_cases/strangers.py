"""TCP clients that break the protocol of an endpoint: malformed, early or excessive messages."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from _cases.garbage import frames_of
from mpidist.rpc.codec import encode
from mpidist.rpc.message import REQUEST, Message
from mpidist.rpc.tcp_connection import hello_message

_LIMIT_S = 30.0
_SILENCE_S = 0.05
_MORE, _LONG, _COMMAND = 1, 2, 4
LENGTHS = (0, 1, 255, 256, 1 << 20, 1 << 31, 1 << 33, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
"""Lengths that a malformed frame may announce, in bytes."""


def opening(identity):
    """Return the greeting and handshake of a ZeroMQ peer (rfc.zeromq.org/spec/23)."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    greeting = signature + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        ready += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return greeting + bytes([_COMMAND, len(ready)]) + ready


def frame(data, *, more=False, length=None):
    """Return a frame as bytes on the wire.

    Args:
        data: Content of the frame.
        more: Whether another frame of the same message follows.
        length: Announced length, in place of the true length.
    """
    said = len(data) if length is None else length
    if said < 256 and length is None:
        return bytes([_MORE * more, said]) + data
    return bytes([_MORE * more | _LONG]) + struct.pack(">Q", said) + data


def conversation(rng, methods=("",), requests=5):
    """Return the bytes of a client: a hello, requests, and malformed requests.

    Args:
        rng: Random generator.
        methods: Methods to request.
        requests: Number of requests, and of malformed requests.
    """
    said = frame(encode(hello_message(rng.randbytes(16)))[0])
    for number in range(requests):
        body = rng.randbytes(rng.randrange(40))
        message = Message(REQUEST, number, 0, 0, rng.choice(methods), body)
        said += frame(encode(message)[0])
        frames = frames_of(rng, sealed=True)
        for place, one in enumerate(frames):
            said += frame(one, more=place < len(frames) - 1)
    return said


def damaged(rng, said):
    """Return the bytes cut, altered, extended by a false length, interrupted, or replaced."""
    place = rng.randrange(len(said))
    what = rng.randrange(5)
    if what == 0:
        return said[:place]
    if what == 1:
        return said[:place] + bytes([said[place] ^ 1 << rng.randrange(8)]) + said[place + 1 :]
    if what == 2:
        return said + frame(rng.randbytes(rng.randrange(100)), length=rng.choice(LENGTHS))
    if what == 3:
        return said[:place] + rng.randbytes(rng.randrange(1, 100)) + said[place:]
    return rng.randbytes(rng.randrange(1, 2000))


def converse(port, identity, said, *, abort=False):
    """Connect as a ZeroMQ peer, send bytes, and hang up.

    Args:
        port: Port on this host.
        identity: Identity of the peer.
        said: Bytes to send.
        abort: Whether to reset the connection and read no answer. Otherwise, read until the other
            side hangs up or is silent.
    """
    with _connect(port, abort) as stranger:
        stranger.sendall(opening(identity))
        heard = b""
        while b"READY" not in heard:  # the peer hangs up on earlier data
            heard += stranger.recv(1000)
        with suppress(ConnectionError):  # the peer has hung up meanwhile
            stranger.sendall(said)
            stranger.settimeout(_SILENCE_S)
            with suppress(TimeoutError):
                while not abort and stranger.recv(1 << 16):
                    pass


def blurt(port, said, *, abort=False):
    """Connect, send bytes without a handshake, and hang up. Arguments as in :func:`converse`."""
    with _connect(port, abort) as stranger, suppress(ConnectionError):
        stranger.sendall(said)


def _connect(port, abort):
    stranger = socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)
    if abort:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return stranger
