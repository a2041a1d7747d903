"""A shard on a GPU: versions of its blocks, and what is seen of it, while it changes."""

import numpy as np
import pytest

from mpidist.gpu import pin
from strategy import optimizers
from strategy.protocol.layout import BLOCK_BYTES, Layout
from strategy.rules import ASSIGN, Kind, Rule, on_arrays
from strategy.server.gpu import LANES, Gpu
from strategy.server.gpu_shard import GpuShard
from strategy.server.memory import paged_bytes

BLOCK = BLOCK_BYTES // 4
BLOCKS = LANES + 3


@pytest.fixture(params=[True, False], ids=["pinned", "not pinned"])
def shard(compiling_xp, request):
    layout, gpu = Layout((BLOCKS * BLOCK,), "f4"), Gpu(0, "ps 0")
    memory = np.zeros(layout.version_bytes + paged_bytes(layout.data_bytes), np.uint8)
    data = layout.version_bytes
    data += -(memory.ctypes.data + data) % 4096
    pinned = pin(memory[data : data + layout.data_bytes], 0) if request.param else None
    values = gpu.array(layout.size, layout.dtype, "a variable")
    given = ("v", memory, layout, 0, data, lambda: None)
    made = GpuShard(*given, gpu=gpu, values=values, pinned=pinned)
    made.apply(":assign", ASSIGN, (), blocks(1))
    yield made
    gpu.close()
    made.close()


def blocks(value, count=BLOCKS):
    return (np.full(BLOCK, value, "f4") for _ in range(count))


def descend(shard, given):
    sgd = optimizers.SGD(1.0, momentum=0.5)
    rule = Rule(on_arrays(sgd.formula()), Kind.OPTIMIZER, sgd.slots())
    shard.apply("SGD", rule, sgd.numbers(1.0, 1), given)


def test_several_blocks_are_under_way_and_then_none(shard):
    seen = []

    def given():
        for block in blocks(3):
            seen.append(shard.versions.tolist())
            yield block

    descend(shard, given())
    most = [sum(version & 1 for version in versions) for versions in seen]
    assert max(most) == LANES - 1
    assert not most[0]
    np.testing.assert_array_equal(shard.versions, np.full(BLOCKS, 4))
    np.testing.assert_array_equal(shard.data, np.full(BLOCKS * BLOCK, -2))


def test_a_gradient_that_breaks_off_leaves_whole_blocks(shard):
    def given():
        yield from blocks(3, 2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        descend(shard, given())
    assert shard.versions.tolist() == [4] * BLOCKS
    np.testing.assert_array_equal(shard.data[: 2 * BLOCK], np.full(2 * BLOCK, -2))
    descend(shard, blocks(0))  # shows what the GPU has
    np.testing.assert_array_equal(shard.data[: 2 * BLOCK], np.full(2 * BLOCK, -2 - 1.5))
    np.testing.assert_array_equal(shard.data[2 * BLOCK :], np.ones((BLOCKS - 2) * BLOCK))


def test_what_is_pushed_may_be_overwritten_at_once(shard):
    memory = np.empty(BLOCK, "f4")

    def given():
        for number in range(BLOCKS):
            memory[:] = number
            yield memory
            memory[:] = np.nan

    descend(shard, given())
    expected = np.repeat(1 - np.arange(BLOCKS, dtype="f4"), BLOCK)
    np.testing.assert_array_equal(shard.data, expected)


def test_slots_are_seen_on_the_host(shard):
    descend(shard, blocks(3))
    slots = shard.slots_on_host()
    assert list(slots) == ["SGD/momentum"]
    np.testing.assert_array_equal(slots["SGD/momentum"], np.full(BLOCKS * BLOCK, 3))
