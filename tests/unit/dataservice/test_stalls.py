"""Reports of long waits. What is waited for comes when the report has been given, not before."""

import logging
import threading
from contextlib import ExitStack

import pytest

from dataservice import Dataset, DispatchServer, WorkerServer, distribute
from dataservice.calls import SlowWait, stall_s
from mpidist.config import Config

RELEASED = {}


def released(name):
    """One event for all copies of a function: it is pickled on its way to the worker."""
    return RELEASED.setdefault(name, threading.Event())


class Reports(logging.Handler):
    """The reports; ``then`` is called at the first, on the thread that waits."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.then = lambda: None

    def emit(self, record):
        self.texts.append(record.getMessage())
        if len(self.texts) == 1:
            self.then()


@pytest.fixture
def reports():
    handler = Reports()
    logger = logging.getLogger("dataservice.calls")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def stall_after(monkeypatch):
    return lambda limit: monkeypatch.setattr("dataservice.calls.config", Config(stall_s=limit))


@pytest.mark.parametrize(("given", "limit"), [(Config.stall_s, 15), (300.0, 15), (0.5, 0.5)])
def test_the_limit_is_a_setting(stall_after, given, limit):
    stall_after(given)
    assert stall_s() == limit


def test_a_wait_is_reported_once(stall_after, reports):
    stall_after(1e-9)
    slow_wait = SlowWait("a consumer", lambda: "an element")
    for _ in range(5):
        slow_wait.check()
    (text,) = reports.texts
    assert text.startswith("a consumer has waited ")
    assert text.endswith(" s for an element")
    assert slow_wait.due_s == float("inf")


def test_a_wait_is_not_reported_before_its_time(stall_after, reports):
    stall_after(1e9)
    SlowWait("a consumer", lambda: "an element").check()
    assert reports.texts == []


def test_a_function_that_hangs(make_service, stall_after, reports):
    service = make_service(2)
    service.workers.pop().stop()  # one that is known no more

    def wait_at_one(i):
        assert i != 1 or released("a function that hangs").wait(30)
        return i

    dataset = Dataset.range(3).map(wait_at_one)
    apply = distribute("parallel_epochs", service.target, job_name="train")
    elements = iter(dataset.apply(apply))
    assert next(elements) == 0
    reports.then = released("a function that hangs").set
    stall_after(0.05)
    assert next(elements) == 1
    (text,) = reports.texts
    assert text.startswith("consumer inproc://localhost:")
    assert f"of job 'train', {dataset.node.summary()}, has waited " in text
    worker = f"inproc://localhost:{service.workers[0]._endpoint.address.port}"
    assert f"elements from the data workers {worker} (task " in text
    assert text.count("task") == 1
    assert f"of the dispatcher {service.target.split('://')[1]}. " in text
    assert "a function of the dataset is slow, or hangs" in text
    elements.close()


def test_no_worker_yet(make_service, stall_after, reports):
    service = make_service(0)
    elements = iter(Dataset.range(3).apply(distribute("parallel_epochs", service.target)))
    reports.then = service.add_worker
    stall_after(0.05)
    assert next(elements) == 0
    (text,) = reports.texts
    assert "of a job of its own, range(0, 3, 1), has waited " in text
    dispatcher = service.target.split("://")[1]
    assert f"for a data worker; none has registered at the dispatcher {dispatcher}. Start" in text
    assert text.endswith("This fails after 60 s")
    elements.close()


def test_no_dispatcher_yet(stall_after, reports):
    target = "inproc://localhost:4811"
    elements = iter(Dataset.range(3).apply(distribute("parallel_epochs", target)))
    with ExitStack() as stack:

        def start():
            stack.enter_context(DispatchServer(port=4811, protocol="inproc"))
            stack.enter_context(WorkerServer(dispatcher_address=target))

        reports.then = start
        stall_after(0.05)
        assert next(elements) == 0
        elements.close()
    assert "consumer inproc://localhost:" in reports.texts[0]
    assert "s for the dispatcher at localhost:4811, which does not answer" in reports.texts[0]


def test_a_worker_without_a_dispatcher_yet(stall_after, reports):
    with ExitStack() as stack:
        reports.then = lambda: stack.enter_context(DispatchServer(port=4812, protocol="inproc"))
        stall_after(0.05)
        with WorkerServer(dispatcher_address="inproc://localhost:4812"):
            (text,) = reports.texts
    assert text.startswith("data worker inproc://localhost:")
    assert "s for the dispatcher at inproc://localhost:4812, which does not answer" in text
    assert text.endswith("This fails after 60 s")


def test_a_read_ahead_reports_a_slow_function(stall_after, reports):
    stall_after(1e-9)
    done = threading.Event()
    reports.then = done.set
    dataset = Dataset.range(1).map(lambda x: x if done.wait(60) else None, num_parallel_calls=2)
    assert [int(x) for x in dataset] == [0]
    assert reports.texts[0].startswith("an iterator of a dataset has waited ")
    assert "a function of the dataset is slow or hangs" in reports.texts[0]
