"""Process groups on arrays in the memory of GPUs, against NumPy."""

import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.gpu_calls import counted_calls, idle_bytes, lent_bytes

from mpidist import P2POp, ProcessGroup, ReduceOp, batch_isend_irecv, irecv, isend
from mpidist.errors import DistBackendError
from mpidist.gpu import HostStaging

LARGE = 1 << 16  # elements: the parts of such an array are separate messages


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def values(rank, shape=(3, 4), dtype="f4"):
    """Return the values of a rank. Every rank computes the same values."""
    return np.random.default_rng(rank).integers(1, 9, shape).astype(dtype)


def everyone(group, *args, **kwargs):
    return [values(rank, *args, **kwargs) for rank in range(group.size())]


def laid_out(xp, data, layout):
    """Return a contiguous or strided device array of the given values."""
    if layout == "contiguous":
        return xp.asarray(data)
    memory = xp.zeros((2 * data.shape[0], *data.shape[1:]), data.dtype)
    memory[::2] = xp.asarray(data)
    return memory[::2]


both_layouts = pytest.mark.parametrize("layout", ["contiguous", "strided"])
both_sizes = pytest.mark.parametrize("size", [12, LARGE])


@pytest.mark.ranks(1, 2, 3)
@both_layouts
@pytest.mark.parametrize("dtype", ["i4", "f2", "f4", "f8", "F"])
@pytest.mark.parametrize("later", [False, True])
def test_all_reduce(group, xp, dtype, layout, later):
    array = laid_out(xp, values(group.rank(), dtype=dtype), layout)
    work = group.all_reduce(array, async_op=later)
    if later:
        work.wait()
    expected = np.sum(everyone(group, dtype=dtype), 0)
    np.testing.assert_array_equal(xp.asnumpy(array), expected)


@pytest.mark.ranks(2)
def test_an_operation_begins_after_what_is_queued_and_its_result_is_there_for_what_follows(
    group, xp
):
    with xp.cuda.Stream(non_blocking=True):
        array = xp.zeros(1000, "f4")
        for _ in range(5):
            array += group.rank() + 1
            group.all_reduce(array)
            array += 1
        expected = 0
        for _ in range(5):
            expected = 2 * expected + 3 + 1
        np.testing.assert_array_equal(xp.asnumpy(array), np.full(1000, expected))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM(0.5)])
def test_reductions(group, xp, op):
    array = xp.asarray(values(group.rank()))
    group.all_reduce(array, op)
    parts = np.stack(everyone(group)).astype("f8")
    wanted = {"AVG": parts.mean(0), "MAX": parts.max(0)}.get(op.name, 0.5 * parts.sum(0))
    np.testing.assert_allclose(xp.asnumpy(array), wanted, rtol=1e-6)
    array = xp.asarray(values(group.rank()))
    group.reduce(array, 1)
    wanted = parts.sum(0) if group.rank() == 1 else parts[group.rank()]
    np.testing.assert_array_equal(xp.asnumpy(array), wanted)
    array = xp.asarray(values(group.rank()))
    group.scan(array)
    np.testing.assert_array_equal(xp.asnumpy(array), parts[: group.rank() + 1].sum(0))
    array = xp.asarray(values(group.rank()))
    group.exscan(array)
    wanted = parts[: group.rank()].sum(0) if group.rank() else parts[0]
    np.testing.assert_array_equal(xp.asnumpy(array), wanted)


