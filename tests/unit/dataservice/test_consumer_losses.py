"""A consumer whose workers are lost, come, and give back."""

import logging

import pytest
from _cases.data_consumer import Script, bounds

from dataservice.proto import dataservice_pb2 as pb
from dataservice.read import fetcher
from mpidist.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)


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


def beat_until(script, found, tasks, **others):
    """Answer heartbeats until one says something."""
    while not found(body := script.beat(tasks, **others)):
        pass
    return body


def test_a_lost_task_is_settled_with_what_is_in_hand_and_nothing_more_is_taken_of_it(make_script):
    script = make_script()
    (request, _), (late, _) = script.asked(), script.asked()
    script.give(request, [0, 1, 2])
    assert script.next() == 0
    script.beat({}, settle=[1], waiting=1)
    beat, body = script.heartbeat()
    assert list(body.settled) == [1]
    assert bounds(body.held) == {0: [1, 3]}
    script.give(late, [3], first=3)
    script.tell(beat, {}, waiting=1)
    body = script.beat({2: 0})
    assert not body.settled
    assert not body.held
    request, body = script.asked(2)
    assert body.sequence == 0
    script.give(request, [4], first=4)
    assert script.read(3) == [1, 2, 4]


def test_a_task_is_settled_again_if_that_was_not_heard(make_script):
    script = make_script()
    request, _ = script.asked()
    script.give(request, [0, 1, 2])
    assert script.next() == 0
    script.beat({}, settle=[1], waiting=1)
    beat, _ = script.heartbeat()
    assert script.next() == 1
    beat.fail(UnavailableError("restarting"))
    body = script.beat({}, waiting=1)
    assert (list(body.settled), bounds(body.held)) == ([1], {0: [2, 3]})
    assert bounds(body.used)[0][-1] == 2


def test_a_part_that_another_worker_got_is_sought_from_where_the_stream_is(make_script):
    script = make_script(pb.EXCLUSIVE, begin={0: 5})
    (request, body), (late, _) = script.asked(), script.asked()
    assert (body.seek, body.start, body.period, body.offset) == (True, 5, 1, 0)
    script.give(request, [5, 6, 7], first=5)
    assert script.next() == 5
    script.beat({2: 0})
    request, body = script.asked(2)
    assert (body.seek, body.start, body.acknowledged) == (True, 8, 6)
    script.give(late, ["late"], first=8)
    script.give(request, [8], first=8, end=True)
    assert script.read(3) == [6, 7, 8]


def test_later_requests_do_not_seek_and_say_what_is_used(make_script):
    script = make_script(pb.EXCLUSIVE)
    request, _ = script.asked()
    script.give(request, [0, 1])
    assert script.next() == 0
    acknowledged = 0
    while acknowledged < 1:
        request, body = script.asked()
        assert not body.seek
        acknowledged = body.acknowledged
        script.give(request, [])
    assert acknowledged == 1


def test_replies_of_an_old_plan_are_ignored(make_script):
    script = make_script(pb.DETERMINISTIC, tasks={1: 0, 2: 1}, consumers=2)
    calls = {1: [], 2: []}
    while min(len(each) for each in calls.values()) < 2:
        request, body = script.asked()
        calls[body.task_id].append((request, body))
    body = calls[1][0][1]
    assert (body.seek, body.period, body.offset, body.consumer_index) == (True, 1, 0, 0)
    script.give(calls[1][0][0], [(0, 0), (0, 1), (0, 2)])
    assert script.next() == (0, 0)
    # Part 1 has two elements: from the second round on, every other one of part 0 is ours.
    script.give(calls[2][0][0], [], stop=2, end=True)
    assert script.next() == (0, 1)
    script.give(calls[1][1][0], [(0, 3), (0, 4)], first=3)
    request, body = script.asked(1)
    while not body.seek:
        script.give(request, [("of the old plan", 5)], first=5)
        request, body = script.asked(1)
    assert (body.start, body.period, body.offset) == (2, 2, 0)
    script.give(request, [(0, 2), (0, 4), (0, 6)], first=2, stop=8)
    assert script.read(3) == [(0, 2), (0, 4), (0, 6)]


def test_elements_that_another_consumer_gave_back_at_the_end(make_script):
    script = make_script()
    (request, _), (second, _) = script.asked(), script.asked()
    script.give(request, [0], end=True)
    script.give(second, [], end=True)
    assert script.next() == 0
    later = script.next_later()
    script.beat_at_end({1: 0}, over=False)
    (request, _), (second, _) = script.asked(), script.asked()
    script.give(request, [7], first=7, end=True)
    script.give(second, [], end=True)
    assert later.result() == 7
    later = script.next_later()
    script.beat_at_end({1: 0}, over=True)
    with pytest.raises(StopIteration):
        later.result()


