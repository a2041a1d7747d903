"""Elements that every trainer gets, if it is not too late."""

import pytest
from _cases.data_buffer import Box

from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.buffers import CrossTrainerBuffer
from mpidist.errors import CancelledError, FailedPreconditionError


def make(limit=1 << 30, start=0):
    box = Box(lambda tell: CrossTrainerBuffer("task 2", pb.Checkpoint(index=start), limit))
    box.made = start
    return box


def client_of(name):
    return sum(name.encode())


def read(box, trainer, count, client=None):
    """So many elements for a trainer; they are numbers, made when there is room for them."""
    got = []
    client = client or client_of(trainer)
    while len(got) < count:
        request = box.ask(client, 1, trainer_id=trainer)
        while request.body is None:
            box.put(box.made)
            box.made += 1
        got += request.elements
    return got


def test_a_second_trainer_gets_the_same_elements():
    box = make()
    for trainer in ("a", "b"):
        assert read(box, trainer, 5) == [0, 1, 2, 3, 4]
    assert box.made == 5


def test_the_same_trainer_gets_new_elements_the_second_time():
    box = make()
    assert read(box, "a", 3, client=1) == [0, 1, 2]
    assert read(box, "a", 3, client=2) == [3, 4, 5]
    box.buffer.release(1, [])
    box.buffer.release(2, [])
    assert read(box, "a", 1, client=3) == [6]


def test_trainers_in_lock_step_see_the_same():
    box = make()
    for round_number in range(10):
        for trainer in "abcdef":
            assert read(box, trainer, 1) == [round_number]


def test_a_slow_reader_loses_what_fell_out_and_gets_as_many_as_it_asked_for():
    box = make(limit=100)  # three numbers of 28 bytes, as Python counts them
    assert read(box, "slow", 1, 1) == [0]
    read(box, "fast", 20, 2)
    kept = box.buffer.needed
    assert 0 < kept < 20
    assert read(box, "slow", 5, 1) == list(range(kept, kept + 5))
    assert box.ask(3, trainer_id="late").indices[0] == box.buffer.needed


def test_a_window_of_one_element_only_degrades():
    box = make(limit=0)
    assert read(box, "a", 5, 1) == [0, 1, 2, 3, 4]
    assert read(box, "b", 3, 2) == [4, 5, 6]


def test_little_is_made_ahead_of_the_fastest_trainer():
    box = make()
    box.put(0, 1)
    third = box.begin_put(2)
    assert third.is_alive()
    assert box.ask(1, 1, trainer_id="a").elements == [0]
    third.join(10)
    assert not third.is_alive()
    assert box.begin_put(3).is_alive()
    box.buffer.close(CancelledError("stopped"))


def test_a_worker_that_was_restarted_begins_again():
    box = make()
    read(box, "a", 5, 1)
    assert read(make(), "a", 2, 1) == [0, 1]


def test_an_end_is_an_error_that_is_told_to_everybody():
    box = make()
    box.put(0)
    with pytest.raises(FailedPreconditionError, match="ended after 1 elements") as caught:
        box.buffer.end()
    box.buffer.fail(caught.value)
    for client, trainer in enumerate("ab"):
        assert box.ask(client, trainer_id=trainer).elements == [0]
        assert box.ask(client, trainer_id=trainer).body.failure
