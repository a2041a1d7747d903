"""A blocked stream, for tests of work that must not wait for the stream."""

import threading
from contextlib import contextmanager

WAIT_S = 20


@contextmanager
def held(stream):
    """Block a stream until the end of the block. The block must not wait for the stream."""
    release, ended = threading.Event(), []
    stream.launch_host_func(lambda _: ended.append(release.wait(WAIT_S)), None)
    try:
        yield
        assert ended == [], "the block has waited for the stream"
    finally:
        release.set()
    stream.synchronize()
    assert ended == [True]
