"""The codec: every message is decoded as it was, and other bytes are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.codec import BadFrameError, decode, encode
from mpidist.rpc.message import Message

numbers = st.integers(0, 2**32 - 1)
arrays = st.builds(
    lambda size, seed: np.random.default_rng(seed).integers(0, 256, size, np.uint8),
    st.sampled_from([0, 1, 7, 100, 8192, 16384, 16385]),
    st.integers(0, 9),
)
messages = st.builds(
    Message,
    kind=st.integers(0, 7),
    has_output_buffers=st.booleans(),
    id=st.integers(0, 2**64 - 1),
    receiver=numbers,
    sender=numbers,
    method=st.text(max_size=20),
    body=st.binary(max_size=50),
    buffers=st.lists(arrays, max_size=4),
    failure=st.none() | st.builds(Failure, code=st.integers(1, 16), message=st.text(max_size=9)),
    acks=st.lists(st.integers(0, 2**64 - 1), max_size=3),
)


def same(got, sent):
    for name in (
        "kind",
        "id",
        "receiver",
        "sender",
        "method",
        "body",
        "failure",
        "has_output_buffers",
    ):
        assert getattr(got, name) == getattr(sent, name)
    assert list(got.acks) == sent.acks


@given(messages)
def test_messages_are_decoded_as_they_were(sent):
    frame, views = encode(sent)
    for form in (bytes, bytearray, memoryview):
        got, following, location = decode(form(frame), "peer")
        assert location is None
        same(got, sent)
        assert got.peer == "peer"
        sizes = [array.nbytes for array in sent.buffers]
        assert list(following) == (sizes if sum(sizes) > 16384 else [])
        assert bool(following) == bool(views)
        here = views if following else got.buffers
        for array, original in zip(here, sent.buffers, strict=True):
            np.testing.assert_array_equal(array, original)


@given(messages, st.data())
def test_wrong_lengths_are_refused(sent, data):
    """A flipped bit in the fixed part or the sizes, a missing end, or one too many."""
    frame = bytearray(encode(sent)[0])
    head = 39 + 8 * len(sent.buffers)
    cut = data.draw(st.integers(0, len(frame) - 1))
    location, bit = data.draw(st.integers(0, head - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(frame)
    flipped[location] ^= 1 << bit
    for bad in (frame[:cut], frame + b"x", flipped):
        with pytest.raises(BadFrameError):
            decode(bad, None)


@given(st.binary(max_size=200))
def test_any_bytes(frame):
    with pytest.raises(BadFrameError):
        decode(frame, None)


def test_text_that_is_not_utf8():
    frame = bytearray(encode(Message(0, method="abc"))[0])
    frame[-3:] = b"\xff\xff\xff"
    with pytest.raises(BadFrameError, match="cannot be read"):
        decode(frame, None)


def test_received_buffers_can_be_written():
    (array,) = decode(bytearray(encode(Message(0, buffers=[np.zeros(8)]))[0]), None)[0].buffers
    array[:] = 1


@given(messages, st.integers(0, 2**64 - 1))
def test_large_buffers_in_shared_memory(sent, location):
    asked = []

    def put(buffers):
        asked.append(buffers)
        return location

    frame, views = encode(sent, put)
    sizes = [array.nbytes for array in sent.buffers]
    large = sum(sizes) > 16384
    got, elsewhere, where = decode(frame, None)
    same(got, sent)
    assert not views
    assert len(asked) == large
    assert list(elsewhere) == (sizes if large else [])
    assert where == (location if large else None)


def test_no_room_in_shared_memory():
    frame, views = encode(Message(0, buffers=[np.ones(20000, np.uint8)]), lambda buffers: None)
    assert len(views) == 1
    assert decode(frame, None)[1:] == ((20000,), None)
