"""A shard on a GPU: versions of its blocks, and reads during changes."""

import ml_dtypes
import numpy as np
import pytest
from _cases.gpu_calls import counted_calls

from mpidist import errors
from mpidist.gpu import persistent
from strategy import optimizers
from strategy.protocol.layout import BLOCK_BYTES, Layout
from strategy.rules import ADD, ASSIGN, Kind, Rule, on_arrays
from strategy.server import gpu
from strategy.server.gpu_shard import GpuShard
from strategy.server.memory import paged_bytes
from strategy.server.shard import wide_dtype

BLOCK = BLOCK_BYTES // 4
BLOCKS = 5


def made(shape, dtype="f4"):
    """Return a shard that holds ones."""
    layout, device = Layout(shape, dtype), gpu.Gpu(0, "ps 0")
    memory = np.zeros(layout.version_bytes + paged_bytes(layout.data_bytes), np.uint8)
    data = layout.version_bytes
    data += -(memory.ctypes.data + data) % 4096
    with device.working("allocating memory"):
        values = device.array(layout.size, wide_dtype(layout), "a variable")
    given = ("v", memory, layout, 0, data, lambda: None)
    shard = GpuShard(*given, gpu=device, values=values)
    shard.apply(":assign", ASSIGN, (), [np.ones(shard.flat.size, dtype)])
    shard.versions[:] = 2
    return shard


@pytest.fixture(params=[True, False], ids=["pinned", "not pinned"])
def shard(xp, request, monkeypatch):
    def refuse(*_):
        raise xp.cuda.runtime.CUDARuntimeError(304)

    if not request.param:
        monkeypatch.setattr(persistent, "_warned", [])
        monkeypatch.setattr(xp.cuda.runtime, "hostRegister", refuse)
    shard = made((BLOCKS * BLOCK,))
    yield shard
    shard.close()


def blocks(value, count=BLOCKS):
    return (np.full(BLOCK, value, "f4") for _ in range(count))


def momentum():
    sgd = optimizers.SGD(1.0, momentum=0.5)
    rule = Rule(on_arrays(sgd.formula()), Kind.OPTIMIZER, sgd.slots())
    return "SGD", rule, sgd.numbers(1.0, 1)


def descend(shard, given):
    shard.apply(*momentum(), given)


def test_all_blocks_change_together(shard):
    seen = []

    def given():
        for block in blocks(3):
            seen.append(shard.versions.tolist())
            yield block

    descend(shard, given())
    assert seen == [[3] * BLOCKS] * BLOCKS
    assert shard.versions.tolist() == [4] * BLOCKS
    np.testing.assert_array_equal(shard.data, np.full(BLOCKS * BLOCK, -2))


def test_a_gradient_that_breaks_off_leaves_whole_blocks(shard):
    def given():
        yield from blocks(3, 2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        descend(shard, given())
    assert shard.versions.tolist() == [4] * BLOCKS
    np.testing.assert_array_equal(shard.data[: 2 * BLOCK], np.full(2 * BLOCK, -2))
    descend(shard, blocks(0))  # shows the values on the GPU
    np.testing.assert_array_equal(shard.data[: 2 * BLOCK], np.full(2 * BLOCK, -2 - 1.5))
    np.testing.assert_array_equal(shard.data[2 * BLOCK :], np.ones((BLOCKS - 2) * BLOCK))


def test_a_plain_change_that_breaks_off_comes_to_the_gpu(shard):
    def given():
        yield from blocks(3, 2)
        raise OSError("gone")

    descend(shard, blocks(0))
    with pytest.raises(OSError, match="gone"):
        shard.apply(":add", ADD, (), given())
    assert shard.versions.tolist() == [6] * BLOCKS
    descend(shard, blocks(0))
    np.testing.assert_array_equal(shard.data[: 2 * BLOCK], np.full(2 * BLOCK, 4))
    np.testing.assert_array_equal(shard.data[2 * BLOCK :], np.ones((BLOCKS - 2) * BLOCK))


@pytest.mark.parametrize("staged", [gpu.STAGED_BYTES, 2 * BLOCK_BYTES])
def test_what_is_pushed_may_be_overwritten_at_once(shard, monkeypatch, staged):
    monkeypatch.setattr(gpu, "STAGED_BYTES", staged)
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


@pytest.mark.parametrize("dtype", ["f8", "f2", ml_dtypes.bfloat16], ids=str)
def test_a_small_push_copies_once_each_way_waits_once_and_allocates_nothing(xp, dtype):
    if xp.__name__ == "cupy":
        pytest.skip("calls are counted with the stand-in")
    shard, grads = made((1,), dtype), [np.ones(1, dtype)]
    descend(shard, grads)  # fills the pools
    xp.cuda.Device(0).synchronize()  # earlier uploads return their memory
    descend(shard, grads)
    with counted_calls(xp) as counts:
        descend(shard, grads)
    # The third event is recorded when the gradient of an earlier push is freed.
    assert counts.pop("events") <= 3
    assert counts == {"to host": 1, "to device": 1, "waits": 1, "allocations": 0}
    shard.close()


def test_rows_that_a_plain_rule_has_changed_are_uploaded_alone(xp):
    if xp.__name__ == "cupy":
        pytest.skip("calls are counted with the stand-in")
    shard, ids = made((BLOCKS, BLOCK)), np.array([3, 1])
    descend(shard, blocks(0))
    with counted_calls(xp) as counts:
        shard.apply_mean_of_rows(":add", ADD, (), [(ids, np.ones(2 * BLOCK, "f4"))])
        assert counts["to device"] == 2  # the numbers, and the rows
        descend(shard, blocks(0))
        assert counts["to device"] == 2 + BLOCKS
    np.testing.assert_array_equal(shard.data[:, 0], [1, 2, 1, 2, 1])
    shard.close()


@pytest.mark.parametrize("kind", ["whole", "rows"])
def test_without_memory_no_version_has_changed(xp, monkeypatch, kind):
    if xp.__name__ == "cupy":
        pytest.skip("it would have to fill the GPU")
    shard, seen = made((BLOCKS, BLOCK)), []
    monkeypatch.setattr(shard, "_sync", lambda: seen.append(shard.versions.tolist()))
    if kind == "whole":
        monkeypatch.setattr(xp, "limit", [sum(xp.in_use.values())])
    else:
        descend(shard, blocks(0))
        seen.clear()
        monkeypatch.setattr(xp, "longest", [BLOCK_BYTES])
    before = shard.versions.tolist()
    rows = [(np.array([3, 1]), np.ones(2 * BLOCK, "f4"))]
    apply, given = (shard.apply, blocks(3)) if kind == "whole" else (shard.apply_mean_of_rows, rows)
    with pytest.raises(errors.ResourceExhaustedError, match=r"variable 'v'.*GPU 0 has not enough"):
        apply(*momentum(), given)
    assert not seen
    assert shard.versions.tolist() == before
    shard.close()
