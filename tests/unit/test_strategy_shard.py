"""Shards: versions per block, and readers that refuse torn states."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategy import optimizers
from strategy.protocol.layout import BLOCK_BYTES, Layout, ShardView
from strategy.rules import ADD, ASSIGN, Kind, Rule, on_arrays
from strategy.server.shard import Shard

sizes_near_blocks = st.builds(
    lambda blocks, off: max(blocks * BLOCK_BYTES // 4 + off, 0),
    st.integers(0, 3),
    st.integers(-2, 2),
)


def make(shape, dtype=np.float32):
    """Return an owned shard, its view in another process, and the hooks that run at view syncs."""
    layout = Layout(shape, dtype)
    versions, data = 64, 64 + -(-layout.version_bytes // 64) * 64
    memory = np.zeros(data + layout.data_bytes, np.uint8)
    owned = Shard("v", memory, layout, versions, data, lambda: None)
    hooks = []
    shared = ShardView(memory, layout, versions, data, lambda: hooks.pop(0)() if hooks else None)
    return owned, shared, hooks


def blocks_of(flat):
    step = BLOCK_BYTES // flat.itemsize
    return (flat[start : start + step].copy() for start in range(0, max(flat.size, 1), step))


def change(owned, rule, value, kind="change", numbers=()):
    owned.apply(kind, rule, numbers, blocks_of(np.broadcast_to(value, owned.layout.size)))


@settings(deadline=None, max_examples=25)
@given(sizes_near_blocks)
def test_all_sizes_near_block_boundaries(size):
    owned, shared, _ = make((size,))
    assert shared.layout.blocks == max(-(-size * 4 // BLOCK_BYTES), 1)
    first, second = (np.random.default_rng(s).random(size, np.float32) for s in (0, 1))
    owned.apply("assign", ASSIGN, (), blocks_of(first))
    owned.apply("add", ADD, (), blocks_of(second))
    out, by_blocks = np.full(size, np.nan, np.float32), np.full(size, np.nan, np.float32)
    assert shared.try_read(out) == owned.version == 2
    shared.read_blocks(by_blocks)
    np.testing.assert_array_equal(out, first + second)
    np.testing.assert_array_equal(by_blocks, out)
    assert list(shared.versions) == [4] * shared.layout.blocks


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 3, 4)])
def test_shapes(shape):
    owned, shared, _ = make(shape, np.int64)
    value = np.arange(owned.layout.size).reshape(shape)
    owned.apply("assign", ASSIGN, (), blocks_of(value.reshape(-1)))
    out = np.full(shape, -1)
    assert shared.try_read(out) == 1
    np.testing.assert_array_equal(out, value)
    np.testing.assert_array_equal(owned.data, value)


def test_one_block_at_a_time_is_odd_while_it_changes():
    owned, shared, _ = make((2 * BLOCK_BYTES // 4 + 7,))
    seen = []
    rule = Rule(lambda update: seen.append(tuple(shared.versions)), Kind.FUNCTION)
    change(owned, rule, np.float32(1))
    assert list(dict.fromkeys(seen)) == [(1, 0, 0), (2, 1, 0), (2, 2, 1)]
    assert list(shared.versions) == [2, 2, 2]


def test_between_blocks_nothing_is_odd():
    owned, shared, _ = make((2 * BLOCK_BYTES // 4,))

    def gradient():
        for block in blocks_of(np.ones(owned.layout.size, np.float32)):
            assert not (shared.versions & 1).any()
            yield block

    owned.apply("add", ADD, (), gradient())
    assert owned.version == 1


@pytest.mark.parametrize(
    ("blocks", "block", "ahead"),
    [(1, 0, 1), *((3, block, ahead) for block in range(3) for ahead in (1, 2))],
)
def test_a_reader_refuses_blocks_under_change_or_at_different_versions(blocks, block, ahead):
    owned, shared, _ = make((blocks * BLOCK_BYTES // 4,))
    change(owned, ASSIGN, np.float32(5))
    out = np.empty(owned.layout.shape, np.float32)
    shared.versions[block] += ahead
    assert shared.try_read(out) is None
    shared.versions[block] -= ahead
    assert shared.try_read(out) == 1


@pytest.mark.parametrize("size", [1, 3 * BLOCK_BYTES // 4])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_reader_refuses_what_changed_while_it_copied(size, ahead):
    owned, shared, hooks = make((size,))
    change(owned, ASSIGN, np.float32(5))
    out = np.empty(size, np.float32)

    def overtake():
        shared.versions[-1] += ahead

    hooks.append(overtake)
    assert shared.try_read(out) is None


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_read_by_blocks_repeats_a_block_that_changed(ahead):
    owned, shared, hooks = make((2 * BLOCK_BYTES // 4,))
    change(owned, ASSIGN, np.float32(1))

    def begin():
        shared.versions[1] += ahead
        owned.flat[-1] = 7

    def end():
        owned.flat[-1] = 8
        shared.versions[1] += ahead

    def idle():
        return None

    hooks += [idle, idle, begin, idle, end]
    out = np.zeros(owned.layout.shape, np.float32)
    shared.read_blocks(out)
    assert (out[0], out[-1]) == (1, 8)
    assert not hooks


def test_a_read_by_blocks_waits_for_a_block_under_change():
    owned, shared, hooks = make((4,))
    shared.versions[0] = 1

    def end():
        owned.flat[:] = 3
        shared.versions[0] = 2

    # The reader makes a whole copy while the version of the block is odd.
    hooks += [lambda: None, lambda: None, lambda: None, end]
    out = np.zeros(4, np.float32)
    shared.read_blocks(out)
    np.testing.assert_array_equal(out, [3, 3, 3, 3])


def test_readers_beside_a_writer_see_whole_versions_only():
    owned, shared, _ = make((3 * BLOCK_BYTES // 4 + 1,))
    changes = 60
    writer = threading.Thread(
        target=lambda: [change(owned, ADD, np.float32(1)) for _ in range(changes)]
    )
    out = np.empty(owned.layout.shape, np.float32)
    writer.start()
    seen = []
    while writer.is_alive():
        version = shared.try_read(out)
        if version is not None:
            assert out.min() == out.max() == version
            seen.append(version)
    assert seen == sorted(seen)
    assert shared.try_read(out) == out[0] == changes


def test_slots_and_steps_by_kind():
    owned, _, _ = make((10,))
    adam, sgd = optimizers.Adam(), optimizers.SGD()
    steps = []
    rule = Rule(lambda update: steps.append(update.numbers), Kind.OPTIMIZER, adam.slots())
    assert not owned.slot("Adam/m").any()
    for step in (1, 2, 3):
        change(owned, rule, np.float32(1), "Adam", (step,))
    plain = Rule(on_arrays(sgd.formula()), Kind.OPTIMIZER)
    change(owned, plain, np.float32(1), "SGD", sgd.numbers(0.1, 1))
    assert steps == [(1,), (2,), (3,)]
    assert owned.steps == {"Adam": 3, "SGD": 1}
    assert set(owned.slots) == {"Adam/m", "Adam/v"}
    assert all(slot.shape == (10,) for slot in owned.slots.values())
    assert owned.version == 4


def test_an_optimizer_over_several_blocks_and_pieces_equals_numpy():
    size = 2 * BLOCK_BYTES // 8 + 3
    owned, _, _ = make((size,), np.float64)
    adam = optimizers.Adam(0.1, 0.9, 0.99, 1e-8)
    rule = Rule(on_arrays(adam.formula()), Kind.OPTIMIZER, adam.slots())
    grad = np.random.default_rng(0).standard_normal(size)
    owned.apply("Adam", rule, adam.numbers(0.1, 1), blocks_of(grad))
    np.testing.assert_allclose(owned.data, -0.1 * grad / (abs(grad) + 1e-8), rtol=1e-10)
    np.testing.assert_allclose(owned.slot("Adam/m"), 0.1 * grad, rtol=1e-12)
    np.testing.assert_allclose(owned.slot("Adam/v"), 0.01 * grad**2, rtol=1e-12)


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<f8"])
def test_variables_are_in_the_byte_order_of_the_machine(dtype):
    assert Layout((2,), dtype).dtype.isnative
