"""A stream that does not go on, to show what passes it by."""

import threading
from contextlib import contextmanager

WAIT_S = 20


@contextmanager
def held(stream):
    """What is queued on a stream is not done before the block ends; nobody may wait for it."""
    release, ended = threading.Event(), []
    stream.launch_host_func(lambda _: ended.append(release.wait(WAIT_S)), None)
    try:
        yield
        assert ended == [], "the block has waited for the stream"
    finally:
        release.set()
    stream.synchronize()
    assert ended == [True]
