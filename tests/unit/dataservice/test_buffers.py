"""The consumer's buffers without threads: consumed, remaining and requested elements."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.payload import pack_elements
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.read import buffers
from dataservice.read.buffers import FirstComeBuffer, Frame, OrderedBuffer
from dataservice.read.order import Order, Plan


def frame(part, indices, nbytes=1, stride=1):
    """Return a frame of elements that are pairs of part and index."""
    parcel = pack_elements([(part, index) for index in indices])
    return Frame(parcel, len(indices), nbytes, part, indices[0], stride)


def drain(buffer):
    """Return all elements until the buffer's end."""
    got = []
    while True:
        try:
            got.append(buffer.next())
        except StopIteration:
            return got


# Elements in the order of arrival.


def test_a_queue_gives_what_came_in_its_order_and_then_its_end():
    buffer = FirstComeBuffer("a user", {})
    for part, first in ((0, 0), (1, 0), (0, 2)):
        buffer.put(frame(part, range(first, first + 2)))
    buffer.finish()
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert drain(buffer) == expected
    assert drain(buffer) == []


def test_an_error_comes_after_what_came_before_it_again_and_again():
    buffer = FirstComeBuffer("a user", {})
    buffer.put(frame(0, [0]))
    buffer.finish(KeyError("bad"))
    buffer.finish()
    assert buffer.next() == (0, 0)
    for call in (lambda: buffer.next(), lambda: buffer.next()):
        with pytest.raises(KeyError, match="bad"):
            call()


def test_a_closed_queue_gives_and_takes_nothing():
    buffer = FirstComeBuffer("a user", {})
    buffer.put(frame(0, [0]))
    buffer.close()
    buffer.put(frame(0, [1]))
    with pytest.raises(StopIteration):
        buffer.next()
    assert buffer.unconsumed() == {0: []}


def test_a_dead_fetching_thread_is_an_error(monkeypatch):
    monkeypatch.setattr(buffers, "_ALIVE_PERIOD_S", 1e-3)
    buffer = FirstComeBuffer("a user", {})
    buffer.is_fetched = lambda: False
    with pytest.raises(RuntimeError, match="died"):
        buffer.next()


def test_an_element_is_used_when_it_has_been_given():
    buffer = FirstComeBuffer("a user", {0: 5})
    buffer.put(frame(0, range(5, 8)))
    assert (buffer.take_consumed(), buffer.watermark(0), buffer.unconsumed()[0]) == (
        [],
        5,
        [5, 8],
    )
    buffer.next()
    assert (buffer.take_consumed(), buffer.watermark(0)) == ([(0, 5, 6)], 6)
    assert buffer.unconsumed()[0] == [6, 8]
    buffer.next()
    buffer.next()
    assert (buffer.take_consumed(), buffer.take_consumed()) == ([(0, 6, 8)], [])
    assert (buffer.watermark(0), buffer.unconsumed()[0]) == (8, [])


def test_used_and_in_hand_are_told_of_every_part():
    buffer = FirstComeBuffer("a user", {})
    for part, first in ((0, 10), (1, 0), (0, 20)):
        buffer.put(frame(part, range(first, first + 2)))
    for _ in range(3):
        buffer.next()
    assert buffer.take_consumed() == [(0, 10, 12), (1, 0, 1)]
    assert [buffer.watermark(part) for part in (0, 1, 2)] == [12, 1, 0]
    assert buffer.unconsumed() == {0: [20, 22], 1: [1, 2]}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_whatever_came_is_used_or_in_hand(sizes, steps, rng):
    buffer, came, used = FirstComeBuffer("a user", {}), {}, {}
    for part, size in sizes:
        first = came.get(part, 0)
        buffer.put(frame(part, range(first, first + size)))
        came[part] = first + size
    buffer.finish()
    for _ in range(min(steps, sum(came.values()))):
        buffer.next()
        if rng.random() < 0.3:
            for part, start, stop in buffer.take_consumed():
                assert start == used.get(part, 0)
                used[part] = stop
    used |= {part: stop for part, _, stop in buffer.take_consumed()}
    for part, stop in came.items():
        together = RangeSet([0, used.get(part, 0), *buffer.unconsumed()[part]])
        assert together.bounds == [0, stop]
        assert buffer.watermark(part) == used.get(part, 0)
        assert buffer.plan(part) == Plan(stop, 1, 0)


def test_a_queue_has_room_for_a_number_of_bytes():
    buffer = FirstComeBuffer("a user", {})
    buffer.put(frame(0, [0], buffers.BUFFER_BYTES - 1))
    assert buffer.has_room(0)
    buffer.put(frame(0, [1], 1))
    assert not buffer.has_room(0)
    rings = []
    buffer.on_room = lambda: rings.append(1)
    buffer.next()
    assert buffer.has_room(0)
    assert rings == [1]


