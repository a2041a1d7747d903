"""Invalid messages over MPI: they are dropped, and nothing piles up."""

import json
import random
import time

import numpy as np
import pytest
from _cases.endpoints import LIMIT_S, Service, as_bytes, ask, pattern
from _cases.footprint import Footprint
from _cases.garbage import frames_of
from _cases.leaks import check_leaks, serve_footprint
from mpi4py import MPI

from mpidist import errors, open_endpoint
from mpidist.rpc import mpi
from mpidist.rpc.codec import encode
from mpidist.rpc.message import NOTICE, REPLY, Message
from mpidist.rpc.mpi import BUFFER_TAG, FRAME_TAG

SIZE = 20_000


@pytest.fixture
def served(world):
    """Open an endpoint on each rank. The first serves on a thread, at the yielded address."""
    endpoint = open_endpoint()
    address = world.bcast(str(endpoint.address))
    if world.rank == 0:
        endpoint.service = Service(endpoint)
        serve_footprint(endpoint)
        endpoint.serve_in_thread()
    yield endpoint, address
    world.Barrier()
    endpoint.close()


def messages():
    from mpidist.mpi import world

    return world().messages


IDENTITY = 3


def send(frames, tags=None):
    """Send frames as the endpoint of rank 1 does, without waiting. Return the requests."""
    tags = tags or [FRAME_TAG] + [BUFFER_TAG] * len(frames)
    return [
        messages().Isend(bytearray(frame), dest=0, tag=tag)
        for frame, tag in zip(frames, tags, strict=False)
    ]


def wait(requests):
    """Wait until the receiver has taken all sent messages."""
    deadline = time.monotonic() + LIMIT_S
    while not MPI.Request.Testall(requests):
        assert time.monotonic() < deadline, "what was sent is taken by nobody"


def notice(address, key, sizes=(SIZE, SIZE), announced=None):
    """Return the frames of a notice: its header, and buffers of the given sizes."""
    buffers = [np.ones(size, np.uint8) for size in sizes]
    message = Message(
        NOTICE,
        IDENTITY,
        receiver=int(address.rpartition(":")[2]),
        method="test/Note",
        body=key + b":",
        buffers=buffers,
    )
    if announced:
        message.buffers = [Says(size) for size in announced]
    first, _ = encode(message)
    return [first, *(bytes(buffer) for buffer in buffers)]


class Says(np.ndarray):
    """An array that reports a false size."""

    def __new__(cls, nbytes):
        array = np.zeros(0, np.uint8).view(cls)
        array.says = nbytes
        return array

    @property
    def nbytes(self):
        return self.says


def elsewhere(address, place):
    """Return a notice frame that places the buffers in the sender's shared memory."""
    message = Message(NOTICE, IDENTITY, int(address.rpartition(":")[2]), 0, "test/Note", b"k:")
    message.buffers = [np.ones(SIZE, np.uint8)]
    return encode(message, lambda buffers: place)[0]


def garbled(kind, address):
    """Return garbage frames of one kind, their tags, and the possible numbers of valid notices."""
    first, one, two = notice(address, b"k")
    tags = [FRAME_TAG, BUFFER_TAG, BUFFER_TAG]
    return {
        "a frame that is cut": ([first[:-1]], None, {0}),
        "a frame that is too long": ([first + b"x"], None, {0}),
        "a buffer that is too short": ([first, one[1:], two], None, {0}),
        "a buffer that is too long": ([first, one + b"x", two], None, {0}),
        "a second buffer that is too long": ([first, one, two + b"x"], None, {0}),
        "no buffers": ([first], None, {0}),
        "one buffer of two": ([first, one], None, {0}),
        "a frame twice": ([first, first, one, two], [FRAME_TAG, *tags], {0, 1}),
        "a buffer twice": ([first, one, two, two], None, {1}),
        "a message twice": ([first, one, two, first, one, two], [*tags, *tags], {2}),
        "buffers before their frame": (
            [one, two, first],
            [BUFFER_TAG, BUFFER_TAG, FRAME_TAG],
            {0, 1},
        ),
        "absurd sizes": (notice(address, b"k", announced=[1 << 62, 1 << 63])[:2], None, {0}),
        "empty": ([b""], None, {0}),
        "nothing elsewhere": ([elsewhere(address, 4096)], None, {0}),
        "within a page": ([elsewhere(address, 5)], None, {0}),
        "behind all memory": ([elsewhere(address, 1 << 40)], None, {0}),
    }[kind]


