"""When the dispatcher answers, seen from its journal."""

import threading
from types import SimpleNamespace

import pytest

from dataservice.dispatch.answers import Answers
from dataservice.dispatch.records import Outcome
from mpidist import LATER, Reply


class Journal:
    """One whose commits take as long as a test wants, or fail."""

    def __init__(self):
        self.begun, self.go_on, self.problem = threading.Event(), threading.Event(), None

    def commit(self, records):
        self.begun.set()
        assert self.go_on.wait(30)
        if self.problem is not None:
            raise self.problem


class Asked:
    """A request that notes what it is answered."""

    answer = None

    def reply(self, body, buffers):
        self.answer = body

    def fail(self, error):
        self.answer = error


@pytest.mark.parametrize("problem", [None, OSError("the disk is full")])
def test_no_answer_overtakes_what_it_rests_on(problem):
    changes = [{("split", 1): None}, {}]
    registry = SimpleNamespace(take_outcome=lambda: Outcome(changed=changes.pop(0)))
    journal, lock = Journal(), threading.RLock()
    journal.problem = problem
    answers = Answers(None, registry, {}, journal, lock)
    first, again = Asked(), Asked()
    assert answers.settle(first, Reply(b"a split")) is LATER
    writing = threading.Thread(target=answers.write)
    writing.start()
    assert journal.begun.wait(30)
    with lock:  # the same is asked again while it is written
        assert answers.settle(again, Reply(b"a split")) is LATER
    journal.go_on.set()
    writing.join(30)
    assert first.answer == (b"a split" if problem is None else problem)
    assert again.answer is None
    journal.problem = None
    answers.write()
    assert again.answer == b"a split"
