"""Object collectives of a process group."""

import pickle

import numpy as np
import pytest

from mpidist import ProcessGroup


class Odd:
    """Something that only pickle can make."""

    def __eq__(self, other):
        return isinstance(other, Odd)

    __hash__ = None


THINGS = [None, 7, "text", b"bytes", [1, [2.5]], {"a": (1, {2})}, np.arange(5), 1j, 1 << 100]


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def thing(rank):
    return {
        "rank": rank,
        "things": THINGS[rank % len(THINGS) :],
        "more": "x" * (rank * 300) + "y" * (100_000 * (rank > 2)),
    }


def same(got, rank):
    assert pickle.dumps(got) == pickle.dumps(thing(rank))


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_gather_object(group):
    got = [None] * group.size()
    group.all_gather_object(got, thing(group.rank()))
    for rank, one in enumerate(got):
        same(one, rank)


@pytest.mark.ranks(1, 2, 3, 4)
def test_gather_object(group):
    for root in range(group.size()):
        is_root = group.rank() == root
        got = [None] * group.size() if is_root else None
        group.gather_object(thing(group.rank()), got, group_dst=root)
        for rank, one in enumerate(got or ()):
            same(one, rank)


@pytest.mark.ranks(1, 2, 3, 4)
def test_broadcast_object_list(group):
    for root in range(group.size()):
        got = [thing(root), "second"] if group.rank() == root else [None, None]
        group.broadcast_object_list(got, group_src=root)
        same(got[0], root)
        assert got[1] == "second"


@pytest.mark.ranks(1, 2, 3, 4)
def test_scatter_object_list(group):
    for root in range(group.size()):
        given = [thing(rank) for rank in range(group.size())] if group.rank() == root else None
        got = [None]
        group.scatter_object_list(got, given, group_src=root)
        same(got[0], group.rank())


@pytest.mark.ranks(2, 3)
def test_messages(group):
    if group.rank() == 0:
        for rank in range(1, group.size()):
            group.send_object_list([thing(rank), Odd()], rank)
        senders = set()
        for _ in range(1, group.size()):
            got = [None]
            sender = group.recv_object_list(got)  # from anybody
            same(got[0], sender)
            senders.add(sender)
        assert senders == set(range(1, group.size()))
    else:
        got = [None, None]
        assert group.recv_object_list(got, 0) == 0
        same(got[0], group.rank())
        assert got[1] == Odd()
        group.send_object_list([thing(group.rank())], 0)


@pytest.mark.ranks(2)
def test_all_lengths_about_that_of_a_block(group):
    """Shorter objects travel in one message, of longer ones the whole follows."""
    other = 1 - group.rank()
    for length in range(470, 520):
        objects = [bytes([rank]) * (length + 7 * rank) for rank in range(2)]
        own = objects[group.rank()]
        for root in range(2):
            is_root = group.rank() == root
            got = [None, None]
            group.all_gather_object(got, own)
            assert got == objects
            got = [None, None] if is_root else None
            group.gather_object(own, got, group_dst=root)
            assert got == (objects if is_root else None)
            got = [objects[root]] if is_root else [None]
            group.broadcast_object_list(got, group_src=root)
            assert got == [objects[root]]
            got = [None]
            group.scatter_object_list(got, objects if is_root else None, group_src=root)
            assert got == [own]
            if is_root:
                group.send_object_list([own], group_dst=other)
            else:
                group.recv_object_list(got, group_src=other)
                assert got == [objects[other]]


class Broken:
    """Cannot be built from its pickle."""

    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.ranks(3)
def test_an_object_that_cannot_be_built_leaves_nothing_behind(group):
    rank, wrong = group.rank(), ValueError
    for use in range(4):
        own = Broken() if use == 0 and rank == 1 else f"{use} from {rank}" + "x" * 2000 * (use + 1)
        expected = [f"{use} from {n}" + "x" * 2000 * (use + 1) for n in range(3)]
        got = [None] * 3
        if use == 0:
            with pytest.raises(wrong):
                group.all_gather_object(got, own)
        else:
            group.all_gather_object(got, own)
            assert got == expected
        got = [None] * 3 if rank == 0 else None
        if use == 0 and rank == 0:
            with pytest.raises(wrong):
                group.gather_object(own, got, group_dst=0)
            continue
        group.gather_object(own, got, group_dst=0)
        assert got == (expected if rank == 0 else None)


@pytest.mark.ranks(2)
def test_arguments_that_cannot_be(group):
    is_root = group.rank() == 0
    with pytest.raises(ValueError, match="a list of 2, not 3"):
        group.all_gather_object([None] * 3, 1)
    with pytest.raises(ValueError, match=r"is missing on the root|only for the root"):
        group.gather_object(1, None if is_root else [None, None])
    with pytest.raises(ValueError, match="needs one entry to write to"):
        group.scatter_object_list([], [1, 2] if is_root else None)
    one = [None]
    group.scatter_object_list(one, ["a", "b"] if is_root else [None] * 3)
    assert one == ["a" if is_root else "b"]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        group.all_gather_object([None] * 2, lambda: None)
    group.barrier()
    got = [None, None, None] if not is_root else ["one", "two"]
    if is_root:
        group.broadcast_object_list(got)
    else:
        with pytest.raises(ValueError, match="brings 2 objects, and the list of rank 1 has 3"):
            group.broadcast_object_list(got)
    group.barrier()


@pytest.mark.ranks(3)
def test_ragged_arrays_of_several_dtypes(group):
    dtype = np.float32 if group.rank() == 2 else np.float64
    with pytest.raises(ValueError, match=r"one dtype, not \['float64', 'float64', 'float32'\]"):
        group.all_gather_ragged(np.zeros(2, dtype))
    group.barrier()


@pytest.mark.ranks(2)
def test_more_than_one_call_can_count(group, monkeypatch):
    from mpidist.group import pickled_objects

    monkeypatch.setattr(pickled_objects, "LARGEST_COUNT", 1000)
    got = [None] * 2
    group.all_gather_object(got, b"x" * (900 + group.rank()))
    assert [len(one) for one in got] == [900, 901]
