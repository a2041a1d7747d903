"""Malformed messages."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from mpidist.rpc.codec import encode
from mpidist.rpc.message import Message


def frames_of(rng, sizes=(0, 1, 100, 20_000), receivers=(0,), *, sealed=False):
    """Return the frames of a message with random damage: cut, extended, altered or replaced bytes.

    Args:
        rng: Random generator.
        sizes: Possible sizes of the buffers.
        receivers: Possible numbers of the receiving endpoint.
        sealed: Whether half of the messages get a valid checksum, so that only later checks can
            refuse them.

    Returns:
        The first frame and the frames that follow it.
    """
    message = Message(
        kind=rng.randrange(8),
        id=rng.randrange(4),
        receiver=rng.choice(receivers),
        sender=rng.randrange(3),
        method=rng.choice(["test/Count", "test/Echo", "nothing", "", "test/"]),
        acks=[rng.randrange(5) for _ in range(rng.randrange(3))],
    )
    message.buffers = [np.zeros(rng.choice(sizes), np.uint8) for _ in range(rng.randrange(3))]
    place = rng.choice([None, None, 0, 3, 4096, 1 << 40])
    first, views = encode(message, lambda buffers: place)
    frames = [first, *(bytes(view) for view in views)]
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(frames))
        frame = bytearray(frames[place])
        what = rng.randrange(6)
        if what == 0:
            frame = frame[: rng.randrange(len(frame) + 1)]
        elif what == 1 and frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif what == 2:
            frame += rng.randbytes(rng.randrange(50))
        elif what == 3:
            frame = bytearray(rng.randbytes(rng.randrange(60)))
        elif what == 4:
            frames.append(b"more")
        elif len(frames) > 1:
            del frames[place]
            continue
        frames[place] = bytes(frame)
    if sealed and rng.random() < 0.5:
        frames[0] = seal(frames[0])
    return frames


def seal(frame):
    """Return a frame with the checksum that fits its lengths."""
    if len(frame) < 39:
        return frame
    head = 39 + 8 * min(int.from_bytes(frame[35:39], "little"), len(frame))
    return crc32(frame[4:head]).to_bytes(4, "little") + frame[4:]
