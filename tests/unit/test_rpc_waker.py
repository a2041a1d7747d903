"""The waker: sockets and other threads wake the waiting threads."""

import os
import threading
import time

import pytest
from _cases.endpoints import LIMIT_S, wait_until

from mpidist.rpc.waker import Waker


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()
    waker.close()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


class Sleepers:
    """Threads that wait, like threads of endpoints, until a flag is set."""

    def __init__(self, waker, count):
        self.flag = threading.Event()
        self.rounds = 0
        self._threads = [threading.Thread(target=self._sleep, args=(waker,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: waker.waiting == count)

    def _sleep(self, waker):
        deadline = time.monotonic() + LIMIT_S
        while not self.flag.is_set() and time.monotonic() < deadline:
            waker.wait(LIMIT_S, self.flag.is_set)
            self.rounds += 1

    def end(self):
        for thread in self._threads:
            thread.join(LIMIT_S / 3)
        assert not any(thread.is_alive() for thread in self._threads)


def never():
    return False


def test_a_readable_descriptor_wakes(waker, pipe):
    waker.watch(pipe[0])
    os.write(pipe[1], b"x")
    begin = time.monotonic()
    waker.wait(LIMIT_S, never)
    assert time.monotonic() - begin < LIMIT_S / 2
    waker.ignore(pipe[0])
    begin = time.monotonic()
    waker.wait(0.01, never)
    assert time.monotonic() - begin >= 0.01
    assert waker.waiting == 0


def test_a_thread_that_need_not_sleep(waker):
    begin = time.monotonic()
    waker.wait(LIMIT_S, lambda: True)
    assert time.monotonic() - begin < LIMIT_S / 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_wake_wakes_all(waker, count):
    sleepers = Sleepers(waker, count)
    sleepers.flag.set()
    waker.wake()
    sleepers.end()
    assert waker.waiting == 0


def test_a_wake_up_does_not_echo(waker):
    sleepers = Sleepers(waker, 1)
    sleepers.flag.set()
    waker.wake()
    sleepers.end()
    waker.wake()  # no thread waits
    begin = time.monotonic()
    waker.wait(0.05, never)
    assert time.monotonic() - begin >= 0.05


def test_another_leads_when_the_leader_is_done(waker, pipe):
    """When the sleeper at the descriptors leaves, the other one takes over and data wakes it."""
    waker.watch(pipe[0])
    sleepers = Sleepers(waker, 2)
    os.write(pipe[1], b"x")
    wait_until(lambda: sleepers.rounds >= 2)  # the first sleeper wakes and hands over the lead
    sleepers.flag.set()
    sleepers.end()


def test_many_threads_that_wait_and_wake(waker):
    """Each thread waits for its turn, and none misses its wake-up."""
    turn, count, rounds = [0], 4, 200

    def work(number):
        for one in range(rounds):
            mine = one * count + number
            while turn[0] != mine:
                waker.wait(LIMIT_S, lambda mine=mine: turn[0] == mine)
            turn[0] += 1
            waker.wake()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert turn == [count * rounds]
    assert time.monotonic() - begin < LIMIT_S


def test_a_wait_that_an_exception_ends(waker):
    """After an exception, as of a signal handler, other threads wait and wake as before."""

    def raises():
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            waker.wait(LIMIT_S, raises)
    assert waker.waiting == 0
    sleepers = Sleepers(waker, 2)
    sleepers.flag.set()
    waker.wake()
    sleepers.end()
