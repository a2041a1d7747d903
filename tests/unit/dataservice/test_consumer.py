"""A consumer with a simulated dispatcher and simulated workers: the usual course."""

import contextlib
import logging
import queue
import time

import pytest
from _cases.data_consumer import Script, bounds

from dataservice.payload import pack_elements
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from mpidist.errors import UnavailableError


@pytest.fixture
def make_script():
    scripts = []

    def make(*arguments, **named):
        scripts.append(Script(*arguments, **named))
        scripts[-1].thread.start()
        return scripts[-1]

    yield make
    for script in scripts:
        script.close()


def test_the_end_is_what_the_dispatcher_says_after_all_tasks_have_ended(make_script):
    script = make_script(pb.EXCLUSIVE)
    early, _ = script.heartbeat()
    request, body = script.asked()
    assert body.task_id == 1
    script.give(request, [5], end=True)
    assert script.next() == 5
    # This request precedes the end, so its answer may lack a worker that came since.
    script.tell(early, {1: 0})
    last, said = script.heartbeat()
    assert said.at_end
    script.tell(last, {1: 0, 2: 1}, over=True)
    request, _ = script.asked(2)
    script.give(request, [6], end=True)
    assert script.next() == 6
    script.beat_at_end({1: 0, 2: 1}, over=True)
    with pytest.raises(StopIteration):
        script.next()
    assert bounds(script.left().used).get(1, [0, 1]) == [0, 1]


def test_a_finished_iteration_ends_for_all_who_read_it(make_script):
    script = make_script()
    request, _ = script.asked()
    script.give(request, [5])
    assert script.next() == 5
    last = script.next_later()
    while not script.beat({}, finished=True, over=True).at_end:
        pass
    with pytest.raises(StopIteration):
        last.result()
    script.left()


def test_who_comes_when_it_is_over_is_told_why_there_is_nothing(make_script, caplog):
    caplog.set_level(logging.INFO)
    script = make_script(tasks={})
    script.beat({}, finished=True)
    with pytest.raises(StopIteration):
        script.next()
    script.left()
    assert "over before this consumer came" in caplog.text


def test_an_iteration_whose_parts_wait_for_a_worker_goes_on(make_script):
    script = make_script(pb.EXCLUSIVE)
    request, _ = script.asked()
    script.give(request, [5], end=True)
    assert script.next() == 5
    for _ in range(2):
        script.beat({1: 0}, waiting=1)
    script.beat({1: 0, 2: 1})
    request, _ = script.asked(2)
    script.give(request, [6], end=True)
    assert script.next() == 6


def test_replies_are_taken_in_the_order_of_the_requests(make_script):
    script = make_script()
    first, second = (script.asked()[0] for _ in range(2))
    script.give(second, [2], first=1)
    script.give(first, [1])
    assert script.read(2) == [1, 2]


def test_an_empty_reply_is_followed_by_another_request(make_script):
    script = make_script()
    request, body = script.asked()
    assert (body.sequence, body.hold) == (0, True)
    script.give(request, [])
    following = [script.asked() for _ in range(2)]  # kept, because a dropped request is answered
    assert [body.sequence for _, body in following] == [1, 2]


def test_no_more_than_the_limit_is_asked_for_or_held(make_script):
    script = make_script(max_outstanding_requests=3)
    requests = [script.asked() for _ in range(2)]
    asked = sum(body.max_elements for _, body in requests)
    assert asked <= 3
    for request, body in requests:
        script.give(request, list(range(body.max_elements)))
    more = []
    while asked + sum(body.max_elements for _, body in more) < 3:
        more.append(script.asked())
    # The buffer is full. Two heartbeat rounds show that the consumer requests no more.
    for _ in range(2):
        script.beat({1: 0})
    assert script.nothing_asked()
    script.next()
    script.next()  # the second element completes the first frame
    assert script.asked()


def test_elements_that_came_with_an_error_are_given_first(make_script):
    script = make_script(pb.EXCLUSIVE)
    request, _ = script.asked()
    failure = pack_elements(KeyError("bad")).pickle
    script.give(request, [1, 2], failure=failure)
    assert script.read(2) == [1, 2]
    for _ in range(2):
        with pytest.raises(KeyError, match="bad"):
            script.next()


def test_elements_that_others_get_because_of_an_error_are_not_used(make_script):
    script = make_script()
    (request, _), (second, _) = script.asked(), script.asked()
    script.give(request, [1, 2, 3])
    assert script.next() == 1
    script.give(second, [4], first=3, failure=pack_elements(KeyError("bad")).pickle)
    said = script.left()
    with pytest.raises(KeyError, match="bad"):
        script.next()
    # The consumer has reported exactly the used elements.
    assert RangeSet(bounds(said.used).get(0, [0, 1])).bounds == [0, 1]


