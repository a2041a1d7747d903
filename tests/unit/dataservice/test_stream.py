"""Streams without threads: what is used, what is in hand, and what is asked for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.read import stream as stream_module
from dataservice.read.order import Order, Plan
from dataservice.read.ordered_stream import OrderedStream
from dataservice.read.reports import Reports
from dataservice.read.stream import Frame, Queue
from dataservice.wire import pack_elements


def frame(part, indices, nbytes=1, period=1):
    """Elements that are part and index."""
    parcel = pack_elements([(part, index) for index in indices])
    return Frame(parcel, len(indices), nbytes, part, indices[0], period)


def alive():
    return True


def drain(stream):
    """All that comes until the stream's end."""
    got = []
    while True:
        try:
            got.append(stream.next(alive))
        except StopIteration:
            return got


# Elements in the order in which they come.


def test_a_queue_gives_what_came_in_its_order_and_then_its_end():
    queue = Queue("a user", {})
    for part, first in ((0, 0), (1, 0), (0, 2)):
        queue.put(frame(part, range(first, first + 2)))
    queue.finish()
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert drain(queue) == expected
    assert drain(queue) == []


def test_an_error_comes_after_what_came_before_it_again_and_again():
    queue = Queue("a user", {})
    queue.put(frame(0, [0]))
    queue.finish(KeyError("bad"))
    queue.finish()
    assert queue.next(alive) == (0, 0)
    for call in (lambda: queue.next(alive), lambda: queue.next(alive), queue.check):
        with pytest.raises(KeyError, match="bad"):
            call()


def test_a_closed_queue_gives_and_takes_nothing():
    queue = Queue("a user", {})
    queue.put(frame(0, [0]))
    queue.close()
    queue.put(frame(0, [1]))
    with pytest.raises(StopIteration):
        queue.next(alive)
    assert queue.in_hand(0) == RangeSet()


def test_a_dead_fetching_thread_is_an_error(monkeypatch):
    monkeypatch.setattr(stream_module, "_ALIVE_PERIOD_S", 1e-3)
    with pytest.raises(RuntimeError, match="died"):
        Queue("a user", {}).next(lambda: False)


def test_an_element_is_used_when_it_has_been_given():
    queue = Queue("a user", {0: 5})
    queue.put(frame(0, range(5, 8)))
    assert (queue.take_used(), queue.marks(), queue.in_hand(0).bounds) == ([], {0: 5}, [5, 8])
    queue.next(alive)
    assert (queue.take_used(), queue.marks()) == ([(0, 5, 6)], {0: 6})
    assert queue.in_hand(0).bounds == [6, 8]
    queue.next(alive)
    queue.next(alive)
    assert (queue.take_used(), queue.take_used()) == ([(0, 6, 8)], [])
    assert (queue.marks(), queue.in_hand(0).bounds) == ({0: 8}, [])


def test_used_and_in_hand_are_told_of_every_part():
    queue = Queue("a user", {})
    for part, first in ((0, 10), (1, 0), (0, 20)):
        queue.put(frame(part, range(first, first + 2)))
    for _ in range(3):
        queue.next(alive)
    assert queue.take_used() == [(0, 10, 12), (1, 0, 1)]
    assert queue.marks() == {0: 12, 1: 1}
    assert {part: queue.in_hand(part).bounds for part in queue.parts} == {0: [20, 22], 1: [1, 2]}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_whatever_came_is_used_or_in_hand(sizes, steps, rng):
    queue, came, used = Queue("a user", {}), {}, {}
    for part, size in sizes:
        first = came.get(part, 0)
        queue.put(frame(part, range(first, first + size)))
        came[part] = first + size
    queue.finish()
    for _ in range(min(steps, sum(came.values()))):
        queue.next(alive)
        if rng.random() < 0.3:
            for part, start, stop in queue.take_used():
                assert start == used.get(part, 0)
                used[part] = stop
    used |= {part: stop for part, _, stop in queue.take_used()}
    for part, stop in came.items():
        together = RangeSet([0, used.get(part, 0), *queue.in_hand(part).bounds])
        assert together.bounds == [0, stop]
        assert queue.marks().get(part, 0) == used.get(part, 0)
        assert queue.plan(part) == Plan(stop, 1, 0)


def test_a_queue_has_room_for_a_number_of_bytes():
    queue = Queue("a user", {})
    queue.put(frame(0, [0], stream_module.BUFFER_BYTES - 1))
    assert queue.has_room(0)
    queue.put(frame(0, [1], 1))
    assert not queue.has_room(0)
    rings = []
    queue.on_room = lambda: rings.append(1)
    queue.next(alive)
    assert queue.has_room(0)
    assert rings == [1]


def test_a_frame_is_held_until_the_next_one_is_begun():
    queue = Queue("a user", {})
    queue.put(frame(0, range(3)))
    queue.put(frame(0, range(3, 5)))
    counts = [queue.held]
    for _ in range(4):
        queue.next(alive)
        counts.append(queue.held)
    assert counts == [5, 5, 5, 5, 2]


# What a consumer reports of a queue.


def heartbeat(reports):
    request = reports.request(1)
    return {ranges.part: list(ranges.bounds) for ranges in request.used}