KINDS = (
    "a frame that is cut",
    "a frame that is too long",
    "a buffer that is too short",
    "a buffer that is too long",
    "a second buffer that is too long",
    "no buffers",
    "one buffer of two",
    "a frame twice",
    "a buffer twice",
    "a message twice",
    "buffers before their frame",
    "absurd sizes",
    "empty",
    "nothing elsewhere",
    "within a page",
    "behind all memory",
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_kind(world, served, kind):
    endpoint, address = served
    if world.rank == 1:
        frames, tags, whole = garbled(kind, address)
        sent = send(frames, tags)
        data = pattern(SIZE)
        for _ in range(2):  # the following message is valid
            (got,) = ask(endpoint, address, "Echo", b"", [data]).buffers
            np.testing.assert_array_equal(as_bytes(got), data)
        noted = json.loads(ask(endpoint, address, "Notes", b"k").body)
        assert len(noted) in whole
        assert all(note == ["", [SIZE, SIZE]] for note in noted)
        wait(sent)
    world.Barrier()
    inbox = endpoint._transport._inbox
    assert not inbox._expecting
    assert not inbox._incoming


@pytest.mark.ranks(2)
def test_a_request_that_is_garbled_fails_at_its_deadline(world, served, monkeypatch):
    endpoint, address = served
    if world.rank == 1:
        with monkeypatch.context() as patch:
            patch.setattr(mpi, "encode", lambda m, write: (encode(m)[0], encode(m)[1][1:]))
            work = endpoint.call(address, "test/Echo", b"", [pattern(SIZE)] * 2, timeout=0.3)
        with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.3 s"):
            work.wait()
        assert ask(endpoint, address, "Echo", b"x").body == b"x"


@pytest.mark.ranks(3)
def test_a_message_under_way_holds_up_no_other_rank(world, served):
    """Send the buffers of a notice late. Another rank gets replies meanwhile."""
    endpoint, address = served
    if world.rank == 1:
        first, *buffers = notice(address, b"late")
        sent = send([first])
        world.send("sent", 2)
        world.recv(source=2)
        sent += send(buffers, [BUFFER_TAG] * 2)
        assert json.loads(ask(endpoint, address, "Notes", b"late").body) == [["", [SIZE, SIZE]]]
        wait(sent)
    elif world.rank == 2:
        world.recv(source=1)
        for _ in range(10):
            assert ask(endpoint, address, "Echo", b"x", [pattern(SIZE)]).body == b"x"
        assert json.loads(ask(endpoint, address, "Notes", b"late").body) == []
        world.send("asked", 1)


@pytest.mark.ranks(2)
def test_messages_to_nobody_do_not_pile_up(world, served):
    endpoint, address = served
    before, sent = Footprint.of(endpoint), []
    if world.rank == 1:
        for number in range(3 * mpi._MAX_UNCLAIMED):
            # Endpoints that may open, endpoints that never can, and replies to no request.
            kind = (NOTICE, NOTICE, REPLY)[number % 3]
            receiver = 2 * (10_000 + number) + (number % 3 == 1)
            sent += send([encode(Message(kind, receiver=receiver))[0]])
            if number % 500 == 0:
                ask(endpoint, address, "Echo")
        wait(sent)
        host, _, _ = address.rpartition(":")
        nobody = 2 * 9_999
        with pytest.raises(errors.DistNetworkError, match="has no endpoint 19998"):
            endpoint.call(f"{host}:{nobody}", "test/Echo").wait(LIMIT_S)
    world.Barrier()
    transport = endpoint._transport
    assert len(transport._unclaimed) <= mpi._MAX_UNCLAIMED
    assert Footprint.of(endpoint).memory - before.memory < 64 << 20
    world.Barrier()
    transport._unclaimed.clear()


@pytest.mark.ranks(2, timeout=3600)
@pytest.mark.parametrize("count", [5000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_random(world, served, count):
    """Send frames of every invalid kind from another rank. Valid messages among them are served."""
    rng = random.Random(count)
    endpoint, address = served
    receivers = (0, int(address.rpartition(":")[2]), int(address.rpartition(":")[2]), 5)
    server, sent = None, []
    if world.rank == 1:
        for number in range(count):
            frames = frames_of(rng, receivers=receivers)
            sent += send(frames, [FRAME_TAG] + [1 + rng.randrange(4)] * len(frames))
            if number % 500 == 0:
                body = b"%d" % number
                assert ask(endpoint, address, "Echo", body, [pattern(SIZE)]).body == body
                wait(sent)
                sent.clear()
            if number == count // 5:
                server = endpoint.call(address, "see/Footprint").result(LIMIT_S).body
        wait(sent)
        assert ask(endpoint, address, "Echo", b"end").body == b"end"
        after = Footprint.unpack(endpoint.call(address, "see/Footprint").result(LIMIT_S).body)
        assert after.memory - Footprint.unpack(server).memory < 32 << 20
        assert after.pending["_incoming"] <= 1


@pytest.mark.ranks(2, timeout=300)
def test_ten_thousand_requests_leave_nothing(world, served):
    endpoint, address = served
    if world.rank == 1:
        check_leaks(endpoint, address)
