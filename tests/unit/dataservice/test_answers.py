"""The times of the dispatcher's answers, as seen from its journal."""

import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from dataservice.dispatch.dispatcher import Answers
from dataservice.dispatch.records import Client, Outcome, Timeouts
from mpidist import LATER, Reply
from mpidist.errors import ResourceExhaustedError


class Journal:
    """A journal with commits that block until the test releases them, or fail."""

    def __init__(self):
        self.begun, self.go_on, self.problem = threading.Event(), threading.Event(), None
        self.tries = []

    def commit(self, records):
        self.tries.append(records)
        self.begun.set()
        assert self.go_on.wait(30)
        if self.problem is not None:
            raise self.problem


class Asked:
    """A request that records its answer."""

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
    assert answers.release(first, Reply(b"a split")) is LATER
    writing = threading.Thread(target=answers.write, args=(0.0,))
    writing.start()
    assert journal.begun.wait(30)
    with lock:  # the same request comes again during the commit
        assert answers.release(again, Reply(b"a split")) is LATER
    journal.go_on.set()
    writing.join(30)
    assert first.answer == (b"a split" if problem is None else problem)
    assert again.answer is None
    journal.problem = None
    answers.write(0.0)
    assert again.answer == b"a split"


@pytest.mark.parametrize(("timeout_s", "held_s"), [(300.0, 1.0), (1.0, 0.25)])
def test_heartbeats_are_answered_well_before_who_sends_them_counts_as_gone(timeout_s, held_s):
    iteration = SimpleNamespace(version=3, job=SimpleNamespace(terms=None), clients={})
    client = Client(1, iteration, "host/1-a", 0, 1, 100.0)
    registry = SimpleNamespace(
        take_outcome=Outcome, clients={1: client}, timeouts=Timeouts(client_s=timeout_s)
    )
    answers, asked = Answers(None, registry, {}, None, threading.RLock()), []
    with mock.patch("dataservice.dispatch.dispatcher.iteration_response"):
        answers.park(SimpleNamespace(reply=asked.append), client, 100.0)
        for now in (100.0, 100.0 + 0.9 * held_s):
            answers.release(None, LATER, now)
            assert not asked
        answers.release(None, LATER, 100.0 + held_s)
        assert len(asked) == 1


class Disk:
    """Answers with a journal on a disk that may be full. Requests name their changes."""

    def __init__(self):
        self.changes = {}
        registry = SimpleNamespace(take_outcome=self.take)
        self.journal = Journal()
        self.journal.go_on.set()
        self.answers = Answers(None, registry, {}, self.journal, threading.RLock())

    def take(self):
        changed, self.changes = self.changes, {}
        return Outcome(changed=changed)

    def ask(self, *keys):
        asked = Asked()
        self.changes = dict.fromkeys(("split", key) for key in keys)
        assert self.answers.release(asked, Reply(b"good")) is LATER
        return asked

    def fill(self):
        self.journal.problem = ResourceExhaustedError("the disk is full")

    def make_room(self):
        self.journal.problem = None


def test_nobody_hears_of_a_disk_that_is_full_for_a_moment(caplog):
    disk = Disk()
    disk.fill()
    first = disk.ask(1)
    disk.answers.write(100.0)
    assert disk.answers.waits_for_disk
    second, third = disk.ask(2), disk.ask()  # the third may depend on unwritten changes
    for now in (100.01, 100.1, 100.19):  # further requests cause no earlier retry
        disk.answers.write(now)
    assert len(disk.journal.tries) == 1
    disk.answers.write(100.25)
    assert [asked.answer for asked in (first, second, third)] == [None] * 3
    disk.make_room()
    disk.answers.write(101.5)
    assert [asked.answer for asked in (first, second, third)] == [b"good"] * 3
    tries = [sorted(key for _, key in records) for records in disk.journal.tries]
    assert tries == [[1], [1, 2], [1, 2]]
    assert not disk.answers.waits_for_disk
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "the dispatcher answers no requests for up to 10 s, until its journal has room: "
            "the disk is full",
        )
    ]


def test_who_waits_for_long_for_a_full_disk_is_told():
    disk = Disk()
    for begin in (100.0, 200.0):  # in between, the disk has room
        disk.fill()
        first = disk.ask(1)
        disk.answers.write(begin)
        disk.answers.write(begin + 9.9)
        assert first.answer is None
        disk.answers.write(begin + 10.2)
        assert first.answer is disk.journal.problem
        assert not disk.answers.waits_for_disk
        second = disk.ask(2)  # later requests do not wait that long
        disk.answers.write(begin + 10.5)
        assert second.answer is disk.journal.problem
        disk.make_room()
        third = disk.ask()
        disk.answers.write(begin + 10.8)
        assert third.answer == b"good"
        assert sorted(disk.journal.tries[-1]) == [("split", 1), ("split", 2)]
