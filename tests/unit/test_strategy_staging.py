"""The staging ring between a worker and its server."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.config import Config
from strategy.shared import staging
from strategy.shared.shard import BLOCK_BYTES
from strategy.shared.staging import POOL_BYTES, Ring, RingBrokenError, ring_bytes, slots_for

GUARD = 64
FLOATS = BLOCK_BYTES // 4


def nothing():
    return None


def make(slots, pump=nothing, lost=lambda: False):
    """Both ends of a ring, and the memory around it."""
    memory = np.zeros(ring_bytes(slots) + 2 * GUARD, np.uint8)
    memory[:GUARD] = memory[-GUARD:] = 0xAB
    ends = [Ring(memory, GUARD, slots, nothing, pump, "its mate", lost) for _ in range(2)]
    return (*ends, memory)


def read_all(ring, size, dtype):
    """What a server reads; it overwrites each block before it asks for the next."""
    blocks = []
    for block in ring.read(size, dtype):
        if block is None:
            continue
        blocks.append(block.copy())
        block[...] = 0
    return np.concatenate(blocks) if blocks else np.empty(0, dtype)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(
        st.builds(
            lambda blocks, off: max(blocks * FLOATS + off, 0), st.integers(0, 3), st.integers(-1, 1)
        ),
        min_size=1,
        max_size=4,
    ),
    slots=st.integers(1, 3),
    source=st.sampled_from([np.float32, np.float64, np.int16]),
)
def test_what_a_thread_writes_another_reads(pool, sizes, slots, source):
    writer, reader, memory = make(slots)
    rng = np.random.default_rng(0)
    arrays = [(100 * rng.random(size)).astype(source) for size in sizes]
    writing = pool.submit(lambda: [writer.write(array, np.float32) for array in arrays])
    for array in arrays:
        got = read_all(reader, array.size, np.float32)
        np.testing.assert_array_equal(got, array.astype(np.float32))
    writing.result(30)
    assert (memory[:GUARD] == 0xAB).all()
    assert (memory[-GUARD:] == 0xAB).all()


def test_a_writer_fills_all_slots_before_it_waits():
    writer, reader, _ = make(3)
    writer.write(np.arange(3 * FLOATS, dtype=np.float32), np.float32)
    got = read_all(reader, 3 * FLOATS, np.float32)
    np.testing.assert_array_equal(got, np.arange(3 * FLOATS))


def test_a_side_that_waits_pumps():
    written = []
    array = np.arange(5 * FLOATS, dtype=np.int32)

    def pump():
        start = len(written) * FLOATS
        writer.write(array[start : start + FLOATS], np.int32)
        written.append(start)

    writer, reader, _ = make(1, pump)
    np.testing.assert_array_equal(read_all(reader, array.size, np.int32), array)
    assert len(written) == 5


def test_a_server_that_takes_nothing_is_waited_for(monkeypatch, caplog):
    """As long as it is there; who waits says so once."""
    monkeypatch.setattr(staging, "_LOOK_S", 0.0)
    monkeypatch.setattr(staging, "settings", Config(stall_s=0.0))
    looks = []

    def lost():
        looks.append(1)
        return len(looks) > 50

    writer, _, _ = make(2, lost=lost)
    with pytest.raises(RingBrokenError, match="its mate has left"):
        writer.write(np.zeros(3 * FLOATS, np.float32), np.float32)
    assert len(looks) == 51
    assert [record.message for record in caplog.records if "its mate" in record.message][1:] == []
    assert "its mate, which takes nothing" in caplog.text


def test_a_worker_that_is_late(monkeypatch):
    monkeypatch.setattr(staging, "PATIENCE_S", 0.001)
    writer, reader, _ = make(1)
    blocks = reader.read(FLOATS + 1, np.float32)
    assert [next(blocks) for _ in range(3)] == [None] * 3
    writer.write(np.ones(FLOATS, np.float32), np.float32)
    assert next(blocks).min() == 1
    assert next(blocks) is None
    assert reader._emptied[0] == 1  # it was given back when more was asked for
    writer.write(np.full(1, 7, np.float32), np.float32)
    assert next(blocks).tolist() == [7]
    assert list(blocks) == []


@pytest.mark.parametrize("reason", ["lost", "broken"])
def test_a_worker_that_puts_nothing_more(monkeypatch, reason):
    monkeypatch.setattr(staging, "PATIENCE_S", 0.001)
    gone = []
    writer, reader, _ = make(2, lost=lambda: bool(gone))
    writer.write(np.ones(FLOATS, np.float32), np.float32)
    blocks = reader.read(2 * FLOATS, np.float32)
    assert next(blocks).min() == 1
    assert next(blocks) is None
    if reason == "lost":
        gone.append(1)
    else:
        reader.broken = "was interrupted"
    with pytest.raises(RingBrokenError, match=r"its mate (has left|was interrupted)"):
        next(blocks)


def test_a_conversion_that_loses_more_than_precision():
    writer, _, _ = make(1)
    with pytest.raises(TypeError, match="same_kind"):
        writer.write(np.ones(3, np.complex64), np.float32)


@pytest.mark.parametrize(("workers", "slots"), [(1, 3), (21, 3), (22, 2), (64, 1), (1000, 1)])
def test_parts_of_the_pool(workers, slots):
    assert slots_for(workers) == slots
    assert slots * BLOCK_BYTES * min(workers, 64) <= POOL_BYTES
