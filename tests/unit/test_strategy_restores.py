"""Which restores a server carries out, and which it refuses."""

import pytest

from mpidist.errors import InvalidArgumentError
from strategy.server.restores import Restores, Wish


def restore(restores, worker, checkpoint, ordinal=None, content=b""):
    """As a worker whose only server this is; whether it was carried out."""
    ordinal = restores.count(worker) + 1 if ordinal is None else ordinal
    wish = Wish(worker, ordinal, checkpoint, content)
    due = restores.is_due(wish)
    restores.complete(wish)
    return due


def test_each_is_due_once():
    restores = Restores()
    due = [restore(restores, worker, path) for path in "aab" for worker in (1, 0, 2)]
    assert due == [True, False, False] * 3
    assert [restores.count(worker) for worker in range(4)] == [3, 3, 3, 0]


def test_a_worker_may_be_behind():
    restores = Restores()
    assert [restore(restores, 0, path) for path in "abc"] == [True] * 3
    assert [restore(restores, 1, path) for path in "abcd"] == [False] * 3 + [True]


def test_another_path_names_both():
    restores = Restores()
    for path in "abc":
        restore(restores, 0, path)
    restore(restores, 1, "a")
    with pytest.raises(InvalidArgumentError) as info:
        restore(restores, 1, "c")
    for part in ("worker 1", "'c'", "number 2", "worker 0", "'b'", "same order"):
        assert part in info.value.message
    assert restores.count(1) == 1
    assert not restore(restores, 1, "b")


def test_a_number_that_failed_elsewhere_is_repeated():
    restores = Restores()
    assert restore(restores, 0, "a", ordinal=1)
    assert not restore(restores, 0, "a", ordinal=1)
    assert restore(restores, 0, "b", ordinal=1)
    assert not restore(restores, 1, "b", ordinal=1)
    assert restores.count(0) == restores.count(1) == 1


def test_what_others_have_built_upon_is_not_replaced():
    restores = Restores()
    restore(restores, 0, "a")
    restore(restores, 1, "a")
    restore(restores, 1, "b")
    with pytest.raises(InvalidArgumentError, match="same checkpoints"):
        restore(restores, 0, "c", ordinal=1)
    assert not restore(restores, 0, "b")


def test_the_same_name_on_two_hosts_is_two_checkpoints():
    restores = Restores()
    assert restore(restores, 0, "a", content=b"new")
    assert not restore(restores, 1, "a")  # which does not see it
    assert not restore(restores, 2, "a", content=b"new")
    with pytest.raises(InvalidArgumentError, match="worker 0 restored 'a', which is another one"):
        restore(restores, 3, "a", content=b"old")