def test_nothing_is_used_unless_the_dispatcher_has_answered_for_a_while(make_script):
    script = make_script()
    request, _ = script.asked()
    script.give(request, [1, 2, 3])
    assert script.next() == 1
    first, _ = script.heartbeat()
    script.buffer.extend_lease(time.monotonic())  # the lease ends now
    later = script.next_later()
    # An answer to the earlier heartbeat does not extend the lease. The consumer sends a new
    # heartbeat that asks for an answer at once.
    second, said = script.heartbeat()
    assert said.version == -1
    assert not later.done()
    script.tell(first, {1: 0})
    assert not later.done()
    script.tell(second, {1: 0})
    assert later.result() == 2


def test_nothing_is_used_when_it_ends_without_an_answer(make_script):
    script = make_script()
    request, _ = script.asked()
    script.give(request, [1, 2, 3])
    assert script.next() == 1
    script.buffer.extend_lease(0.0)
    later = script.next_later()
    script.buffer.finish(UnavailableError("the dispatcher is gone"))
    with pytest.raises(UnavailableError, match="is gone"):
        later.result()


def test_what_is_dropped_on_the_fetching_thread_waits_for_no_lock_of_that_thread(make_script):
    script = make_script()
    request, _ = script.asked()
    put = script.buffer.put

    def collect_garbage(frame):
        # As if the garbage collector had run while this thread held the lock.
        with script.fetcher._wake._lock:
            script.buffer.close()
        put(frame)

    script.buffer.put = collect_garbage
    script.give(request, [1])
    script.left()


# Reports of used elements to the dispatcher and the workers.


def test_workers_hear_what_is_used_with_the_next_request(make_script):
    script = make_script()
    first, second = (script.asked()[0] for _ in range(2))
    script.give(first, [0, 1])
    assert script.next() == 0
    script.give(second, [2], first=2)
    assert script.read(2) == [1, 2]
    used = RangeSet()
    while used.bounds != [0, 3]:
        request, body = script.asked()
        used.update(RangeSet(body.used.bounds))
        script.give(request, [])


def test_used_is_said_once_when_it_was_heard(make_script):
    script = make_script()
    request, _ = script.asked()
    script.give(request, [0, 1])
    assert script.next() == 0
    told = []
    while [0, 1] not in told:
        told.append(bounds(script.beat({1: 0}).used).get(0))
    assert script.next() == 1
    while [1, 2] not in told:
        told.append(bounds(script.beat({1: 0}).used).get(0))
    assert [each for each in told if each] == [[0, 1], [1, 2]]
    assert bounds(script.beat({1: 0}).used) == {}


def test_where_consumers_say_what_they_want_a_number_is_enough(make_script):
    script = make_script(pb.EXCLUSIVE, begin={0: 3})
    request, _ = script.asked()
    script.give(request, [3, 4, 5], first=3)
    assert script.next() == 3
    told = []
    while {0: [0, 4]} not in told:
        told.append(bounds(script.beat({1: 0}).used))
    assert [each for each in told if each] == [{0: [0, 4]}]


def test_used_is_said_again_after_a_heartbeat_that_failed(make_script):
    script = make_script()
    request, _ = script.asked()
    script.give(request, [0, 1, 2])
    assert script.next() == 0
    while not bounds((beat := script.heartbeat())[1].used):
        script.tell(beat[0], {1: 0})
    assert script.next() == 1
    beat[0].fail(UnavailableError("restarting"))
    again, body = script.heartbeat()
    assert bounds(body.used) == {0: [0, 2]}
    again.fail(UnavailableError("restarting"))
    assert bounds(script.beat({1: 0}).used) == {0: [0, 2]}
    assert bounds(script.beat({1: 0}).used) == {}
    script.buffer.close()
    assert bounds(script.left().used) == {}


def test_a_consumer_says_last_what_it_has_not_said(make_script):
    script = make_script()
    beat, _ = script.heartbeat()
    request, _ = script.asked()
    script.give(request, [0, 1, 2])
    assert script.read(2) == [0, 1]
    script.buffer.close()
    assert bounds(script.left().used) == {0: [0, 2]}
    beat.reply(b"")


def test_a_dispatcher_that_is_away_for_a_while_stops_nobody(make_script):
    script = make_script()
    for number in range(3):
        script.heartbeat()[0].fail(UnavailableError("restarting"))
        request, _ = script.asked()
        script.give(request, [number], first=number)
        assert script.next() == number


def test_a_dispatcher_that_is_away_for_good_is_an_error(make_script):
    script = make_script(start_timeout_s=0.2)
    while script.thread.is_alive():
        with contextlib.suppress(queue.Empty):
            script.heartbeat(0.1)[0].fail(UnavailableError("gone for good"))
    with pytest.raises(UnavailableError, match="gone for good"):
        script.next()
