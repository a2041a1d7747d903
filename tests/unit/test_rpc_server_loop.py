"""The serving loop of an endpoint, over a transport that has to be asked."""

import faulthandler
import sys
import threading
import time

import pytest

from mpidist.mpi import Backoff
from mpidist.rpc import Endpoint
from mpidist.rpc.message import NOTICE, Message


class Quiet:
    """A transport on which nothing ever arrives."""

    protocol = "inproc"
    needs_polling = True
    spin_count = 0

    def attach(self, receiver, number):
        return 1

    def detach(self, number):
        pass

    def host(self):
        return "localhost"

    def progress(self):
        return False

    def wait(self, seconds, done):
        return False


@pytest.fixture
def rivals():
    """Threads that take the interpreter away as often as they can."""
    interval = sys.getswitchinterval()
    stop = threading.Event()
    threads = [threading.Thread(target=lambda: spin(stop)) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)


def spin(stop):
    while not stop.is_set():
        pass


@pytest.mark.usefixtures("rivals")
def test_short_sleeps_end_whoever_competes_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(Backoff, "_FIRST_S", 1e-6)
    heard = []
    rounds = iter(range(8000))
    # A loop that stands still cannot look at a deadline: then this ends the run, with all stacks.
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        with Endpoint(Quiet()) as endpoint:
            endpoint.register("test", {"Note": lambda _: heard.append(1)})

            def enough():
                number = next(rounds, None)
                if number is not None and number % 2:  # in the other rounds it sleeps
                    endpoint.deliver(Message(NOTICE, method="test/Note"))
                return number is None

            assert endpoint.serve(enough, time.monotonic() + 55)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert len(heard) == 4000
