"""Answers: a request that comes again is not carried out again."""

from hypothesis import given
from hypothesis import strategies as st

from mpidist.endpoint import answers as module
from mpidist.endpoint.answers import Answers
from mpidist.endpoint.message import REPLY, Message


def reply(identity):
    return Message(REPLY, identity)


def test_life_of_a_request():
    answers = Answers()
    assert answers.admit(7)
    assert not answers.admit(7)
    assert answers.get(7) is None  # under way
    answer = reply(7)
    answers.store(7, answer)
    assert not answers.admit(7)
    assert answers.get(7) is answer
    answers.settle([7])
    assert not answers.admit(7)
    assert answers.get(7) is None
    answers.store(7, answer)  # a handler that answers twice
    assert answers.get(7) is None


def test_what_was_never_asked_is_not_kept():
    answers = Answers()
    answers.store(3, reply(3))
    answers.settle([3, 4])
    assert answers.get(3) is None
    assert answers.admit(3)


def test_old_ones_are_forgotten_and_stay_refused(monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 10)
    answers = Answers()
    for identity in range(1, 1001):
        assert answers.admit(identity)
        answers.settle([identity])
        assert len(answers._answers) <= 11
    assert not any(answers.admit(identity) for identity in range(1, 1001))
    assert answers.admit(1001)


def test_one_that_waits_does_not_keep_those_behind_it(monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 10)
    answers = Answers()
    for identity in range(1, 1001):
        assert answers.admit(identity)
        if identity != 5:
            answers.settle([identity])
    assert len(answers._answers) <= 11
    answers.store(5, reply(5))
    assert answers.get(5) is not None
    assert not any(answers.admit(identity) for identity in range(1, 1001))


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from("rsa")), max_size=80))
def test_nothing_is_done_twice(script):
    answers, done = Answers(), []
    for identity, what in script:
        if what == "r" and answers.admit(identity):
            done.append(identity)
        elif what == "a" and identity in done:
            answers.store(identity, reply(identity))
        elif what == "s":
            answers.settle([identity])
    assert len(done) == len(set(done))
