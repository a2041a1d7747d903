"""The order of restores by the workers of a strategy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import errors
from strategy.server.checkpoints import CheckpointId, Restores

A, B = CheckpointId("a", b"1"), CheckpointId("b", b"2")


def test_workers_wait_for_the_chief():
    restores = Restores()
    assert restores.wait(1, 1, A, "one") == restores.wait(2, 1, CheckpointId("a", b""), "two") == []
    assert restores.end(0, A, "") == [("one", None), ("two", None)]
    assert restores.wait(1, 2, B, "one") == []
    assert restores.wait(3, 1, A, "late") == [("late", None)]
    assert [restores.count(worker) for worker in range(4)] == [1, 1, 1, 1]


def test_a_restore_that_fails_ends_for_all():
    restores = Restores()
    restores.wait(1, 1, A, "one")
    ((request, error),) = restores.end(0, A, "DataLossError: gone")
    assert request == "one"
    assert isinstance(error, errors.AbortedError)
    assert "worker 0 could not restore 'a' for all workers: DataLossError: gone" in error.message
    ((request, error),) = restores.wait(2, 1, A, "two")  # after the chief has failed
    assert isinstance(error, errors.AbortedError)
    restores.wait(1, 1, B, "one")
    assert restores.end(0, A, "it was interrupted") == []  # another checkpoint
    assert restores.end(0, B, "") == [("one", None)]
    assert restores.count(1) == 1
    assert restores.end(0, A, "") == []
    assert restores.wait(1, 2, A, "again") == [("again", None)]


@pytest.mark.parametrize("other", [B, CheckpointId("a", b"2")])
def test_workers_that_restore_something_else(other):
    restores = Restores()
    restores.end(0, A, "")
    ((_, error),) = restores.wait(1, 1, other, "one")
    assert isinstance(error, errors.InvalidArgumentError)
    for part in ("worker 1 restores", "as its restore number 1", "the chief restored 'a'"):
        assert part in error.message
    assert ("another checkpoint of this name" in error.message) == (other.path == "a")
    assert restores.count(1) == 0
    assert restores.wait(1, 1, A, "again") == [("again", None)]


def test_a_request_replaces_an_earlier_one_of_the_worker():
    restores = Restores()
    restores.wait(1, 1, A, "interrupted")
    restores.wait(1, 1, A, "again")
    assert restores.end(0, A, "") == [("again", None)]


@given(st.lists(st.integers(0, 3), max_size=40))
def test_every_worker_gets_all_restores_in_order(turns):
    """The chief is worker 0. The others have at most one request each."""
    restores, done, counts, waiting = Restores(), 0, [0] * 4, set()
    for worker in [*turns, *[0] * 12, 1, 2, 3]:
        if worker == 0:
            answers = restores.end(0, CheckpointId(str(done), b""), "")
            done += 1
        elif worker not in waiting:
            waiting.add(worker)
            wanted = CheckpointId(str(counts[worker]), b"")
            answers = restores.wait(worker, counts[worker] + 1, wanted, worker)
        else:
            continue
        for one, error in answers:
            assert error is None
            waiting.remove(one)
            counts[one] += 1
        assert all(counts[one] == restores.count(one) <= done for one in (1, 2, 3))
    assert not waiting
