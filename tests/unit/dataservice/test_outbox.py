"""The outbox without endpoints: requests that remember their answers."""

import threading
from itertools import permutations

import numpy as np
import pytest

from dataservice.outbox import Outbox
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import unpack
from mpidist.errors import CancelledError


class FakeRequest:
    def __init__(self):
        self.body = None
        self.elements = []
        self.error = None

    def reply(self, body=b"", buffers=()):
        assert self.body is None
        self.body = pb.GetElementReply.FromString(body)
        self.elements = list(unpack(self.body.pickle, buffers)) if self.body.count else []
        assert len(self.elements) == self.body.count

    def fail(self, error):
        self.error = error


class Box:
    def __init__(self):
        self.drained = 0
        self.outbox = Outbox("data worker 1, task 2", self._count)
        self._sequence = {}

    def _count(self):
        self.drained += 1

    def ask(self, client=1, most=10, hold=True, sequence=None):
        if sequence is None:
            sequence = self._sequence.get(client, 0)
            self._sequence[client] = sequence + 1
        request = FakeRequest()
        body = pb.GetElementRequest(
            client_id=client, max_elements=most, hold=hold, sequence=sequence
        )
        self.outbox.ask(request, body)
        return request


@pytest.fixture
def box():
    return Box()


def test_a_request_is_held_until_there_is_an_element(box):
    request = box.ask()
    assert request.body is None
    box.outbox.put(5)
    assert (request.elements, request.body.end) == ([5], False)


def test_the_end_is_pushed_to_all_who_wait(box):
    first, second = box.ask(client=1), box.ask(client=2)
    box.outbox.end()
    assert first.body.end
    assert second.body.end
    assert box.drained == 1


def test_the_end_comes_with_the_last_elements(box):
    box.outbox.put(1)
    box.outbox.put(2)
    box.outbox.end()
    assert box.drained == 0
    first = box.ask(most=1)
    assert (first.elements, first.body.end) == ([1], False)
    second = box.ask()
    assert (second.elements, second.body.end) == ([2], True)
    assert box.ask().body.end
    assert box.drained == 1


def test_small_elements_share_a_reply(box):
    for i in range(10):
        box.outbox.put(i)
    assert box.ask(most=4).elements == [0, 1, 2, 3]
    assert box.ask(most=100).elements == [4, 5, 6, 7, 8, 9]


def test_large_elements_do_not(box):
    large = np.zeros(2 << 20, np.uint8)
    box.outbox.put(large)
    box.outbox.put(large)
    assert len(box.ask().elements) == 1


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_elements_come_in_order_whatever_overtakes(box, order):
    requests = {sequence: box.ask(most=1, sequence=sequence) for sequence in order}
    for i in range(3):
        box.outbox.put(i)
    assert [requests[sequence].elements for sequence in range(3)] == [[0], [1], [2]]


def test_a_request_that_does_not_wait(box):
    held = box.ask(client=1)
    impatient = box.ask(client=2, hold=False)
    assert (impatient.body.count, impatient.body.end) == (0, False)
    assert held.body is None


def test_elements_before_an_error_are_given_and_the_error_to_everybody(box):
    box.outbox.put(1)
    box.outbox.fail(KeyError("bad"))
    assert box.ask(client=1, most=1).elements == [1]
    for client in (1, 2, 1):
        error = unpack(box.ask(client=client).body.failure, ())
        assert isinstance(error, KeyError)
        assert "data worker 1, task 2" in error.__notes__[0]
    assert box.drained == 0


def test_elements_that_cannot_be_pickled_fail_the_task(box):
    box.outbox.put(threading.Lock())
    box.outbox.put(1)
    error = unpack(box.ask().body.failure, ())
    assert isinstance(error, TypeError)
    assert isinstance(unpack(box.ask().body.failure, ()), TypeError)


def test_what_was_lost_is_not_drained(box):
    box.outbox.put(threading.Lock())
    assert box.ask().body.failure
    assert box.outbox.put(1) is False
    box.outbox.end()
    box.ask()
    assert box.drained == 0


def test_what_was_given_up_is_not_drained(box):
    box.outbox.put(1)
    box.outbox.close(CancelledError("stopped"))
    box.outbox.end()
    assert box.drained == 0


def test_who_has_left_gets_nothing(box):
    gone, stays = box.ask(client=1), box.ask(client=2)
    box.outbox.release(1)
    box.outbox.put(7)
    assert gone.body is None
    assert stays.elements == [7]


def test_a_request_held_for_long_is_answered_with_nothing(box):
    request = box.ask()
    box.outbox.refresh(2)
    assert request.body is None
    box.outbox.refresh(2)
    assert (request.body.count, request.body.end) == (0, False)
    again = box.ask()
    box.outbox.put(3)
    assert again.elements == [3]


def test_closing_fails_what_is_held_and_what_comes(box):
    held, early = box.ask(sequence=0), box.ask(sequence=2)
    box.outbox.close(CancelledError("stopped"))
    assert [str(request.error) for request in (held, early, box.ask())] == ["stopped"] * 3
    assert box.outbox.put(1) is False


def test_a_runner_waits_for_room_and_is_freed_by_reading_or_closing(box):
    large = np.zeros(40 << 20, np.uint8)
    results = []

    def run():
        results.extend(box.outbox.put(large) for _ in range(4))

    runner = threading.Thread(target=run)
    runner.start()
    # Two lie there, the third waits; reading one lets the third in, and the fourth wait.
    while len(box.ask(hold=False).elements) == 0:
        pass
    runner.join(0.05)
    assert runner.is_alive()
    box.outbox.close(CancelledError("stopped"))
    runner.join(10)
    assert not runner.is_alive()
    assert results == [True, True, True, False]
