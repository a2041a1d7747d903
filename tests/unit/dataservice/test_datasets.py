"""Datasets that tasks of one worker share."""

import logging
import threading

import pytest

from dataservice import Dataset
from dataservice.payload import pack_dataset
from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.worker import Datasets
from mpidist import Reply
from mpidist.errors import CancelledError, UnavailableError


class Dispatcher:
    """Answers when it is told to, with a dataset or an error."""

    def __init__(self, error=None):
        self.calls = 0
        self.error = error
        self.called, self.go_on = threading.Event(), threading.Event()
        self.is_stopped = False

    def stopped(self):
        return self.is_stopped

    def fetch_with_retry(self, method, request, limit_s):
        self.calls += 1
        self.called.set()
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        parcel = pack_dataset(Dataset.range(request.dataset_id)._node)
        return Reply(pb.Dataset(pickle=parcel.pickle).SerializeToString(), parcel.buffers)


class Get(threading.Thread):
    """Gets a dataset on a thread of its own."""

    def __init__(self, datasets, dispatcher, **lease):
        super().__init__()
        self.dataset = self.error = None
        self.arguments = datasets, pb.Task(dataset_id=3, **lease), dispatcher
        self.start()

    def run(self):
        datasets, lease, dispatcher = self.arguments
        try:
            self.dataset = datasets.get(lease, dispatcher)
        except Exception as error:
            self.error = error


@pytest.fixture
def datasets():
    return Datasets("data worker x", 1.0)


def test_parts_that_begin_at_the_same_time_share_one_object(datasets):
    dispatcher = Dispatcher()
    tasks = [Get(datasets, dispatcher, part=part) for part in range(16)]
    assert dispatcher.called.wait(10)
    dispatcher.go_on.set()
    for task in tasks:
        task.join(10)
    assert dispatcher.calls == 1
    assert len({id(task.dataset) for task in tasks}) == 1
    assert tasks[0].dataset.summary() == "range(0, 3, 1)"


def test_static_parts_do_not(datasets):
    dispatcher = Dispatcher()
    dispatcher.go_on.set()
    leases = [pb.Task(dataset_id=3, policy=pb.DATA, num_parts=2, part=part) for part in (0, 1, 0)]
    first, second, again = (datasets.get(lease, dispatcher) for lease in leases)
    assert first is again
    assert first is not second


def test_if_the_task_that_fetches_fails_the_next_one_fetches(datasets):
    failing, other = Dispatcher(UnavailableError("gone")), Dispatcher()
    first = Get(datasets, failing)
    assert failing.called.wait(10)
    second = Get(datasets, other)
    failing.go_on.set()
    other.go_on.set()
    first.join(10)
    second.join(10)
    assert isinstance(first.error, UnavailableError)
    assert second.dataset is not None
    assert other.calls == 1


def test_a_task_that_is_closed_waits_no_longer(datasets):
    slow, closed = Dispatcher(), Dispatcher()
    first = Get(datasets, slow)
    assert slow.called.wait(10)
    second = Get(datasets, closed)
    closed.is_stopped = True
    second.join(10)
    assert isinstance(second.error, CancelledError)
    slow.go_on.set()
    first.join(10)
    assert first.dataset is not None


def test_the_one_that_was_used_longest_ago_is_dropped_and_that_is_logged(datasets, caplog):
    dispatcher = Dispatcher()
    dispatcher.go_on.set()
    with caplog.at_level(logging.INFO):
        for number in range(1, 9):
            datasets.get(pb.Task(dataset_id=number), dispatcher)
        datasets.get(pb.Task(dataset_id=1), dispatcher)
        assert not caplog.messages
        datasets.get(pb.Task(dataset_id=9), dispatcher)
    assert "data worker x keeps 8 datasets" in caplog.text
    calls = dispatcher.calls
    datasets.get(pb.Task(dataset_id=1), dispatcher)
    assert dispatcher.calls == calls
    datasets.get(pb.Task(dataset_id=2), dispatcher)
    assert dispatcher.calls == calls + 1