def test_a_frame_is_held_until_the_next_one_is_begun():
    buffer = FirstComeBuffer("a user", {})
    buffer.put(frame(0, range(3)))
    buffer.put(frame(0, range(3, 5)))
    counts = [buffer.buffered]
    for _ in range(4):
        buffer.next()
        counts.append(buffer.buffered)
    assert counts == [5, 5, 5, 5, 2]


# The global order.


def ordered(lengths, consumers=1, index=0, begin=None):
    return OrderedBuffer("a user", Order(len(lengths), consumers, index, begin))


def fetch(buffer, lengths, part, most):
    """Put up to ``most`` planned elements of a part into a buffer."""
    plan = buffer.plan(part)
    stop = lengths[part] if plan.until < 0 else min(plan.until, lengths[part])
    stop = min(plan.start + most, stop)
    wanted = range(plan.start, stop)
    wanted = [i for i in wanted if plan.period and i % plan.period == plan.offset]
    if wanted:
        buffer.put(frame(part, wanted, stride=plan.period))
    buffer.note_extent(part, max(stop, plan.start), end=max(stop, plan.start) >= lengths[part])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
)
def test_an_ordered_stream_gives_the_global_order_whatever_comes_first(lengths, consumers, seed):
    everything = [(p, r) for r in range(9) for p, n in enumerate(lengths) if r < n]
    rng = random.Random(seed)
    for index in range(consumers):
        buffer, got = ordered(lengths, consumers, index), []
        for expected in everything[index::consumers]:
            while not buffer._is_here():
                fetch(buffer, lengths, rng.randrange(len(lengths)), rng.randint(1, 4))
            got.append(buffer.next())
            assert buffer.watermark(expected[0]) == expected[1] + 1
        assert got == everything[index::consumers]
        while not buffer._is_here():
            fetch(buffer, lengths, rng.randrange(len(lengths)), 9)
        assert drain(buffer) == []


def test_used_marks_of_an_ordered_stream_are_told_once():
    buffer = ordered([3, 3])
    for part in range(2):
        fetch(buffer, [3, 3], part, 9)
    assert buffer.take_consumed() == []
    for _ in range(3):
        buffer.next()
    assert [(part, stop) for part, _, stop in buffer.take_consumed()] == [(0, 2), (1, 1)]
    assert buffer.take_consumed() == []
    assert buffer.buffered == 3


def test_what_came_before_an_end_was_known_is_cut_and_asked_for_anew():
    buffer = ordered([9, 2], consumers=2)
    assert buffer.plan(0) == Plan(0, 1, 0)
    buffer.put(frame(0, range(5)))
    assert buffer.note_extent(0, 5, end=False) is False
    assert buffer.buffered == 5
    assert buffer.note_extent(1, 2, end=True) is True
    assert buffer.buffered == 2
    assert buffer.plan(0) == Plan(2, 2, 0)
    buffer.put(frame(0, [2, 4, 6], stride=2))
    buffer.note_extent(0, 7, end=False)
    assert [buffer.next() for _ in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 4)]


def test_a_cut_goes_through_frames_that_are_in_use():
    buffer = ordered([9, 2], consumers=2)
    buffer.note_extent(1, 2, end=False)
    for indices in (range(4), range(4, 6)):
        buffer.put(frame(0, indices))
        buffer.note_extent(0, indices[-1] + 1, end=False)
    assert [buffer.next() for _ in range(2)] == [(0, 0), (0, 1)]
    assert buffer.buffered == 4
    buffer.note_extent(1, 2, end=True)
    assert (buffer.buffered, buffer.plan(0).start) == (0, 2)


def test_a_single_consumer_wants_the_same_whatever_ends():
    buffer = ordered([9, 2])
    buffer.put(frame(0, range(5)))
    buffer.note_extent(0, 5, end=False)
    assert buffer.note_extent(1, 2, end=True) is False
    assert buffer.buffered == 5


def test_an_ordered_stream_has_room_for_one_frame_of_every_part():
    buffer = ordered([9, 9])
    big = buffers.BUFFER_BYTES
    buffer.put(frame(1, [0], big))
    assert (buffer.has_room(0), buffer.has_room(1)) == (True, False)


def test_the_state_of_a_stream_takes_another_one_on():
    buffer = ordered([4, 2])
    for part in range(2):
        fetch(buffer, [4, 2], part, 9)
    got = [buffer.next() for _ in range(3)]
    state = pb.State.FromString(buffer.state().SerializeToString())
    again = ordered([4, 2], begin=state)
    for part in range(2):
        assert again.plan(part).start == state.parts[part].start
        fetch(again, [4, 2], part, 9)
    assert got + drain(again) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3)]