def test_used_elements_are_reported_once_if_that_was_heard():
    queue = Queue("a user", {})
    queue.put(frame(0, range(6)))
    reports = Reports(queue, shared=True)
    queue.next(alive)
    assert heartbeat(reports) == {0: [0, 1]}
    queue.next(alive)
    reports.retry()
    assert heartbeat(reports) == {0: [0, 2]}
    reports.confirm()
    assert heartbeat(reports) == {}
    reports.confirm()
    queue.next(alive)
    assert heartbeat(reports) == {0: [2, 3]}
    queue.next(alive)
    assert [list(r.bounds) for r in reports.farewell().used] == [[2, 4]]
    assert reports.used_since(0) == [0, 4]
    assert reports.used_since(0) == []


def test_where_consumers_are_told_apart_a_mark_is_enough():
    queue = Queue("a user", {0: 3})
    queue.put(frame(0, range(3, 6)))
    reports = Reports(queue, shared=False)
    queue.next(alive)
    assert heartbeat(reports) == {0: [0, 4]}


def test_what_is_held_is_told_with_what_is_settled():
    queue = Queue("a user", {})
    queue.put(frame(0, range(6)))
    reports = Reports(queue, shared=True)
    queue.next(alive)
    assert not reports.request(1).held
    reports.settled.add(7)
    for again in (reports.retry, reports.confirm):
        request = reports.request(1)
        assert (list(request.settled), list(request.held[0].bounds)) == ([7], [1, 6])
        again()
    assert not reports.request(1).settled


# The global order.


def ordered(lengths, consumers=1, index=0, begin=None):
    return OrderedStream("a user", Order(len(lengths), consumers, index, begin))


def fetch(stream, lengths, part, most):
    """Give a stream some of what it wants of a part."""
    plan = stream.plan(part)
    stop = lengths[part] if plan.until < 0 else min(plan.until, lengths[part])
    stop = min(plan.start + most, stop)
    wanted = range(plan.start, stop)
    wanted = [i for i in wanted if plan.period and i % plan.period == plan.offset]
    if wanted:
        stream.put(frame(part, wanted, period=plan.period))
    stream.note(part, max(stop, plan.start), end=max(stop, plan.start) >= lengths[part])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
)
def test_an_ordered_stream_gives_the_global_order_whatever_comes_first(lengths, consumers, seed):
    everything = [(p, r) for r in range(9) for p, n in enumerate(lengths) if r < n]
    rng = random.Random(seed)
    for index in range(consumers):
        stream, got = ordered(lengths, consumers, index), []
        for expected in everything[index::consumers]:
            while not stream._is_here():
                fetch(stream, lengths, rng.randrange(len(lengths)), rng.randint(1, 4))
            got.append(stream.next(alive))
            assert stream.marks()[expected[0]] == expected[1] + 1
        assert got == everything[index::consumers]
        while not stream._is_here():
            fetch(stream, lengths, rng.randrange(len(lengths)), 9)
        assert drain(stream) == []


def test_used_marks_of_an_ordered_stream_are_told_once():
    stream = ordered([3, 3])
    for part in range(2):
        fetch(stream, [3, 3], part, 9)
    assert stream.take_used() == []
    for _ in range(3):
        stream.next(alive)
    assert [(part, stop) for part, _, stop in stream.take_used()] == [(0, 2), (1, 1)]
    assert stream.take_used() == []
    assert stream.held == 3


def test_what_came_before_an_end_was_known_is_cut_and_asked_for_anew():
    stream = ordered([9, 2], consumers=2)
    assert stream.plan(0) == Plan(0, 1, 0)
    stream.put(frame(0, range(5)))
    assert stream.note(0, 5, end=False) is False
    assert stream.held == 5
    assert stream.note(1, 2, end=True) is True
    assert stream.held == 2
    assert stream.plan(0) == Plan(2, 2, 0)
    stream.put(frame(0, [2, 4, 6], period=2))
    stream.note(0, 7, end=False)
    assert [stream.next(alive) for _ in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 4)]


def test_a_cut_goes_through_frames_that_are_in_use():
    stream = ordered([9, 2], consumers=2)
    stream.note(1, 2, end=False)
    for indices in (range(4), range(4, 6)):
        stream.put(frame(0, indices))
        stream.note(0, indices[-1] + 1, end=False)
    assert [stream.next(alive) for _ in range(2)] == [(0, 0), (0, 1)]
    assert stream.held == 4
    stream.note(1, 2, end=True)
    assert (stream.held, stream.plan(0).start) == (0, 2)


def test_a_single_consumer_wants_the_same_whatever_ends():
    stream = ordered([9, 2])
    stream.put(frame(0, range(5)))
    stream.note(0, 5, end=False)
    assert stream.note(1, 2, end=True) is False
    assert stream.held == 5


def test_an_ordered_stream_has_room_for_one_frame_of_every_part():
    stream = ordered([9, 9])
    big = stream_module.BUFFER_BYTES
    stream.put(frame(1, [0], big))
    assert (stream.has_room(0), stream.has_room(1)) == (True, False)


def test_the_state_of_a_stream_takes_another_one_on():
    stream = ordered([4, 2])
    for part in range(2):
        fetch(stream, [4, 2], part, 9)
    got = [stream.next(alive) for _ in range(3)]
    state = pb.State.FromString(stream.state().SerializeToString())
    again = ordered([4, 2], begin=state)
    for part in range(2):
        assert again.plan(part).start == state.parts[part].start
        fetch(again, [4, 2], part, 9)
    assert got + drain(again) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3)]