def test_who_has_something_left_does_not_ask_about_the_end(make_script):
    script = make_script()
    (request, _), (second, _) = script.asked(), script.asked()
    script.give(request, [0, 1], end=True)
    script.give(second, [], end=True)
    assert script.next() == 0
    assert not any(script.beat({1: 0}).at_end for _ in range(3))
    assert script.next() == 1
    later = script.next_later()
    script.beat_at_end({1: 0}, over=True)
    with pytest.raises(StopIteration):
        later.result()


def test_who_is_asked_whether_it_is_there_says_so_at_once(make_script, monkeypatch):
    monkeypatch.setattr(fetcher, "HEARTBEAT_S", 1000)
    script = make_script()
    script.asked()
    for _ in range(3):
        script.beat({1: 0}, beat_soon=True)
    assert not script.heartbeat()[1].at_end


def test_who_was_given_up_uses_nothing_more_of_what_it_has(make_script):
    script = make_script()
    (request, _), (second, _) = script.asked(), script.asked()
    script.give(request, [0, 1])
    script.give(second, [2], first=2)
    assert script.next() == 0
    beat, _ = script.heartbeat()
    beat.fail(NotFoundError("consumer 1 is not known"))
    script.thread.join(10)
    with pytest.raises(NotFoundError, match="is not known"):
        script.next()


@pytest.mark.parametrize("error", [CancelledError, NotFoundError, UnavailableError])
def test_a_worker_that_is_gone_is_told_to_the_dispatcher(make_script, error):
    script = make_script(pb.EXCLUSIVE)
    request, _ = script.asked()
    script.give(request, [0])
    request, _ = script.asked()
    request.fail(error("it was stopped"))
    body = beat_until(script, lambda body: body.unreachable, {1: 0})
    assert list(body.unreachable) == [1]
    script.beat({2: 0})
    request, body = script.asked(2)
    assert (body.seek, body.start) == (True, 1)
    script.give(request, [1], first=1)
    assert script.read(2) == [0, 1]
    assert not beat_until(script, lambda body: not body.unreachable, {2: 0}).unreachable


def test_one_worker_that_is_gone_leaves_the_others(make_script):
    script = make_script(tasks={1: 0, 2: 1})
    request, _ = script.asked(1)
    request.fail(UnavailableError("gone"))
    request, _ = script.asked(2)
    script.give(request, [5])
    assert script.next() == 5


def test_without_workers_there_is_an_error_after_a_while(make_script):
    script = make_script(tasks={}, start_timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"no data worker has registered .*within 0.2 s"):
        script.next()


def test_the_loss_of_all_workers_is_an_error_that_names_them(make_script):
    script = make_script(start_timeout_s=0.2)
    request, _ = script.asked()
    request.fail(UnavailableError("the plug was pulled"))
    with pytest.raises(UnavailableError, match=f"{script.address}.*the plug was pulled"):
        script.next()


def test_a_worker_whose_dispatcher_has_stopped_is_an_error(make_script):
    script = make_script()
    request, _ = script.asked()
    request.fail(AbortedError("the dispatcher is gone"))
    with pytest.raises(UnavailableError, match=r"task 1.*the dispatcher is gone"):
        script.next()


def test_an_element_that_is_not_kept_any_more_is_an_error(make_script):
    script = make_script(pb.EXCLUSIVE)
    request, _ = script.asked()
    request.fail(FailedPreconditionError("element 0 has been used"))
    with pytest.raises(FailedPreconditionError, match="element 0"):
        script.next()


def test_a_consumer_that_the_dispatcher_has_forgotten_is_an_error(make_script):
    script = make_script()
    script.heartbeat()[0].fail(NotFoundError("consumer 1 is not known"))
    with pytest.raises(NotFoundError, match="consumer 1"):
        script.next()


def test_parts_that_are_given_up_are_told_once(make_script, caplog):
    caplog.set_level(logging.WARNING)
    script = make_script()
    for dropped in (2, 2, 3):
        script.beat({1: 0}, dropped=dropped)
    script.heartbeat()
    told = [record.message for record in caplog.records if "lost with their" in record.message]
    assert [message.split()[0] for message in told] == ["2", "1"]