@pytest.mark.ranks(2, 3)
@both_layouts
@both_sizes
def test_moves(group, xp, layout, size):
    rank, shape = group.rank(), (size // 4, 4)
    parts = everyone(group, shape)

    def own():
        return laid_out(xp, values(rank, shape), layout)

    def empty():
        return laid_out(xp, np.zeros(shape, "f4"), layout)

    def check(arrays, expected):
        for array, one in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(xp.asnumpy(array), one)

    array = own()
    group.broadcast(array, 1)
    check([array], [parts[1]])
    outputs = [empty() for _ in parts]
    group.all_gather(outputs, own())
    check(outputs, parts)
    output = laid_out(xp, np.zeros((len(parts) * shape[0], 4), "f4"), layout)
    group.all_gather_into_tensor(output, own())
    check([output], [np.concatenate(parts)])
    outputs = [empty() for _ in parts] if rank == 1 else None
    group.gather(own(), outputs, 1)
    check(outputs or [], parts if rank == 1 else [])
    array, inputs = empty(), [laid_out(xp, part, layout) for part in parts]
    group.scatter(array, inputs if rank == 0 else None)
    check([array], [parts[rank]])
    outputs = [empty() for _ in parts]
    group.all_to_all(outputs, [own() + 10 * n for n in range(len(parts))])
    check(outputs, [part + 10 * rank for part in parts])
    array = empty()
    group.reduce_scatter(array, [own() + n for n in range(len(parts))])
    check([array], [np.sum(parts, 0) + len(parts) * rank])


@pytest.mark.ranks(2)
def test_parts_of_one_array(group, xp):
    rank, parts = group.rank(), everyone(group, (4, 3))
    output = xp.zeros((2, 3), "f4")
    group.reduce_scatter_tensor(output, xp.asarray(values(rank, (4, 3))))
    np.testing.assert_array_equal(xp.asnumpy(output), np.sum(parts, 0)[2 * rank :][:2])
    output = xp.zeros((4, 3), "f4")
    group.all_to_all_single(output, xp.asarray(values(rank, (4, 3))))
    expected = np.concatenate([part[2 * rank :][:2] for part in parts])
    np.testing.assert_array_equal(xp.asnumpy(output), expected)
    splits = [1, 3] if rank == 0 else [2, 2]
    output = xp.zeros(((3, 5)[rank], 3), "f4")
    takes = [1, 2] if rank == 0 else [3, 2]
    group.all_to_all_single(output, xp.asarray(values(rank, (4, 3))), takes, splits)
    stretches = [parts[0][:1], parts[1][:2]] if rank == 0 else [parts[0][1:], parts[1][2:]]
    np.testing.assert_array_equal(xp.asnumpy(output), np.concatenate(stretches))


@pytest.mark.ranks(2)
@both_layouts
def test_messages(group, xp, layout):
    other = 1 - group.rank()
    array = laid_out(xp, np.zeros((3, 4), "f4"), layout)
    if group.rank() == 0:
        group.send(xp.asarray(values(0)), 1)
        assert group.recv(array) == 1
    else:
        assert group.recv(array) == 0
        group.send(xp.asarray(values(1)), 0)
    np.testing.assert_array_equal(xp.asnumpy(array), values(other))
    array = laid_out(xp, np.zeros((3, 4), "f4"), layout)
    ops = [
        P2POp(isend, xp.asarray(values(group.rank())), other, group),
        P2POp(irecv, array, other, group),
    ]
    for work in batch_isend_irecv(ops):
        work.wait()
    np.testing.assert_array_equal(xp.asnumpy(array), values(other))


@pytest.mark.ranks(2)
def test_what_a_short_message_does_not_fill_stays(group, xp):
    array = xp.asarray(np.arange(8, dtype="f4"))
    if group.rank() == 0:
        group.send(np.full(3, 9, "f4"), 1)
    else:
        group.recv(array, 0)
        np.testing.assert_array_equal(xp.asnumpy(array), [9, 9, 9, 3, 4, 5, 6, 7])


@pytest.mark.ranks(2)
def test_host_and_device_together(group, xp):
    mine = values(group.rank())
    array = xp.asarray(mine) if group.rank() else mine
    group.all_reduce(array)
    np.testing.assert_array_equal(xp.asnumpy(array), np.sum(everyone(group), 0))
    outputs = [np.zeros((3, 4), "f4"), xp.zeros((3, 4), "f4")]
    group.all_gather(outputs, values(group.rank()))
    for output, part in zip(outputs, everyone(group), strict=True):
        np.testing.assert_array_equal(xp.asnumpy(output), part)


@pytest.mark.ranks(2)
def test_several_at_once(group, xp):
    arrays = [xp.asarray(values(group.rank() + n)) for n in range(4)]
    works = [group.all_reduce(array, async_op=True) for array in arrays]
    for work in works:
        work.wait()
    group.all_reduce_coalesced(arrays)
    for number, array in enumerate(arrays):
        expected = 2 * np.sum([values(rank + number) for rank in range(2)], 0)
        np.testing.assert_array_equal(xp.asnumpy(array), expected)


@pytest.mark.ranks(2)
def test_arrays_that_are_given_twice_together_are_refused(group, xp):
    array = xp.ones(4, "f4")
    for pair in ((array, array), (array[:3], array[1:])):
        with pytest.raises(ValueError, match="use the same memory"):
            group.all_reduce_coalesced(pair)
    with group.coalesce():
        group.all_reduce(array[::2])
        group.all_reduce(array[1::2])
    np.testing.assert_array_equal(xp.asnumpy(array), np.full(4, 2))


@pytest.mark.ranks(2)
def test_a_mean_whose_way_back_is_interrupted_is_not_divided_again(group, xp, monkeypatch):
    array = xp.full(4, 8.0, "f4")
    work = group.all_reduce(array, "avg", async_op=True)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostStaging, "upload", interrupt)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    with pytest.raises(DistBackendError, match=r"all_reduce .* KeyboardInterrupt"):
        work.wait()
    group.all_reduce(array, "avg")
    np.testing.assert_array_equal(xp.asnumpy(array), np.full(4, 8))


