"""Yields of a thread that copies or writes a checkpoint."""

import os
import time

import numpy as np
import pytest

from mpidist.checkpoints.core_sharing import CHUNK_BYTES, CoreSharing
from mpidist.checkpoints.tensor_file import write_tensors
from strategy.checkpoints.parts import PartState
from strategy.server.snapshot import Snapshot


class Clock:
    """A clock that a test moves. Other threads use the core for ``others_s`` at each yield."""

    def __init__(self):
        self.now, self.others_s, self.yields = 0.0, 0.0, 0

    def sched_yield(self):
        self.yields += 1
        self.now += self.others_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(os, "sched_yield", clock.sched_yield)
    return clock


def work(clock, sharing, chunks, chunk_s):
    for _ in range(chunks):
        clock.now += chunk_s
        sharing.yield_if_due()


def test_a_thread_that_is_alone_yields_after_each_chunk(clock):
    work(clock, CoreSharing(), chunks=10, chunk_s=2e-4)
    assert clock.yields == 10


def test_small_arrays_share_a_yield(clock):
    work(clock, CoreSharing(), chunks=10_000, chunk_s=1e-6)
    assert 100 <= clock.yields <= 200


def test_beside_threads_that_compute_it_keeps_a_third_of_the_core(clock):
    clock.others_s = 4e-3
    sharing = CoreSharing()
    work(clock, sharing, chunks=2_000, chunk_s=2e-4)
    own_s = 2_000 * 2e-4
    assert own_s / clock.now >= 0.33


@pytest.fixture
def slow_clock(clock, monkeypatch):
    """Return a clock that advances by 1 ms at each reading, so that each chunk is due."""

    def read():
        clock.now += 1e-3
        return clock.now

    monkeypatch.setattr(time, "perf_counter", read)
    return clock


def test_writing_yields_after_each_chunk(slow_clock, tmp_path):
    write_tensors(str(tmp_path / "file"), {"a": np.zeros(4 * CHUNK_BYTES, np.uint8)}, {})
    assert slow_clock.yields >= 4


def test_only_the_thread_that_copies_all_variables_yields(slow_clock):
    arrays = {name: {"data": np.zeros(4 * CHUNK_BYTES, np.uint8)} for name in "ab"}
    state = PartState(arrays, {})
    snapshot = Snapshot(state, np.empty(state.nbytes, np.uint8))
    snapshot.copy("a")  # a push waits for this copy
    assert slow_clock.yields == 0
    snapshot.finish()
    assert slow_clock.yields == 4
