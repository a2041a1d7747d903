"""The common behaviour of all buffers, and first-come buffers."""

import threading
from itertools import permutations

import numpy as np
import pytest
from _cases.data_buffer import Box

from dataservice.payload import unpack
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.work.buffers import FirstComeBuffer
from mpidist.errors import CancelledError

WHERE = "data worker 1, task 2"


def make(start=0, used=(), held=(), keeps=True):
    sets = {client: RangeSet(bounds) for client, bounds in dict(held).items()}
    return Box(
        lambda tell: FirstComeBuffer(
            WHERE, pb.Checkpoint(index=start), tell, RangeSet(used), sets, keeps
        )
    )


@pytest.fixture
def box():
    return make()


def test_a_request_is_held_until_there_is_an_element(box):
    request = box.ask()
    assert request.body is None
    box.put(5)
    assert (request.elements, request.body.end, request.indices) == ([5], False, (0, 1))


def test_the_end_is_pushed_to_all_who_wait(box):
    first, second = box.ask(client=1), box.ask(client=2)
    box.buffer.end()
    assert first.body.end
    assert second.body.end
    assert box.told == 1


def test_the_end_comes_with_the_last_elements(box):
    box.put(1, 2)
    box.buffer.end()
    assert box.told == 0
    first = box.ask(most=1)
    assert (first.elements, first.body.end) == ([1], False)
    second = box.ask()
    assert (second.elements, second.body.end) == ([2], True)
    assert box.ask().body.end
    assert box.told == 1


def test_small_elements_share_a_reply(box):
    box.put(*range(10))
    assert box.ask(most=4).elements == [0, 1, 2, 3]
    assert box.ask(most=100).elements == [4, 5, 6, 7, 8, 9]


def test_large_elements_do_not(box):
    large = np.zeros(2 << 20, np.uint8)
    box.put(large, large)
    assert len(box.ask().elements) == 1


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_elements_come_in_order_whatever_overtakes(box, order):
    requests = {sequence: box.ask(most=1, sequence=sequence) for sequence in order}
    box.put(*range(3))
    assert [requests[sequence].elements for sequence in range(3)] == [[0], [1], [2]]


def test_a_request_that_does_not_wait(box):
    held = box.ask(client=1)
    impatient = box.ask(client=2, hold=False)
    assert (impatient.body.count, impatient.body.end) == (0, False)
    assert held.body is None


def test_elements_before_an_error_are_given_and_the_error_to_everybody(box):
    box.put(1)
    box.buffer.fail(KeyError("bad"))
    assert box.ask(client=1, most=1).elements == [1]
    for client in (1, 2, 1):
        error = unpack(box.ask(client=client).body.failure, ())
        assert isinstance(error, KeyError)
        assert WHERE in error.__notes__[0]
    assert box.told == 0


def test_elements_that_cannot_be_pickled_fail_the_task(box):
    box.put(threading.Lock(), 1)
    error = unpack(box.ask().body.failure, ())
    assert isinstance(error, TypeError)
    assert isinstance(unpack(box.ask().body.failure, ()), TypeError)


def test_what_was_lost_is_not_drained(box):
    box.put(threading.Lock())
    assert box.ask().body.failure
    assert box.buffer.put(1) is False
    box.buffer.end()
    box.ask()
    assert box.told == 0


def test_what_was_given_up_is_not_drained(box):
    box.put(1)
    box.buffer.close(CancelledError("stopped"))
    box.buffer.end()
    assert box.told == 0


def test_who_has_left_gets_nothing(box):
    gone, stays = box.ask(client=1), box.ask(client=2)
    box.buffer.release(1, [])
    box.put(7)
    assert gone.body is None
    assert stays.elements == [7]


def test_a_request_held_for_long_is_answered_with_nothing(box):
    request = box.ask()
    box.buffer.refresh(2)
    assert request.body is None
    box.buffer.refresh(2)
    assert (request.body.count, request.body.end) == (0, False)
    again = box.ask()
    box.put(3)
    assert again.elements == [3]


def test_closing_fails_what_is_held_and_what_comes(box):
    held, early = box.ask(sequence=0), box.ask(sequence=2)
    box.buffer.close(CancelledError("stopped"))
    assert [str(request.error) for request in (held, early, box.ask())] == ["stopped"] * 3
    assert box.buffer.put(1) is False


