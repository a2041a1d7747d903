"""Elements for consumers that say which they want."""

import threading
import time

import numpy as np
import pytest
from _cases.data_buffer import Box
from hypothesis import given
from hypothesis import strategies as st

from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.buffers import RetainingBuffer
from mpidist.errors import CancelledError, FailedPreconditionError


def make(consumers=1, start=0, limit=64 << 20):
    return Box(
        lambda tell: RetainingBuffer("task 2", pb.Checkpoint(index=start), tell, consumers, limit)
    )


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 30),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_every_consumer_gets_what_it_asks_for_whatever_the_order(periods, count, most, random):
    box = make(len(periods))
    offsets = [random.randrange(period) for period in periods]
    requests = [
        [box.seek(0, period, offset, client, consumer_index=client, most=most)]
        for client, (period, offset) in enumerate(zip(periods, offsets, strict=True))
    ]
    for element in range(count):
        box.put(element)
        client = random.randrange(len(periods))
        if requests[client][-1].body is not None:
            requests[client].append(box.ask(client, most, consumer_index=client))
    box.buffer.end()
    for client, mine in enumerate(requests):
        while mine[-1].body is None or not mine[-1].body.end:
            assert mine[-1].body is not None
            mine.append(box.ask(client, most, consumer_index=client))
        got = [element for request in mine for element in request.elements]
        assert got == list(range(count))[offsets[client] :: periods[client]]
        for request in mine:
            expected = range(request.body.first, count, periods[client])
            assert request.elements == list(expected[: len(request.elements)])
        assert mine[-1].body.stop == count
    assert box.told == 1


def test_a_consumer_learns_that_elements_exist_which_it_does_not_want():
    box = make(2)
    box.put(*range(5))
    request = box.seek(0, 3, 0)
    assert (request.elements, request.indices) == ([0, 3], (0, 5))
    assert (box.seek(0, 0).body.count, box.seek(0, 0).body.stop) == (0, 5)


def test_a_consumer_that_wants_nothing_learns_of_the_end():
    box = make(2)
    waiting = box.seek(0, 0)
    assert waiting.body is None
    box.put(1)
    assert (waiting.body.stop, waiting.body.end) == (1, False)
    last = box.ask()
    assert last.body is None
    box.buffer.end()
    assert (last.body.stop, last.body.end) == (1, True)


def test_nothing_from_until_on():
    box = make(2)
    box.put(*range(6))
    request = box.seek(1, 2, 0, until=4)
    assert (request.elements, request.indices) == ([2], (2, 4))
    assert (box.ask().body.count, box.ask().body.stop) == (0, 4)
    request = box.seek(4, 3, 2)
    assert (request.elements, request.indices) == ([5], (5, 6))


def test_elements_come_again_until_all_consumers_have_used_them():
    box = make(2)
    box.put(*range(6))
    for _ in range(2):
        assert box.seek(0, 1, 0, client=1).elements == [0, 1, 2, 3, 4, 5]
    box.ask(client=1, consumer_index=0, acknowledged=4, hold=False)
    assert box.buffer.needed == 0
    box.ask(client=2, consumer_index=1, acknowledged=3, hold=False)
    assert box.buffer.needed == 3
    assert box.seek(3, 1, 0, client=1).elements == [3, 4, 5]


def test_a_mark_never_goes_back():
    box = make()
    box.put(*range(6))
    box.seek(0, acknowledged=4)
    box.ask(acknowledged=2, hold=False)
    assert box.buffer.needed == 4


def test_what_all_have_used_is_not_kept():
    box = make()
    box.put(*range(6))
    box.seek(0, acknowledged=4)
    error = box.seek(2, client=7).error
    assert isinstance(error, FailedPreconditionError)
    assert "element 2 of task 2" in str(error)
    assert "first that is kept is 4" in str(error)
    assert box.seek(4, client=7).elements == [4, 5]


def test_what_was_used_before_a_worker_was_lost_is_made_and_dropped():
    box = make(start=3)
    waiting = box.seek(6, acknowledged=6)
    box.put(3, 4, 5)
    assert waiting.body is None
    box.put(6)
    assert (waiting.elements, waiting.indices) == ([6], (6, 7))
    assert box.buffer.produced == 7


def test_a_task_that_goes_on_begins_where_it_was_told():
    box = make(start=50)
    box.put(50, 51)
    assert box.seek(51).elements == [51]
    assert box.seek(49, client=2).error is not None


def test_the_slowest_consumer_decides_how_much_is_made():
    box = make(2, limit=100)
    made = []

    def run():
        made.extend(box.buffer.put(np.zeros(60, np.uint8)) for _ in range(12))

    runner = threading.Thread(target=run)
    runner.start()
    fast = [box.seek(0, client=1, consumer_index=0, most=3)]
    while len(fast[-1].elements) < 3:
        fast.append(box.seek(0, client=1, consumer_index=0, most=3))
    box.ask(client=1, consumer_index=0, acknowledged=3, hold=False)
    assert box.buffer.needed == 0
    wait_until(box, 5)
    assert runner.is_alive()
    box.ask(client=2, consumer_index=1, acknowledged=3, hold=False)
    assert box.buffer.needed == 3
    while box.buffer.produced < 8:
        assert runner.is_alive()
    box.buffer.close(CancelledError("stopped"))
    runner.join(10)
    assert made == [True] * 8 + [False] * 4


def test_who_leaves_does_not_change_what_is_needed():
    box = make(2)
    box.put(*range(4))
    box.seek(0, client=1, consumer_index=0, acknowledged=3)
    box.seek(0, client=2, consumer_index=1, acknowledged=1)
    box.buffer.release(2, [])
    assert box.buffer.needed == 1


def test_a_failure_comes_after_what_was_made():
    box = make()
    box.put(1)
    box.buffer.fail(KeyError("bad"))
    assert box.seek(0).elements == [1]
    assert box.ask().body.failure
    assert box.told == 0


@pytest.mark.parametrize("consumers", [1, 3])
def test_no_more_is_made_early_than_has_been_asked_for(consumers):
    box, early = make(consumers), 32 * consumers
    runner = threading.Thread(target=put_all, args=(box, 100_000), daemon=True)
    runner.start()
    made = wait_until(box, early)
    # One consumer alone gets on, and the others need not have begun.
    for last in range(3):
        box.ask(consumer_index=consumers - 1, most=1000, hold=False)
        made = wait_until(box, 2 * made + early)
        assert runner.is_alive(), last
    if consumers > 1:
        deadline = time.monotonic() + 20
        while box.buffer.produced < 4096 * consumers:
            assert time.monotonic() < deadline
            box.ask(consumer_index=consumers - 1, most=1000, hold=False)
        wait_until(box, 4096 * consumers)
    box.buffer.close(CancelledError("stopped"))
    runner.join(10)


def wait_until(box, count):
    """Wait until there is no room after so many."""
    assert box.fills_at(count), box.buffer.produced
    return count


@pytest.mark.parametrize("period", [40, 1000])
def test_who_wants_one_that_is_far_gets_it(period):
    box = make()
    runner = threading.Thread(target=put_all, args=(box, 5000), daemon=True)
    runner.start()
    request = box.seek(0, period, period - 1)
    deadline = time.monotonic() + 20
    while request.body is None:
        assert time.monotonic() < deadline
    assert request.elements[0] == period - 1
    box.buffer.close(CancelledError("stopped"))
    runner.join(10)


def put_all(box, count):
    for number in range(count):
        if not box.buffer.put(number):
            return
