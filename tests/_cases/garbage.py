"""Messages that nobody should send."""

from __future__ import annotations

import numpy as np

from mpidist.endpoint.frames import pack
from mpidist.endpoint.message import Message
from mpidist.proto.mpidist_pb2 import Header


def frames_of(rng, sizes=(0, 1, 100, 20_000)):
    """Frames that are almost a message: cut, lengthened, altered, or of any bytes.

    Args:
        rng: Draws them.
        sizes: Of the buffers.

    Returns:
        The first frame, and those that follow it.
    """
    header = Header(
        kind=rng.randrange(8),
        id=rng.randrange(4),
        sender=rng.randrange(3),
        method=rng.choice(["test/Count", "test/Echo", "nothing", "", "test/"]),
        settled=[rng.randrange(5) for _ in range(rng.randrange(3))],
    )
    lengths = [rng.choice(sizes) for _ in range(rng.randrange(3))]
    header.sizes.extend(lengths)
    buffers = [np.zeros(size, np.uint8) for size in lengths]
    first, views = pack(Message(header, buffers, None))
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
    return frames
