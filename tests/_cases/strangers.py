"""Strangers at a tcp port: who speaks almost as an endpoint does, not at all, or too much."""

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
"""That a frame may say it has, in bytes."""


def opening(identity):
    """What a ZeroMQ peer says before any message (rfc.zeromq.org/spec/23)."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    greeting = signature + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        ready += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return greeting + bytes([_COMMAND, len(ready)]) + ready


def frame(data, *, more=False, length=None):
    """A frame on the wire.

    Args:
        data: What is in it.
        more: Whether another one of the same message follows.
        length: What it says, in place of the truth.
    """
    said = len(data) if length is None else length
    if said < 256 and length is None:
        return bytes([_MORE * more, said]) + data
    return bytes([_MORE * more | _LONG]) + struct.pack(">Q", said) + data


def conversation(rng, methods=("",), requests=5):
    """What a client says next: a hello, requests, and messages that are almost requests.

    Args:
        rng: Draws them.
        methods: That are asked for.
        requests: How many of each.
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
    """The same, but cut, altered, with an absurd length, or with something between."""
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
    """Connect as a ZeroMQ peer does, say something, and hang up.

    Args:
        port: On this host.
        identity: Of the peer.
        said: Bytes.
        abort: Whether without a goodbye, and without listening; otherwise what is answered is read
            until the other side hangs up, or falls silent.
    """
    with _connect(port, abort) as stranger:
        stranger.sendall(opening(identity))
        heard = b""
        while b"READY" not in heard:  # whoever speaks before that is hung up on
            heard += stranger.recv(1000)
        with suppress(ConnectionError):  # it has hung up meanwhile
            stranger.sendall(said)
            stranger.settimeout(_SILENCE_S)
            with suppress(TimeoutError):
                while not abort and stranger.recv(1 << 16):
                    pass


def blurt(port, said, *, abort=False):
    """Connect, say something at once, and hang up; arguments as of :func:`converse`."""
    with _connect(port, abort) as stranger, suppress(ConnectionError):
        stranger.sendall(said)


def _connect(port, abort):
    stranger = socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)
    if abort:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return stranger
