"""Credits: what may be under way to a peer, whatever happens in which order."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.endpoint.credits import Credits

LIMIT = 100
PEER, OTHER = ("peer", 1), ("peer", 2)


@dataclass(eq=False)
class Shipment:
    peer: tuple
    nbytes: int
    send: Callable
    sent: bool = False
    released: bool = False


class Wire:
    """Shipments, and the order in which they have left."""

    def __init__(self):
        self.credits = Credits(LIMIT)
        self.left = []
        self.under_way = {}

    def submit(self, name, nbytes, peer=PEER):
        def send():
            self.left.append(name)
            self.under_way[name] = shipment

        shipment = Shipment(peer, nbytes, send)
        self.credits.submit(shipment)
        return shipment

    def answer(self, name):
        self.credits.release(self.under_way.pop(name))


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
    wire.credits.release(given_up)
    wire.credits.release(given_up)
    wire.answer("one")
    assert wire.left == ["one", "three"]


def test_a_send_that_fails_does_not_stop_the_others():
    wire = Wire()

    def send():
        raise OSError("no route")

    shipment = Shipment(PEER, 10, send)
    with pytest.raises(OSError, match="no route"):
        wire.credits.submit(shipment)
    wire.credits.release(shipment)
    wire.submit("next", LIMIT)
    assert wire.left == ["next"]


def test_an_answer_that_comes_while_sending():
    wire = Wire()

    def send():
        wire.left.append("echo")
        wire.credits.release(shipment)

    shipment = Shipment(PEER, LIMIT, send)
    wire.credits.submit(shipment)
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
            if wire.under_way:
                wire.answer(next(iter(wire.under_way)))
        total = sum(sizes[name] for name in wire.under_way)
        assert total <= LIMIT or sum(1 for n in wire.under_way if sizes[n]) == 1
    while wire.under_way:
        wire.answer(next(iter(wire.under_way)))
    assert wire.left == list(range(len(script)))
    assert all(flow.at_rest() for flow in wire.credits._flows.values())


def test_peers_at_rest_are_forgotten_in_the_end():
    wire = Wire()
    wire.submit("stays", 1, ("busy", 1))
    for number in range(1000):
        wire.submit(number, 1, ("peer", number))
        wire.answer(number)
    assert len(wire.credits._flows) < 100
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
            with_answer = list(wire.under_way)[:1]
            for name in with_answer:
                shipment = wire.under_way.pop(name, None)
                if shipment is not None:
                    wire.credits.release(shipment)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while wire.under_way:
        wire.answer(next(iter(wire.under_way)))
    assert len(wire.left) == 2000
    for thread in range(4):
        assert [n for t, n in wire.left if t == thread] == list(range(500))
