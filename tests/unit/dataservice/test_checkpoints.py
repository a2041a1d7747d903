import pickle
import threading

import pytest

from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.task import LARGEST_STATE, Checkpoints
from mpidist.errors import UnimplementedError

FIRST = pb.Checkpoint(index=3, state=b"first", position=2)


class Elements:
    """An iterator of which only the state is asked; a state is how often it was."""

    def __init__(self):
        self.states = 0

    def get_state(self):
        self.states += 1
        return self.states


class Stateless:
    def get_state(self):
        raise UnimplementedError("a generator cannot say")


def take(checkpoints, *indices, needed=0, elements=None):
    elements = elements or Elements()
    for index in indices:
        checkpoints.take(index, elements, lambda index=index: index + 1, needed)
    return elements


def test_without_any_a_part_goes_on_from_where_it_began():
    checkpoints = Checkpoints(FIRST, "task 2")
    assert checkpoints.before(100) == FIRST
    assert checkpoints.report(100) is None


def test_the_newest_one_that_is_not_after_an_element():
    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10, 20, 30)
    indices = {i: checkpoints.before(i).index for i in (9, 10, 19, 20, 29, 1000)}
    assert indices == {9: 3, 10: 10, 19: 10, 20: 20, 29: 20, 1000: 30}


def test_a_checkpoint_has_the_state_and_the_split_of_its_time():
    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10, 20)
    taken = checkpoints.before(20)
    assert pickle.loads(taken.state) == 2
    assert taken.position == 21


def test_where_it_is_is_asked_after_the_state():
    asked = []

    class Told(Elements):
        def get_state(self):
            asked.append("state")
            return 0

    def where():
        asked.append("where")
        return 0

    Checkpoints(FIRST, "task 2").take(1, Told(), where, 0)
    assert asked == ["state", "where"]


def test_what_is_before_the_newest_that_nobody_is_behind_is_forgotten():
    checkpoints = Checkpoints(FIRST, "task 2")
    elements = take(checkpoints, 10, 20)
    take(checkpoints, 30, needed=25, elements=elements)
    assert checkpoints.before(25).index == 20
    assert checkpoints.before(19) == FIRST
    take(checkpoints, 40, needed=30, elements=elements)
    assert checkpoints.before(29) == FIRST
    assert [checkpoints.before(index).index for index in (30, 40)] == [30, 40]


def test_one_is_kept_however_much_is_used():
    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10, 20, needed=1000)
    assert checkpoints.before(1000).index == 20


def test_what_has_no_state_is_asked_once():
    checkpoints = Checkpoints(FIRST, "task 2")
    assert checkpoints.is_due()
    take(checkpoints, 10, elements=Stateless())
    assert not checkpoints.is_due()
    assert checkpoints.report(100) is None
    with pytest.raises(UnimplementedError, match="a generator cannot say"):
        checkpoints.before(100)


def test_it_is_not_due_at_once_again(monkeypatch):
    now = 100.0
    monkeypatch.setattr("dataservice.work.task.time.monotonic", lambda: now)
    checkpoints = Checkpoints(FIRST, "task 2")
    assert checkpoints.is_due()
    take(checkpoints, 10)
    assert not checkpoints.is_due()
    now += 1.0
    assert checkpoints.is_due()


def test_states_that_cost_much_are_taken_seldom(monkeypatch):
    now = 100.0
    monkeypatch.setattr("dataservice.work.task.time.monotonic", lambda: now)

    class Slow(Elements):
        def get_state(self):
            nonlocal now
            now += 2.0
            return 0

    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10, elements=Slow())
    now += 90.0
    assert not checkpoints.is_due()
    now += 11.0
    assert checkpoints.is_due()


def test_a_state_that_cannot_be_pickled_is_an_error_when_it_is_wanted():
    class Odd(Elements):
        def get_state(self):
            return threading.Lock()

    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10, elements=Odd())
    with pytest.raises(UnimplementedError, match="cannot be pickled"):
        checkpoints.before(10)
    assert checkpoints.report(10) is None
    assert not checkpoints.is_due()


def test_the_dispatcher_gets_the_newest_that_is_not_after_what_is_needed_once():
    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10, 20)
    assert checkpoints.report(9) is None
    assert checkpoints.report(29).index == 20
    assert checkpoints.report(29) is None
    take(checkpoints, 30)
    assert checkpoints.report(100).index == 30


def test_the_dispatcher_gets_no_state_that_is_too_large(caplog):
    class Large(Elements):
        def get_state(self):
            return bytes(LARGEST_STATE + 1)

    checkpoints = Checkpoints(FIRST, "task 2")
    take(checkpoints, 10)
    take(checkpoints, 20, 30, elements=Large())
    assert checkpoints.report(25).index == 10
    assert checkpoints.report(100) is None
    assert len(checkpoints.before(30).state) > LARGEST_STATE
    assert len(caplog.messages) == 1
    assert "task 2: the state of its iterator has about" in caplog.text


def test_one_that_is_wanted_early_is_due_unless_there_are_none():
    checkpoints = Checkpoints(FIRST, "task 2", 3600.0)
    take(checkpoints, 10)
    assert not checkpoints.is_due()
    assert checkpoints.is_due(early=True)
    take(checkpoints, 20, elements=Stateless())
    assert not checkpoints.is_due(early=True)
