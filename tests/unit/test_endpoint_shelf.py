"""The shelf: buffers lie where the sender put them until the receiver has done with them."""

import gc
import mmap
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.endpoint.frames import BadFrameError
from mpidist.endpoint.message import Message
from mpidist.endpoint.shelf import Shelf

PAGE = mmap.PAGESIZE


def put(shelf, buffers, identity=7):
    return shelf.put(Message(0, identity, buffers=buffers))


def take(shelf, place, sizes, identity=7):
    return shelf.take(Message(0, identity), place, sizes)


def pair(pages):
    """The same memory, as the sender and the receiver know it."""
    shared = np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)
    return Shelf(shared), Shelf(shared)


def test_what_is_put_is_taken():
    ours, theirs = pair(512)
    sent = [np.arange(10_000), np.empty((0, 3)), np.asfortranarray(np.ones((7, 1000))).T]
    place = put(ours, sent)
    got = take(theirs, place, [array.nbytes for array in sent])
    for array, original in zip(got, sent, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, original.reshape(-1).view(np.uint8))


def test_a_piece_is_kept_as_long_as_one_view_of_it():
    ours, theirs = pair(65)  # a table, and room for 64 pages
    data = [np.full(4 * PAGE, 1, np.uint8), np.full(4 * PAGE, 2, np.uint8)]
    places = [put(ours, data) for _ in range(8)]
    assert len(set(places)) == 8
    one, two = take(theirs, places[3], [4 * PAGE, 4 * PAGE])
    view = two[100:].reshape(2, -1)[:, 5]
    del one, two
    gc.collect()
    assert put(ours, data[:1]) is None  # no room
    assert (view == 2).all()
    del view
    gc.collect()
    assert put(ours, data) == places[3]


def test_what_takes_too_large_a_part():
    ours, _ = pair(65)
    assert put(ours, [np.zeros(8 * PAGE, np.uint8), np.zeros(PAGE, np.uint8)]) is None
    assert put(ours, [np.zeros(8 * PAGE, np.uint8)]) is not None


def test_memory_of_one_page_has_no_room():
    ours, theirs = pair(1)
    assert put(ours, [np.zeros(20_000, np.uint8)]) is None
    with pytest.raises(BadFrameError):
        take(theirs, 0, [20_000])


@pytest.mark.parametrize(
    ("place", "sizes"),
    [
        (PAGE, [10]),  # nothing was put there
        (8, [10]),
        (0, [1 << 40]),
        (1 << 40, [10]),
        (1 << 40, [0]),
        (62 * PAGE, [3 * PAGE]),
    ],
)
def test_what_cannot_lie_there(place, sizes):
    ours, theirs = pair(64)
    assert put(ours, [np.zeros(PAGE, np.uint8)]) == 0
    with pytest.raises(BadFrameError, match="lie at"):
        take(theirs, place, sizes)


def test_pieces_that_are_held_do_not_keep_others_from_being_used_again():
    ours, theirs = pair(1000)
    held = [take(theirs, put(ours, [np.full(PAGE, n % 251, np.uint8)]), [PAGE]) for n in range(500)]
    places = set()
    for number in range(300):
        place = put(ours, [np.full(PAGE, number % 251, np.uint8)])
        (got,) = take(theirs, place, [PAGE])
        assert (got == number % 251).all()
        places.add(place)
        del got
    assert len(places) < 200
    assert all((array == n % 251).all() for n, (array,) in enumerate(held))


def test_a_piece_of_another_message():
    ours, theirs = pair(64)
    place = put(ours, [np.ones(10, np.uint8)], identity=1 << 40)
    with pytest.raises(BadFrameError, match="lie at"):
        take(theirs, place, [10], identity=1)
    (got,) = take(theirs, place, [10], identity=1 << 40)
    assert got.all()


@given(st.lists(st.tuples(st.integers(0, 9 * PAGE), st.booleans()), max_size=30))
def test_no_two_share_memory(script):
    ours, theirs = pair(73)
    alive = []
    for number, (nbytes, drop) in enumerate(script):
        place = put(ours, [np.full(nbytes, number, np.uint8)])
        if place is not None:
            alive.append((take(theirs, place, [nbytes])[0], number))
        if drop and alive:
            alive.pop(len(alive) // 2)
        for array, value in alive:
            assert (array == value).all()


def test_threads_that_put():
    ours, theirs = pair(400)
    failures = []

    def work(seed):
        for number in range(300):
            data = np.full(PAGE * (1 + number % 5), (seed * 50 + number) % 251, np.uint8)
            place = put(ours, [data])
            if place is not None and not (take(theirs, place, [data.nbytes])[0] == data).all():
                failures.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
