"""Flow control: the bound on bytes in flight and the order hold in every interleaving."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import Reply, open_endpoint
from mpidist.rpc.client import Flow, FlowControl
from mpidist.rpc.message import REQUEST, Message

LIMIT = 100
PEER, OTHER = ("peer", 1), ("peer", 2)


class Request:
    def __init__(self, name, nbytes, send=None):
        self.name, self.nbytes, self.send = name, nbytes, send
        self.flow, self.in_flight, self.released = Flow(), False, False
        self.message = Message(REQUEST)


class Wire:
    """Requests under flow control, and the order in which they have left."""

    def __init__(self):
        self.flow_control = FlowControl(LIMIT)
        self.left = []
        self.in_flight = {}

    def submit(self, name, nbytes, peer=PEER, send=None):
        request = Request(name, nbytes, send)
        self.send(self.flow_control.submit(request, peer))
        return request

    def send(self, request):
        """Send requests as a client does."""
        while request is not None:
            self.left.append(request.name)
            self.in_flight[request.name] = request
            try:
                if request.send is not None:
                    request.send(request)
            finally:
                request.flow.sending = False
            request = self.flow_control.next(request.flow)

    def release(self, request):
        self.send(self.flow_control.release(request))

    def answer(self, name):
        self.release(self.in_flight.pop(name))


def test_what_fits_leaves_at_once():
    wire = Wire()
    for name in range(4):
        wire.submit(name, 25)
    wire.submit("too much", 1)
    assert wire.left == [0, 1, 2, 3]
    wire.answer(2)
    assert wire.left[4:] == ["too much"]


def test_a_request_larger_than_all_credit_leaves_alone():
    wire = Wire()
    wire.submit("small", 1)
    wire.submit("large", 10 * LIMIT)
    wire.submit("next", 1)
    assert wire.left == ["small"]
    wire.answer("small")
    assert wire.left == ["small", "large"]
    wire.answer("large")
    assert wire.left == ["small", "large", "next"]


def test_peers_do_not_wait_for_each_other():
    wire = Wire()
    wire.submit("one", LIMIT)
    wire.submit("waits", 1)
    wire.submit("other", LIMIT, OTHER)
    assert wire.left == ["one", "other"]


def test_what_is_given_up_before_its_turn_never_leaves():
    wire = Wire()
    wire.submit("one", LIMIT)
    given_up = wire.submit("two", LIMIT)
    wire.submit("three", 1)
    wire.release(given_up)
    wire.release(given_up)
    wire.answer("one")
    assert wire.left == ["one", "three"]


def test_a_request_that_is_released_before_it_is_submitted():
    wire = Wire()
    request = Request("closed", LIMIT)
    wire.release(request)
    wire.send(wire.flow_control.submit(request, PEER))
    wire.submit("next", LIMIT)
    assert wire.left == ["next"]


def test_a_send_that_fails_does_not_stop_the_others():
    wire = Wire()

    def fail(request):
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        wire.submit("fails", 10, send=fail)
    wire.answer("fails")
    wire.submit("next", LIMIT)
    assert wire.left == ["fails", "next"]


def test_an_answer_that_comes_while_sending():
    wire = Wire()
    wire.submit("echo", LIMIT, send=wire.release)
    wire.submit("next", LIMIT)
    assert wire.left == ["echo", "next"]


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 5)), max_size=40))
def test_bound_order_and_end(script):
    """Whatever is answered when: never too much under way, nothing overtakes, all leaves."""
    wire = Wire()
    sizes = {}
    for name, (nbytes, answers) in enumerate(script):
        sizes[name] = nbytes
        wire.submit(name, nbytes)
        for _ in range(answers):
            if wire.in_flight:
                wire.answer(next(iter(wire.in_flight)))
        total = sum(sizes[name] for name in wire.in_flight)
        assert total <= LIMIT or sum(1 for n in wire.in_flight if sizes[n]) == 1
    while wire.in_flight:
        wire.answer(next(iter(wire.in_flight)))
    assert wire.left == list(range(len(script)))
    assert all(flow.is_idle() for flow in wire.flow_control._flows.values())


def test_peers_at_rest_are_forgotten_in_the_end():
    wire = Wire()
    wire.submit("stays", 1, ("busy", 1))
    for number in range(1000):
        wire.submit(number, 1, ("peer", number))
        wire.answer(number)
    assert len(wire.flow_control._flows) < 100
    wire.submit("waits", LIMIT, ("busy", 1))
    assert wire.left == ["stays", *range(1000)]
    wire.answer("stays")
    assert wire.left[-1] == "waits"


def test_threads_share_one_order():
    wire = Wire()
    start = threading.Barrier(4)

    def work(thread):
        start.wait()
        for number in range(500):
            wire.submit((thread, number), 1)
            with_answer = list(wire.in_flight)[:1]
            for name in with_answer:
                shipment = wire.in_flight.pop(name, None)
                if shipment is not None:
                    wire.release(shipment)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while wire.in_flight:
        wire.answer(next(iter(wire.in_flight)))
    assert len(wire.left) == 2000
    for thread in range(4):
        assert [n for t, n in wire.left if t == thread] == list(range(500))


def test_an_interrupted_send_returns_its_credit():
    with open_endpoint("inproc") as server, open_endpoint("inproc") as client:
        server.register("s", {"Size": lambda request: Reply(b"%d" % request.buffers[0].nbytes)})
        server.serve_in_thread()
        transport, half = client._client._transport, np.zeros(40 << 20, np.uint8)

        class Interrupted:
            def __getattr__(self, name):
                return getattr(transport, name)

            def send(self, message):
                raise KeyboardInterrupt

        client._client._transport = Interrupted()
        for _ in range(3):  # together more than all credit
            with pytest.raises(KeyboardInterrupt):
                client.call(server.address, "s/Size", buffers=[half])
        client._client._transport = transport
        reply = client.call(server.address, "s/Size", buffers=[half], timeout=30).result()
        assert int(reply.body) == half.nbytes