def test_a_runner_waits_for_room_and_is_freed_by_reading_or_closing(box):
    large = np.zeros(40 << 20, np.uint8)
    results = []

    def run():
        results.extend(box.buffer.put(large) for _ in range(4))

    runner = threading.Thread(target=run)
    runner.start()
    # The buffer has room for two results. A read admits the third, and then the fourth waits.
    while len(box.ask(hold=False).elements) == 0:
        pass
    assert box.fills_at(3)
    assert runner.is_alive()
    box.buffer.close(CancelledError("stopped"))
    runner.join(10)
    assert not runner.is_alive()
    assert results == [True, True, True, False]


# Elements that consumers hold unused.


def test_what_a_consumer_has_not_used_goes_to_another_when_it_leaves(box):
    box.put(*range(6))
    assert box.ask(client=1, most=4).elements == [0, 1, 2, 3]
    box.buffer.release(1, [0, 1])
    back = box.ask(client=2, most=10)
    assert (back.elements, back.indices) == ([1, 2, 3, 4, 5], (1, 6))


def test_what_a_consumer_says_with_its_requests_is_used(box):
    box.put(*range(6))
    box.ask(client=1, most=4)
    box.ask(client=1, most=1, used=pb.Ranges(bounds=[0, 1, 2, 3]))
    box.buffer.release(1, [])
    replies = [box.ask(client=2) for _ in range(2)]
    assert [(reply.elements, reply.indices[0]) for reply in replies] == [([1], 1), ([3, 4, 5], 3)]


def test_an_end_that_was_told_is_taken_back_for_what_comes_back(box):
    box.put(0, 1)
    box.buffer.end()
    box.ask(client=1)
    assert box.ask(client=2).body.end
    box.buffer.release(1, [0, 1])
    again = box.ask(client=2)
    assert (again.elements, again.body.end) == ([1], True)
    assert box.told == 1


def test_a_waiting_request_gets_what_comes_back(box):
    box.put(0, 1)
    box.ask(client=1)
    waiting = box.ask(client=2)
    box.buffer.release(1, [])
    assert waiting.elements == [0, 1]


def test_needed_is_what_nobody_has_used(box):
    assert box.buffer.needed == 0
    box.put(*range(6))
    box.ask(client=1, most=2)
    box.ask(client=2, most=2)
    assert box.buffer.needed == 0
    box.ask(client=1, most=1, used=pb.Ranges(bounds=[0, 2]))
    assert box.buffer.needed == 2
    box.buffer.release(2, [])
    assert box.buffer.needed == 2
    box.ask(client=1, used=pb.Ranges(bounds=[4, 5]))
    assert box.ask(client=1, used=pb.Ranges(bounds=[2, 4])).elements == [5]
    assert box.buffer.needed == 5
    box.ask(client=1, hold=False, used=pb.Ranges(bounds=[5, 6]))
    assert box.buffer.needed == 6


def test_without_keeping_what_was_given_is_gone():
    box = make(keeps=False)
    box.put(0, 1)
    box.ask(client=1)
    box.buffer.release(1, [])
    assert box.ask(client=2, hold=False).elements == []
    assert box.buffer.needed == 2


# After the loss of a worker.


def test_a_task_goes_on_without_what_is_used():
    box = make(start=2, used=[0, 4, 5, 6])
    box.put(*range(2, 8))
    replies = [box.ask() for _ in range(2)]
    assert [(reply.elements, reply.indices[0]) for reply in replies] == [([4], 4), ([6, 7], 6)]


def test_what_a_consumer_holds_is_given_to_others_only_when_it_leaves():
    box = make(held={1: [1, 3], 9: [4, 5]})
    box.put(*range(6))
    assert [box.ask(client=2).elements for _ in range(3)] == [[0], [3], [5]]
    assert box.buffer.needed == 0
    box.buffer.release(1, [1, 2])
    assert box.ask(client=2).elements == [2]
    assert box.ask(client=2, hold=False).elements == []


def test_what_a_consumer_held_and_used_before_it_was_made_again():
    box = make(held={1: [1, 3]})
    box.buffer.release(1, [1, 2])
    box.put(*range(4))
    replies = [box.ask(client=2) for _ in range(2)]
    assert [reply.elements for reply in replies] == [[0], [2, 3]]


def test_the_end_waits_for_no_consumer_that_holds_something():
    box = make(held={1: [0, 2]})
    box.put(0, 1)
    box.buffer.end()
    assert box.told == 1
    assert box.ask(client=2).body.end
