"""A consumer between a dispatcher and workers that the test plays by hand."""

import queue
import threading

import pytest

from dataservice.calls import Caller
from dataservice.consumer import Consumer, Terms
from dataservice.proto import dataservice_pb2 as pb
from dataservice.stream import Stream
from dataservice.wire import pack_elements
from mpidist import LATER, open_endpoint
from mpidist.errors import UnavailableError


class Script:
    """Takes a consumer's calls one by one, and answers when the test says so."""

    def __init__(self, max_outstanding=None):
        self.server = open_endpoint("inproc")
        self._calls = {}
        for service, methods in {
            "dispatcher": ("ClientHeartbeat", "ReleaseClient"),
            "data_worker": ("GetElement", "ReleaseClient"),
        }.items():
            self.server.register(service, dict.fromkeys(methods, self._take))
            self._calls |= {f"{service}/{method}": queue.Queue() for method in methods}
        self.server.serve_in_thread()
        self.address = str(self.server.address)
        self.stream = Stream("a consumer")
        self._client = open_endpoint("inproc")
        caller = Caller(self._client, self.address, "dispatcher", lambda: False)
        terms = Terms(start_timeout_s=30, max_outstanding=max_outstanding)
        self._consumer = Consumer(self._client, caller, self.stream, terms)
        self.thread = threading.Thread(target=self._run)

    def _take(self, request):
        self._calls[request.method].put(request)
        return LATER

    def _run(self):
        try:
            self._consumer.run(pb.IterationReply(client_id=1, state=self._state([1])))
        except Exception as error:
            self.stream.finish(error)
        else:
            self.stream.finish()

    def _state(self, tasks, lost=()):
        def addresses(ids):
            return [pb.TaskAddress(task_id=task, worker=self.address) for task in ids]

        return pb.IterationState(tasks=addresses(tasks), lost=addresses(lost))

    def heartbeat(self):
        """The consumer's next heartbeat."""
        return self._calls["dispatcher/ClientHeartbeat"].get(timeout=10)

    def tell(self, heartbeat, tasks, lost=()):
        heartbeat.reply(self._state(tasks, lost).SerializeToString())

    def asked(self):
        """The consumer's next request for elements, and what it says."""
        request = self._calls["data_worker/GetElement"].get(timeout=10)
        return request, pb.GetElementRequest.FromString(request.body)

    def give(self, request, elements, end=False):
        parcel = pack_elements(elements)
        body = pb.GetElementReply(count=len(elements), pickle=parcel.pickle, end=end)
        request.reply(body.SerializeToString(), parcel.buffers)

    def left(self):
        """Wait until the consumer has told the dispatcher that it leaves."""
        self._calls["dispatcher/ReleaseClient"].get(timeout=10)

    def take(self):
        return list(self.stream.take(self.thread.is_alive))

    def nothing_asked(self):
        return self._calls["data_worker/GetElement"].empty()

    def close(self):
        self.stream.close()
        self.thread.join(10)
        assert not self.thread.is_alive()
        self._client.close()
        self.server.close()


@pytest.fixture
def make_script():
    scripts = []

    def make(**arguments):
        scripts.append(Script(**arguments))
        scripts[-1].thread.start()
        return scripts[-1]

    yield make
    for script in scripts:
        script.close()


def test_the_end_is_what_the_dispatcher_says_after_all_tasks_have_ended(make_script):
    script = make_script()
    early = script.heartbeat()
    request, body = script.asked()
    assert body.task_id == 1
    script.give(request, [5], end=True)
    assert script.take() == [5]
    # Asked before the end: it cannot know of a worker that came since.
    script.tell(early, tasks=[1])
    script.tell(script.heartbeat(), tasks=[1, 2])
    while body.task_id != 2:
        request, body = script.asked()
    script.give(request, [6], end=True)
    assert script.take() == [6]
    script.tell(script.heartbeat(), tasks=[])
    script.left()
    with pytest.raises(StopIteration):
        script.take()


def test_replies_are_taken_in_the_order_of_the_requests(make_script):
    script = make_script()
    first, second = (script.asked()[0] for _ in range(2))
    script.give(second, [2])
    script.give(first, [1])
    assert [script.take(), script.take()] == [[1], [2]]


def test_an_empty_reply_is_followed_by_another_request(make_script):
    script = make_script()
    request, body = script.asked()
    assert (body.sequence, body.hold) == (0, True)
    script.give(request, [])
    following = [script.asked() for _ in range(2)]  # kept: what is dropped is answered
    assert [body.sequence for _, body in following] == [1, 2]


def test_no_more_than_the_limit_is_asked_for_or_held(make_script):
    script = make_script(max_outstanding=3)
    requests = [script.asked() for _ in range(2)]
    asked = sum(body.max_elements for _, body in requests)
    assert asked <= 3
    for request, body in requests:
        script.give(request, list(range(body.max_elements)))
    more = []
    while asked + sum(body.max_elements for _, body in more) < 3:
        more.append(script.asked())
    # Everything allowed lies here unused; a heartbeat's round shows that nothing more is asked.
    script.tell(script.heartbeat(), tasks=[1])
    script.tell(script.heartbeat(), tasks=[1])
    assert script.nothing_asked()
    script.take()
    script.take()  # the first frame is used up when the second is taken
    assert script.asked()


def test_a_lost_task_is_missed_unless_it_had_ended(make_script):
    script = make_script()
    script.tell(script.heartbeat(), tasks=[1, 2])
    ends = {1: False, 2: False}
    while not ends[1]:
        request, body = script.asked()
        if body.task_id == 1:
            script.give(request, [], end=True)
            ends[1] = True
    script.tell(script.heartbeat(), tasks=[2], lost=[1])
    script.tell(script.heartbeat(), tasks=[], lost=[1, 2])
    with pytest.raises(UnavailableError, match=r"task 2.*missing from this iteration"):
        script.take()


def test_elements_that_came_with_an_error_are_given_first(make_script):
    script = make_script()
    request, _ = script.asked()
    parcel = pack_elements([1, 2])
    failure = pack_elements(KeyError("bad")).pickle
    body = pb.GetElementReply(count=2, pickle=parcel.pickle, failure=failure)
    request.reply(body.SerializeToString(), parcel.buffers)
    assert script.take() == [1, 2]
    for _ in range(2):
        with pytest.raises(KeyError, match="bad"):
            script.take()


def test_what_is_dropped_on_the_fetching_thread_waits_for_no_lock_of_that_thread(make_script):
    script = make_script()
    request, _ = script.asked()
    put = script.stream.put

    def collect_garbage(frame):
        # As if the collection had begun while this thread looked at what wakes it.
        with script._consumer._wake._lock:
            script.stream.close()
        put(frame)

    script.stream.put = collect_garbage
    script.give(request, [1])
    script.left()