@pytest.mark.ranks(2)
def test_a_handle_that_is_kept_keeps_no_memory(group, xp):
    array = xp.zeros(1 << 16, "f4")
    before = lent_bytes()
    work = group.all_reduce(array, async_op=True)
    work.wait()
    # The watchdog may still hold the operation.
    wait_until(lambda: lent_bytes() <= before)
    assert work.is_success()
    assert "all_reduce" in repr(work)


@pytest.mark.ranks(2)
def test_a_factor_on_a_gpu(group, xp):
    for array in (xp.ones(3, "f4"), np.ones(3, "f4")):
        group.all_reduce(array, ReduceOp.PREMUL_SUM(xp.asarray(np.float32(0.5))))
        np.testing.assert_array_equal(xp.asnumpy(array), np.ones(3))


@pytest.mark.ranks(2)
def test_objects_arrive_on_the_device_of_the_receiver(group, xp):
    got = [None, None]
    group.all_gather_object(got, {"weights": xp.asarray(values(group.rank()))})
    for rank, one in enumerate(got):
        assert isinstance(one["weights"], xp.ndarray)
        np.testing.assert_array_equal(xp.asnumpy(one["weights"]), values(rank))


@pytest.mark.ranks(2)
def test_bad_input_is_told_before_anything_moves(group, xp):
    array = xp.zeros((4, 4), "f4")
    with pytest.raises(ValueError, match="arrays 0 and 1 of a list"):
        group.all_gather([array[:2], array[1:3]], xp.zeros((2, 4), "f4"))
    with pytest.raises(ValueError, match="cannot be prepared"):
        group.prepare("all_reduce", array)
    with pytest.raises(TypeError, match="cannot be reduced"):
        group.all_reduce(xp.zeros(3, "f4"), ReduceOp.BXOR)
    group.all_reduce(array)


@pytest.mark.ranks(2)
def test_pinned_memory_does_not_grow(group, xp):
    array = xp.asarray(values(group.rank(), (1000,)))
    for _ in range(3):
        group.all_reduce(array)
    before = lent_bytes() + idle_bytes()
    for _ in range(200):
        group.all_reduce(array)
        group.all_reduce(array, async_op=True).wait()
    xp.asnumpy(array)
    assert lent_bytes() + idle_bytes() <= before + 2 * 4096


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("later", [False, True])
def test_a_small_all_reduce_copies_once_each_way_waits_once_and_allocates_nothing(group, xp, later):
    if xp.__name__ == "cupy":
        pytest.skip("calls are counted with the stand-in")
    array = xp.asarray(np.ones(1))
    for _ in range(3):  # the first operations fill the pool
        group.all_reduce(array)
        xp.asnumpy(array)
    with counted_calls(xp) as counts:
        work = group.all_reduce(array, async_op=later)
        if later:
            work.wait()
    assert counts == {"to host": 1, "to device": 1, "events": 2, "waits": 1, "allocations": 0}
    assert xp.asnumpy(array) == [group.size() ** 4]
