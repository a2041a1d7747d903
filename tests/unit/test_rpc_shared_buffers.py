"""Shared buffers: a segment stays unchanged until its last view is gone."""

import gc
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.rpc.codec import BadFrameError
from mpidist.rpc.shared_buffers import SharedBuffer

PAGE = mmap.PAGESIZE


def pair(pages):
    """Return the buffers of the sender and of the receiver on the same memory."""
    shared = np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)
    return SharedBuffer(shared), SharedBuffer(shared)


def test_arrays_written_are_read():
    ours, theirs = pair(512)
    sent = [np.arange(10_000), np.empty((0, 3)), np.asfortranarray(np.ones((7, 1000))).T]
    place = ours.write(sent)
    got = theirs.read(place, [array.nbytes for array in sent])
    for array, original in zip(got, sent, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, original.reshape(-1).view(np.uint8))


def test_a_segment_is_kept_as_long_as_one_view_of_it():
    ours, theirs = pair(65)  # a table, and room for 64 pages
    data = [np.full(4 * PAGE, 1, np.uint8), np.full(4 * PAGE, 2, np.uint8)]
    places = [ours.write(data) for _ in range(8)]
    assert len(set(places)) == 8
    one, two = theirs.read(places[3], [4 * PAGE, 4 * PAGE])
    view = two[100:].reshape(2, -1)[:, 5]
    del one, two
    gc.collect()
    assert ours.write(data[:1]) is None  # no room
    assert (view == 2).all()
    del view
    gc.collect()
    assert page(ours.write(data)) == page(places[3])


def test_a_message_that_takes_too_much():
    ours, _ = pair(65)
    assert ours.write([np.zeros(8 * PAGE, np.uint8), np.zeros(PAGE, np.uint8)]) is None
    assert ours.write([np.zeros(8 * PAGE, np.uint8)]) is not None


def test_memory_of_one_page_has_no_room():
    ours, theirs = pair(1)
    assert ours.write([np.zeros(20_000, np.uint8)]) is None
    with pytest.raises(BadFrameError):
        theirs.read(0, [20_000])


def page(place):
    return place % (1 << 32)


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        (lambda place: place + 1, [10]),  # nothing was written there
        (lambda place: place + (1 << 32), [10]),  # another piece
        (page, [10]),  # none
        (lambda place: place, [1 << 40]),
        (lambda place: place, [63 * PAGE, PAGE]),
        (lambda place: place + 5000, [10]),
        (lambda place: place + 5000, [0]),
    ],
)
def test_locations_without_a_segment(change, sizes):
    ours, theirs = pair(64)
    place = ours.write([np.zeros(PAGE, np.uint8)])
    with pytest.raises(BadFrameError, match="has no segment of"):
        theirs.read(change(place), sizes)
    assert len(theirs.read(place, [PAGE])) == 1


def test_a_segment_is_read_once():
    ours, theirs = pair(64)
    place = ours.write([np.zeros(10, np.uint8)])
    del theirs.read(place, [10])[:]
    again = ours.write([np.ones(10, np.uint8)])
    assert page(again) == page(place)
    with pytest.raises(BadFrameError, match="has no segment of"):
        theirs.read(place, [10])
    assert theirs.read(again, [10])[0].all()


def test_segments_in_use_do_not_keep_others_from_being_used_again():
    ours, theirs = pair(1000)
    held = [theirs.read(ours.write([np.full(PAGE, n % 251, np.uint8)]), [PAGE]) for n in range(500)]
    places = set()
    for number in range(300):
        place = ours.write([np.full(PAGE, number % 251, np.uint8)])
        (got,) = theirs.read(place, [PAGE])
        assert (got == number % 251).all()
        places.add(page(place))
        del got
    assert len(places) < 200
    assert all((array == n % 251).all() for n, (array,) in enumerate(held))


@given(st.lists(st.tuples(st.integers(0, 9 * PAGE), st.booleans()), max_size=30))
def test_no_two_share_memory(script):
    ours, theirs = pair(73)
    alive = []
    for number, (nbytes, drop) in enumerate(script):
        place = ours.write([np.full(nbytes, number, np.uint8)])
        if place is not None:
            alive.append((theirs.read(place, [nbytes])[0], number))
        if drop and alive:
            alive.pop(len(alive) // 2)
        for array, value in alive:
            assert (array == value).all()


def test_a_segment_in_use_at_a_fork_is_never_reclaimed():
    ours, theirs = pair(64)
    place = ours.write([np.full(PAGE, 5, np.uint8)])
    (held,) = theirs.read(place, [PAGE])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        del held
        gc.collect()
        os.write(write, bytes([theirs._entries[page(place)] != 0]))
        os._exit(0)
    assert os.read(read, 1) != b"\0"
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    del held
    gc.collect()
    assert page(ours.write([np.ones(PAGE, np.uint8)])) != page(place)


def test_all_segments_are_checked_before_a_refusal():
    ours, theirs = pair(129)
    arrays = [theirs.read(ours.write([np.zeros(PAGE, np.uint8)]), [PAGE]) for _ in range(120)]
    assert ours.write([np.zeros(10 * PAGE, np.uint8)]) is None
    del arrays[60:]
    gc.collect()
    assert ours.write([np.zeros(10 * PAGE, np.uint8)]) is not None


def test_threads_that_write():
    ours, theirs = pair(400)
    failures = []

    def work(seed):
        for number in range(300):
            data = np.full(PAGE * (1 + number % 5), (seed * 50 + number) % 251, np.uint8)
            place = ours.write([data])
            if place is not None and not (theirs.read(place, [data.nbytes])[0] == data).all():
                failures.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
