"""The doorbell: whoever waits is woken by what arrives, and by whoever rings."""

import os
import threading
import time

import pytest
from _cases.endpoints import LIMIT_S, wait_until

from mpidist.endpoint.doorbell import Doorbell


@pytest.fixture
def bell():
    bell = Doorbell()
    yield bell
    bell.close()
    bell.close()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


class Sleepers:
    """Threads that wait, as those of endpoints do, until a flag is set."""

    def __init__(self, bell, count):
        self.flag = threading.Event()
        self.rounds = 0
        self._threads = [threading.Thread(target=self._sleep, args=(bell,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: bell.waiting == count)

    def _sleep(self, bell):
        deadline = time.monotonic() + LIMIT_S
        while not self.flag.is_set() and time.monotonic() < deadline:
            bell.wait(LIMIT_S, self.flag.is_set)
            self.rounds += 1

    def end(self):
        for thread in self._threads:
            thread.join(LIMIT_S / 3)
        assert not any(thread.is_alive() for thread in self._threads)


def never():
    return False


def test_what_is_readable_wakes(bell, pipe):
    bell.watch(pipe[0])
    os.write(pipe[1], b"x")
    begin = time.monotonic()
    bell.wait(LIMIT_S, never)
    assert time.monotonic() - begin < LIMIT_S / 2
    bell.ignore(pipe[0])
    begin = time.monotonic()
    bell.wait(0.01, never)
    assert time.monotonic() - begin >= 0.01
    assert bell.waiting == 0


def test_nobody_sleeps_who_need_not(bell):
    begin = time.monotonic()
    bell.wait(LIMIT_S, lambda: True)
    assert time.monotonic() - begin < LIMIT_S / 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_to_ring_wakes_all(bell, count):
    sleepers = Sleepers(bell, count)
    sleepers.flag.set()
    bell.ring()
    sleepers.end()
    assert bell.waiting == 0


def test_a_ring_does_not_echo(bell):
    sleepers = Sleepers(bell, 1)
    sleepers.flag.set()
    bell.ring()
    sleepers.end()
    bell.ring()  # nobody waits
    begin = time.monotonic()
    bell.wait(0.05, never)
    assert time.monotonic() - begin >= 0.05


def test_another_leads_when_the_leader_is_done(bell, pipe):
    """Of two sleepers the one at the descriptors goes; what arrives then wakes the other."""
    bell.watch(pipe[0])
    sleepers = Sleepers(bell, 2)
    os.write(pipe[1], b"x")
    wait_until(lambda: sleepers.rounds >= 2)  # the first wakes, and lets the other lead
    sleepers.flag.set()
    sleepers.end()


def test_many_threads_that_wait_and_ring(bell):
    """Each waits for its turn: nobody sleeps on, whatever the order."""
    turn, count, rounds = [0], 4, 200

    def work(number):
        for one in range(rounds):
            mine = one * count + number
            while turn[0] != mine:
                bell.wait(LIMIT_S, lambda mine=mine: turn[0] == mine)
            turn[0] += 1
            bell.ring()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert turn == [count * rounds]
    assert time.monotonic() - begin < LIMIT_S


def test_a_wait_that_an_exception_ends(bell):
    """As the handler of a signal may raise: the next thread sleeps, and hears the bell."""

    def raises():
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            bell.wait(LIMIT_S, raises)
    assert bell.waiting == 0
    sleepers = Sleepers(bell, 2)
    sleepers.flag.set()
    bell.ring()
    sleepers.end()
