"""The buffer pool: memory comes back when the last view of it is gone, and never before."""

import gc
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpidist.rpc.buffer_pool import BufferPool

MIB = 1 << 20


def place(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again():
    pool = BufferPool(4 * MIB)
    array = pool.allocate(MIB)
    assert (array.shape, array.dtype, array.flags.writeable) == ((MIB,), np.uint8, True)
    where = place(array)
    del array
    assert place(pool.allocate(MIB - 5)) == where


def test_views_keep_the_memory():
    pool = BufferPool(4 * MIB)
    array = pool.allocate(MIB)
    where = place(array)
    views = [
        array[5:50],
        array.view(np.float64)[3:].reshape(-1, 1),
        array.data[10:],
        memoryview(array[7:]),
        np.asarray(array)[::2],
        array.reshape(2, -1).T,
    ]
    del array
    while views:
        assert place(pool.allocate(MIB)) != where
        views.pop()
    del views
    gc.collect()
    assert where in {
        place(one) for one in [pool.allocate(MIB), pool.allocate(MIB), pool.allocate(MIB)]
    }


def test_idle_memory_is_bounded():
    pool = BufferPool(3 * MIB)
    arrays = [pool.allocate(MIB) for _ in range(10)]
    del arrays
    assert pool._idle_bytes == sum(len(m) for free in pool._free.values() for m in free) == 3 * MIB
    big = pool.allocate(100 * MIB)
    del big
    assert pool._idle_bytes == 3 * MIB
    assert len(pool._leases) == 0


def test_nothing_is_as_good_as_any_length():
    pool = BufferPool(MIB)
    assert pool.allocate(0).shape == (0,)
    assert pool.allocate(1).shape == (1,)


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=40))
def test_no_two_share_memory(script):
    pool = BufferPool(20_000)
    alive = []
    for number, (nbytes, drop) in enumerate(script):
        array = pool.allocate(nbytes)
        array[:] = number % 251
        alive.append((array, number % 251))
        if drop:
            alive.pop(len(alive) // 2)
        for held, value in alive:
            assert (held == value).all()
    assert pool._idle_bytes <= 20_000


def test_threads():
    pool = BufferPool(MIB)
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(500):
            arrays = [pool.allocate(int(n)) for n in rng.integers(1, 50_000, 4)]
            for array in arrays:
                array[:] = seed
            if not all((array == seed).all() for array in arrays):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(pool._leases) == 0
    assert pool._idle_bytes == sum(len(m) for free in pool._free.values() for m in free)
